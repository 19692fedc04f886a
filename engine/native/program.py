"""Programs: operations of the compiled kernels that run in one call, by threads that start once."""

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
        """Raises AttributeError when the file is of an older version."""
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
    """The programs of this installation's library, if they are there."""
    return native_library.load(ProgramLibrary)


class NativeProgram:
    """Operations in a row over the same rows; each begins when the one before is complete.

    Whoever adds an operation sees to it that the memory it names outlives the program.
    """

    def __init__(self, capacity: int, most_rows: int) -> None:
        """Empty. Raises ValueError where the native kernels are not there."""
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
        """Calls a function of the library that adds operations to the program it is given first."""
        if function(self._address, *arguments):
            raise ValueError("the program is full")

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Memory that one operation may fill for the next; it is the same for all."""
        for memory in self._scratch:
            if memory.nbytes >= num_bytes:
                return memory
        self._scratch.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._scratch[-1]

    def run(self, num_rows: int) -> bool:
        """Computes all operations for so many rows, by torch's number of threads. Gives False when one of them cannot
        begin; then nothing is computed."""
        assert 0 < num_rows <= self.most_rows
        failed: int = self._library.run(self._address, *threads(), num_rows)
        return failed == 0
