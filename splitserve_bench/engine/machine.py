"""Measure the rates that torch reaches on this machine in plain matrix products and memory reads.

The rates of an engine are shown as shares of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch.nn import functional

from engine.model.layers import Linear
from serving_core.process.memory import available_bytes
from serving_core.sharding import whole

CPU_SHAPES: Final = ((512, 1024, 1024), (512, 2048, 2048), (512, 4096, 4096))  # rows, inputs, outputs
CUDA_SHAPES: Final = ((4096, 4096, 4096), (8192, 8192, 8192))
MAX_BUFFER_BYTES: Final = 2**30  # far larger than caches, so that memory is what is read
MAX_DEVICE_BYTES: Final = 2**32  # beside which the start of a kernel is nothing; torch.dot takes no more
MIN_SAMPLES: Final = 3
SAMPLE_S: Final = 0.25  # how long each kind of product or read is tried
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The best rates that torch reaches on this machine with `num_threads` threads."""

    num_threads: int
    gemm_dtype: str
    gemm_flops_per_s: float
    read_bytes_per_s: float


def measure_machine(device: torch.device, dtype: torch.dtype) -> MachineFigures:
    """Return the device's best rate of several matrix products in this dtype, and of several ways to read memory."""
    name = str(dtype).removeprefix("torch.")
    return MachineFigures(torch.get_num_threads(), name, max(_gemms(device, dtype)), max(_reads(device)))


def better_of(one: MachineFigures, other: MachineFigures) -> MachineFigures:
    """Return the higher of the rates of two measurements of the same dtype and number of threads."""
    return replace(
        one,
        gemm_flops_per_s=max(one.gemm_flops_per_s, other.gemm_flops_per_s),
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
    )


@torch.inference_mode()
def _gemms(device: torch.device, dtype: torch.dtype) -> Iterator[float]:
    """Yield the FLOP/s of products of several shapes, with plain weights and with weights packed by the engine."""
    for num_rows, num_inputs, num_outputs in CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES:
        x = torch.randn(num_rows, num_inputs, device=device).to(dtype)
        weight = torch.randn(num_outputs, num_inputs, device=device).to(dtype)
        layer = Linear(whole(num_inputs), {"out": whole(num_outputs)}, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.pack(None)
        flops = 2 * num_rows * num_inputs * num_outputs
        yield flops / least_s(partial(functional.linear, x, weight), device)
        yield flops / least_s(partial(layer, x), device)


@torch.inference_mode()
def _reads(device: torch.device) -> list[float]:
    """Return the bytes a second of several of torch's reductions over a buffer."""
    if device.type == "cuda":
        num_bytes = min(MAX_DEVICE_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        num_bytes = min(MAX_BUFFER_BYTES, available_bytes() // 4)
    buffer = torch.ones(num_bytes // FLOAT_BYTES, device=device)  # written, so that it lies in memory of its own
    reads = (buffer.amax, buffer.sum, partial(torch.dot, buffer, buffer))  # the last reads an element twice at once
    return [buffer.nbytes / least_s(read, device) for read in reads]


def least_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls of `work`, after one that does not count.

    On a CUDA device each call is followed by a wait until the device is done.
    """
    samples_s: list[float] = []
    while len(samples_s) <= MIN_SAMPLES or sum(samples_s) < SAMPLE_S:
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples_s.append(time.perf_counter() - start_s)
    return min(samples_s[1:])
