"""Where the keys and values of all tokens of one rank lie."""

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.planes import (
    HeadSlice,
    Stack,
    await_stream,
    bytes_of,
    check_heads,
    check_lengths,
    copied,
    empty_stacks,
    index_of,
)
from engine.cache.quantization import QuantizedPlanes, ScaledPlanes, Touched
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.memory import available_bytes
from serving_core.units import size_of

TRIED_AT_ONCE: Final = 4096  # tokens: what rounding them takes of memory is bounded


class PagedKVPool:
    """K and V of each layer of a layout as num_blocks planes, zero at first."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, compute_dtype: torch.dtype | None = None
    ) -> None:
        """compute_dtype is what `gather` gives of a quantized pool, by default float32; others give their own.

        Raises SettingsError when the pool is larger than the free memory, or quantized blocks are of an odd size.
        """
        self.layout: Final = layout
        self.num_blocks: Final = num_blocks
        self.device: Final = device
        self._quantized = QuantizedPlanes(layout, num_blocks) if layout.is_quantized else None
        own_dtype = compute_dtype or torch.float32 if layout.is_quantized else getattr(torch, layout.dtype)
        self.compute_dtype: Final[torch.dtype] = own_dtype
        self._touched: Touched | None = None
        _check_memory(layout.block_bytes * num_blocks, device)
        self._stacks = {layer: empty_stacks(layout, layer, num_blocks, device) for layer in layout.layers}
        self._elements = {} if layout.is_quantized else {layer: self._views(layer) for layer in layout.layers}

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, width], a view. Not of a quantized pool, which has none."""
        return self._elements[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, width], a view. Not of a quantized pool, which has none."""
        return self._elements[layer][1]

    def scaled_planes(self, layer: int) -> tuple[ScaledPlanes, ScaledPlanes]:
        """K and V as they are stored. Views; of a pool that is not quantized the scales are of no use."""
        if self._quantized is not None:
            keys, values = self._quantized.views(self._stacks[layer])
        else:
            keys, values = (ScaledPlanes(plane, plane[:, 0, :, 0]) for plane in self._elements[layer])
        return keys, values

    def try_values(self, layer: int, num_blocks: int) -> None:
        """Puts normal numbers into the first blocks, to try something out before the pool holds anything. They are the
        same each time: what is tried goes as it went before."""
        generator = torch.Generator(self.device).manual_seed(layer)
        if self._quantized is None:
            for plane in self._elements[layer]:
                plane[:num_blocks].normal_(generator=generator)
            return
        shape = (self.layout.num_kv_heads, self.layout.head_dim)
        every = torch.arange(num_blocks * self.layout.block_size, device=self.device)
        for slots in torch.split(every, TRIED_AT_ONCE):
            self.store(layer, slots, *torch.randn(2, len(slots), *shape, device=self.device, generator=generator))

    def clear(self, layer: int, num_blocks: int) -> None:
        """Puts zeros into the first blocks."""
        for stack in self._stacks[layer]:
            stack.storage[:, :num_blocks].zero_()

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks [N] int64, each a copy [N, block_size, num_kv_heads, width] in compute_dtype."""
        if self._quantized is not None:
            return self._quantized.gather(self._stacks[layer], blocks, self.compute_dtype)
        keys, values = self._elements[layer]
        return keys.index_select(0, blocks), values.index_select(0, blocks)

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [T, num_kv_heads, width] at slots [T] (block id * block_size + offset).

        A quantized block must be filled from offset 0 upward, and `slots` not be changed in place afterwards.
        """
        if self._quantized is not None:
            if self._touched is None or self._touched.slots is not slots:  # a step stores all layers with one tensor
                self._touched = self._quantized.touch(slots)
            self._quantized.store(self._stacks[layer], self._touched, keys, values)
            return
        for plane, tokens in zip(self._elements[layer], (keys, values), strict=True):
            plane.flatten(0, 1).index_copy_(0, slots, tokens)

    def begin_steps(self, slots: torch.Tensor) -> None:
        """Before each store of a step of requests with one token each at these slots, of which no block has two but one
        that no request owns: what is to be known of them is found without awaiting a device. Of use to a quantized pool
        alone."""
        if self._quantized is not None:
            self._touched = self._quantized.touch_apart(slots)

    def heads(self, heads: range) -> "PagedKVPool | HeadSlice":
        """The same blocks, but only these heads; all of them give the pool itself. Raises ValueError for others."""
        check_heads(heads, self.layout)
        return self if len(heads) == self.layout.num_kv_heads else HeadSlice(self.layout, self._stacks, heads)

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The K planes of these blocks in order, and their V planes, as 1-D uint8 tensors on the pool's device: views
        of the pool when the ids are consecutive, else copies."""
        index = self._on_device(index_of(block_ids))
        stacks = [stack.storage for stack in self._stacks[layer]]
        if isinstance(index, slice):
            keys, values = chain.from_iterable(stack[:, index] for stack in stacks)
        else:
            keys, values = chain.from_iterable(stack.index_select(1, index) for stack in stacks)
        return keys.flatten(), values.flatten()

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of read_tensors, from 1-D uint8 tensors on any device. Raises ValueError when they are not of
        the right length."""
        check_lengths(len(keys), len(values), block_ids, self.layout.plane_bytes(layer))
        if self.device.type == "cpu":
            self._put(layer, block_ids, keys.cpu().numpy(), values.cpu().numpy())
            return
        targets = chain.from_iterable(stack.storage for stack in self._stacks[layer])
        index = self._on_device(index_of(block_ids))
        for target, planes in zip(targets, (keys, values), strict=True):
            target[index] = planes.to(self.device, non_blocking=True).view(len(block_ids), target.shape[1])
        await_stream(self.device)

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[memoryview, memoryview]:
        """The bytes of read_tensors, read-only. On a CPU they are views where those are, elsewhere copies."""
        return bytes_of(*self.read_tensors(layer, block_ids))

    def write(self, layer: int, block_ids: Sequence[int], keys: memoryview, values: memoryview) -> None:
        """The inverse of read. Raises ValueError when they are not of the right length."""
        check_lengths(keys.nbytes, values.nbytes, block_ids, self.layout.plane_bytes(layer))
        if self.device.type == "cpu":
            self._put(layer, block_ids, np.frombuffer(keys, np.uint8), np.frombuffer(values, np.uint8))
        else:
            self.write_tensors(layer, block_ids, copied(keys, self.device), copied(values, self.device))

    def _on_device(self, index: slice | list[int]) -> slice | torch.Tensor:
        return index if isinstance(index, slice) else torch.tensor(index, device=self.device)

    def _put(
        self, layer: int, block_ids: Sequence[int], keys: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]
    ) -> None:
        """Into host memory, where numpy scatters planes five times as fast as torch."""
        index = index_of(block_ids)
        targets = chain.from_iterable(stack.storage.numpy() for stack in self._stacks[layer])
        for target, planes in zip(targets, (keys, values), strict=True):
            target[index] = planes.reshape(len(block_ids), target.shape[1])

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements of K and of V."""
        keys, values = chain.from_iterable(map(self._view, self._stacks[layer]))
        return keys, values

    def _view(self, stack: Stack) -> torch.Tensor:
        block_size, num_heads, width, _ = stack.plane
        elements = stack.storage.flatten().view(self.compute_dtype)
        return elements.view(len(stack.storage), self.num_blocks, block_size, num_heads, width)


def _check_memory(num_bytes: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself counts as used
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = available_bytes()
    if num_bytes > available:
        raise SettingsError(f"the KV pool needs {size_of(num_bytes)}, and {size_of(available)} of memory are free")
