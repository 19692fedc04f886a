"""Find out what this machine has: versions, processor, memory, devices, free ports; and what would serve a model."""

import importlib.metadata
import os
import platform
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from engine.native.library import UnknownVariant
from engine.native.linear_library import best_variant
from serving_core.errors import SettingsError
from serving_core.net.ports import Port, check_ports
from serving_core.process.memory import available_bytes
from serving_core.units import size_of
from splitserve.launch.cluster import LOOPBACK, ClusterSettings
from splitserve.launch.launcher import free_port
from splitserve.launch.preflight import cuda_devices
from splitserve_bench.device_report import kept_report, verdict

PACKAGES: Final = ("splitserve", "torch", "transformers")
CPU_INFO: Final = Path("/proc/cpuinfo")
FEATURES: Final = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}


PUBLIC_PORTS: Final = {"--grpc-port": ClusterSettings().grpc_port, "--http-port": ClusterSettings().http_port}


@dataclass(frozen=True, slots=True)
class Environment:
    """What was found, as text by what it is called, and the command line that would serve the model."""

    facts: Mapping[str, str]
    command: str

    def lines(self) -> list[str]:
        """Return everything as lines of two columns."""
        rows = {**self.facts, "this would run": self.command}
        width = max(map(len, rows))
        return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def find_environment(model: str, cpus: Sequence[int], ports: Mapping[str, int] = PUBLIC_PORTS) -> Environment:
    """Return what this machine has for a process with these CPUs, and whether the ports of these flags are free.

    `model` is for the command line, and may be "". Nothing is started, and no port stays taken.
    """
    taken = [flag for flag, number in ports.items() if not _is_free(flag, number)]
    facts = {
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]),
        "cores": f"{len(cpus) or os.cpu_count()} of {os.cpu_count()} for this process",
        "instructions": _features(),
        "kernels": _kernels(),
        "memory": f"{size_of(available_bytes())} free of {size_of(psutil.virtual_memory().total)}",
        "CUDA devices": ", ".join(cuda_devices(os.environ)) or "none",
        "CUDA on a card": verdict(kept_report()),
        "ports": ", ".join(
            f"{number} ({flag}) {'in use' if flag in taken else 'free'}" for flag, number in ports.items()
        ),
    }
    return Environment(facts, command_for(model, len(cpus), taken))


def command_for(model: str, num_cores: int, taken: Collection[str]) -> str:
    """Return the command line that serves a model on `num_cores` cores, 0 when their number is not known.

    A single core gets one mixed node, else there are a prefill and a decode node. Each flag of `taken`, whose usual
    port is in use, gets a free port.
    """
    words = ["splitserve", "up", *([model] if model else [])]
    words += ["--mixed", "1"] if num_cores == 1 else ["--prefill", "1", "--decode", "1"]
    for flag in taken:
        words += [flag, str(free_port())]
    return shlex.join(words)


def _is_free(flag: str, number: int) -> bool:
    try:
        check_ports([Port(flag, LOOPBACK, number)])
    except SettingsError:
        return False
    return True


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _features() -> str:
    """Return the instruction sets of the processor for which there are kernels, in words."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return ", ".join(name for flag, name in FEATURES.items() if flag in flags) or f"{platform.machine()}, none known"


def _kernels() -> str:
    try:
        return best_variant() or "none compiled: PyTorch computes"
    except UnknownVariant as error:
        return str(error)
