"""Compute attention over the paged KV cache: one function for prefill, chunked prefill and decode.

A backend first builds a plan of a batch (once a step for each window size), then attends with it (once a layer):

    query [T, num_heads, head_dim]  ->  [T, num_heads, head_dim]

The pool already holds the keys and values of the step's own tokens. A token attends to itself and the tokens before it;
with a window, only to the last `window` of them.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.nn import functional

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch
from engine.ops.base import capped

QUERY_CHUNK: Final = 64  # query rows of one call: more would compute scores that the causal mask discards
PADDING_BLOCKS: Final = 8  # largest difference between the contexts of one call, in blocks


class Attention(Protocol):
    """An attention backend, bound to one pool."""

    name: str
    pool: PagedKVPool
    score_scale: float | None  # factor of query-key products; None: 1 / sqrt(key width)
    softcap: float | None  # each score becomes softcap * tanh(score / softcap); None: unchanged

    def plan(self, batch: ForwardBatch, window: int | None) -> Any:
        """Prepare the attention of a batch in all layers with this window; return the backend's plan.

        `window` is the number of last tokens that each token attends to; None: all.
        """

    def attend(self, query: torch.Tensor, layer: int, plan: Any) -> torch.Tensor:
        """Return the attention output of one layer, given the query rows of the batch that `plan` was made for.

        The output is [T, num_heads, width of a value], and the query [T, num_heads, width of a key].
        """


@dataclass(frozen=True, slots=True)
class _Span:
    """num_queries rows of one request, from first_row on; the last row attends to the tokens up to kv_end."""

    request: int
    first_row: int
    num_queries: int
    kv_end: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of one call: N spans of Q queries over L key slots. Heads that share a key are folded into rows."""

    rows: slice | torch.Tensor  # rows of the query
    num_spans: int
    num_queries: int
    blocks: slice  # N * L / block_size of the gathered blocks
    mask: torch.Tensor  # [N, 1, Q * heads per key head, L], or one row for all if Q is 1; 0 or -inf


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Blocks that are gathered once, and the groups that attend to them: chunks of one request, or single queries."""

    blocks: torch.Tensor  # int64
    not_theirs: torch.Tensor  # int64, the slots of these blocks that hold data of other requests
    groups: list[_Group]


_AttentionOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries, keys, values and a mask -> the attention output."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Changes of scores beyond the mask: a soft cap, sinks and a factor.

    Each score becomes cap * tanh(score / cap), and each head's sink counts as one more score, of a key without a value.
    """

    softcap: float | None
    sinks: torch.Tensor | None = None  # [num_heads]
    scale: float | None = None  # factor of scores; None: 1 / sqrt(key width)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend like torch's scaled_dot_product_attention, with this scoring.

        Queries are [N, Hkv, Q * H / Hkv, D], where heads that share a key are adjacent; `mask` is added to the scores.
        """
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (queries @ keys.transpose(-1, -2)).float() * scale
        if self.softcap is not None:
            scores = capped(scores, self.softcap)
        scores = scores + mask
        if self.sinks is not None:
            by_key = self.sinks.float().view(1, keys.shape[1], -1)
            sinks = by_key.repeat(1, 1, queries.shape[2] // by_key.shape[2]).unsqueeze(-1)
            scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1)), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
        return torch.matmul(weights, values)


class PortableAttention:
    """Gathers blocks and calls torch's scaled_dot_product_attention: correct on every device."""

    name = "portable"

    def __init__(
        self, pool: PagedKVPool, num_heads: int, score_scale: float | None = None, softcap: float | None = None
    ) -> None:
        self.pool = pool
        self.score_scale, self.softcap = score_scale, softcap
        self._attention: _AttentionOf = functools.partial(functional.scaled_dot_product_attention, scale=score_scale)
        if softcap is not None:
            self._attention = Scoring(softcap, scale=score_scale).attend
        self._num_kv_heads = pool.layout.num_kv_heads
        self._heads_per_key = num_heads // pool.layout.num_kv_heads

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Gathering]:
        chunks: dict[int, list[_Span]] = {}
        singles = []
        for span in _spans(batch, window, self.pool.layout.block_size):
            if span.num_queries == 1:
                singles.append(span)
            else:
                chunks.setdefault(span.request, []).append(span)
        gatherings = [self._gather_chunks(batch, spans, window) for spans in chunks.values()]
        return gatherings + [self._gather_singles(batch, spans, window) for spans in _alike(singles)]

    def attend(
        self, query: torch.Tensor, layer: int, plan: list[_Gathering], scoring: Scoring | None = None
    ) -> torch.Tensor:
        """Return the attention output of one layer for the query rows, by the groups of the plan.

        `scoring` replaces the usual scores. In a layer without V, keys serve as values.
        """
        attention = self._attention if scoring is None else scoring.attend
        width = self.pool.layout.cache_shapes(layer)[1].width
        output = query.new_empty((*query.shape[:2], width or query.shape[2]))
        for gathering in plan:
            keys, values = self.pool.gather(layer, gathering.blocks)
            values = values if width else keys
            for cache in (keys, values):  # a mask hides numbers, but not NaN
                cache.flatten(0, 1).index_fill_(0, gathering.not_theirs, 0)
            for group in gathering.groups:
                output[group.rows] = self._attend_group(query[group.rows], keys, values, group, attention)
        return output

    def _attend_group(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, attention: _AttentionOf
    ) -> torch.Tensor:
        """Attend one group: query [N * Q, H, D] and gathered blocks [num_blocks, block_size, Hkv, D] -> [N * Q, H,
        width of V].
        """
        k, v = (
            cache[group.blocks].view(group.num_spans, -1, *cache.shape[2:]).transpose(1, 2) for cache in (keys, values)
        )
        folded = query.reshape(group.num_spans, group.num_queries, self._num_kv_heads, self._heads_per_key, -1)
        folded = folded.transpose(1, 2).flatten(2, 3)  # [N, Hkv, Q * H / Hkv, D]
        attended = attention(folded, k, v, group.mask)
        attended = attended.reshape(group.num_spans, self._num_kv_heads, group.num_queries, self._heads_per_key, -1)
        return attended.transpose(1, 2).reshape(*query.shape[:2], -1)

    def _gather_chunks(self, batch: ForwardBatch, spans: list[_Span], window: int | None) -> _Gathering:
        """Gather all spans of one request, in order; they share blocks."""
        first, last = spans[0].first_block, spans[-1].first_block + spans[-1].num_blocks
        groups = []
        for span in spans:
            start = span.first_block - first
            groups.append(self._group(batch, [span], slice(start, start + span.num_blocks), window))
        blocks = batch.block_tables[spans[0].request, first:last].long()
        end = spans[-1].kv_end - first * self.pool.layout.block_size
        not_theirs = torch.arange(end, len(blocks) * self.pool.layout.block_size, device=blocks.device)
        return _Gathering(blocks, not_theirs, groups)

    def _gather_singles(self, batch: ForwardBatch, spans: list[_Span], window: int | None) -> _Gathering:
        """Gather single queries of several requests in one group, each padded to the blocks of the longest."""
        spans = sorted(spans, key=lambda span: span.first_row)
        num_blocks = max(span.num_blocks for span in spans)
        requests, first_blocks = _columns(batch, [(span.request, span.first_block) for span in spans])
        positions = first_blocks + torch.arange(num_blocks, device=requests.device)
        blocks = batch.block_tables[requests, positions.clamp(max=batch.block_tables.shape[1] - 1)].flatten().long()
        num_keys = num_blocks * self.pool.layout.block_size
        num_own = [span.kv_end - span.first_block * self.pool.layout.block_size for span in spans]
        is_own = torch.arange(num_keys, device=blocks.device) < torch.tensor(num_own, device=blocks.device).unsqueeze(1)
        not_theirs = is_own.logical_not().flatten().nonzero().flatten()
        return _Gathering(blocks, not_theirs, [self._group(batch, spans, slice(None), window)])

    def _group(self, batch: ForwardBatch, spans: list[_Span], blocks: slice, window: int | None) -> _Group:
        num_queries, device = spans[0].num_queries, batch.block_tables.device
        num_keys = max(span.num_blocks for span in spans) * self.pool.layout.block_size
        first_keys, kv_ends = _columns(
            batch, [(span.first_block * self.pool.layout.block_size, span.kv_end) for span in spans]
        )
        key_positions = first_keys + torch.arange(num_keys, device=device)  # [N, L]
        query_positions = kv_ends - num_queries + torch.arange(num_queries, device=device)  # [N, Q]
        distances = query_positions.unsqueeze(2) - key_positions.unsqueeze(1)
        hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
        mask = torch.zeros(hidden.shape, dtype=self.pool.compute_dtype, device=device).masked_fill(hidden, -torch.inf)
        if num_queries > 1:
            mask = mask.repeat_interleave(self._heads_per_key, dim=1)
        return _Group(_rows(spans, device), len(spans), num_queries, blocks, mask.unsqueeze(1))


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


def _alike(singles: list[_Span]) -> list[list[_Span]]:
    """Group single queries so that a shared call needs little padding."""
    groups: list[list[_Span]] = []
    limit = 0
    for span in sorted(singles, key=lambda span: span.num_blocks):
        if not groups or span.num_blocks > limit:
            groups.append([])
            limit = span.num_blocks * 5 // 4 + PADDING_BLOCKS
        groups[-1].append(span)
    return groups


def _columns(batch: ForwardBatch, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two columns of a table [N, 2], each [N, 1]."""
    first, second = torch.tensor(rows, device=batch.block_tables.device).unsqueeze(2).unbind(1)
    return first, second


def _rows(spans: list[_Span], device: torch.device) -> slice | torch.Tensor:
    """Return the query rows of spans in order, as a slice (no copy) if they are adjacent."""
    first, last = spans[0].first_row, spans[-1].first_row
    if last - first == len(spans) - 1 or len(spans) == 1:
        return slice(first, last + spans[-1].num_queries)
    return torch.tensor([span.first_row for span in spans], device=device)
