"""Planes as bytes: which blocks, in host memory, and the share of some heads."""

import math
from collections.abc import Sequence
from typing import Final

import torch

from serving_core.layout import SCALE_BYTES, KVLayout

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HeadSlice:
    """The same blocks as a pool, but only some of its heads. What it reads are copies."""

    def __init__(self, layout: KVLayout, storage: Sequence[torch.Tensor], heads: range) -> None:
        """`layout` and `storage` are the pool's: for each layer [2, num_blocks, plane_bytes] uint8, K and V."""
        self.layout: Final = layout.with_heads(len(heads))
        self._pool = (layout, storage)
        self._heads = heads
        sizes = (
            layout.plane_bytes,
            self.layout.plane_bytes,
            layout.head_bytes,
            SCALE_BYTES if layout.is_quantized else 8,
        )
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

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The K planes of these blocks in order, and their V planes, as 1-D uint8 tensors on the pool's device."""
        parts = self._parts[layer]
        shape = (2, len(block_ids), self.layout.plane_bytes)
        planes = torch.empty(shape, dtype=torch.uint8, device=parts[0].device)
        index = index_of(block_ids)
        for ours, theirs in zip(self._split(self.layout, planes), parts, strict=True):
            ours.copy_(theirs[:, index])
        keys, values = planes
        return keys.flatten(), values.flatten()

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of read_tensors, from 1-D uint8 tensors on any device; other heads keep what they hold.
        Raises ValueError when they are not of the right length."""
        check_lengths(len(keys), len(values), block_ids, self.layout)
        index = index_of(block_ids)
        for kind, planes in enumerate((keys, values)):
            planes = planes.to(self._parts[layer][0].device)
            if planes.storage_offset() % self._word.itemsize:
                planes = planes.clone()
            split = self._split(self.layout, planes.view(1, len(block_ids), self.layout.plane_bytes))
            for theirs, (ours,) in zip(self._parts[layer], split, strict=True):
                theirs[kind][index] = ours

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[memoryview, memoryview]:
        """The bytes of read_tensors, read-only."""
        keys, values = self.read_tensors(layer, block_ids)
        return bytes_of(keys).toreadonly(), bytes_of(values).toreadonly()

    def write(self, layer: int, block_ids: Sequence[int], keys: memoryview, values: memoryview) -> None:
        """The inverse of read. Raises ValueError when they are not of the right length."""
        self.write_tensors(layer, block_ids, copied(keys), copied(values))

    def _split(self, layout: KVLayout, planes: torch.Tensor) -> list[torch.Tensor]:
        """Of planes [k, n, plane_bytes] data [k, n, block_size, heads, words] and, if any, scales [k, n, heads, 1]."""
        data = planes[..., : layout.data_bytes].view(self._word)
        words = layout.head_bytes // self._word.itemsize
        parts = [data.view(*planes.shape[:2], layout.block_size, layout.num_kv_heads, words)]
        if layout.is_quantized:
            scales = planes[..., layout.data_bytes :].view(self._word)
            parts.append(scales.view(*planes.shape[:2], layout.num_kv_heads, SCALE_BYTES // self._word.itemsize))
        return parts


def index_of(block_ids: Sequence[int]) -> slice | list[int]:
    """Picks these blocks out of many: a slice, which copies faster and may be a view, when they are neighbours."""
    first = block_ids[0] if block_ids else 0
    run = range(first, first + len(block_ids))
    return slice(run.start, run.stop) if tuple(block_ids) == tuple(run) else list(block_ids)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor: a view when it is in host memory, else a copy."""
    return tensor.flatten().cpu().numpy().data


def copied(planes: memoryview) -> torch.Tensor:
    """A copy of the bytes, 1-D uint8 in host memory."""
    copy = torch.empty(planes.nbytes, dtype=torch.uint8)
    bytes_of(copy)[:] = planes
    return copy


def check_lengths(key_bytes: int, value_bytes: int, block_ids: Sequence[int], layout: KVLayout) -> None:
    """Raises ValueError unless these are the sizes of the K planes and the V planes of so many blocks in one layer."""
    expected_bytes = len(block_ids) * layout.plane_bytes
    if not key_bytes == value_bytes == expected_bytes:
        raise ValueError(
            f"{key_bytes} and {value_bytes} bytes for {len(block_ids)} planes of K and V, not {expected_bytes} each"
        )


def check_heads(heads: range, layout: KVLayout) -> None:
    """Raises ValueError unless these are neighbouring heads of the layout, at least one."""
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise ValueError(f"{heads} are not neighbouring heads of {layout.num_kv_heads}")
