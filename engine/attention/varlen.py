"""Attend on CUDA with torch's varlen_attn (FlashAttention): over the paged pool in place, or over gathered keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import torch
from torch.nn.attention.varlen import varlen_attn

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch

NO_LIMIT = -1
BLOCK_TOKENS: Final = 256  # FlashAttention 2 requires blocks of a multiple of 256 tokens
GATHERED_TOKENS: Final = 65_536  # bounds the memory of gathered keys and values, unless one request has more tokens

PARAMETERS: Final = signature(varlen_attn).parameters
CAN_PAGE: Final = "block_table" in PARAMETERS  # since torch 2.12
GROUPED: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in PARAMETERS else {}
)  # before, no flag was needed


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: ForwardBatch
    window: tuple[int, int]  # tokens seen to the left and to the right


class VarlenAttention:
    """Attends with varlen_attn in the pool itself, whose blocks must be a multiple of BLOCK_TOKENS.

    The pool must be of float16 or bfloat16, and torch must be CAN_PAGE. Further support depends on the GPU, so a trial
    must precede its use.
    """

    name = "varlen_attn"

    def __init__(self, pool: PagedKVPool, score_scale: float | None = None) -> None:
        self.pool = pool
        self.score_scale = score_scale
        self.softcap: float | None = None

    def plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        return _Plan(batch, _window(window))

    def attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        attended = varlen_attn(
            query.contiguous(),
            self.pool.keys(layer),
            self.pool.values(layer),
            plan.batch.query_starts,
            plan.batch.query_starts,  # required by FlashAttention 2, but kv_lengths and block_tables determine the keys
            plan.batch.longest_query,
            plan.batch.longest_context,
            scale=self.score_scale,
            window_size=plan.window,
            enable_gqa=True,
            seqused_k=plan.batch.kv_lengths,
            block_table=plan.batch.block_tables,
            num_splits=1,  # the same bits for a request in any batch
        )
        assert isinstance(attended, torch.Tensor)
        return attended


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Adjacent requests of a batch whose keys and values are gathered together."""

    rows: slice  # rows of the query
    batch: ForwardBatch
    slots: torch.Tensor  # [K] int64, of all tokens of each request in turn
    key_starts: torch.Tensor  # [B + 1] int32, the first of each request in `slots`
    window: tuple[int, int]


class GatheredAttention:
    """Copies the keys and values of each request out of the pool, then attends with varlen_attn.

    For prefill, where the copy is small beside the products. Supports float16 and bfloat16 pools with blocks of any
    size. In a layer it holds the keys and values of at most GATHERED_TOKENS tokens, or of one request. Further support
    depends on the GPU, so a trial must precede its use.
    """

    name = "varlen_attn over gathered keys"

    def __init__(self, pool: PagedKVPool, score_scale: float | None = None) -> None:
        self.pool = pool
        self.score_scale = score_scale
        self.softcap: float | None = None

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Gathering]:
        return [self._gathering(batch, first, end, window) for first, end in _parts(batch.context_lengths)]

    def _gathering(self, batch: ForwardBatch, first: int, end: int, window: int | None) -> _Gathering:
        rows, part = slice(batch.starts[first], batch.starts[end]), batch.part(first, end)
        return _Gathering(rows, part, *_keys(part, self.pool.layout.block_size), _window(window))

    def attend(self, query: torch.Tensor, layer: int, plan: list[_Gathering]) -> torch.Tensor:
        attended = [self._attend(query[part.rows], layer, part) for part in plan]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(self, query: torch.Tensor, layer: int, part: _Gathering) -> torch.Tensor:
        caches = self.pool.keys(layer), self.pool.values(layer)
        keys, values = (cache.flatten(0, 1).index_select(0, part.slots) for cache in caches)
        attended = varlen_attn(
            query.contiguous(),
            keys,
            values,
            part.batch.query_starts,
            part.key_starts,
            part.batch.longest_query,
            part.batch.longest_context,
            scale=self.score_scale,
            window_size=part.window,
            **GROUPED,
        )
        assert isinstance(attended, torch.Tensor)
        return attended


def _window(window: int | None) -> tuple[int, int]:
    """Return how many tokens a token sees to the left and to the right, for a window that counts the token itself."""
    return (NO_LIMIT if window is None else window - 1, 0)


def _parts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and end of each run of requests with at most GATHERED_TOKENS tokens together, or of one request."""
    first, num_tokens = 0, 0
    for request, length in enumerate(lengths):
        if request > first and num_tokens + length > GATHERED_TOKENS:
            yield first, request
            first, num_tokens = request, 0
        num_tokens += length
    yield first, len(lengths)


def _keys(batch: ForwardBatch, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of all tokens of the requests, and where those of each request start. The host does not wait."""
    ends = batch.kv_lengths.cumsum(0, dtype=torch.int32)
    starts = torch.nn.functional.pad(ends, (1, 0))
    tokens = torch.arange(sum(batch.context_lengths), dtype=torch.int32, device=ends.device)
    requests = torch.bucketize(tokens, ends, right=True)
    offsets = tokens - starts[requests]
    blocks = batch.block_tables[requests, offsets // block_size].long()
    return blocks * block_size + offsets % block_size, starts
