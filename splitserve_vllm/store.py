"""Give KV transfers access to the blocks of vLLM's KV cache.

A layer is one tensor, whose first dimension counts blocks; the order within a block is vLLM's own, and may depend on
the kernels of a CPU. A VllmStore sends blocks as vLLM has them, to nodes with the same vLLM, all heads together. An
OrderedStore sends them in the order of our engine's blocks, to nodes with any engine; each value has its place in a
block of vLLM's, which `places_in_block` finds out.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from kv_transfer.payload import Buffer
from kv_transfer.results import TransferError
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout

NO_BYTES: Final = memoryview(b"")
DTYPES: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_NUMBER: Final = re.compile(r"\d+")


class VllmStore:
    """The KV blocks of one worker of vLLM."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], block_size: int) -> None:
        """Create the store of these layers, by their names in the model. Raises SettingsError for layers that are not
        alike.
        """
        names = sorted(kv_caches, key=_layer_of)
        self._layers = [kv_caches[name] for name in names]
        self.indices: Final = {name: index for index, name in enumerate(names)}
        first = self._layers[0]
        if any(each.shape != first.shape or each.dtype is not first.dtype for each in self._layers):
            raise SettingsError("layers of the KV cache differ in shape: vLLM's KV of this model cannot be sent")
        if first.dtype not in DTYPES:
            raise SettingsError(f"KV of {first.dtype} cannot be sent, only {', '.join(DTYPES.values())}")
        num_heads = first.shape[1] if first.dim() == 4 else 1
        width = first[0].numel() // (block_size * num_heads)
        self.layout = KVLayout.uniform(len(names), num_heads, width, block_size, DTYPES[first.dtype], is_latent=True)
        if self.layout.cache_bytes(0)[0] != first[0].numel() * first.element_size():
            raise SettingsError(f"a block of {tuple(first.shape[1:])} values does not divide by {block_size} tokens")

    def heads(self, heads: range) -> "VllmStore":
        """Return the store itself. Raises TransferError for anything but all heads."""
        if heads != range(self.layout.num_kv_heads):
            raise TransferError("heads of vLLM's KV blocks cannot be sent apart: both nodes need the same parallelism")
        return self

    def computed(self) -> Callable[[], None]:
        """Return a function that waits until the device has computed what this thread has given it by now."""
        if not self._layers[0].is_cuda:
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[Buffer, Buffer]:
        """Return a copy of these blocks of one layer, and nothing."""
        cache = self._layers[layer]
        blocks = cache.index_select(0, torch.tensor(block_ids, device=cache.device)).cpu()
        return _bytes_of(blocks), NO_BYTES

    def write(self, layer: int, block_ids: Sequence[int], keys: Buffer, values: Buffer) -> None:
        """Write blocks, in the format of `read`, into these blocks of one layer."""
        cache = self._layers[layer]
        blocks = torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(cache.dtype)
        blocks = blocks.view(len(block_ids), *cache.shape[1:]).to(cache.device)
        cache.index_copy_(0, torch.tensor(block_ids, device=cache.device), blocks)
        if cache.is_cuda:  # vLLM may compute with the blocks at once, on another stream
            torch.cuda.current_stream(cache.device).synchronize()


class OrderedStore(VllmStore):
    """The KV blocks of one worker of vLLM, given and taken in the order of our engine: [tokens, heads, values]."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], block_size: int, places: torch.Tensor) -> None:
        """Create the store of these layers, on CPUs, whose blocks have K and V at `places`, of places_in_block.

        Raises SettingsError for layers that are not alike.
        """
        super().__init__(kv_caches, block_size)
        _, _, num_heads, width = places.shape
        self.layout = KVLayout.uniform(len(self._layers), num_heads, width, block_size, self.layout.dtype)
        self._places = places

    def heads(self, heads: range) -> "OrderedStore":
        if heads == range(self.layout.num_kv_heads):
            return self
        part = copy.copy(self)
        part.layout = self.layout.with_heads(len(heads))
        part._places = self._places[:, :, heads.start : heads.stop].contiguous()
        return part

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[Buffer, Buffer]:
        """Return keys and values of these blocks of one layer."""
        blocks = self._layers[layer].index_select(0, torch.tensor(block_ids)).flatten(1)
        keys, values = (_bytes_of(blocks.index_select(1, places.flatten())) for places in self._places)
        return keys, values

    def write(self, layer: int, block_ids: Sequence[int], keys: Buffer, values: Buffer) -> None:
        cache, index = self._layers[layer], torch.tensor(block_ids)
        blocks = cache.index_select(0, index).flatten(1)
        for places, given in zip(self._places, (keys, values), strict=True):
            new = torch.frombuffer(bytearray(given), dtype=torch.uint8).view(cache.dtype)
            blocks.index_copy_(1, places.flatten(), new.view(len(block_ids), -1))
        cache.index_copy_(0, index, blocks.view(-1, *cache.shape[1:]))


def places_in_block(shape: Sequence[int], dtype: torch.dtype, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the place of each value in a block of vLLM's, [K and V, tokens, heads, values].

    `shape` is that of a block, [heads, tokens, values of K and V]. `pack` brings a tensor of one block, [1, *shape],
    from that plain order into the kernels' own. Raises SettingsError if more than the order changes.
    """
    num_values = math.prod(shape)
    numbers = torch.arange(num_values)
    found = torch.zeros(num_values, dtype=torch.int64)
    for bit in range(num_values.bit_length()):  # every dtype has 0 and 1
        block = (numbers >> bit & 1).to(dtype).view(1, *shape)
        pack(block)
        found |= (block.flatten() != 0).to(torch.int64) << bit
    if not torch.equal(found.sort().values, numbers):
        raise SettingsError("vLLM's KV blocks have no order that could be mapped to ours: --kv-order vllm")
    places = torch.empty_like(found)
    places[found] = numbers
    num_heads, num_tokens, num_both = shape
    return places.view(num_heads, num_tokens, 2, num_both // 2).permute(2, 1, 0, 3).contiguous()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


def _layer_of(name: str) -> int:
    """Return the number of a layer in the model, as in `model.layers.11.self_attn.attn`. Raises SettingsError."""
    numbers = _NUMBER.findall(name)
    if len(numbers) != 1:
        raise SettingsError(f"the KV cache of {name!r} is of no numbered layer: it cannot be sent")
    return int(numbers[0])
