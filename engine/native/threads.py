"""Share torch's threads with the compiled kernels."""

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch

_SHARED_ELEMENTS: Final = 2**14  # fewer are done sooner than another thread wakes up


def threads() -> tuple[int | None, int]:
    """Return the function that runs torch's threads, and their number."""
    num_threads = torch.get_num_threads()
    return (parallel_function(), num_threads) if num_threads > 1 else (None, 1)


def threads_for(num_elements: int) -> tuple[int | None, int]:
    """Return the function that runs threads, and as many threads as num_elements elements are worth."""
    return threads() if num_elements >= _SHARED_ELEMENTS else (None, 1)


@functools.cache
def parallel_function() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch uses; None without one.

    A second pool of threads would compete with torch's, whose threads spin for a while after each operation.
    """
    for path in _loaded_openmp():
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _loaded_openmp() -> list[str]:
    """Return the files of OpenMP runtimes in this process, torch's own first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if line.count("/") > 1}
    runtimes = (file for file in files if Path(file).name.startswith(("libgomp", "libomp", "libiomp5")))
    return sorted(runtimes, key=lambda file: ("/torch/" not in file, file))
