"""What the C library does with memory that this process has freed, much of which it keeps."""

import ctypes
import platform
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MAX_HEAP_BYTES: Final = 32 * 2**20  # larger pieces are mapped anew each time; the most that glibc takes
KEPT_BYTES: Final = 128 * 2**20


def trim() -> None:
    """Give freed memory back to the system, where the C library can: what reading a large file takes for a moment would
    else stay with the process."""
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)


def keep_freed_memory() -> None:
    """Lets this process keep up to KEPT_BYTES of freed memory on each heap, for what comes next. By default glibc gives
    it back after nearly every frame, and after some steps that read prompts, and each page that is fetched again costs
    a fault: up to a fifth of a receiver's CPU time. C libraries other than glibc are left alone."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
