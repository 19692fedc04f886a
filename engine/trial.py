"""Kernels that a device's compiler and driver make are tried out before they are taken."""

from collections.abc import Callable
from typing import TypeVar

import torch

from serving_core.extras import TRITON, is_installed

T = TypeVar("T")


def tried(trial: Callable[[], T]) -> tuple[T, str] | tuple[None, str]:
    """What a trial gives, or None and why it failed. Raises torch.OutOfMemoryError, which says nothing of a kernel."""
    try:
        return trial(), ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler's and a driver's are of all kinds
        return None, str(error)


def why_not_triton(largest_difference: Callable[[], float], tolerance: float) -> str:
    """Why kernels of Triton are not taken; empty where their largest difference from torch is within the tolerance.
    Raises torch.OutOfMemoryError."""
    if not is_installed(TRITON):
        return "Triton is not installed"
    difference, why = tried(largest_difference)
    if difference is None or difference <= tolerance:  # which what is not a number is not
        return why
    return f"they are off by {difference:f}"
