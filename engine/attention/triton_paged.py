"""Attend on CUDA with Triton kernels, which read the paged KV cache in place, in blocks of any size.

A program of `attend` computes some rows of one request and the heads that share a key. It goes through the keys in
tiles that begin at multiples of their size, and weighs them relative to the largest score so far (FlashAttention, Dao
et al., 2022).

A decode step has few rows, and one program for each would leave most of a device idle. So several programs share the
keys of a request, each a run of tiles, and `merge` combines their results (Flash-Decoding, Dao et al., 2023). How they
divide the keys depends only on the number of keys, not on the rest of the batch. The number of rows of a program
depends on the request with the most rows, and with it possibly the order in which a row's weights are added.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch

TILE_KEYS: Final = 64
FEW_ROWS: Final = 16  # the fewest rows of a Triton product
SHARING_ROWS: Final = 32  # the most rows of a program that shares keys with others
MANY_ROWS: Final = 64
LEAST_TILES: Final = 4  # of a program that shares keys with others
ALONE: Final = 1  # SPLITS without sharing
NOTHING: Final = -1e30  # less than any score; unlike with -inf, differences from it are numbers
UNCAPPED: Final = 0.0
SMALLEST: Final = 1e-30  # smallest divisor
LOG2_E: Final = math.log2(math.e)  # the device computes powers of two
# Slices of a batch's tensors, which may begin anywhere
OF_REQUESTS: Final = ("query_starts", "kv_lengths", "block_tables")


@triton.jit  # type: ignore[untyped-decorator]
def first_key(position, window, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of the first key in the first tile of KEYS keys that a position attends to.

    That is 0 without a window; `window` counts the last tokens seen.
    """
    return tl.maximum(position - window + 1, 0) // KEYS * KEYS if HAS_WINDOW else 0


