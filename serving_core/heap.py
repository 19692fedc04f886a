"""What this process has freed, and holds all the same."""

import ctypes


def trim() -> None:
    """Gives it back to the system, where the C library can: what reading a large file takes for a moment would else
    stay with the process."""
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)
