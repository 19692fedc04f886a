"""Hold the KV pool of one rank: the key cache and value cache of each layer, as tensors and as bytes.

With a quantized dtype, the scale of a block and head is its largest magnitude divided by the largest number of the
dtype. When a later token is larger, the scale grows and the earlier tokens are rounded again; so the data depend on the
steps that filled the block, but never on other blocks. A token at offset 0 starts a block anew, whatever it held
before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.native.huge_memory import huge_zeros
from serving_core.errors import SettingsError
from serving_core.layout import SCALE_BYTES, CacheShape, KVLayout
from serving_core.process.memory import available_bytes
from serving_core.settings import EngineSettings
from serving_core.units import size_of


def device_room(settings: EngineSettings, device: torch.device, num_kept_bytes: int) -> int:
    """Return the bytes of CUDA memory that --gpu-memory-utilization leaves for the KV pool.

    Loaded weights and `num_kept_bytes` are subtracted. Returns 0 on a CPU, or if other settings give the pool's size.
    Raises SettingsError if nothing is left, or if other processes have taken a part of it.
    """
    if device.type != "cuda" or settings.num_kv_blocks or settings.kv_cache_memory_bytes:
        return 0
    torch.cuda.empty_cache()  # what loading has freed
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * settings.gpu_memory_utilization)
    taken = torch.cuda.memory_allocated(device) + num_kept_bytes
    if taken >= share:
        raise SettingsError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} of {size_of(total)} leaves nothing for KV "
            f"beside {size_of(taken)} of weights"
        )
    if share - taken > free:
        raise SettingsError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} of {size_of(total)} asks for "
            f"{size_of(share - taken)} of KV, and {size_of(free)} are free: processes that share a device each take a "
            f"share of it, two of them at most {EngineSettings().gpu_memory_utilization / 2:g} each"
        )
    return share - taken


_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Stack(NamedTuple):
    """K and V of one layer in one tensor if their shapes are equal, so that one copy moves both; else K or V alone."""

    cache_shape: CacheShape
    storage: torch.Tensor  # [2 or 1, num_blocks, cache_shape.num_bytes] uint8


def empty_stacks(layout: KVLayout, layer: int, num_blocks: int, device: torch.device) -> list[Stack]:
    """Return zero-filled caches of num_blocks blocks for a layer: one stack of K and V, or K's, then V's."""
    keys, values = layout.cache_shapes(layer)
    shapes = [(keys, 2)] if keys == values else [(keys, 1), (values, 1)]
    return [Stack(cache, _zeros((height, num_blocks, cache.num_bytes), device)) for cache, height in shapes]


def _zeros(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # a request's blocks may lie anywhere, and large pages save address lookups
        return huge_zeros(math.prod(shape)).view(shape)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


class HeadSlice:
    """The blocks of a pool restricted to some of its heads, read and written as bytes. Reads return copies."""

    def __init__(self, layout: KVLayout, stacks: Mapping[int, Sequence[Stack]], heads: range) -> None:
        """Restrict `layout` and `stacks` (by layer) of a pool to `heads`."""
        self.layout: Final = layout.with_heads(len(heads))
        self._pool = (layout, stacks)
        self._heads = heads
        self._device = next(stack.storage.device for whole in stacks.values() for stack in whole)
        self._slices = {layer: [_StackSlice(stack, heads) for stack in whole] for layer, whole in stacks.items()}

    def heads(self, heads: range) -> "HeadSlice":
        """Return the slice of these heads, counted from this slice's first; this slice itself for all of them.

        Raises ValueError if this slice lacks them.
        """
        check_heads(heads, self.layout)
        if len(heads) == self.layout.num_kv_heads:
            return self
        first = self._heads.start + heads.start
        return HeadSlice(*self._pool, range(first, first + len(heads)))

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V of these blocks in order, each as a 1-D uint8 tensor on the pool's device."""
        index = index_of(block_ids)
        keys, values = (caches for part in self._slices[layer] for caches in part.read(index, len(block_ids)))
        return keys.flatten(), values.flatten()

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V of these blocks, as `read_tensors` returns them; the pool's other heads stay unchanged.

        The 1-D uint8 tensors may be on any device. Raises ValueError if the lengths are wrong.
        """
        check_lengths(len(keys), len(values), block_ids, self.layout.cache_bytes(layer))
        index = index_of(block_ids)
        rows = [(part, row) for part in self._slices[layer] for row in range(part.height)]
        for (part, row), caches in zip(rows, (keys, values), strict=True):
            part.write(row, index, caches.view(1, len(block_ids), part.cache_shape.num_bytes))
        await_stream(self._device)

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[memoryview, memoryview]:
        """Return the bytes of K and of V of these blocks, as `read_tensors` has them; read-only, in host memory."""
        return bytes_of(*self.read_tensors(layer, block_ids))

    def write(self, layer: int, block_ids: Sequence[int], keys: memoryview, values: memoryview) -> None:
        """Write K and V of these blocks, as `read` returns them. Raises ValueError if the lengths are wrong."""
        self.write_tensors(layer, block_ids, copied(keys, self._device), copied(values, self._device))


class _StackSlice:
    """Some heads of a stack."""

    def __init__(self, stack: Stack, heads: range) -> None:
        self.cache_shape: Final = stack.cache_shape._replace(num_heads=len(heads))
        self.height: Final = len(stack.storage)
        self._device = stack.storage.device
        self._word = _word_of(stack.cache_shape, self.cache_shape)
        self._parts = [part[..., heads.start : heads.stop, :] for part in self._split(stack.cache_shape, stack.storage)]

    def read(self, index: slice | list[int], num_blocks: int) -> torch.Tensor:
        """Return the bytes [height, num_blocks, bytes of a cache] of these blocks."""
        size = (self.height, num_blocks, self.cache_shape.num_bytes)
        caches = torch.empty(size, dtype=torch.uint8, device=self._device)
        for ours, theirs in zip(self._split(self.cache_shape, caches), self._parts, strict=True):
            ours.copy_(theirs[:, index])
        return caches

    def write(self, row: int, index: slice | list[int], caches: torch.Tensor) -> None:
        """Write [1, num_blocks, bytes of a cache] to one row of the stack."""
        caches = caches.to(self._device, non_blocking=self._device.type == "cuda")
        if caches.storage_offset() % self._word.itemsize:
            caches = caches.clone()
        for theirs, (ours,) in zip(self._parts, self._split(self.cache_shape, caches), strict=True):
            theirs[row][index] = ours

    def _split(self, cache: CacheShape, caches: torch.Tensor) -> list[torch.Tensor]:
        """Return data [k, n, block_size, heads, words] of [k, n, num_bytes] and, if quantized, scales [k, n, heads,
        1].
        """
        if not cache.width:
            return []
        data = caches[..., : cache.data_bytes].view(self._word)
        words = cache.head_bytes // self._word.itemsize
        parts = [data.view(*caches.shape[:2], cache.block_size, cache.num_heads, words)]
        if cache.scale_bytes:
            scales = caches[..., cache.data_bytes :].view(self._word)
            parts.append(scales.view(*caches.shape[:2], cache.num_heads, SCALE_BYTES // self._word.itemsize))
        return parts


@lru_cache(maxsize=256)  # called for every layer of a slice
def _word_of(whole: CacheShape, part: CacheShape) -> torch.dtype:
    """Return the largest element type that divides the heads and blocks of both: copies of large elements are
    faster.
    """
    sizes = (whole.num_bytes, part.num_bytes, part.head_bytes)
    return _WORDS[math.gcd(*sizes, SCALE_BYTES if part.scale_bytes else 8)]


def index_of(block_ids: Sequence[int]) -> slice | list[int]:
    """Return an index of these blocks: a slice if they are consecutive, else the list of their ids.

    A slice copies faster and may yield a view.
    """
    first = block_ids[0] if block_ids else 0
    run = range(first, first + len(block_ids))
    return slice(run.start, run.stop) if tuple(block_ids) == tuple(run) else list(block_ids)


def bytes_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[memoryview, memoryview]:
    """Return the bytes of two contiguous uint8 tensors of one device, read-only: views of host memory, else copies."""
    if keys.is_cuda:
        on_host = [empty_on_host(len(each), keys.device).copy_(each, non_blocking=True) for each in (keys, values)]
        await_stream(keys.device)
        keys, values = on_host
    return keys.numpy().data.toreadonly(), values.numpy().data.toreadonly()


def copied(caches: memoryview, device: torch.device) -> torch.Tensor:
    """Return a copy of the bytes as a 1-D uint8 tensor in host memory, from which the device can copy directly."""
    copy = empty_on_host(caches.nbytes, device)
    copy.numpy().data[:] = caches
    return copy


def empty_on_host(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return num_bytes of host memory, uninitialized, as a 1-D uint8 tensor that the device can access directly."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def await_stream(device: torch.device) -> None:
    """Wait until the device has finished the work that this thread queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def check_lengths(key_bytes: int, value_bytes: int, block_ids: Sequence[int], cache_bytes: tuple[int, int]) -> None:
    """Raise ValueError unless key_bytes and value_bytes are the sizes of len(block_ids) blocks of K and of V.

    `cache_bytes` are the bytes of one block of K and of one of V.
    """
    expected = [len(block_ids) * each for each in cache_bytes]
    if [key_bytes, value_bytes] != expected:
        raise ValueError(
            f"{key_bytes} and {value_bytes} bytes for {len(block_ids)} blocks of K and V, not {expected[0]} and "
            f"{expected[1]}"
        )


