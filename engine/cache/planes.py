"""Planes as bytes: how those of a layer lie together, which blocks, in host memory, and the share of some heads."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from engine.native.huge_memory import huge_zeros
from serving_core.layout import SCALE_BYTES, KVLayout, Plane

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Stack(NamedTuple):
    """The planes of K and V of one layer where both are of one shape, so that one copy moves both; else those of one of
    them."""

    plane: Plane
    storage: torch.Tensor  # [2 or 1, num_blocks, plane.num_bytes] uint8


def empty_stacks(layout: KVLayout, layer: int, num_blocks: int, device: torch.device) -> list[Stack]:
    """All planes of a layer, zero: K, then V."""
    keys, values = layout.planes(layer)
    shapes = [(keys, 2)] if keys == values else [(keys, 1), (values, 1)]
    return [Stack(plane, _zeros((height, num_blocks, plane.num_bytes), device)) for plane, height in shapes]


def _zeros(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # a request's blocks may lie anywhere, and each has addresses to be looked up
        return huge_zeros(math.prod(shape)).view(shape)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


class HeadSlice:
    """The same blocks as a pool, but only some of its heads. What it reads are copies."""

    def __init__(self, layout: KVLayout, stacks: Mapping[int, Sequence[Stack]], heads: range) -> None:
        """`layout` and `stacks`, by layer, are the pool's."""
        self.layout: Final = layout.with_heads(len(heads))
        self._pool = (layout, stacks)
        self._heads = heads
        self._device = next(stack.storage.device for whole in stacks.values() for stack in whole)
        self._slices = {layer: [_StackSlice(stack, heads) for stack in whole] for layer, whole in stacks.items()}

    def heads(self, heads: range) -> "HeadSlice":
        """Only these heads, counted from this slice's first; all of them give the slice itself."""
        check_heads(heads, self.layout)
        if len(heads) == self.layout.num_kv_heads:
            return self
        first = self._heads.start + heads.start
        return HeadSlice(*self._pool, range(first, first + len(heads)))

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The K planes of these blocks in order, and their V planes, as 1-D uint8 tensors on the pool's device."""
        index = index_of(block_ids)
        keys, values = (planes for part in self._slices[layer] for planes in part.read(index, len(block_ids)))
        return keys.flatten(), values.flatten()

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of read_tensors, from 1-D uint8 tensors on any device; other heads keep what they hold.
        Raises ValueError when they are not of the right length."""
        check_lengths(len(keys), len(values), block_ids, self.layout.plane_bytes(layer))
        index = index_of(block_ids)
        rows = [(part, row) for part in self._slices[layer] for row in range(part.height)]
        for (part, row), planes in zip(rows, (keys, values), strict=True):
            part.write(row, index, planes.view(1, len(block_ids), part.plane.num_bytes))
        await_stream(self._device)

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[memoryview, memoryview]:
        """The bytes of read_tensors, read-only."""
        return bytes_of(*self.read_tensors(layer, block_ids))

    def write(self, layer: int, block_ids: Sequence[int], keys: memoryview, values: memoryview) -> None:
        """The inverse of read. Raises ValueError when they are not of the right length."""
        self.write_tensors(layer, block_ids, copied(keys, self._device), copied(values, self._device))


class _StackSlice:
    """Some heads of a stack."""

    def __init__(self, stack: Stack, heads: range) -> None:
        self.plane: Final = stack.plane._replace(num_heads=len(heads))
        self.height: Final = len(stack.storage)
        self._device = stack.storage.device
        self._word = _word_of(stack.plane, self.plane)
        self._parts = [part[..., heads.start : heads.stop, :] for part in self._split(stack.plane, stack.storage)]

    def read(self, index: slice | list[int], num_blocks: int) -> torch.Tensor:
        """[height, num_blocks, plane.num_bytes]"""
        planes = torch.empty((self.height, num_blocks, self.plane.num_bytes), dtype=torch.uint8, device=self._device)
        for ours, theirs in zip(self._split(self.plane, planes), self._parts, strict=True):
            ours.copy_(theirs[:, index])
        return planes

    def write(self, row: int, index: slice | list[int], planes: torch.Tensor) -> None:
        """Planes [1, num_blocks, plane.num_bytes] to one row of the stack."""
        planes = planes.to(self._device, non_blocking=self._device.type == "cuda")
        if planes.storage_offset() % self._word.itemsize:
            planes = planes.clone()
        for theirs, (ours,) in zip(self._parts, self._split(self.plane, planes), strict=True):
            theirs[row][index] = ours

    def _split(self, plane: Plane, planes: torch.Tensor) -> list[torch.Tensor]:
        """Of planes [k, n, num_bytes] data [k, n, block_size, heads, words] and, if any, scales [k, n, heads, 1]."""
        if not plane.width:
            return []
        data = planes[..., : plane.data_bytes].view(self._word)
        words = plane.head_bytes // self._word.itemsize
        parts = [data.view(*planes.shape[:2], plane.block_size, plane.num_heads, words)]
        if plane.scale_bytes:
            scales = planes[..., plane.data_bytes :].view(self._word)
            parts.append(scales.view(*planes.shape[:2], plane.num_heads, SCALE_BYTES // self._word.itemsize))
        return parts


@lru_cache(maxsize=256)  # asked for every layer of a slice
def _word_of(whole: Plane, part: Plane) -> torch.dtype:
    """The largest element that heads and planes of both are made of: copying is faster in large ones."""
    sizes = (whole.num_bytes, part.num_bytes, part.head_bytes)
    return _WORDS[math.gcd(*sizes, SCALE_BYTES if part.scale_bytes else 8)]


def index_of(block_ids: Sequence[int]) -> slice | list[int]:
    """Picks these blocks out of many: a slice, which copies faster and may be a view, when they are neighbours."""
    first = block_ids[0] if block_ids else 0
    run = range(first, first + len(block_ids))
    return slice(run.start, run.stop) if tuple(block_ids) == tuple(run) else list(block_ids)


def bytes_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[memoryview, memoryview]:
    """The bytes of contiguous uint8 tensors of one device, read-only: views of those in host memory, else copies."""
    if keys.is_cuda:
        on_host = [empty_on_host(len(each), keys.device).copy_(each, non_blocking=True) for each in (keys, values)]
        await_stream(keys.device)
        keys, values = on_host
    return keys.numpy().data.toreadonly(), values.numpy().data.toreadonly()


def copied(planes: memoryview, device: torch.device) -> torch.Tensor:
    """A copy of the bytes, 1-D uint8 in host memory, from which the device is filled."""
    copy = empty_on_host(planes.nbytes, device)
    copy.numpy().data[:] = planes
    return copy


def empty_on_host(num_bytes: int, device: torch.device) -> torch.Tensor:
    """1-D uint8, that the device reads and writes by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def await_stream(device: torch.device) -> None:
    """Returns when the device has done what this thread has queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def check_lengths(key_bytes: int, value_bytes: int, block_ids: Sequence[int], plane_bytes: tuple[int, int]) -> None:
    """Raises ValueError unless these are the sizes of so many planes of K and of V, of which one has plane_bytes."""
    expected = [len(block_ids) * each for each in plane_bytes]
    if [key_bytes, value_bytes] != expected:
        raise ValueError(
            f"{key_bytes} and {value_bytes} bytes for {len(block_ids)} planes of K and V, not {expected[0]} and "
            f"{expected[1]}"
        )


def check_heads(heads: range, layout: KVLayout) -> None:
    """Raises ValueError unless these are neighbouring heads of the layout, at least one."""
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise ValueError(f"{heads} are not neighbouring heads of {layout.num_kv_heads}")
