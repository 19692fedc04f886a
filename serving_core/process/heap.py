"""Control how much freed memory the C library keeps, and how often Python looks for garbage in cycles."""

import ctypes
import gc
import platform
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
MAX_HEAP_BYTES: Final = 32 * 2**20  # larger pieces are mapped anew each time; the largest value that glibc accepts
KEPT_BYTES: Final = 128 * 2**20
OBJECTS_PER_COLLECTION: Final = 20_000  # new ones; Python's 700 are alive at once in a step of some hundred streams


def trim() -> None:
    """Return freed memory to the system, where the C library supports it; useful after reading a large file."""
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)


def keep_freed_memory() -> None:
    """Let this process keep up to KEPT_BYTES of freed memory on each heap for reuse.

    By default glibc returns memory after nearly every frame and after some prefill steps, and each page that is fetched
    again costs a fault: up to a fifth of a receiver's CPU time. C libraries other than glibc are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def collect_seldom() -> None:
    """Exclude all objects that exist from garbage collections, and collect after OBJECTS_PER_COLLECTION new objects.

    For a process that has started: with Python's own thresholds a tenth of a streamed token's CPU time is collections.
    """
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
