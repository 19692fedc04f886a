"""Attention by torch of which the bits of a row depend on that row and its keys alone: what --batch-invariant takes on
a CPU where the native kernels are not.

As these do, it takes keys in tiles that start at multiples of TILE_KEYS, weighs each tile relative to its own largest
score, and merges the tiles in their order. All is float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch
from engine.invariant import PROBE_SEED, Rows, Tiling

TILE_KEYS: Final = 256
LOWEST: Final = -1e30  # less than any score; unlike with -inf, differences from it are numbers


@dataclass(frozen=True, slots=True)
class _Request:
    rows: slice  # of the query
    start: int  # position of the first row
    blocks: torch.Tensor  # int64, from the one that holds first_key
    first_key: int  # the first of a block
    window: int | None


class _Merged:
    """Of rows [R, K, D] what the tiles until now give, relative to the largest score in them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.largest = rows.new_full((*rows.shape[:2], 1), LOWEST)
        self.sums, self.outputs = torch.zeros_like(self.largest), torch.zeros_like(rows)

    def add(self, rows: slice, largest: torch.Tensor, sums: torch.Tensor, outputs: torch.Tensor) -> None:
        """One more tile, as these rows see it; changes the outputs given."""
        before = self.largest[rows]
        now = torch.maximum(before, largest)
        kept, added = (before - now).exp_(), (largest - now).exp_()
        self.sums[rows] = (self.sums[rows] * kept).add_(sums * added)
        self.outputs[rows] = (self.outputs[rows] * kept).add_(outputs.mul_(added))
        self.largest[rows] = now


class TiledAttention:
    """One request and tile of keys after the other, for all heads at once."""

    name = "portable"

    def __init__(self, pool: PagedKVPool, num_heads: int) -> None:
        self.pool = pool
        self._num_kv_heads = pool.layout.num_kv_heads
        self._heads_per_key = num_heads // pool.layout.num_kv_heads
        self._tiling = Tiling(pool.device, torch.float32)
        # Sizes are tried with numbers that tell: of a first request there may be few keys.
        shape = (2, TILE_KEYS, pool.layout.num_kv_heads, pool.layout.head_dim)
        keys, values = torch.randn(shape, generator=torch.Generator().manual_seed(PROBE_SEED))
        self._score(keys)
        self._sum(values)

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Request]:
        starts, layout, requests = batch.query_starts.tolist(), self.pool.layout, []
        for index, length in enumerate(batch.kv_lengths.tolist()):
            rows = slice(starts[index], starts[index + 1])
            start = length - (rows.stop - rows.start)
            first_block = 0 if window is None else max(0, start + 1 - window) // layout.block_size
            blocks = batch.block_tables[index, first_block : layout.num_blocks_for(length)].long()
            requests.append(_Request(rows, start, blocks, first_block * layout.block_size, window))
        return requests

    def attend(self, query: torch.Tensor, layer: int, plan: list[_Request]) -> torch.Tensor:
        output = torch.empty_like(query)
        for request in plan:
            keys, values = (plane.flatten(0, 1).float() for plane in self.pool.gather(layer, request.blocks))
            output[request.rows] = self._attend(query[request.rows], keys, values, request)
        return output

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, request: _Request) -> torch.Tensor:
        """query [T, H, D]; heads that share a key become rows of their own"""
        num_tokens, _, head_dim = query.shape
        shape = (num_tokens, self._num_kv_heads, self._heads_per_key, head_dim)
        rows = query.reshape(shape).transpose(1, 2).flatten(0, 1).float().mul_(head_dim**-0.5)
        positions = torch.arange(request.start, request.start + num_tokens).repeat_interleave(self._heads_per_key)
        merged = _Merged(rows)
        num_keys = request.start + num_tokens - request.first_key
        for tile, tile_keys, tile_values in _tiles(keys[:num_keys], values, request.first_key):
            seeing = slice(max(0, tile - request.start) * self._heads_per_key, None)  # those before see none of it
            scores = self._score(tile_keys)(rows[seeing].flatten(1)).view(-1, self._num_kv_heads, TILE_KEYS)
            scores.masked_fill_(_hidden(positions[seeing], tile, request.window), -torch.inf)
            largest = scores.amax(-1, keepdim=True).clamp_min_(LOWEST)
            weights = scores.sub_(largest).exp_()
            outputs = self._sum(tile_values)(weights.flatten(1)).view(-1, self._num_kv_heads, head_dim)
            merged.add(seeing, largest, weights.sum(-1, keepdim=True), outputs)
        attended = merged.outputs.div_(merged.sums).to(query.dtype)
        return attended.view(num_tokens, self._heads_per_key, -1, head_dim).transpose(1, 2).reshape(query.shape)

    def _score(self, keys: torch.Tensor) -> Rows:
        """Rows of queries [R, K * D] -> [R, K * TILE_KEYS]"""
        return self._tiled("score", keys.permute(1, 2, 0).contiguous())

    def _sum(self, values: torch.Tensor) -> Rows:
        """Rows of weights [R, K * TILE_KEYS] -> [R, K * D]"""
        return self._tiled("sum", values.transpose(0, 1).contiguous())

    def _tiled(self, name: str, matrices: torch.Tensor) -> Rows:
        """A product of each key head's columns with a matrix of its own."""
        num_heads, num_inputs, num_outputs = matrices.shape

        def product(rows: torch.Tensor) -> torch.Tensor:
            heads = rows.view(-1, num_heads, num_inputs).transpose(0, 1).contiguous()
            return torch.bmm(heads, matrices).transpose(0, 1).reshape(-1, num_heads * num_outputs)

        return self._tiling.tiled(product, num_heads * num_inputs, name)


def _tiles(
    keys: torch.Tensor, values: torch.Tensor, first_key: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The first key of each tile, its keys and its values [TILE_KEYS, K, D], zeros where it has none."""
    end = first_key + len(keys)
    for tile in range(first_key // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        first, last = max(tile, first_key), min(tile + TILE_KEYS, end)
        held, padding = slice(first - first_key, last - first_key), (0, 0, 0, 0, first - tile, tile + TILE_KEYS - last)
        yield tile, functional.pad(keys[held], padding), functional.pad(values[held], padding)


def _hidden(positions: torch.Tensor, tile: int, window: int | None) -> torch.Tensor:
    """Which keys of a tile the rows do not see: [R, 1, TILE_KEYS]"""
    distances = positions.unsqueeze(1) - torch.arange(tile, tile + TILE_KEYS)
    hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
    return hidden.unsqueeze(1)
