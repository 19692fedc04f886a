"""Try kernels that a device's compiler and driver make, before an engine uses them."""

from collections.abc import Callable
from typing import TypeVar

import torch

from serving_core.process.extras import TRITON, is_installed

T = TypeVar("T")


def tried(trial: Callable[[], T]) -> tuple[T, str] | tuple[None, str]:
    """Call `trial`: return its result and "", or None and the message of the exception that it raised.

    torch.OutOfMemoryError is raised, since it does not indicate a faulty kernel.
    """
    try:
        return trial(), ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler's and a driver's are of all kinds
        return None, str(error)


def why_not_triton(largest_difference: Callable[[], float], tolerance: float) -> str:
    """Return why Triton kernels cannot be used; empty if they can.

    `largest_difference` runs them and returns their largest difference from torch, which may not exceed `tolerance`.
    The reasons are that Triton is not installed, the message of its exception, or the difference. Raises
    torch.OutOfMemoryError.
    """
    if not is_installed(TRITON):
        return "Triton is not installed"
    difference, why = tried(largest_difference)
    if difference is None or difference <= tolerance:  # not so for NaN
        return why
    return f"they are off by {difference:f}"
