"""Compute batch-invariant attention with torch, for --batch-invariant where no kernel is batch-invariant.

Like the native kernels, this backend takes keys in tiles that start at multiples of TILE_KEYS, weighs each tile
relative to its own largest score, and merges the tiles in order, all in float32. Single rows of several requests are
batched, in numbers that were tried to agree with a row alone: on a device a call costs more than its arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import torch

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch
from engine.ops.base import capped
from engine.ops.tiled import PROBE_SEED, Rows, agreeing_sizes, in_tiles, telling_rows

TILE_KEYS: Final = 256
LOWEST: Final = -1e30  # less than any score; unlike -inf, differences from it are numbers
SUMS: Final = 4  # columns of ones beside the values, for the sum of the weights: one is needed, four keep rows aligned
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)  # of requests in one batch
MOST_HEADS: Final = 128  # key heads in one batch: bounds the memory of a tile


class _Span(NamedTuple):
    """Rows of one request."""

    request: int
    first_row: int
    num_rows: int
    start: int  # position of the first row
    first_tile: int  # first key of the first tile that the rows attend to

    @property
    def num_tiles(self) -> int:
        return -(-(self.start + self.num_rows - self.first_tile) // TILE_KEYS)


@dataclass(frozen=True, slots=True)
class _Group:
    """N requests with T rows each: one request, or single rows of several. Positions count from a request's own first
    tile.
    """

    rows: slice | torch.Tensor  # T * N rows of the query
    positions: torch.Tensor  # [T * heads of a key, N]
    blocks: torch.Tensor  # [N, blocks of all tiles] int64
    offset: int  # of the first tile in its block
    start: int  # the largest position in the first row
    num_tiles: int
    window: int | None


class _Merged:
    """The merged output of the tiles so far for rows [R, K, D], relative to their largest score."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.largest = rows.new_full((*rows.shape[:2], 1), LOWEST)
        self.sums, self.outputs = torch.zeros_like(self.largest), torch.zeros_like(rows)

    def add(self, rows: slice, largest: torch.Tensor, outputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Merge one more tile into these rows: its largest scores, its weighted values, and the sums of its weights."""
        before = self.largest[rows]
        now = torch.maximum(before, largest)
        kept, added = (before - now).exp_(), (largest - now).exp_()
        self.sums[rows] = (self.sums[rows] * kept).add_(sums * added)
        self.outputs[rows] = (self.outputs[rows] * kept).add_(outputs * added)
        self.largest[rows] = now


class _Products:
    """Products of each head's columns with a matrix of its own, in batch sizes of rows and requests that agree bit for
    bit.
    """

    def __init__(self, matrices: torch.Tensor, num_single: int) -> None:
        """Try batch sizes with matrices [K, I, O] of one request, whose values expose the order of sums; `num_single`
        is the number of rows that a single row becomes.
        """
        num_heads, num_inputs, _ = matrices.shape
        alone = _product(matrices)
        probes = telling_rows(alone, num_heads * num_inputs, matrices.dtype, matrices.device)
        self._sizes = agreeing_sizes(alone, probes)
        expected = in_tiles(alone, probes, self._sizes)

        def agrees(count: int) -> bool:
            many = _product(matrices.repeat(count, 1, 1))
            return all(
                torch.equal(in_tiles(many, probe.repeat(num_single, count), self._sizes), row.repeat(num_single, count))
                for probe, row in zip(probes, expected, strict=True)
            )

        self.counts: Final = [count for count in COUNTS if count * num_heads <= MOST_HEADS and agrees(count)]

    def __call__(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Multiply rows [R, N * K, I] by matrices [N * K, I, O] -> [R, N * K, O]."""
        outputs = in_tiles(_product(matrices), rows.flatten(1), self._sizes)
        return outputs.view(*rows.shape[:2], matrices.shape[2])


class TiledAttention:
    """Attends one group of rows and one tile of keys after the other, for all heads at once."""

    name = "tiled"

    @torch.inference_mode()
    def __init__(
        self, pool: PagedKVPool, num_heads: int, score_scale: float | None = None, softcap: float | None = None
    ) -> None:
        self.pool = pool
        self.score_scale, self.softcap = score_scale, softcap
        self._num_kv_heads, self._head_dim = pool.layout.num_kv_heads, pool.layout.head_dim
        self._heads_per_key = num_heads // self._num_kv_heads
        shape = (2, TILE_KEYS, self._num_kv_heads, self._head_dim)
        caches = torch.randn(shape, generator=torch.Generator().manual_seed(PROBE_SEED), device="cpu")
        keys, values = caches.to(pool.device).unsqueeze(1)
        self._score = _Products(_by_key(keys), self._heads_per_key)
        self._sum = _Products(_by_value(values), self._heads_per_key)
        self._counts = sorted({1} | (set(self._score.counts) & set(self._sum.counts)), reverse=True)

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Group]:
        groups, singles = [], []
        for span in _spans(batch, window):
            if span.num_rows == 1:
                singles.append(span)
            else:
                groups.append(self._group(batch, [span], window))
        return groups + [self._group(batch, spans, window) for spans in self._together(singles)]

    def attend(self, query: torch.Tensor, layer: int, plan: list[_Group]) -> torch.Tensor:
        output = torch.empty_like(query)
        for group in plan:
            output[group.rows] = self._attend(query[group.rows], layer, group)
        return output

    def _together(self, singles: list[_Span]) -> Iterator[list[_Span]]:
        """Yield batches of single-row spans; within a batch no span has twice the tiles of another."""

        def kind(span: _Span) -> tuple[int, int]:
            return span.first_tile % self.pool.layout.block_size, span.num_tiles.bit_length()

        for _, alike in groupby(sorted(singles, key=kind), kind):
            left = list(alike)
            while left:
                count = next(count for count in self._counts if count <= len(left))
                yield left[:count]
                left = left[count:]

    def _group(self, batch: ForwardBatch, spans: list[_Span], window: int | None) -> _Group:
        block_size, tables, first = self.pool.layout.block_size, batch.block_tables, spans[0]
        num_tiles = max(span.num_tiles for span in spans)
        offset = first.first_tile % block_size
        numbers = [(span.request, span.first_row, span.start, span.first_tile) for span in spans]
        requests, first_rows, starts, first_tiles = torch.tensor(numbers, device=tables.device).unbind(1)
        columns = torch.arange(-(-(offset + num_tiles * TILE_KEYS) // block_size), device=tables.device)
        columns = (first_tiles.unsqueeze(1) // block_size + columns).clamp_(max=tables.shape[1] - 1)
        positions = (starts - first_tiles) + torch.arange(first.num_rows, device=tables.device).unsqueeze(1)
        return _Group(
            rows=slice(first.first_row, first.first_row + first.num_rows) if len(spans) == 1 else first_rows,
            positions=positions.repeat_interleave(self._heads_per_key, 0),
            blocks=tables[requests.unsqueeze(1), columns].long(),
            offset=offset,
            start=max(span.start - span.first_tile for span in spans),
            num_tiles=num_tiles,
            window=window,
        )

    def _attend(self, query: torch.Tensor, layer: int, group: _Group) -> torch.Tensor:
        """Attend one group: query [T * N, H, D]; heads that share a key become rows."""
        num_requests = len(group.blocks)
        shape = (-1, num_requests, self._num_kv_heads, self._heads_per_key, self._head_dim)
        folded = query.reshape(shape).permute(0, 3, 1, 2, 4)  # [T, H / K, N, K, D]
        scale = self._head_dim**-0.5 if self.score_scale is None else self.score_scale
        rows = folded.flatten(0, 1).flatten(1, 2).float() * scale
        merged = _Merged(rows)
        for tile in range(0, group.num_tiles * TILE_KEYS, TILE_KEYS):
            # Earlier rows attend to none of the tile
            seeing = slice(max(0, tile - group.start) * self._heads_per_key, None)
            keys, values = self._tile(layer, group, tile)
            scores = self._score(rows[seeing], keys)
            if self.softcap is not None:
                scores = capped(scores, self.softcap)
            hidden = _hidden(group.positions[seeing], tile, group.window)
            scores.view(-1, num_requests, self._num_kv_heads, TILE_KEYS).masked_fill_(hidden, -torch.inf)
            largest = scores.amax(-1, keepdim=True).clamp_min_(LOWEST)
            outputs = self._sum(scores.sub_(largest).exp_(), values)
            merged.add(seeing, largest, outputs[..., : self._head_dim], outputs[..., self._head_dim :][..., :1])
        attended = merged.outputs.div_(merged.sums).to(query.dtype).view(folded.shape)
        return attended.permute(0, 2, 3, 1, 4).reshape(query.shape)

    def _tile(self, layer: int, group: _Group, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of one tile's keys and values, for all requests.

        Keys beyond a request's context come from blocks of others and may hold any value: their scores are masked
        later, and their values are 0 here.
        """
        first = group.offset + tile
        in_blocks, block_size = slice(first, first + TILE_KEYS), self.pool.layout.block_size
        columns = slice(in_blocks.start // block_size, -(-in_blocks.stop // block_size))
        blocks = group.blocks[:, columns]
        at = first - columns.start * block_size
        keys, values = (
            cache.view(len(blocks), -1, *cache.shape[2:])[:, at : at + TILE_KEYS]
            for cache in self.pool.gather(layer, blocks.flatten())
        )
        lacking = group.positions[-1:].T - _places(group.positions, tile) < 0  # [N, TILE_KEYS]
        return _by_key(keys), _by_value(values.masked_fill(lacking[..., None, None], 0))


def _spans(batch: ForwardBatch, window: int | None) -> Iterator[_Span]:
    starts = batch.query_starts.tolist()
    for request, length in enumerate(batch.kv_lengths.tolist()):
        num_rows = starts[request + 1] - starts[request]
        start = length - num_rows
        first_seen = 0 if window is None else max(0, start + 1 - window)
        yield _Span(request, starts[request], num_rows, start, first_seen // TILE_KEYS * TILE_KEYS)


def _product(matrices: torch.Tensor) -> Rows:
    """Return a function of rows [R, K * I] -> [R, K * O], which multiplies each head's columns by its matrix [I, O]."""
    num_heads, num_inputs, num_outputs = matrices.shape

    def product(rows: torch.Tensor) -> torch.Tensor:
        heads = rows.view(-1, num_heads, num_inputs).transpose(0, 1).contiguous()
        return torch.bmm(heads, matrices).transpose(0, 1).reshape(-1, num_heads * num_outputs)

    return product


def _by_key(keys: torch.Tensor) -> torch.Tensor:
    """Return keys [N, TILE_KEYS, K, D] as matrices [N * K, D, TILE_KEYS]."""
    return keys.permute(0, 2, 3, 1).flatten(0, 1).float().contiguous()


def _by_value(values: torch.Tensor) -> torch.Tensor:
    """Return values [N, TILE_KEYS, K, D] as matrices [N * K, TILE_KEYS, D + SUMS]; the last columns sum the weights."""
    num_requests, num_keys, num_heads, head_dim = values.shape
    matrices = values.new_ones((num_requests, num_heads, num_keys, head_dim + SUMS), dtype=torch.float32)
    matrices[..., :head_dim] = values.transpose(1, 2)
    return matrices.flatten(0, 1)


def _places(positions: torch.Tensor, tile: int) -> torch.Tensor:
    return torch.arange(tile, tile + TILE_KEYS, device=positions.device)


def _hidden(positions: torch.Tensor, tile: int, window: int | None) -> torch.Tensor:
    """Return the mask of keys of a tile that the rows do not attend to: [R, N, 1, TILE_KEYS]."""
    distances = positions.unsqueeze(-1) - _places(positions, tile)
    hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
    return hidden.unsqueeze(2)
