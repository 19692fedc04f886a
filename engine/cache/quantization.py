"""8-bit keys and values: in each plane the data, then one float32 scale for each head; value = data * scale.

The scale of a block and head is its largest magnitude so far over the largest number of the dtype. When a later token
is larger, the scale grows and the tokens before it are rounded anew; so the data depend on the steps in which a block
was filled, but never on other blocks. A token at offset 0 starts a block anew, whatever lay there before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import torch

from engine.cache.planes import Stack
from serving_core.errors import SettingsError
from serving_core.layout import SCALE_BYTES, KVLayout, Plane

LARGEST: Final = {"int8": 127.0, "fp8_e4m3": 448.0}
_SMALLEST: Final = torch.finfo(torch.float32).tiny  # the reciprocals of smaller scales overflow; they count as 0
_UNITS: Final = {"int8": 1.0, "fp8_e4m3": 256.0}  # what 1 stands for in what _decode gives
_TILE_ELEMENTS: Final = 2**18  # on a CPU: the float32 of a tile stay in its cache


@dataclass(frozen=True, slots=True)
class Touched:
    """The U blocks that T new tokens go to; first those that hold earlier tokens, which must be kept."""

    slots: torch.Tensor  # [T], what it was made from
    planes: tuple[torch.Tensor, torch.Tensor]  # int64, numbers of planes in a stack of one [U] and of two [2 * U]
    num_held: int  # how many of the U hold earlier tokens
    is_held: torch.Tensor | None  # [num_held], of which of those that is so; None: of all
    blocks: torch.Tensor  # [T] int64, which of the U a token goes to
    offsets: torch.Tensor  # [T] int64, where in that block


class ScaledPlanes(NamedTuple):
    """K or V of all blocks: numbers times scales."""

    numbers: torch.Tensor  # [num_blocks, block_size, num_kv_heads, width]
    scales: torch.Tensor  # [num_blocks, num_kv_heads], float32 where they are of use


class QuantizedPlanes:
    """What is done with the planes of a layer, one stack after the other."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        """Raises SettingsError when the scales would not lie on multiples of 4 bytes."""
        for plane in (plane for layer in layout.layers for plane in layout.planes(layer)):
            if plane.data_bytes % SCALE_BYTES:
                raise SettingsError(
                    f"a {layout.dtype} block of {plane.block_size} tokens, {plane.num_heads} heads and head size "
                    f"{plane.width} takes {plane.data_bytes} bytes, which must be a multiple of {SCALE_BYTES}"
                )
        self._dtype = layout.dtype
        self._block_size = layout.block_size
        self._num_blocks = num_blocks
        self._largest, self._unit = LARGEST[layout.dtype], _UNITS[layout.dtype]

    def touch(self, slots: torch.Tensor) -> Touched:
        """What `store` needs to know of slots [T]; the same for all layers."""
        offsets = slots % self._block_size
        ids, blocks = torch.unique(slots // self._block_size, return_inverse=True)
        is_new = torch.zeros(len(ids), dtype=torch.bool, device=slots.device)
        is_new.index_fill_(0, blocks[offsets == 0], True)
        order = is_new.int().argsort(stable=True)
        ids = ids[order]
        planes = ids, torch.cat((ids, ids + self._num_blocks))
        return Touched(slots, planes, len(ids) - int(is_new.sum()), None, order.argsort()[blocks], offsets)

    def touch_apart(self, slots: torch.Tensor) -> Touched:
        """The same of slots in a block each, awaiting nothing."""
        offsets, ids = slots % self._block_size, slots // self._block_size
        planes = ids, torch.cat((ids, ids + self._num_blocks))
        return Touched(slots, planes, len(ids), offsets > 0, torch.arange(len(ids), device=ids.device), offsets)

    def views(self, stacks: Sequence[Stack]) -> list[ScaledPlanes]:
        """Of K and of V, the numbers as int8 or float8_e4m3fn."""
        views: list[ScaledPlanes] = []
        for stack in stacks:
            data, scales = _parts(stack.plane, stack.storage)
            numbers = data if self._dtype == "int8" else data.view(torch.float8_e4m3fn)
            views += map(ScaledPlanes, numbers, scales)
        return views

    def store(self, stacks: Sequence[Stack], touched: Touched, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [T, num_kv_heads, width] of the touched tokens."""
        if len(stacks) == 1:
            self._store(stacks[0], touched, torch.stack((keys, values)))
            return
        for stack, tokens in zip(stacks, (keys, values), strict=True):
            if stack.plane.width:
                self._store(stack, touched, tokens.unsqueeze(0))

    def gather(
        self, stacks: Sequence[Stack], blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(blocks), block_size, num_kv_heads, width] of these blocks."""
        keys, values = chain.from_iterable(self._gather(stack, blocks, dtype) for stack in stacks)
        return keys, values

    def _store(self, stack: Stack, touched: Touched, tokens: torch.Tensor) -> None:
        """Tokens [1 or 2, T, H, D]."""
        tokens = tokens.float()
        numbers = touched.planes[len(tokens) - 1]
        storage = stack.storage.flatten(0, 1)
        planes = storage.index_select(0, numbers)
        data, scales = _parts(stack.plane, planes.view(len(tokens), -1, stack.plane.num_bytes))

        largest = tokens.abs().amax(-1)
        index = touched.blocks.view(1, -1, 1).expand_as(largest)
        grown = torch.zeros_like(scales).scatter_reduce_(1, index, largest, "amax").div_(self._largest)
        held = scales[:, : touched.num_held]
        if touched.is_held is not None:
            held = torch.where(touched.is_held[:, None], held, 0.0)  # of who had the block before it may be no number
        torch.maximum(grown[:, : touched.num_held], held, out=grown[:, : touched.num_held])
        inverse = grown.reciprocal().masked_fill_(grown < _SMALLEST, 0.0)

        if touched.num_held:
            shrink = held * inverse[:, : touched.num_held] * self._unit
            earlier = data[:, : touched.num_held]
            kept = self._encode(self._decode(earlier).mul_(shrink[:, :, None, :, None]))
            if touched.is_held is not None:
                kept = torch.where(touched.is_held[:, None, None, None], kept, earlier)
            earlier.copy_(kept)
        scales.copy_(grown)
        data[:, touched.blocks, touched.offsets] = self._encode(tokens * inverse[:, touched.blocks].unsqueeze(-1))
        storage.view(torch.int32).index_copy_(0, numbers, planes.view(torch.int32))  # faster than by bytes

    def _gather(self, stack: Stack, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[1 or 2, N, block_size, heads, width]"""
        plane, storage = stack.plane, stack.storage
        shape = (len(storage), len(blocks), plane.block_size, plane.num_heads, plane.width)
        gathered = torch.empty(shape, dtype=dtype, device=storage.device)
        if not plane.width:
            return gathered
        num_tiles = 1 + gathered.numel() // _TILE_ELEMENTS if storage.device.type == "cpu" else 1
        planes = torch.cat((blocks, blocks + self._num_blocks)) if len(storage) == 2 else blocks
        for tile, target in zip(planes.chunk(num_tiles), gathered.flatten(0, 1).chunk(num_tiles), strict=True):
            data, scales = _parts(plane, storage.flatten(0, 1).index_select(0, tile))
            target.copy_(self._decode(data).mul_((scales * self._unit)[:, None, :, None]))
        return gathered

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers up to LARGEST in magnitude, rounded to the nearest; as int8, which for fp8_e4m3 are the bits."""
        if self._dtype == "int8":
            return values.round().to(torch.int8)
        return values.to(torch.float8_e4m3fn).view(torch.int8)

    def _decode(self, data: torch.Tensor) -> torch.Tensor:
        """The inverse of _encode, in float32 and in units of 1 / unit."""
        if self._dtype == "int8":
            return data.float()
        # The bits of a float16 that is 1/256 of the number; torch's own conversion takes many times as long on a CPU.
        return data.short().bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16).float()


def _parts(plane: Plane, planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of planes [..., num_bytes] data [..., block_size, heads, width] and scales [..., heads]."""
    data, scales = planes[..., : plane.data_bytes], planes[..., plane.data_bytes :]
    shape = (*planes.shape[:-1], plane.block_size, plane.num_heads, plane.width)
    return data.view(torch.int8).view(shape), scales.view(torch.float32)
