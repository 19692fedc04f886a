"""Products of groups of rows, each with a matrix of its own, in one call of the compiled kernels."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from engine.native import library as native_library
from engine.native.dense_linear import ELEMENTS, DenseMatrix
from engine.native.threads import threads
from engine.quantization.quantized_linear import QuantizedMatrix


class GroupedLibrary:
    """The functions of the compiled library."""

    def __init__(self, path: Path) -> None:
        """Raises AttributeError when the file is of an older version."""
        library = ctypes.CDLL(str(path))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.dense = library.dense_multiply_groups
        self.dense.argtypes = [pointer, pointer, int32, pointer, int32, pointer, int64, pointer]
        self.linear = library.linear_multiply_groups
        self.linear.argtypes = [pointer, pointer, int32, pointer, int32, int32, pointer, int64, pointer]
        for function in (self.dense, self.linear):
            function.restype = int32


class GroupedProduct:
    """Of matrices of one shape and kind. A row's outputs have the bits that its matrix gives for it alone."""

    def __init__(self, library: GroupedLibrary, matrices: Sequence[DenseMatrix | QuantizedMatrix]) -> None:
        self._library = library
        self._matrices = matrices  # whose addresses these are
        self._addresses = (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices))
        self._dense_dtype: Final = matrices[0].dtype if isinstance(matrices[0], DenseMatrix) else None

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether rows of it can be multiplied."""
        return dtype in ELEMENTS if self._dense_dtype is None else dtype == self._dense_dtype

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """x [T, num_inputs] -> [T, num_outputs]; starts [matrices + 1] int32 are those of their rows, and T."""
        first = self._matrices[0]
        assert x.is_contiguous(), "rows behind each other"
        assert (x.shape[1], starts.dtype) == (first.num_inputs, torch.int32)
        outputs = x.new_empty((x.shape[0], first.num_outputs))
        groups = (self._addresses, starts.data_ptr(), len(self._matrices))
        rows = (x.data_ptr(), x.stride(0) * x.itemsize, outputs.data_ptr())
        if self._dense_dtype is not None:
            failed = self._library.dense(*groups, *threads(), *rows)
        else:
            failed = self._library.linear(*groups, *threads(), ELEMENTS[x.dtype], *rows)
        if failed:
            raise MemoryError(f"no memory for {x.shape[0]} rows of {len(self._matrices)} matrices")
        return outputs


def grouped_product(matrices: Sequence[object]) -> GroupedProduct | None:
    """One for these, where kernels compute with all of them in the same way; else None."""
    library = native_library.load(GroupedLibrary)
    dense = [matrix for matrix in matrices if isinstance(matrix, DenseMatrix)]
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix) and matrix.is_recordable]
    kinds: set[tuple[object, ...]] = {(each.dtype, each.num_inputs, each.num_outputs) for each in dense}
    kinds |= {(each.bits, each.input_bits, each.group_size, each.num_inputs, each.num_outputs) for each in quantized}
    if library is None or len(kinds) != 1 or len(dense) + len(quantized) < len(matrices):
        return None
    return GroupedProduct(library, dense or quantized)
