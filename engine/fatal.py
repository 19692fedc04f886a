"""After which errors a process cannot compute any more."""

from typing import Final

import torch

from engine.offload.layers_on_disk import WeightsLost

OUT_OF_MEMORY: Final = 2  # of CUDA's error codes
OF_TRITON: Final = "Triton Error [CUDA]"
MOST_FAILED_STEPS: Final = 4  # in a row, after which the next one is not believed to be better


def is_fatal(error: Exception) -> bool:
    """Whether every later step would fail too: weights that are gone, a device that has failed. CUDA gives such an
    error to all calls that follow, the first of which may be Triton's."""
    if isinstance(error, RuntimeError) and str(error).startswith(OF_TRITON):
        return "out of memory" not in str(error)
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) != OUT_OF_MEMORY
    return isinstance(error, WeightsLost)