def check_heads(heads: range, layout: KVLayout) -> None:
    """Raise ValueError unless `heads` is a non-empty run of the layout's heads."""
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise ValueError(f"{heads} are not neighbouring heads of {layout.num_kv_heads}")


LARGEST: Final = {"int8": 127.0, "fp8_e4m3": 448.0}
_SMALLEST: Final = torch.finfo(torch.float32).tiny  # reciprocals of smaller scales overflow; these scales count as 0
_UNITS: Final = {"int8": 1.0, "fp8_e4m3": 256.0}  # the value of 1 in the output of _decode
_TILE_ELEMENTS: Final = 2**18  # on a CPU: the float32 values of a tile stay in its cache


@dataclass(frozen=True, slots=True)
class Touched:
    """The U blocks that T new tokens go to; first the blocks with earlier tokens, which must be kept."""

    slots: torch.Tensor  # [T], the input
    caches: tuple[torch.Tensor, torch.Tensor]  # int64, indices into a stack of one [U] and of two [2 * U]
    num_held: int  # number of the U blocks that hold earlier tokens
    is_held: torch.Tensor | None  # [num_held], whether the block really holds earlier tokens; None: all do
    blocks: torch.Tensor  # [T] int64, index among the U blocks of a token's block
    offsets: torch.Tensor  # [T] int64, offset in that block


