"""`python -m splitserve_bench.device.facts`: what the device is, and the best rates that torch reaches on it, as one
JSON object. Where there is no CUDA device it is the CPU."""

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
from typing import Any, Final

import torch

from serving_core.memory import available_bytes
from serving_core.units import size_of
from splitserve_bench.engine.machine import least_s, measure_machine
from splitserve_bench.plan.devices import DEVICES, Device

COPIED_BYTES: Final = 2**30
QUERY_S: Final = 20.0
CPU: Final = "cpu"


def device_facts() -> dict[str, Any]:
    """Rates are bytes and operations a second; 0 of what there is not."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_cuda else torch.device(CPU)
    name = torch.cuda.get_device_name(device) if is_cuda else CPU
    nominal = nominal_of(name)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory if is_cuda else available_bytes()
    return {
        "name": name,
        "num_devices": torch.cuda.device_count(),
        "memory": size_of(memory_bytes),
        "driver": _driver() if is_cuda else "",
        "cuda": str(torch.version.cuda or ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "vcpus": os.cpu_count(),
        "machine": dataclasses.asdict(measure_machine(device, torch.bfloat16)),
        "nominal": nominal and {"flops_per_s": nominal.flops, "bytes_per_s": nominal.bytes_per_s},
        **_copies(device),
    }


def nominal_of(name: str) -> Device | None:
    """The device of the data sheets that torch means by NVIDIA H100 80GB HBM3; None when it is none of them."""
    words = re.findall(r"[a-z]+\d+", name.lower())
    return next((device for known, device in DEVICES.items() if known in words), None)


@torch.inference_mode()
def _copies(device: torch.device) -> dict[str, float]:
    """Of a copy within the memory what is read and what is written counts; between two, the bytes once."""
    num_bytes = min(COPIED_BYTES, available_bytes() // 8)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"copy_bytes_per_s": 2 * num_bytes / least_s(lambda: target.copy_(source), device)}
    if device.type == CPU:
        return {**rates, "host_to_device_bytes_per_s": 0.0, "device_to_host_bytes_per_s": 0.0}
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates["host_to_device_bytes_per_s"] = num_bytes / least_s(lambda: target.copy_(host, non_blocking=True), device)
    rates["device_to_host_bytes_per_s"] = num_bytes / least_s(lambda: host.copy_(target, non_blocking=True), device)
    return rates


def _driver() -> str:
    """Its version; empty where nobody tells."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.splitlines()[0].strip() if told.stdout else ""


if __name__ == "__main__":
    print(json.dumps(device_facts()))
