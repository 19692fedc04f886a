"""Attention on CUDA by a kernel of Triton, which reads the paged pool in place, in blocks of any size.

A program computes some rows of one request and the heads that share a key. It goes through the keys in tiles that begin
at multiples of their size, keeps the largest score so far and weighs relative to it (FlashAttention, Dao et al., 2022).
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch

TILE_KEYS: Final = 64
FEW_ROWS: Final = 16  # the least that a product of Triton's takes
MANY_ROWS: Final = 64
NOTHING: Final = -1e30  # less than any score; unlike with -inf, differences from it are numbers
UNCAPPED: Final = 0.0
LOG2_E: Final = math.log2(math.e)  # a device knows powers of two


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]  # it differs from batch to batch
def attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    attended,
    query_starts,
    kv_lengths,
    block_tables,
    row_stride,
    head_stride,
    block_stride,
    token_stride,
    key_head_stride,
    scale_stride,
    table_stride,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LOWEST: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    request, key_head = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_row
    first = tl.program_id(0) * ROWS
    if first >= num_queries * GROUP:
        return
    length = tl.load(kv_lengths + request)
    rows = first + tl.arange(0, ROWS)
    is_row = rows < num_queries * GROUP
    token = rows // GROUP
    position = length - num_queries + token
    head = key_head * GROUP + rows % GROUP
    columns = tl.arange(0, PADDED_DIM)
    is_column = columns < HEAD_DIM
    places = (first_row + token).to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + columns[None, :]
    inside = is_row[:, None] & is_column[None, :]
    query = tl.load(queries + places, mask=inside, other=0.0)

    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    last = tl.minimum(first + ROWS, num_queries * GROUP) - 1
    end = length - num_queries + last // GROUP + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - num_queries + first // GROUP - window + 1, 0) // KEYS * KEYS
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = at < end
        block = tl.load(block_tables + request * table_stride + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        of_keys = block * block_stride + (at % BLOCK_SIZE) * token_stride + key_head * key_head_stride
        there = is_key[:, None] & is_column[None, :]
        key = tl.load(keys + of_keys[:, None] + columns[None, :], mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if HAS_SCALES:
            of_scales = block * scale_stride + key_head
            scores *= tl.load(key_scales + of_scales, mask=is_key, other=0.0)[None, :]
        if HAS_CAP:
            small = tl.exp2(tl.abs(scores) * (-2 * LOG2_E / softcap))
            tanh = (1 - small) / (1 + small)
            scores = tl.where(scores < 0, -tanh, tanh) * softcap
        is_seen = (at[None, :] <= position[:, None]) & is_row[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, LOWEST)
        now = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp2(scores - now[:, None]), 0.0)
        kept = tl.exp2(highest - now)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(values + of_keys[:, None] + columns[None, :], mask=there, other=0.0)
        if HAS_SCALES:
            weights *= tl.load(value_scales + of_scales, mask=is_key, other=0.0)[None, :]
        value = value.to(query.dtype)
        result = result * kept[:, None] + tl.dot(weights.to(query.dtype), value, input_precision="ieee")
        highest = now
    result = result / tl.where(is_row, total, 1.0)[:, None]
    tl.store(attended + places, result.to(attended.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: ForwardBatch
    window: int | None


class TritonAttention:
    """Takes pools of any dtype and block size; what of 8 bits it takes depends on the device, so it is to be tried out
    first."""

    name = "triton"

    def __init__(
        self,
        pool: PagedKVPool,
        num_heads: int,
        score_scale: float | None = None,
        softcap: float | None = None,
        *,
        is_uniform: bool = False,
    ) -> None:
        """`is_uniform`: prompts are computed as steps are, so that the bits of a row may depend on it and its keys
        alone."""
        self.pool = pool
        self.score_scale = score_scale
        self.softcap = softcap
        self._planes = {layer: pool.scaled_planes(layer) for layer in pool.layout.layers}
        self._group = num_heads // pool.layout.num_kv_heads
        self._most_rows = FEW_ROWS if is_uniform else MANY_ROWS

    def plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        return _Plan(batch, window)

    def attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        with torch.cuda.device(query.device):  # that of the pool, which need not be the thread's
            return self._attend(query, layer, plan)

    def _attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        batch, window, layout = plan.batch, plan.window, self.pool.layout
        (keys, key_scales), (values, value_scales) = self._planes[layer]
        query = query.contiguous()
        attended = torch.empty_like(query)
        num_rows = batch.longest_query * self._group
        rows = FEW_ROWS if num_rows <= FEW_ROWS else self._most_rows
        head_dim = query.shape[-1]
        scale = head_dim**-0.5 if self.score_scale is None else self.score_scale
        grid = (triton.cdiv(num_rows, rows), len(batch.kv_lengths), layout.num_kv_heads)
        attend[grid](
            query,
            keys,
            values,
            key_scales,
            value_scales,
            attended,
            batch.query_starts,
            batch.kv_lengths,
            batch.block_tables,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            key_scales.stride(0),
            batch.block_tables.stride(0),
            scale * LOG2_E,
            UNCAPPED if self.softcap is None else self.softcap * LOG2_E,
            0 if window is None else window,
            GROUP=self._group,
            BLOCK_SIZE=layout.block_size,
            HEAD_DIM=head_dim,
            PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
            ROWS=rows,
            KEYS=TILE_KEYS,
            HAS_CAP=self.softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_SCALES=layout.is_quantized,
            LOWEST=NOTHING,
            LOG2_E=LOG2_E,
        )
        return attended