class ScaledCaches(NamedTuple):
    """K or V of all blocks: numbers times scales."""

    numbers: torch.Tensor  # [num_blocks, block_size, num_kv_heads, width]
    scales: torch.Tensor  # [num_blocks, num_kv_heads], float32 if quantized


class QuantizedCaches:
    """Reads and writes a layer's quantized key and value caches, one stack after the other."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        """Check the layout. Raises SettingsError if the scales are not aligned to 4 bytes."""
        for cache in (cache for layer in layout.layers for cache in layout.cache_shapes(layer)):
            if cache.data_bytes % SCALE_BYTES:
                raise SettingsError(
                    f"a {layout.dtype} block of {cache.block_size} tokens, {cache.num_heads} heads and head size "
                    f"{cache.width} takes {cache.data_bytes} bytes, which must be a multiple of {SCALE_BYTES}"
                )
        self._dtype = layout.dtype
        self._block_size = layout.block_size
        self._num_blocks = num_blocks
        self._largest, self._unit = LARGEST[layout.dtype], _UNITS[layout.dtype]

    def touch(self, slots: torch.Tensor) -> Touched:
        """Return what `store` needs to know about a step's slots [T]; the same for all layers."""
        offsets = slots % self._block_size
        ids, blocks = torch.unique(slots // self._block_size, return_inverse=True)
        is_new = torch.zeros(len(ids), dtype=torch.bool, device=slots.device)
        is_new.index_fill_(0, blocks[offsets == 0], True)
        order = is_new.int().argsort(stable=True)
        ids = ids[order]
        caches = ids, torch.cat((ids, ids + self._num_blocks))
        return Touched(slots, caches, len(ids) - int(is_new.sum()), None, order.argsort()[blocks], offsets)

    def touch_apart(self, slots: torch.Tensor) -> Touched:
        """Return what `store` needs to know about slots [T] that lie in one block each; the same for all layers.

        Does not synchronize with the device.
        """
        offsets, ids = slots % self._block_size, slots // self._block_size
        caches = ids, torch.cat((ids, ids + self._num_blocks))
        return Touched(slots, caches, len(ids), offsets > 0, torch.arange(len(ids), device=ids.device), offsets)

    def views(self, stacks: Sequence[Stack]) -> list[ScaledCaches]:
        """Return K and V of all blocks of a layer as views: the numbers, int8 or float8_e4m3fn, and their scales.

        `stacks` are the layer's.
        """
        views: list[ScaledCaches] = []
        for stack in stacks:
            data, scales = _parts(stack.cache_shape, stack.storage)
            numbers = data if self._dtype == "int8" else data.view(torch.float8_e4m3fn)
            views += map(ScaledCaches, numbers, scales)
        return views

    def store(self, stacks: Sequence[Stack], touched: Touched, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize the keys and values [T, num_kv_heads, width] of a step's tokens, and write them to a layer's slots.

        `stacks` are the layer's; `touched`, from `touch` or `touch_apart`, has the slots. Earlier tokens of a block are
        rounded again if its scale grows.
        """
        if len(stacks) == 1:
            self._store(stacks[0], touched, torch.stack((keys, values)))
            return
        for stack, tokens in zip(stacks, (keys, values), strict=True):
            if stack.cache_shape.width:
                self._store(stack, touched, tokens.unsqueeze(0))

    def gather(
        self, stacks: Sequence[Stack], blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of these blocks in `dtype`, each [len(blocks), block_size, num_kv_heads, width].

        `stacks` are those of one layer (see `empty_stacks`), and `blocks` is a tensor [N] of block ids. The width of
        keys may differ from that of values.
        """
        keys, values = chain.from_iterable(self._gather(stack, blocks, dtype) for stack in stacks)
        return keys, values

    def _store(self, stack: Stack, touched: Touched, tokens: torch.Tensor) -> None:
        """Write tokens [1 or 2, T, H, D]."""
        tokens = tokens.float()
        numbers = touched.caches[len(tokens) - 1]
        storage = stack.storage.flatten(0, 1)
        caches = storage.index_select(0, numbers)
        data, scales = _parts(stack.cache_shape, caches.view(len(tokens), -1, stack.cache_shape.num_bytes))

        largest = tokens.abs().amax(-1)
        index = touched.blocks.view(1, -1, 1).expand_as(largest)
        grown = torch.zeros_like(scales).scatter_reduce_(1, index, largest, "amax").div_(self._largest)
        held = scales[:, : touched.num_held]
        if touched.is_held is not None:
            held = torch.where(touched.is_held[:, None], held, 0.0)  # stale data of the block's former owner may be NaN
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
        storage.view(torch.int32).index_copy_(0, numbers, caches.view(torch.int32))  # faster than by bytes

    def _gather(self, stack: Stack, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return [1 or 2, N, block_size, heads, width]."""
        cache, storage = stack.cache_shape, stack.storage
        shape = (len(storage), len(blocks), cache.block_size, cache.num_heads, cache.width)
        gathered = torch.empty(shape, dtype=dtype, device=storage.device)
        if not cache.width:
            return gathered
        num_tiles = 1 + gathered.numel() // _TILE_ELEMENTS if storage.device.type == "cpu" else 1
        caches = torch.cat((blocks, blocks + self._num_blocks)) if len(storage) == 2 else blocks
        for tile, target in zip(caches.chunk(num_tiles), gathered.flatten(0, 1).chunk(num_tiles), strict=True):
            data, scales = _parts(cache, storage.flatten(0, 1).index_select(0, tile))
            target.copy_(self._decode(data).mul_((scales * self._unit)[:, None, :, None]))
        return gathered

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """Round to numbers of magnitude up to LARGEST; as int8, which for fp8_e4m3 holds the bits."""
        if self._dtype == "int8":
            return values.round().to(torch.int8)
        return values.to(torch.float8_e4m3fn).view(torch.int8)

    def _decode(self, data: torch.Tensor) -> torch.Tensor:
        """Return the inverse of _encode, in float32 and in units of 1 / unit."""
        if self._dtype == "int8":
            return data.float()
        # The bits of a float16 of 1/256 of the number; torch's own conversion takes many times as long on a CPU.
        return data.short().bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16).float()


def _parts(cache: CacheShape, caches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data [..., block_size, heads, width] and scales [..., heads] of [..., num_bytes]."""
    data, scales = caches[..., : cache.data_bytes], caches[..., cache.data_bytes :]
    shape = (*caches.shape[:-1], cache.block_size, cache.num_heads, cache.width)
    return data.view(torch.int8).view(shape), scales.view(torch.float32)


TRIED_AT_ONCE: Final = 4096  # tokens: bounds the memory that rounding takes


class PagedKVPool:
    """The KV pool of one rank: K and V of each layer of `layout` in num_blocks blocks, zero-filled at first."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, compute_dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the pool.

        `compute_dtype` is the dtype that `gather` returns of a quantized pool, by default float32; other pools return
        their own. Raises SettingsError if the pool is larger than the free memory, or if quantized blocks have an
        unaligned size.
        """
        self.layout: Final = layout
        self.num_blocks: Final = num_blocks
        self.device: Final = device
        self._quantized = QuantizedCaches(layout, num_blocks) if layout.is_quantized else None
        own_dtype = compute_dtype or torch.float32 if layout.is_quantized else getattr(torch, layout.dtype)
        self.compute_dtype: Final[torch.dtype] = own_dtype
        self._touched: Touched | None = None
        _check_memory(layout.block_bytes * num_blocks, device)
        self._stacks = {layer: empty_stacks(layout, layer, num_blocks, device) for layer in layout.layers}
        self._elements = {} if layout.is_quantized else {layer: self._views(layer) for layer in layout.layers}

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's key cache, [num_blocks, block_size, num_kv_heads, width].

        Not for a quantized pool.
        """
        return self._elements[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's value cache, [num_blocks, block_size, num_kv_heads, width].

        Not for a quantized pool.
        """
        return self._elements[layer][1]

    def scaled_caches(self, layer: int) -> tuple[ScaledCaches, ScaledCaches]:
        """Return views of K and V of a layer as stored: numbers and scales.

        Scales mean nothing unless the pool is quantized.
        """
        if self._quantized is not None:
            keys, values = self._quantized.views(self._stacks[layer])
        else:
            keys, values = (ScaledCaches(cache, cache[:, 0, :, 0]) for cache in self._elements[layer])
        return keys, values

    def try_values(self, layer: int, num_blocks: int) -> None:
        """Fill the first num_blocks blocks of a layer with normally distributed numbers, for a trial.

        The pool must not hold data yet. The numbers are the same each time, so that a trial is repeatable.
        """
        generator = torch.Generator(self.device).manual_seed(layer)
        if self._quantized is None:
            for cache in self._elements[layer]:
                cache[:num_blocks].normal_(generator=generator)
            return
        shape = (self.layout.num_kv_heads, self.layout.head_dim)
        every = torch.arange(num_blocks * self.layout.block_size, device=self.device)
        for slots in torch.split(every, TRIED_AT_ONCE):
            self.store(layer, slots, *torch.randn(2, len(slots), *shape, device=self.device, generator=generator))

    def clear(self, layer: int, num_blocks: int) -> None:
        """Fill the first num_blocks blocks of a layer with zeros."""
        for stack in self._stacks[layer]:
            stack.storage[:, :num_blocks].zero_()

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a layer's keys and values, each [N, block_size, num_kv_heads, width] in compute_dtype.

        `blocks` holds the N block ids, int64.
        """
        if self._quantized is not None:
            return self._quantized.gather(self._stacks[layer], blocks, self.compute_dtype)
        keys, values = self._elements[layer]
        return keys.index_select(0, blocks), values.index_select(0, blocks)

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's keys and values [T, num_kv_heads, width] at slots [T] (block id * block_size + offset).

        A quantized block must be filled from offset 0 upward, and `slots` must not change in place afterwards.
        """
        if self._quantized is not None:
            if self._touched is None or self._touched.slots is not slots:  # a step stores all layers with one tensor
                self._touched = self._quantized.touch(slots)
            self._quantized.store(self._stacks[layer], self._touched, keys, values)
            return
        for cache, tokens in zip(self._elements[layer], (keys, values), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, tokens)

    def begin_steps(self, slots: torch.Tensor) -> None:
        """Prepare a quantized pool for `store` of a decode step with these slots, without waiting for the device.

        The step has one token for each slot. No two slots may share a block, except a block that no request owns. Does
        nothing for other pools.
        """
        if self._quantized is not None:
            self._touched = self._quantized.touch_apart(slots)

    def heads(self, heads: range) -> "PagedKVPool | HeadSlice":
        """Return the same blocks restricted to these heads; the pool itself for all of them.

        Raises ValueError unless `heads` is a non-empty run of the pool's heads.
        """
        check_heads(heads, self.layout)
        return self if len(heads) == self.layout.num_kv_heads else HeadSlice(self.layout, self._stacks, heads)

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer's blocks in order, as 1-D uint8 tensors on the pool's device.

        They are views of the pool if the ids are consecutive, else copies.
        """
        index = self._on_device(index_of(block_ids))
        stacks = [stack.storage for stack in self._stacks[layer]]
        if isinstance(index, slice):
            keys, values = chain.from_iterable(stack[:, index] for stack in stacks)
        else:
            keys, values = chain.from_iterable(stack.index_select(1, index) for stack in stacks)
        return keys.flatten(), values.flatten()

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V of a layer's blocks, as `read_tensors` returns them, from 1-D uint8 tensors on any device.

        Raises ValueError if the lengths are wrong.
        """
        check_lengths(len(keys), len(values), block_ids, self.layout.cache_bytes(layer))
        if self.device.type == "cpu":
            self._put(layer, block_ids, keys.cpu().numpy(), values.cpu().numpy())
            return
        targets = chain.from_iterable(stack.storage for stack in self._stacks[layer])
        index = self._on_device(index_of(block_ids))
        for target, caches in zip(targets, (keys, values), strict=True):
            target[index] = caches.to(self.device, non_blocking=True).view(len(block_ids), target.shape[1])
        await_stream(self.device)

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[memoryview, memoryview]:
        """Return the bytes of K and of V of a layer's blocks, as `read_tensors` has them; read-only, in host memory.

        On a CPU they are views if read_tensors returns views; else copies.
        """
        return bytes_of(*self.read_tensors(layer, block_ids))

    def write(self, layer: int, block_ids: Sequence[int], keys: memoryview, values: memoryview) -> None:
        """Write K and V of a layer's blocks, as `read` returns them. Raises ValueError if the lengths are wrong."""
        check_lengths(keys.nbytes, values.nbytes, block_ids, self.layout.cache_bytes(layer))
        if self.device.type == "cpu":
            self._put(layer, block_ids, np.frombuffer(keys, np.uint8), np.frombuffer(values, np.uint8))
        else:
            self.write_tensors(layer, block_ids, copied(keys, self.device), copied(values, self.device))

    def _on_device(self, index: slice | list[int]) -> slice | torch.Tensor:
        return index if isinstance(index, slice) else torch.tensor(index, device=self.device)

    def _put(
        self, layer: int, block_ids: Sequence[int], keys: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]
    ) -> None:
        """Write to host memory, where numpy scatters blocks five times as fast as torch."""
        index = index_of(block_ids)
        targets = chain.from_iterable(stack.storage.numpy() for stack in self._stacks[layer])
        for target, caches in zip(targets, (keys, values), strict=True):
            target[index] = caches.reshape(len(block_ids), target.shape[1])

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements of K and of V."""
        keys, values = chain.from_iterable(map(self._view, self._stacks[layer]))
        return keys, values

    def _view(self, stack: Stack) -> torch.Tensor:
        block_size, num_heads, width, _ = stack.cache_shape
        elements = stack.storage.flatten().view(self.compute_dtype)
        return elements.view(len(stack.storage), self.num_blocks, block_size, num_heads, width)


def _check_memory(num_bytes: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch's cached memory counts as used
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = available_bytes()
    if num_bytes > available:
        raise SettingsError(f"the KV pool needs {size_of(num_bytes)}, and {size_of(available)} of memory are free")
