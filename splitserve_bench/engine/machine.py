"""The rates that this machine reaches with plain products and plain memory, by which an engine's are divided."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.nn import functional

from engine.model.layers import Linear
from serving_core.memory import available_bytes
from serving_core.sharding import whole

CPU_SHAPES: Final = ((512, 1024, 1024), (512, 2048, 2048), (512, 4096, 4096))  # rows, inputs, outputs
CUDA_SHAPES: Final = ((4096, 4096, 4096), (8192, 8192, 8192))
MOST_BUFFER_BYTES: Final = 2**30  # far larger than caches, so that memory is what is read
MOST_DEVICE_BYTES: Final = 2**32  # beside which the start of a kernel is nothing; torch.dot takes no more
LEAST_SAMPLES: Final = 3
SAMPLE_S: Final = 0.25  # how long each kind of product or read is tried
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The best that torch reaches here with this number of threads, and with what."""

    num_threads: int
    gemm_dtype: str
    gemm_flops_per_s: float
    gemm_with: str
    read_bytes_per_s: float
    read_with: str


def measure_machine(device: torch.device, dtype: torch.dtype) -> MachineFigures:
    """Return the best of several products in dtype and of several ways to read memory, with torch's threads."""
    gemm_flops_per_s, gemm_with = max(_gemms(device, dtype))
    read_bytes_per_s, read_with = max(_reads(device))
    return MachineFigures(
        num_threads=torch.get_num_threads(),
        gemm_dtype=str(dtype).removeprefix("torch."),
        gemm_flops_per_s=gemm_flops_per_s,
        gemm_with=gemm_with,
        read_bytes_per_s=read_bytes_per_s,
        read_with=read_with,
    )


def better_of(one: MachineFigures, other: MachineFigures) -> MachineFigures:
    """Return the better rates of two measurements of the same kind."""
    gemm = max(one, other, key=lambda figures: figures.gemm_flops_per_s)
    read = max(one, other, key=lambda figures: figures.read_bytes_per_s)
    return replace(gemm, read_bytes_per_s=read.read_bytes_per_s, read_with=read.read_with)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _gemms(device: torch.device, dtype: torch.dtype) -> list[tuple[float, str]]:
    """Return rates with the names of what reached them."""
    rates = []
    for num_rows, num_inputs, num_outputs in CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES:
        x = torch.randn(num_rows, num_inputs, device=device).to(dtype)
        weight = torch.randn(num_outputs, num_inputs, device=device).to(dtype)
        layer = Linear(whole(num_inputs), {"out": whole(num_outputs)}, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.pack(None)
        flops = 2 * num_rows * num_inputs * num_outputs
        shape = f"[{num_rows}, {num_inputs}] x [{num_inputs}, {num_outputs}]"
        products: list[tuple[str, Callable[[], object]]] = [
            ("plain weights", lambda x=x, weight=weight: functional.linear(x, weight)),  # type: ignore[misc]
            ("weights packed as the engine's", lambda x=x, layer=layer: layer(x)),  # type: ignore[misc]
        ]
        rates += [(flops / least_s(product, device), f"{shape}, {name}") for name, product in products]
    return rates


@torch.inference_mode()
def _reads(device: torch.device) -> list[tuple[float, str]]:
    """Return rates with the names of what reached them."""
    if device.type == "cuda":
        num_bytes = min(MOST_DEVICE_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        num_bytes = min(MOST_BUFFER_BYTES, available_bytes() // 4)
    buffer = torch.ones(num_bytes // FLOAT_BYTES, device=device)  # written, so that it lies in memory of its own
    reads: list[tuple[str, Callable[[], object]]] = [
        ("amax", buffer.amax),
        ("sum", buffer.sum),
        ("dot", lambda: torch.dot(buffer, buffer)),  # the same element twice: read once
    ]
    size = f"{num_bytes / 2**20:.0f} MiB of float32"
    return [(buffer.nbytes / least_s(read, device), f"torch's {name} over {size}") for name, read in reads]


def least_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several runs, after one that does not count."""
    work()
    synchronize(device)
    samples_s: list[float] = []
    while len(samples_s) < LEAST_SAMPLES or sum(samples_s) < SAMPLE_S:
        start_s = time.perf_counter()
        work()
        synchronize(device)
        samples_s.append(time.perf_counter() - start_s)
    return min(samples_s)
