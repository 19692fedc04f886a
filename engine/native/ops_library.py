"""Load the compiled ops of engine/native/ops*.c and experts.c, if built.

As with the attention kernels, SPLITSERVE_NATIVE names the variant; without it the best for this CPU is used.
"""

import ctypes
from pathlib import Path
from typing import Any, Final

from engine.native import library as native_library

VERSION: Final = 7  # OPS_VERSION in native/ops.h
EXPERTS_VERSION: Final = 1  # in native/experts.c
VARIANTS: Final = ("avx512", "avx2", "plain")  # the fastest first

_VARIANT_OF: Final = {"amx": "avx512", "avx512_bf16": "avx512", "avx512": "avx512", "avx2": "avx2", "plain": "plain"}


class NativeNorm(ctypes.Structure):
    """Norm in native/ops.h."""

    _fields_ = [
        ("element", ctypes.c_int32),
        ("weight_element", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("increases", ctypes.c_int32),
        ("centers", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("delta_scale", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("delta", ctypes.c_void_p),
        ("delta_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
    ]


class HeadStore(ctypes.Structure):
    """HeadStore in native/ops.h."""

    _fields_ = [
        ("element", ctypes.c_int32),
        ("weight_element", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("query_weight", ctypes.c_void_p),
        ("key_weight", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("signed_sines", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
    ]


class Table(ctypes.Structure):
    """Table in native/ops.h."""

    _fields_ = [("rows", ctypes.c_void_p), ("num_rows", ctypes.c_int64)]


class NativeSampling(ctypes.Structure):
    """Sampling in native/ops.h."""

    _fields_ = [
        ("row", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("temperature", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
    ]


class SamplingBatch(ctypes.Structure):
    """SamplingBatch in native/ops.h."""

    _fields_ = [
        ("element", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("highest", ctypes.c_void_p),
        ("samplings", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("masses", ctypes.c_void_p),
    ]


class OpsLibrary:
    """The compiled functions for the ops."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises OSError if it cannot be loaded or has another version."""
        library = ctypes.CDLL(str(path))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        run: list[Any] = [pointer, pointer, int32]
        rows = [*run, int32, int32, int32]
        self._kernel = library.ops_kernel
        self._kernel.restype = pointer
        self._kernel.argtypes = [ctypes.c_char_p]
        self.norm, self.rotate_and_store, self.gate = library.ops_norm, library.ops_rotate_and_store, library.ops_gate
        self.search, self.cap = library.ops_search, library.ops_cap
        self.norm.argtypes = [*run, pointer, int32]
        self.rotate_and_store.argtypes = [*run, pointer, int32, int64]
        self.gate.argtypes = [*run, int32, int32, int32, int32, pointer, int64, pointer]
        self.search.argtypes = [*rows, pointer, int64, pointer, pointer]
        self.cap.argtypes = [*rows, pointer, int64, ctypes.c_float]
        self.sample, self.sample_bytes = library.ops_sample, library.ops_sample_bytes
        self.sample.argtypes = [*run, int32, pointer]
        self.sample_bytes.argtypes, self.sample_bytes.restype = [int64], int64
        for function in (self.norm, self.gate, self.search, self.cap, self.sample):
            function.restype = None
        self.add_norm, self.add_rotate_and_store = library.ops_add_norm, library.ops_add_rotate_and_store
        self.add_gate, self.add_cap = library.ops_add_gate, library.ops_add_cap
        self.add_sum, self.add_search = library.ops_add_sum, library.ops_add_search
        self.add_gather = library.ops_add_gather
        self.add_norm.argtypes = [pointer, pointer, pointer]
        self.add_sum.argtypes = [pointer, pointer, int32, int32, pointer, pointer]
        self.add_rotate_and_store.argtypes = [pointer, pointer, pointer, int64, pointer]
        self.add_gate.argtypes = [pointer, pointer, int32, int32, int32, pointer, int64, pointer]
        self.add_cap.argtypes = [pointer, pointer, int32, int32, pointer, int64, ctypes.c_float]
        self.add_search.argtypes = [pointer, pointer, int32, int32, pointer, int64, pointer, pointer]
        self.add_gather.argtypes = [pointer, pointer, pointer, int64, pointer]
        adding = (self.add_norm, self.add_sum, self.add_rotate_and_store, self.add_gate, self.add_cap, self.add_search)
        for function in (self.rotate_and_store, self.add_gather, *adding):
            function.restype = int32
        self.route, self.mix = library.experts_route, library.experts_mix
        self.route.argtypes = [pointer, int32, int32, int32, int32, int32, int32, *(pointer,) * 6]
        self.mix.argtypes = [pointer, int32, int32, int32, int32, int32, *(pointer,) * 6]
        self.route.restype = self.mix.restype = None
        is_ours = library.ops_version() == VERSION and library.experts_version() == EXPERTS_VERSION
        for size, structure in (
            (library.ops_norm_bytes, NativeNorm),
            (library.ops_head_store_bytes, HeadStore),
            (library.ops_sampling_batch_bytes, SamplingBatch),
        ):
            size.restype = int64
            is_ours = is_ours and size() == ctypes.sizeof(structure)
        if not is_ours:
            raise OSError(f"{path.name} is of another version: install the package again")

    def kernel(self, variant: str) -> int | None:
        """Return the address of the kernels of one of VARIANTS; None if the CPU does not support it."""
        address: int | None = self._kernel(variant.encode())
        return address


def ops_library() -> OpsLibrary | None:
    """Return the compiled functions for the ops; None, with the reason in the log, if they cannot be used."""
    return native_library.load(OpsLibrary)


def best_variant() -> str | None:
    """Return the best of VARIANTS for ops on this CPU; None without native kernels.

    Raises UnknownVariant if SPLITSERVE_NATIVE names an unknown variant.
    """
    return native_library.best_variant(ops_library(), _VARIANT_OF)
