"""What the error that ends a step means: whether later steps would fail too, and its cause in words."""

from typing import Final

import torch

from engine.offload.layers_on_disk import WeightsLost

OUT_OF_MEMORY: Final = 2  # of CUDA's error codes
OF_TRITON: Final = "Triton Error [CUDA]"
OF_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
MOST_FAILED_STEPS: Final = 4  # in a row, after which the next one is not believed to be better


def is_fatal(error: Exception) -> bool:
    """Whether every later step would fail too: weights that are gone, a device that has failed. CUDA gives such an
    error to all calls that follow, the first of which may be Triton's."""
    of_device = isinstance(error, torch.AcceleratorError) or str(error).startswith(OF_TRITON)
    return isinstance(error, WeightsLost) or (of_device and not _is_out_of_memory(error))


def cause_of(error: Exception) -> str:
    """Return the cause in words that a client may read: the error's own message may hold paths."""
    return "the node is out of memory" if _is_out_of_memory(error) else f"the step failed ({type(error).__name__})"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == OUT_OF_MEMORY
    text = str(error)
    return OF_CPU_ALLOCATOR in text or (text.startswith(OF_TRITON) and "out of memory" in text)
