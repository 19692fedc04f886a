"""The compiled kernels of engine/native, if the package was built where a C compiler is.

All are in one library: attention (declared here), products with quantized weights (linear_library.py), with others
(dense_linear.py) and with many matrices (grouped.py), what experts add to them (dispatch.py), the steps between
products (steps.py), programs of these (program.py) and the sums of several ranks (engine/shared_sums.py).

Which variant runs is decided when the process starts: the best that this CPU has, or what the environment variable
SPLITSERVE_NATIVE names (one of VARIANTS, or "off").
"""

import ctypes
import functools
import importlib.machinery
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol, TypeVar

from serving_core.errors import SettingsError
from serving_core.flags import NATIVE as ENVIRONMENT

logger = logging.getLogger(__name__)

VERSION: Final = 6  # ATTENTION_VERSION in native/attention.h
VARIANTS: Final = ("amx", "avx512_bf16", "avx512", "avx2", "plain")  # the fastest first
OFF: Final = "off"
ELEMENTS: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "fp8_e4m3": 4}

_FILE_STEM: Final = "kernels"

F = TypeVar("F")


class Plan(ctypes.Structure):
    """Plan in native/attention.h."""

    _fields_ = [
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("pool_element", ctypes.c_int32),
        ("query_element", ctypes.c_int32),
        ("plane_bytes", ctypes.c_int64),
        ("data_bytes", ctypes.c_int64),
        ("score_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("partial_floats", ctypes.c_int64),
        ("num_finished", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("kernel", ctypes.c_void_p),
    ]


class NativeLibrary:
    """The functions of the compiled library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be loaded or is of another version."""
        library = ctypes.CDLL(str(path))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self._native_kernel = library.attention_kernel
        self._native_kernel.restype = pointer
        self._native_kernel.argtypes = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32]
        self.scratch_bytes = library.attention_scratch_bytes
        self.partial_floats = library.attention_partial_floats
        self.units = library.attention_units
        self.units.restype = None
        self.units.argtypes = [pointer, pointer, pointer, ctypes.c_int32, pointer, int64, pointer]
        self.add = library.attention_add
        self.add.restype = ctypes.c_int32
        self.add.argtypes = [pointer, pointer, pointer, int64, pointer, pointer, pointer]
        self.attend = library.attention_attend
        self.attend.restype = None
        self.attend.argtypes = [pointer, pointer, pointer, int64, pointer, pointer, pointer]
        for function in (self.scratch_bytes, self.partial_floats):
            function.restype = int64
            function.argtypes = [pointer]
        for function in (library.attention_plan_bytes, library.attention_unit_bytes):
            function.restype = int64
        self.unit_bytes: Final[int] = library.attention_unit_bytes()
        if library.attention_version() != VERSION or library.attention_plan_bytes() != ctypes.sizeof(Plan):
            raise OSError(f"{path.name} is of another version: install the package again")

    def kernel(self, variant: str, pool_dtype: str, query_dtype: str) -> int | None:
        """The address of what computes this; None where the CPU or the variant cannot."""
        address: int | None = self._native_kernel(variant.encode(), ELEMENTS[pool_dtype], ELEMENTS[query_dtype])
        return address


@functools.cache
def load(functions: Callable[[Path], F]) -> F | None:
    """The functions of the library that a class declares, given its path; None, with a line in the log, where it was
    not built or does not fit."""
    path = library_path()
    if path is None:
        logger.info("the native kernels were not built: there was no C compiler when the package was installed")
        return None
    try:
        return functions(path)
    except (OSError, AttributeError) as error:
        logger.warning("the native kernels cannot be used: %s", error)
        return None


def library_path() -> Path | None:
    """The library's file, if it was built."""
    folder = Path(__file__).parent
    paths = (folder / (_FILE_STEM + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


def native_library() -> NativeLibrary | None:
    """The attention kernels of this installation, if they are there."""
    return load(NativeLibrary)


class Kernels(Protocol):
    """A class to `load` whose kernels go by their variant."""

    def kernel(self, variant: str) -> int | None:
        """The address of a variant; None where the CPU does not have it."""


def best_variant(kernels: Kernels | None, variant_of: Mapping[str, str]) -> str | None:
    """The variant that computes here, by the kernels' own name for each of VARIANTS; None where nothing native does.
    Raises UnknownVariant."""
    for wanted in wanted_variants():
        if kernels is not None and kernels.kernel(variant_of[wanted]) is not None:
            return variant_of[wanted]
    return None


class UnknownVariant(SettingsError, ValueError):
    """SPLITSERVE_NATIVE names no variant."""


def wanted_variants() -> tuple[str, ...]:
    """Those of VARIANTS that may be used here, best first. Raises UnknownVariant."""
    name = os.environ.get(ENVIRONMENT, "")
    if name == OFF:
        return ()
    if not name:
        return VARIANTS
    if name not in VARIANTS:
        raise UnknownVariant(f"{ENVIRONMENT}={name} is none of {', '.join((*VARIANTS, OFF))}")
    return (name,)
