"""Where the keys and values of all tokens of one node lie."""

import itertools
from collections.abc import Sequence

import psutil
import torch

from engine.errors import SettingsError
from engine.layout import KVLayout


class PagedKVPool:
    """For each layer K and V of shape [num_blocks, block_size, num_kv_heads, head_dim], zero at first."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """Raises SettingsError when the pool is larger than the free memory."""
        _check_memory(layout.block_bytes * num_blocks, device)
        shape = (num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        self.layout = layout
        self.num_blocks = num_blocks
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""
        return self._values[layer]

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [T, num_kv_heads, head_dim] at slots [T] (block id * block_size + offset)."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of these blocks, K planes in order, then V planes in order; one buffer for each run of
        consecutive ids. On a CPU they are read-only views of the pool, elsewhere copies."""
        runs = _runs(block_ids)
        return [
            _bytes_of(plane[first : first + count]).toreadonly()
            for plane in (self._keys[layer], self._values[layer])
            for first, count in runs
        ]

    def write(self, layer: int, block_ids: Sequence[int], planes: memoryview) -> None:
        """The inverse of read, from one buffer. Raises ValueError when it is not of the right length."""
        plane_bytes = self.layout.plane_bytes
        expected_bytes = 2 * len(block_ids) * plane_bytes
        if planes.nbytes != expected_bytes:
            raise ValueError(f"{planes.nbytes} bytes for {len(block_ids)} blocks of a layer, not {expected_bytes}")
        source, start = planes.cast("B"), 0
        runs = _runs(block_ids)
        for plane in (self._keys[layer], self._values[layer]):
            for first, count in runs:
                end = start + count * plane_bytes
                _fill(plane[first : first + count], source[start:end])
                start = end


def _bytes_of(blocks: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor: a view when it is in host memory, else a copy."""
    return blocks.flatten().view(torch.uint8).cpu().numpy().data


def _fill(blocks: torch.Tensor, source: memoryview) -> None:
    if blocks.device.type == "cpu":
        _bytes_of(blocks)[:] = source
        return
    staged = torch.empty_like(blocks, device="cpu")
    _bytes_of(staged)[:] = source
    blocks.copy_(staged)


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Each run of consecutive ids as (first id, how many)."""
    groups = itertools.groupby(enumerate(block_ids), key=lambda pair: pair[1] - pair[0])
    runs = (list(members) for _, members in groups)
    return [(run[0][1], len(run)) for run in runs]


def _check_memory(num_bytes: int, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    available = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if num_bytes > available:
        raise SettingsError(f"the KV pool needs {num_bytes} bytes, and {available} bytes of memory are free")
