"""Run programs: operations of the compiled kernels in one call, with threads that start once."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from engine.native import library as native_library
from engine.native.threads import threads

ALIGNMENT: Final = 64  # CACHE_LINE in native/work.h


class ProgramLibrary:
    """The functions of the compiled library."""

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
    """Return the programs of this installation's library, if built."""
    return native_library.load(ProgramLibrary)


class NativeProgram:
    """A sequence of operations on the same rows; each begins when the one before is complete.

    The caller that appends an operation must keep the memory that it uses alive as long as the program.
    """

    def __init__(self, capacity: int, most_rows: int) -> None:
        """Create an empty program. Raises ValueError without native kernels."""
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
        """Call a library function that appends operations to the program, its first argument."""
        if function(self._address, *arguments):
            raise ValueError("the program is full")

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return memory that one operation may fill for the next; all calls share it."""
        for memory in self._scratch:
            if memory.nbytes >= num_bytes:
                return memory
        self._scratch.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._scratch[-1]

    def run(self, num_rows: int) -> bool:
        """Run all operations for num_rows rows, with torch's number of threads.

        Returns False, with nothing computed, if an operation cannot begin.
        """
        assert 0 < num_rows <= self.most_rows
        failed: int = self._library.run(self._address, *threads(), num_rows)
        return failed == 0
