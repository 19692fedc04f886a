"""Control how much freed memory the C library keeps."""

import ctypes
import platform
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
MAX_HEAP_BYTES: Final = 32 * 2**20  # larger pieces are mapped anew each time; the largest value that glibc accepts
KEPT_BYTES: Final = 128 * 2**20


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
