"""Load the compiled kernels of engine/native, if the package was built where a C compiler is.

One library has all kernels: attention (declared here), products with quantized weights (linear_library.py), with dense
weights (linear.py), the ops between products (ops_library.py), programs of these (program.py) and sums over
ranks (shared_sums.py).

The variant is chosen when the process starts: the best that this CPU supports, or the one that the environment variable
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

VERSION: Final = 7  # ATTENTION_VERSION in native/attention.h
VARIANTS: Final = ("amx", "avx512_bf16", "avx512", "avx2", "plain")  # the fastest first
OFF: Final = "off"
ELEMENTS: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "fp8_e4m3": 4}

_FILE_STEM: Final = "kernels"

F = TypeVar("F")


class Plan(ctypes.Structure):
    """The C structure Plan of native/attention.h."""

    _fields_ = [
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("pool_element", ctypes.c_int32),
        ("query_element", ctypes.c_int32),
        ("cache_bytes", ctypes.c_int64),
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
    """The compiled attention functions."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises OSError if it cannot be loaded or has another version."""
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
        self.move = library.attention_move
        self.move.restype = ctypes.c_int32
        self.move.argtypes = [pointer, pointer, pointer, pointer, pointer, ctypes.c_int32, int64, int64]
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
        """Return the address of the attention kernel of this variant and these dtypes (names in ELEMENTS).

        None if the CPU or the variant does not support them.
        """
        address: int | None = self._native_kernel(variant.encode(), ELEMENTS[pool_dtype], ELEMENTS[query_dtype])
        return address


@functools.cache
def load(functions: Callable[[Path], F]) -> F | None:
    """Return an object of `functions`, a class that declares C functions, made with the path of the compiled library.

    Returns None, and logs why, if the library was not built or does not match. The result is cached.
    """
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
    """Return the path of the compiled library; None if it was not built."""
    folder = Path(__file__).parent
    paths = (folder / (_FILE_STEM + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


def native_library() -> NativeLibrary | None:
    """Return this installation's attention kernels; None if they were not built or cannot be used."""
    return load(NativeLibrary)


class Kernels(Protocol):
    """The functions of a library whose kernels are selected by variant."""

    def kernel(self, variant: str) -> int | None:
        """Return the address of the kernel of this variant; None if the CPU does not support it."""


def best_variant(kernels: Kernels | None, variant_of: Mapping[str, str]) -> str | None:
    """Return the best allowed variant that these kernels have on this machine, by the kernels' own name.

    `variant_of` maps each of VARIANTS to that name. None without kernels, without such a variant, or with native
    kernels off. Raises UnknownVariant if the environment names none of VARIANTS.
    """
    for wanted in wanted_variants():
        if kernels is not None and kernels.kernel(variant_of[wanted]) is not None:
            return variant_of[wanted]
    return None


class UnknownVariant(SettingsError, ValueError):
    """SPLITSERVE_NATIVE names an unknown variant."""


def wanted_variants() -> tuple[str, ...]:
    """Return the VARIANTS that SPLITSERVE_NATIVE allows, best first.

    That is all of them if it is unset, the one that it names, or none if it is "off". Raises UnknownVariant if it names
    something else.
    """
    name = os.environ.get(ENVIRONMENT, "")
    if name == OFF:
        return ()
    if not name:
        return VARIANTS
    if name not in VARIANTS:
        raise UnknownVariant(f"{ENVIRONMENT}={name} is none of {', '.join((*VARIANTS, OFF))}")
    return (name,)
