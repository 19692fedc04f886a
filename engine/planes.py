"""Planes as bytes: runs of blocks, host memory, and the share of some heads."""

import itertools
import math
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from engine.layout import KVLayout

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Planes(Protocol):
    """A pool of planes, all heads of it or some."""

    @property
    def layout(self) -> KVLayout: ...

    def write_tensors(self, layer: int, block_ids: Sequence[int], planes: torch.Tensor) -> None:
        """Takes K planes in order, then V planes in order, as bytes."""
        ...


class HeadSlice:
    """The same blocks as a pool, but only some of its heads. What it reads are copies."""

    def __init__(self, layout: KVLayout, storage: Sequence[torch.Tensor], heads: range) -> None:
        """`layout` and `storage` are the pool's: for each layer [2, num_blocks, plane_bytes] uint8, K and V."""
        self.layout: Final = layout.with_heads(len(heads))
        self._pool = (layout, storage)
        self._heads = heads
        sizes = (layout.plane_bytes, self.layout.plane_bytes, layout.head_bytes, 8)
        self._word = _WORDS[math.gcd(*sizes)]  # copying is faster in large elements
        self._parts = [
            [part[..., heads.start : heads.stop, :] for part in self._split(layout, planes)] for planes in storage
        ]

    def heads(self, heads: range) -> "HeadSlice":
        """Only these heads, counted from this slice's first; all of them give the slice itself."""
        check_heads(heads, self.layout)
        if len(heads) == self.layout.num_kv_heads:
            return self
        first = self._heads.start + heads.start
        return HeadSlice(*self._pool, range(first, first + len(heads)))

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """All K planes, then all V planes, as 1-D uint8 tensors on the pool's device; copies."""
        if not block_ids:
            return []
        parts = self._parts[layer]
        shape = (2, len(block_ids), self.layout.plane_bytes)
        planes = torch.empty(shape, dtype=torch.uint8, device=parts[0].device)
        index = self._index(block_ids)
        for ours, theirs in zip(self._split(self.layout, planes), parts, strict=True):
            ours.copy_(theirs[:, index])
        return [planes[0].flatten(), planes[1].flatten()]

    def write_tensors(self, layer: int, block_ids: Sequence[int], planes: torch.Tensor) -> None:
        """The inverse of read_tensors, from one 1-D uint8 tensor on any device; other heads keep what they hold.
        Raises ValueError when it is not of the right length."""
        check_length(planes.numel(), block_ids, self.layout)
        if not block_ids:
            return
        parts = self._parts[layer]
        planes = planes.to(parts[0].device)
        if planes.storage_offset() % self._word.itemsize:
            planes = planes.clone()
        index = self._index(block_ids)
        planes = planes.view(2, len(block_ids), self.layout.plane_bytes)
        for theirs, ours in zip(parts, self._split(self.layout, planes), strict=True):
            theirs[:, index] = ours

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """All K planes, then all V planes, as read-only copies in host memory."""
        return [bytes_of(planes).toreadonly() for planes in self.read_tensors(layer, block_ids)]

    def write(self, layer: int, block_ids: Sequence[int], planes: memoryview) -> None:
        """The inverse of read, from one buffer. Raises ValueError when it is not of the right length."""
        write_staged(self, layer, block_ids, planes)

    def _index(self, block_ids: Sequence[int]) -> slice | torch.Tensor:
        """Of the blocks, as a slice (a faster copy) when they are neighbours."""
        all_runs = runs(block_ids)
        if len(all_runs) == 1:
            first, count = all_runs[0]
            return slice(first, first + count)
        return torch.tensor(block_ids, device=self._parts[0][0].device)

    def _split(self, layout: KVLayout, planes: torch.Tensor) -> list[torch.Tensor]:
        """Of planes [2, n, plane_bytes] data [2, n, block_size, heads, words] and, if any, scales [2, n, heads, 1]."""
        shape = (*planes.shape[:2], layout.block_size, layout.num_kv_heads, -1)
        parts = [planes[..., : layout.data_bytes].view(self._word).view(shape)]
        if layout.is_quantized:
            scales = planes[..., layout.data_bytes :].view(self._word)
            parts.append(scales.view(*planes.shape[:2], layout.num_kv_heads, -1))
        return parts


def runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Each run of consecutive ids as (first id, how many)."""
    groups = itertools.groupby(enumerate(block_ids), key=lambda pair: pair[1] - pair[0])
    members = (list(run) for _, run in groups)
    return [(run[0][1], len(run)) for run in members]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor: a view when it is in host memory, else a copy."""
    return tensor.flatten().cpu().numpy().data


def write_staged(target: Planes, layer: int, block_ids: Sequence[int], planes: memoryview) -> None:
    """Writes bytes of the host by way of a tensor. Raises ValueError when they are not of the right length."""
    check_length(planes.nbytes, block_ids, target.layout)
    staged = torch.empty(planes.nbytes, dtype=torch.uint8)
    bytes_of(staged)[:] = planes.cast("B")
    target.write_tensors(layer, block_ids, staged)


def check_length(num_bytes: int, block_ids: Sequence[int], layout: KVLayout) -> None:
    """Raises ValueError unless these are the bytes of K and V of so many blocks in one layer."""
    expected_bytes = 2 * len(block_ids) * layout.plane_bytes
    if num_bytes != expected_bytes:
        raise ValueError(f"{num_bytes} bytes for {len(block_ids)} blocks of a layer, not {expected_bytes}")


def check_heads(heads: range, layout: KVLayout) -> None:
    """Raises ValueError unless these are neighbouring heads of the layout, at least one."""
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise ValueError(f"{heads} are not neighbouring heads of {layout.num_kv_heads}")
