"""The torch.distributed transport for tests that speak bytes."""

import warnings

import torch

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.payload import HOST
from kv_transfer.transports.tensor_payload import TensorStore
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener

CPU = torch.device("cpu")


def tensor_of(frame):
    """A tensor over the very bytes of a frame."""
    with warnings.catch_warnings(action="ignore"):  # that some are read-only; nobody writes to them
        return torch.frombuffer(frame, dtype=torch.uint8) if len(frame) else torch.empty(0, dtype=torch.uint8)


class HostDialer(TorchDistDialer):
    """Sends memoryviews."""

    def __init__(self):
        super().__init__(CPU)
        self.payload = HOST

    def send(self, address, header, frames=()):
        return super().send(address, header, [tensor_of(frame) for frame in frames])


class HostListener(TorchDistListener):
    """Shows memoryviews."""

    def __init__(self, bind="dist://127.0.0.1:*"):
        super().__init__(bind, CPU)
        self.payload = HOST

    def start(self, on_message):
        super().start(lambda peer, header, frames: on_message(peer, header, [frame.numpy().data for frame in frames]))


def tensor_store(layout, num_blocks, seed=None, device=CPU):
    """The pool of an engine for such a transport: random bytes for a seed, zeros without."""
    pool = PagedKVPool(layout, num_blocks, device)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for layer in layout.layers:
            sizes = [num_blocks * cache.num_bytes for cache in layout.cache_shapes(layer)]
            caches = (torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes)
            pool.write_tensors(layer, range(num_blocks), *(cache.to(device) for cache in caches))
    return TensorStore(pool)


def bytes_of(store, block_ids):
    """Every byte of these blocks."""
    views = [view for layer in store.layout.layers for view in store.read(layer, block_ids)]
    return b"".join(view.cpu().numpy().tobytes() for view in views)
