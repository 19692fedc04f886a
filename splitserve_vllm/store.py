"""Give KV transfers access to the blocks of vLLM's KV cache.

A layer is one tensor, whose first dimension counts blocks; the order within a block is vLLM's own, and may depend on
the kernels of a CPU. So a block is sent as vLLM has it, between nodes with the same vLLM, and all its heads together.
"""

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
        self.layout: Final = KVLayout.uniform(
            len(names), num_heads, width, block_size, DTYPES[first.dtype], is_latent=True
        )
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
        return memoryview(blocks.flatten().view(torch.uint8).numpy().data), NO_BYTES

    def write(self, layer: int, block_ids: Sequence[int], keys: Buffer, values: Buffer) -> None:
        """Write blocks, in the format of `read`, into these blocks of one layer."""
        cache = self._layers[layer]
        blocks = torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(cache.dtype)
        blocks = blocks.view(len(block_ids), *cache.shape[1:]).to(cache.device)
        cache.index_copy_(0, torch.tensor(block_ids, device=cache.device), blocks)
        if cache.is_cuda:  # vLLM may compute with the blocks at once, on another stream
            torch.cuda.current_stream(cache.device).synchronize()


def _layer_of(name: str) -> int:
    """Return the number of a layer in the model, as in `model.layers.11.self_attn.attn`. Raises SettingsError."""
    numbers = _NUMBER.findall(name)
    if len(numbers) != 1:
        raise SettingsError(f"the KV cache of {name!r} is of no numbered layer: it cannot be sent")
    return int(numbers[0])
