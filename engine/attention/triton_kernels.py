"""Attention over a paged pool as kernels of Triton.

A program of `attend` computes some rows of one request and the heads that share a key. It goes through the keys in
tiles that begin at multiples of their size, keeps the largest score so far and weighs relative to it (FlashAttention,
Dao et al., 2022).

A step has few rows, and a program for each would leave most of a device without work. So several programs share the
keys of a request, each some tiles in a row, and `merge` puts together what they give (Flash-Decoding, Dao et al.,
2023). How they are shared depends on the number of keys alone, not on what else is in the batch. How many rows a
program has depends on the request with the most, and with it perhaps the order in which weights of a row are added up.
"""

import math
from typing import Final

import triton
import triton.language as tl

TILE_KEYS: Final = 64
FEW_ROWS: Final = 16  # the least that a product of Triton's takes
SHARING_ROWS: Final = 32  # the most of a program that shares keys with others
MANY_ROWS: Final = 64
LEAST_TILES: Final = 4  # of a program that shares keys with others
ALONE: Final = 1  # SPLITS, where none do
NOTHING: Final = -1e30  # less than any score; unlike with -inf, differences from it are numbers
UNCAPPED: Final = 0.0
SMALLEST: Final = 1e-30  # that anything is divided by
LOG2_E: Final = math.log2(math.e)  # a device knows powers of two
OF_REQUESTS: Final = ("query_starts", "kv_lengths", "block_tables")  # which begin anywhere in those of a whole batch


@triton.jit  # type: ignore[untyped-decorator]
def first_key(position, window, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of the first tile that is seen from a position."""
    return tl.maximum(position - window + 1, 0) // KEYS * KEYS if HAS_WINDOW else 0


@triton.jit  # type: ignore[untyped-decorator]
def keys_of_each(  # type: ignore[no-untyped-def]
    num_keys, KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr
):
    """How many of its keys a program takes, where up to SPLITS share them: whole tiles, LEAST or more."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, KEYS), SPLITS), LEAST) * KEYS


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_stride"],  # which differs by batches, each of which would be compiled for
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
    """Attends. Of SPLITS programs the first axis of the grid is which one; those that share keys write to `parts`
    [tokens, heads, SPLITS, HEAD_DIM] and the logarithms of their sums to `part_sizes`."""
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
        if HAS_SCALES:  # the largest is taken out: with small ones, small weights would be none in 16 bits
            value_scale = tl.load(value_scales + of_scales, mask=is_key, other=0.0)
            largest = tl.maximum(tl.max(value_scale, 0), TINY)
            weights *= (value_scale / largest)[None, :]
        summed = tl.dot(weights.to(query.dtype), value, input_precision="ieee")
        result = result * kept[:, None] + (summed * largest if HAS_SCALES else summed)
        highest = now
    sees_any = total > 0  # a row that is none does not, nor one whose keys are all other programs'
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
    """One row of what programs of `attend` have shared; where they have not, it is there already."""
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
