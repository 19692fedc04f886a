"""Multiply by dense weights on a CPU with the compiled kernels of engine/native.

As with the attention kernels, SPLITSERVE_NATIVE names the variant; without it the best for this CPU is used.
"""

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from engine.native import library as native_library
from engine.native.huge_memory import weight_memory
from engine.native.program import NativeProgram, threads

VERSION: Final = 4  # DENSE_VERSION in native/dense.h
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1}
VARIANTS: Final = {  # variants that are faster than torch where supported
    torch.float32: ("amx", "avx512_bf16", "avx512"),
    torch.bfloat16: ("amx", "avx512_bf16", "avx512", "avx2"),
}
OUTPUTS: Final = 16  # of a vector of weights, as in native/dense.h
PANEL_OUTPUTS: Final = 64  # of a panel of weights; the last panel may have fewer
WORD_BYTES: Final = 4
SLICE_OUTPUTS: Final = 16 * PANEL_OUTPUTS  # packed by a thread at a time: panels are independent


class Matrix(ctypes.Structure):
    """The C structure DenseMatrix of native/dense.h."""

    _fields_ = [
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
    ]


class DenseLibrary:
    """The compiled functions for products with dense weights."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises OSError if it cannot be loaded or has another version."""
        library = ctypes.CDLL(str(path))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._kernel = library.dense_kernel
        self._kernel.restype = pointer
        self._kernel.argtypes = [ctypes.c_char_p, int32]
        self.multiply = library.dense_multiply
        self.multiply.restype = None
        self.multiply.argtypes = [pointer, pointer, int32, pointer, int64, int32, pointer]
        self.add = library.dense_add
        self.add.restype = int32
        self.add.argtypes = [pointer, pointer, pointer, int64, pointer]
        self.pack = library.dense_pack
        self.pack.restype = None
        self.pack.argtypes = [pointer, int64, int32, int32, int32, pointer]
        self.rows = library.dense_rows
        self.rows.restype = int32
        self.rows.argtypes = [pointer, pointer, int32, pointer, int32, pointer]
        self.add_rows = library.dense_add_rows
        self.add_rows.restype = int32
        self.add_rows.argtypes = [pointer, pointer, pointer, pointer]
        library.dense_matrix_bytes.restype = int64
        if library.dense_version() != VERSION or library.dense_matrix_bytes() != ctypes.sizeof(Matrix):
            raise OSError(f"{path.name} is of another version: install the package again")

    def kernel(self, variant: str, dtype: torch.dtype) -> int | None:
        """Return the address of this variant's kernel for a dtype of ELEMENTS; None if the CPU does not support it."""
        address: int | None = self._kernel(variant.encode(), ELEMENTS[dtype])
        return address


def dense_library() -> DenseLibrary | None:
    """Return the compiled functions for dense products; None if they were not built or cannot be used."""
    return native_library.load(DenseLibrary)


def best_variant(dtype: torch.dtype) -> str | None:
    """Return the best variant, of those that SPLITSERVE_NATIVE allows, that multiplies weights of this dtype.

    None if there is none. Raises UnknownVariant if SPLITSERVE_NATIVE names an unknown variant.
    """
    library = dense_library()
    for name in native_library.wanted_variants():
        if library is not None and name in VARIANTS.get(dtype, ()) and library.kernel(name, dtype) is not None:
            return name
    return None


class DenseMatrix:
    """float32 or bfloat16 weights [num_outputs, num_inputs] on a CPU, packed as native/dense.h describes.

    Sums are float32. Batch-invariant: the bits of a row's outputs depend on that row alone, not on other rows or the
    number of threads.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copy the weights into the packed form. Raises ValueError if `best_variant` of their dtype is None."""
        library, variant = dense_library(), best_variant(weight.dtype)
        if library is None or variant is None:
            raise ValueError(f"there is no kernel for {weight.dtype} weights here")
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype: Final = weight.dtype
        self._library = library
        self._weights = _packed(library, weight.detach())
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._matrix = Matrix(
            num_inputs=self.num_inputs,
            num_outputs=self.num_outputs,
            element=ELEMENTS[self.dtype],
            weights=self._weights.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            kernel=library.kernel(variant, self.dtype),
        )
        self._address = ctypes.addressof(self._matrix)

    @property
    def address(self) -> int:
        """Return the address of the matrix for compiled functions. Valid while this object lives."""
        return self._address

    @property
    def num_bytes(self) -> int:
        """Return the size of the packed matrix in bytes."""
        return self._weights.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights [T, num_inputs] of the outputs whose numbers are outputs [T], int64.

        Raises IndexError for an output that does not exist.
        """
        outputs = outputs.contiguous()
        assert outputs.dtype == torch.int64
        found = torch.empty((len(outputs), self.num_inputs), dtype=self.dtype)
        where = outputs.data_ptr(), len(outputs), found.data_ptr()
        if self._library.rows(self._address, *threads(), *where):
            raise IndexError(f"the matrix has {self.num_outputs} outputs, and not all of these")
        return found

    def record_rows(self, program: NativeProgram, outputs: ctypes.c_void_p, found: torch.Tensor) -> None:
        """Append to `program` the work of `rows`, into the contiguous rows of `found`.

        When the program runs, `outputs` must hold the address of the numbers; a run does nothing if one of these
        outputs does not exist.
        """
        program.add(self._library.add_rows, self._address, ctypes.addressof(outputs), found.data_ptr())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [T, num_inputs] by the weights, add the bias, and return [T, num_outputs].

        All have the weights' dtype.
        """
        assert (x.dtype, x.shape[1]) == (self.dtype, self.num_inputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        outputs = x.new_empty((x.shape[0], self.num_outputs))
        where = x.data_ptr(), x.stride(0) * x.itemsize, x.shape[0], outputs.data_ptr()
        self._library.multiply(self._address, *threads(), *where)
        return outputs

    def record(self, program: NativeProgram, x: torch.Tensor, outputs: torch.Tensor) -> None:
        """Append to `program` the product of the rows of x into `outputs`.

        Both have the weights' dtype and are contiguous.
        """
        row_bytes = self.num_inputs * x.itemsize
        program.add(self._library.add, self._address, x.data_ptr(), row_bytes, outputs.data_ptr())


def _padded(num_outputs: int) -> int:
    """Return the number of outputs padded to whole vectors."""
    return -(-num_outputs // OUTPUTS) * OUTPUTS


def _packed(library: DenseLibrary, weight: torch.Tensor) -> torch.Tensor:
    """Return [panels, words of inputs, outputs of the panel] as bytes, with zero padding."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    num_words = -(-num_inputs * weight.itemsize // WORD_BYTES)
    row_bytes, packed_bytes = weight.stride(0) * weight.itemsize, num_words * WORD_BYTES
    packed = weight_memory().empty(_padded(num_outputs) * packed_bytes)

    def pack(first: int) -> None:
        where = weight.data_ptr() + first * row_bytes, row_bytes
        sizes = min(SLICE_OUTPUTS, num_outputs - first), num_inputs, ELEMENTS[weight.dtype]
        library.pack(*where, *sizes, packed.data_ptr() + first * packed_bytes)

    if num_outputs <= SLICE_OUTPUTS:
        pack(0)
        return packed
    with ThreadPoolExecutor(torch.get_num_threads(), "packing") as packers:
        deque(packers.map(pack, range(0, num_outputs, SLICE_OUTPUTS)), maxlen=0)  # raises the packers' errors
    return packed
