"""Memory in huge pages, of which a CPU reads a third more in the same time: it looks up fewer addresses."""

import contextlib
import mmap
import threading
from collections.abc import Iterator
from typing import Final, Protocol

import torch

PAGE_BYTES: Final = 2**21
ALIGNMENT: Final = 64
CHUNK_BYTES: Final = 16 * PAGE_BYTES  # that small tensors share, so that few pages are filled in part

_HAS_HUGE_PAGES: Final = hasattr(mmap, "MADV_HUGEPAGE")


class Memory(Protocol):
    """Where tensors can be had."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes of any content, which start at a multiple of ALIGNMENT. Raises OSError when there is no memory."""


class HugeMemory:
    """Gives out tensors. The memory of a chunk is let go with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes of any content, which start at a multiple of ALIGNMENT. Raises OSError when there is no memory."""
        if not _HAS_HUGE_PAGES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        reserved = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if reserved > self._rest.nbytes:
                fresh = huge_chunk(max(reserved, CHUNK_BYTES))
                if reserved >= CHUNK_BYTES:
                    return fresh[:num_bytes]
                self._rest = fresh
            given, self._rest = self._rest[:num_bytes], self._rest[reserved:]
        return given


def huge_chunk(num_bytes: int) -> torch.Tensor:
    """Bytes that start with a huge page. A page takes memory once it is written."""
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without huge pages, on which small ones must do
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + num_bytes]


def huge_zeros(num_bytes: int) -> torch.Tensor:
    """Bytes that are 0, in huge pages where they fill one."""
    if not _HAS_HUGE_PAGES or num_bytes < PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return huge_chunk(num_bytes)


_for_weights: Memory = HugeMemory()


def weight_memory() -> Memory:
    """Where weights are put that kernels read."""
    return _for_weights


@contextlib.contextmanager
def weights_in(memory: Memory) -> Iterator[None]:
    """Puts those elsewhere that are packed meanwhile. To be used by the thread that loads them."""
    global _for_weights
    before, _for_weights = _for_weights, memory
    try:
        yield
    finally:
        _for_weights = before
