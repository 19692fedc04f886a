"""Run operations of the compiled kernels: with torch's threads, and as programs of many operations in one call."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from engine.native import library as native_library

ALIGNMENT: Final = 64  # CACHE_LINE in native/work.h
_SHARED_ELEMENTS: Final = 2**14  # fewer are done sooner than another thread wakes up


def threads() -> tuple[int | None, int]:
    """Return the address of the function that runs torch's threads, and how many threads torch uses.

    (None, 1) if torch uses a single thread.
    """
    num_threads = torch.get_num_threads()
    return (parallel_function(), num_threads) if num_threads > 1 else (None, 1)


def threads_for(num_elements: int) -> tuple[int | None, int]:
    """Return the address of the function that runs torch's threads, and how many threads num_elements are worth.

    That is torch's number, or (None, 1) for few elements or if torch uses a single thread.
    """
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


class ProgramLibrary:
    """The compiled functions for programs."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises AttributeError if it has an older version."""
        library = ctypes.CDLL(str(path))
        pointer, int32 = ctypes.c_void_p, ctypes.c_int32
        self.num_bytes = library.program_bytes
        self.num_bytes.restype = ctypes.c_int64
        self.num_bytes.argtypes = [int32]
        self.start = library.program_start
        self.start.restype = None
        self.start.argtypes = [pointer, int32]
        self.run = library.program_run
        self.run.restype = int32
        self.run.argtypes = [pointer, pointer, int32, int32]


def program_library() -> ProgramLibrary | None:
    """Return the compiled functions for programs; None if they were not built or cannot be used."""
    return native_library.load(ProgramLibrary)


class NativeProgram:
    """A sequence of operations on the same rows, run in one call; each begins when the one before is complete.

    The caller that appends an operation must keep the memory that it uses alive as long as the program.
    """

    def __init__(self, capacity: int, most_rows: int) -> None:
        """Create an empty program for `capacity` operations on at most most_rows rows.

        Raises ValueError without native kernels.
        """
        library = program_library()
        if library is None:
            raise ValueError("the native kernels are not there")
        self.most_rows: Final = most_rows
        self._library = library
        self._memory = torch.empty(library.num_bytes(capacity) + ALIGNMENT, dtype=torch.uint8)
        self._address: Final = -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        self._scratch: list[torch.Tensor] = []
        library.start(self._address, capacity)

    def add(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a library function that appends operations: it gets this program's address, then `arguments`.

        Raises ValueError if the program is full.
        """
        if function(self._address, *arguments):
            raise ValueError("the program is full")

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return at least num_bytes of memory that one operation may fill for the next; all calls share it."""
        for memory in self._scratch:
            if memory.nbytes >= num_bytes:
                return memory
        self._scratch.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._scratch[-1]

    def run(self, num_rows: int) -> bool:
        """Run all operations for num_rows rows, with torch's number of threads; return whether they were run.

        False, with nothing computed, if an operation cannot begin.
        """
        assert 0 < num_rows <= self.most_rows
        failed: int = self._library.run(self._address, *threads(), num_rows)
        return failed == 0
