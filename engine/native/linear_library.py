"""Load the compiled products with quantized weights of engine/native/linear*.c, if built.

As with the attention kernels, SPLITSERVE_NATIVE names the variant; without it the best for this CPU is used.
"""

import ctypes
from pathlib import Path
from typing import Final

from engine.native import library as native_library

VERSION: Final = 3  # LINEAR_VERSION in native/linear.h
ELEMENTS: Final = {"float32": 0, "bfloat16": 1}
VARIANTS: Final = ("amx_int8", "avx512_vnni", "avx2", "plain")  # the fastest first

_VARIANT_OF: Final = {
    "amx": "amx_int8",
    "avx512_bf16": "avx512_vnni",
    "avx512": "avx512_vnni",
    "avx2": "avx2",
    "plain": "plain",
}


class Matrix(ctypes.Structure):
    """The C structure Matrix of native/linear.h."""

    _fields_ = [
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("padded_inputs", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("weight_bits", ctypes.c_int32),
        ("input_bits", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
    ]


class LinearLibrary:
    """The compiled functions for products with quantized weights."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises OSError if it cannot be loaded or has another version."""
        library = ctypes.CDLL(str(path))
        pointer, int32 = ctypes.c_void_p, ctypes.c_int32
        self._kernel = library.linear_kernel
        self._kernel.restype = pointer
        self._kernel.argtypes = [ctypes.c_char_p]
        self.multiply = library.linear_multiply
        self.multiply.restype = int32
        self.multiply.argtypes = [pointer, pointer, int32, int32, pointer, ctypes.c_int64, int32, pointer]
        self.add = library.linear_add
        self.add.restype = int32
        self.add.argtypes = [pointer, pointer, int32, pointer, ctypes.c_int64, int32, pointer, pointer]
        self.rounded_bytes = library.linear_rounded_bytes
        self.rounded_bytes.restype = ctypes.c_int64
        self.rounded_bytes.argtypes = [pointer, int32]
        library.linear_matrix_bytes.restype = ctypes.c_int64
        if library.linear_version() != VERSION or library.linear_matrix_bytes() != ctypes.sizeof(Matrix):
            raise OSError(f"{path.name} is of another version: install the package again")

    def kernel(self, variant: str) -> int | None:
        """Return the address of the kernel of one of VARIANTS; None if the CPU does not support it."""
        address: int | None = self._kernel(variant.encode())
        return address


def linear_library() -> LinearLibrary | None:
    """Return the compiled functions for quantized products; None if they were not built or cannot be used."""
    return native_library.load(LinearLibrary)


def best_variant() -> str | None:
    """Return the best of VARIANTS for quantized products on this CPU; None without native kernels.

    Raises UnknownVariant if SPLITSERVE_NATIVE names an unknown variant.
    """
    return native_library.best_variant(linear_library(), _VARIANT_OF)
