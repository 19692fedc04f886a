"""Attention over the paged KV cache: one function for prefill, chunked prefill and decode.

A backend first makes a plan of a batch (once a step for each window size), then attends with it (once a layer):

    query [T, num_heads, head_dim]  ->  [T, num_heads, head_dim]

The keys and values of the step's own tokens are in the pool already. A token sees the tokens before it and itself;
with a window, only the last `window` of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.nn import functional

from engine.forward_batch import ForwardBatch
from engine.kv_pool import PagedKVPool

QUERY_CHUNK: Final = 64  # query rows in one call: more would compute scores that the causal mask throws away
PADDING_BLOCKS: Final = 8  # how unequal the contexts of one call may be, in blocks


class Attention(Protocol):
    """A backend, bound to one pool."""

    name: str
    pool: PagedKVPool

    def plan(self, batch: ForwardBatch, window: int | None) -> Any:
        """What `attend` needs to know of a batch; the same for all layers with this window."""

    def attend(self, query: torch.Tensor, layer: int, plan: Any) -> torch.Tensor:
        """The attention output of all query rows [T, num_heads, head_dim] in one layer."""


@dataclass(frozen=True, slots=True)
class _Span:
    """num_queries rows of one request, from first_row on; the last of them sees the tokens up to kv_end."""

    request: int
    first_row: int
    num_queries: int
    kv_end: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans that one call computes: N spans of Q queries over L key slots, heads that share a key folded into rows."""

    rows: slice | torch.Tensor  # of the query
    num_spans: int
    num_queries: int
    blocks: torch.Tensor  # [N * L / block_size] int64
    mask: torch.Tensor  # [N, 1, Q * heads per key head, L], or one row for all when Q is 1; 0 or -inf


class PortableAttention:
    """Gathers blocks and calls torch's scaled_dot_product_attention: correct on every device."""

    name = "portable"

    def __init__(self, pool: PagedKVPool, num_heads: int) -> None:
        self.pool = pool
        self._num_kv_heads = pool.layout.num_kv_heads
        self._heads_per_key = num_heads // pool.layout.num_kv_heads

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Group]:
        spans = list(_spans(batch, window, self.pool.layout.block_size))
        spans.sort(key=lambda span: (span.num_queries, span.num_blocks))
        groups: list[list[_Span]] = []
        for span in spans:
            if groups and _fits(groups[-1], span):
                groups[-1].append(span)
            else:
                groups.append([span])
        return [self._group(batch, group, window) for group in groups]

    def attend(self, query: torch.Tensor, layer: int, plan: list[_Group]) -> torch.Tensor:
        keys, values = self.pool.keys(layer).flatten(1), self.pool.values(layer).flatten(1)
        output = torch.empty_like(query)
        for group in plan:
            output[group.rows] = self._attend_group(query[group.rows], keys, values, group)
        return output

    def _attend_group(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group
    ) -> torch.Tensor:
        """query [N * Q, H, D] and whole pools [num_blocks, block_size * Hkv * D] -> [N * Q, H, D]"""
        shape = (group.num_spans, -1, self._num_kv_heads, query.shape[-1])
        k = keys.index_select(0, group.blocks).view(shape).transpose(1, 2)
        v = values.index_select(0, group.blocks).view(shape).transpose(1, 2)
        folded = query.reshape(group.num_spans, group.num_queries, self._num_kv_heads, self._heads_per_key, -1)
        folded = folded.transpose(1, 2).flatten(2, 3)  # [N, Hkv, Q * H / Hkv, D]
        attended = functional.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        attended = attended.reshape(group.num_spans, self._num_kv_heads, group.num_queries, self._heads_per_key, -1)
        return attended.transpose(1, 2).reshape(query.shape)

    def _group(self, batch: ForwardBatch, spans: list[_Span], window: int | None) -> _Group:
        spans = sorted(spans, key=lambda span: span.first_row)
        num_queries = spans[0].num_queries
        block_size, device = self.pool.layout.block_size, batch.block_tables.device
        requests, first_blocks, kv_ends = (
            torch.tensor(column, device=device).unsqueeze(1)
            for column in zip(*((span.request, span.first_block, span.kv_end) for span in spans), strict=True)
        )
        num_blocks = max(span.num_blocks for span in spans)
        block_positions = first_blocks + torch.arange(num_blocks, device=device)
        blocks = batch.block_tables[requests, block_positions.clamp(max=batch.block_tables.shape[1] - 1)]

        key_positions = first_blocks * block_size + torch.arange(num_blocks * block_size, device=device)  # [N, L]
        query_positions = kv_ends - num_queries + torch.arange(num_queries, device=device)  # [N, Q]
        distances = query_positions.unsqueeze(2) - key_positions.unsqueeze(1)
        hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
        mask = torch.zeros(hidden.shape, dtype=self.pool.keys(0).dtype, device=device).masked_fill(hidden, -torch.inf)
        if num_queries > 1:
            mask = mask.repeat_interleave(self._heads_per_key, dim=1)
        return _Group(_rows(spans, device), len(spans), num_queries, blocks.flatten().long(), mask.unsqueeze(1))


def _spans(batch: ForwardBatch, window: int | None, block_size: int) -> Iterator[_Span]:
    starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
    for request, length in enumerate(lengths):
        end = starts[request + 1]
        for row in range(starts[request], end, QUERY_CHUNK):
            num_queries = min(QUERY_CHUNK, end - row)
            kv_end = length - (end - row - num_queries)
            first_seen = 0 if window is None else max(0, kv_end - num_queries + 1 - window)
            first_block = first_seen // block_size
            yield _Span(request, row, num_queries, kv_end, first_block, -(-kv_end // block_size) - first_block)


def _fits(group: list[_Span], span: _Span) -> bool:
    """Single queries (decode) share a call when that pads little; spans come with growing num_blocks."""
    limit = group[0].num_blocks * 5 // 4 + PADDING_BLOCKS
    return group[0].num_queries == span.num_queries == 1 and span.num_blocks <= limit


def _rows(spans: list[_Span], device: torch.device) -> slice | torch.Tensor:
    """The query rows of spans in order, as a slice (no copy) when they are neighbours."""
    first, last = spans[0].first_row, spans[-1].first_row
    if last - first == len(spans) - 1 or len(spans) == 1:
        return slice(first, last + spans[-1].num_queries)
    return torch.tensor([span.first_row for span in spans], device=device)