@triton.jit  # type: ignore[untyped-decorator]
def keys_of_each(  # type: ignore[no-untyped-def]
    num_keys, KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr
):
    """Return how many of num_keys keys each program takes if up to SPLITS programs share them.

    Each takes whole tiles of KEYS keys, at least LEAST tiles.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, KEYS), SPLITS), LEAST) * KEYS


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_stride"],  # varies between batches; specializing would recompile for each value
    do_not_specialize_on_alignment=OF_REQUESTS,
)
def attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    attended,
    parts,
    part_sizes,
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
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LOWEST: tl.constexpr,
    TINY: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Compute attention of ROWS rows (queries times GROUP heads of a key) of one request and key head.

    The grid is (index among SPLITS programs or among the chunks of rows, request, key head). A program that has all
    keys writes to `attended`. Programs that share keys write to `parts` [tokens, heads, SPLITS, HEAD_DIM] and the
    logarithms of their sums to `part_sizes`, which `merge` combines. query_starts, kv_lengths and block_tables are
    those of ForwardBatch; strides are in elements. HAS_SCALES: keys and values are quantized, with scales. HAS_CAP:
    scores are capped at softcap. HAS_WINDOW: only the last `window` keys are seen.
    """
    request, key_head = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_row
    first = 0 if SPLITS > 1 else tl.program_id(0) * ROWS
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
    inside = is_row[:, None] & is_column[None, :]

    last = tl.minimum(first + ROWS, num_queries * GROUP) - 1
    end = length - num_queries + last // GROUP + 1
    begin = first_key(length - num_queries + first // GROUP, window, KEYS, HAS_WINDOW)
    is_shared = False
    if SPLITS > 1:
        share = keys_of_each(end - begin, KEYS, SPLITS, LEAST)
        is_shared = share < end - begin
        begin += tl.program_id(0) * share
        if begin >= end:
            return
        end = tl.minimum(end, begin + share)

    places = (first_row + token).to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + columns[None, :]
    query = tl.load(queries + places, mask=inside, other=0.0)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
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
        value = tl.load(values + of_keys[:, None] + columns[None, :], mask=there, other=0.0).to(query.dtype)
        largest = 1.0
        if HAS_SCALES:  # the largest scale is factored out: small scales would round weights to zero in 16 bits
            value_scale = tl.load(value_scales + of_scales, mask=is_key, other=0.0)
            largest = tl.maximum(tl.max(value_scale, 0), TINY)
            weights *= (value_scale / largest)[None, :]
        summed = tl.dot(weights.to(query.dtype), value, input_precision="ieee")
        result = result * kept[:, None] + (summed * largest if HAS_SCALES else summed)
        highest = now
    sees_any = total > 0  # False for padding rows, and rows whose keys all belong to other programs
    result = result / tl.where(sees_any, total, 1.0)[:, None]
    if is_shared:
        of_rows = ((first_row + token) * tl.num_programs(2) * GROUP + head) * SPLITS + tl.program_id(0)
        sizes = tl.where(sees_any, highest + tl.log2(tl.where(sees_any, total, 1.0)), LOWEST)
        tl.store(part_sizes + of_rows, sizes, mask=is_row)
        tl.store(parts + of_rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], result, mask=inside)
    else:
        tl.store(attended + places, result.to(attended.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    attended,
    parts,
    part_sizes,
    query_starts,
    kv_lengths,
    row_stride,
    head_stride,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    """Combine what programs of `attend` wrote to `parts` and `part_sizes` for one row, and write it to `attended`.

    A row whose keys were not shared is complete already, and stays as it is. The arguments are those of `attend`.
    """
    row, request, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_row
    if row >= num_queries * GROUP:
        return
    end = tl.load(kv_lengths + request)
    begin = first_key(end - num_queries, window, KEYS, HAS_WINDOW)
    share = keys_of_each(end - begin, KEYS, SPLITS, LEAST)
    if share >= end - begin:
        return
    splits = tl.arange(0, SPLITS)
    is_split = splits < tl.cdiv(end - begin, share)
    token, head = first_row + row // GROUP, key_head * GROUP + row % GROUP
    of_row = (token * tl.num_programs(2) * GROUP + head) * SPLITS + splits
    sizes = tl.load(part_sizes + of_row, mask=is_split, other=LOWEST)
    weights = tl.exp2(sizes - tl.max(sizes, 0))
    columns = tl.arange(0, PADDED_DIM)
    is_column = columns < HEAD_DIM
    inside = is_split[:, None] & is_column[None, :]
    part = tl.load(parts + of_row.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    result = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    place = token.to(tl.int64) * row_stride + head * head_stride
    tl.store(attended + place + columns, result.to(attended.dtype.element_ty), mask=is_column)


# Up to these key widths, by the rows of a program, more tiles are prefetched, which hides their latency, if the
# device's
# shared memory suffices.
DEEP_BYTES: Final = {FEW_ROWS: 512, SHARING_ROWS: 256, MANY_ROWS: 256}
DEEP_STAGES, STAGES, ONE_STAGE = 5, 3, 1
DEEP_MEMORY_BYTES: Final = 160 * 1024
COMMON_MEMORY_BYTES: Final = 99 * 1024  # of devices that do not report it
SCALES_BYTES: Final = 16  # of a key and its value, while both are loaded
SUMS_BYTES: Final = 1024  # of rows, among the warps
SHARING_DIM: Final = 128  # head width up to which SHARING_ROWS rows of 16 bits fit in the registers
PROGRAMS: Final = 128  # programs that a step of one request should have, to fill a device
FEWEST_SPLITS, MOST_SPLITS = 16, 64


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: ForwardBatch
    window: int | None
    rows: int  # of a program
    programs: int  # for each request and key head
    splits: int  # most programs that share keys; ALONE: no sharing, each program has rows of its own


class TritonAttention:
    """Attends on CUDA in pools of any dtype and block size.

    Support of 8-bit pools depends on the device, so a trial must precede its use.
    """

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
        """Prepare the kernels.

        `is_uniform`: prefill is computed like decode, and programs share no keys, so that the bits of a row may depend
        only on the row and its keys.
        """
        self.pool = pool
        self.score_scale = score_scale
        self.softcap = softcap
        self._caches = {layer: pool.scaled_caches(layer) for layer in pool.layout.layers}
        self._group = num_heads // pool.layout.num_kv_heads
        head_dim, properties = pool.layout.head_dim, torch.cuda.get_device_properties(pool.device)
        memory_bytes = getattr(properties, "shared_memory_per_block_optin", COMMON_MEMORY_BYTES)
        itemsizes = pool.compute_dtype.itemsize, self._caches[pool.layout.layers[0]][0][0].itemsize
        self._stages = stages_by_rows(head_dim, *itemsizes, memory_bytes)
        is_wide = pool.compute_dtype.itemsize > 2  # products of many rows would exceed the registers
        self._most_rows = most_rows(FEW_ROWS if is_uniform or is_wide else MANY_ROWS, self._stages)
        most_sharing = FEW_ROWS if is_wide or head_dim > SHARING_DIM else SHARING_ROWS
        self.few_tokens: Final = 0 if is_uniform else most_sharing // self._group
        """Tokens per request: programs share keys only if no request of a batch has more."""
        wanted = triton.next_power_of_2(PROGRAMS // pool.layout.num_kv_heads)
        self._splits = min(max(wanted, FEWEST_SPLITS), MOST_SPLITS)

    def plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        num_rows = batch.longest_query * self._group
        if batch.longest_query > self.few_tokens:
            return _Plan(batch, window, self._most_rows, triton.cdiv(num_rows, self._most_rows), ALONE)
        most_shares = triton.cdiv(batch.longest_context, LEAST_TILES * TILE_KEYS)
        splits = self._splits if most_shares > 1 else ALONE
        rows = max(FEW_ROWS, triton.next_power_of_2(num_rows))
        return _Plan(batch, window, rows, min(splits, most_shares), splits)

    def attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        with torch.cuda.device(query.device):  # the pool's device, which may differ from the thread's
            return self._attend(query.contiguous(), layer, plan)

    def _attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        batch, layout = plan.batch, self.pool.layout
        (keys, key_scales), (values, value_scales) = self._caches[layer]
        num_requests, head_dim = len(batch.kv_lengths), query.shape[-1]
        attended = torch.empty_like(query)
        shared = (*query.shape[:2], plan.splits) if plan.splits > ALONE else (0,)
        part_sizes = query.new_empty(shared, dtype=torch.float32)
        parts = part_sizes.new_empty((*shared, head_dim))
        scale = head_dim**-0.5 if self.score_scale is None else self.score_scale
        window = 0 if plan.window is None else plan.window
        constants = {
            "GROUP": self._group,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded(head_dim),
            "KEYS": TILE_KEYS,
            "SPLITS": plan.splits,
            "LEAST": LEAST_TILES,
            "HAS_WINDOW": plan.window is not None,
            "LOWEST": NOTHING,
        }
        attend[plan.programs, num_requests, layout.num_kv_heads](
            query,
            keys,
            values,
            key_scales,
            value_scales,
            attended,
            parts,
            part_sizes,
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
            window,
            BLOCK_SIZE=layout.block_size,
            ROWS=plan.rows,
            HAS_CAP=self.softcap is not None,
            HAS_SCALES=layout.is_quantized,
            TINY=SMALLEST,
            LOG2_E=LOG2_E,
            num_stages=self._stages[plan.rows],
            **constants,
        )
        if plan.splits > ALONE:
            merge[batch.longest_query * self._group, num_requests, layout.num_kv_heads](
                attended,
                parts,
                part_sizes,
                batch.query_starts,
                batch.kv_lengths,
                query.stride(0),
                query.stride(1),
                window,
                **constants,
            )
        return attended


def padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def stages_by_rows(head_dim: int, itemsize: int, stored_itemsize: int, memory_bytes: int) -> dict[int, int]:
    """Return how many pipeline stages a program of `attend` gets, by its number of rows.

    The device has `memory_bytes` of shared memory per program. head_dim is the width of a head, `itemsize` and
    `stored_itemsize` the bytes of a query's and of the pool's numbers. At least ONE_STAGE, even if that is too much.
    """
    stages = {}
    for rows, deep_bytes in DEEP_BYTES.items():
        is_deep = memory_bytes >= DEEP_MEMORY_BYTES and head_dim * stored_itemsize <= deep_bytes
        wanted = DEEP_STAGES if is_deep else STAGES
        fits = shared_bytes(rows, wanted, head_dim, itemsize, stored_itemsize) <= memory_bytes
        stages[rows] = wanted if fits else ONE_STAGE
    return stages


def most_rows(at_most: int, stages: Mapping[int, int]) -> int:
    """Return the most rows, up to `at_most`, of a program that prefetches; FEW_ROWS if none does.

    `stages` is the result of stages_by_rows.
    """
    return max((rows for rows in stages if rows <= at_most and stages[rows] > ONE_STAGE), default=FEW_ROWS)


def shared_bytes(rows: int, stages: int, head_dim: int, itemsize: int, stored_itemsize: int) -> int:
    """Return the most bytes of shared memory that a program takes for its queries, weights and prefetched tiles.

    It computes `rows` rows of width head_dim; `itemsize` and `stored_itemsize` are the bytes of a query's and of the
    pool's numbers. stages - 1 tiles are prefetched; with any prefetch, at least one of keys and one of values. Devices
    of compute capability 9.0, which have enough memory, use some more.
    """
    dim, num_tiles = padded(head_dim), max(2, stages - 1) if stages > ONE_STAGE else 1
    key_bytes = dim * stored_itemsize + (SCALES_BYTES if stored_itemsize < itemsize else 0)
    return rows * (dim + TILE_KEYS) * itemsize + num_tiles * TILE_KEYS * key_bytes + SUMS_BYTES
