"""Compute the ops of a decoder layer between its products on CUDA with Triton kernels.

Each op is one kernel that reads and writes every number once. torch needs several kernels for each, whose launches
alone take a good part of a decode step.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from engine.ops.base import HeadNorms, KVSlots, Norm, Ops
from engine.ops.rope import Rotation
from serving_core.model_files.differences import GELU_TANH, SILU

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_ROW: Final = 2**15  # numbers that a program holds
COLUMNS_OF_A_WARP: Final = 512
MOST_WARPS: Final = 16
HEADS: Final = 16  # of a program
GATES: Final = 1024  # of a program
ROOT_2_OVER_PI: Final = 0.7978845608028654


@triton.jit  # type: ignore[untyped-decorator]
def normed(x, weight, num_columns, eps, CENTERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the norm of rows x [R, C], float32, of which num_columns columns are not zero padding.

    `weight` [C] is multiplied, eps added to the mean square. CENTERS: the mean is subtracted first.
    """
    if CENTERS:
        x = x - (tl.sum(x, 1) / num_columns)[:, None]
        x = tl.where(tl.arange(0, x.shape[1])[None, :] < num_columns, x, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 1) / num_columns + eps)[:, None] * weight


@triton.jit  # type: ignore[untyped-decorator]
def norm_rows(  # type: ignore[no-untyped-def]
    x,
    delta,
    weight,
    outputs,
    x_stride,
    delta_stride,
    num_columns,
    eps,
    delta_scale,
    HAS_DELTA: tl.constexpr,
    IS_SCALED: tl.constexpr,
    CENTERS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the norm of one row of x, of num_columns numbers, to `outputs`, after adding delta to x if HAS_DELTA.

    The addition is in place. IS_SCALED: delta is multiplied by delta_scale first. `weight`, eps and CENTERS are those
    of `normed`; strides are in elements.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < num_columns
    here = x + row * x_stride + columns
    numbers = tl.load(here, mask=inside, other=0.0)
    dtype = numbers.dtype
    numbers = numbers.to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if IS_SCALED:
            added = (added * delta_scale).to(dtype).to(tl.float32)
        total = (numbers + added).to(dtype)
        tl.store(here, total, mask=inside)
        numbers = total.to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = normed(numbers, weights, num_columns, eps, CENTERS)
    tl.store(outputs + row * num_columns + columns, result.to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_rows(  # type: ignore[no-untyped-def]
    x, delta, weight, x_stride, delta_stride, num_columns, eps, COLUMNS: tl.constexpr
) -> None:
    """Add the norm of one row of delta, of num_columns numbers, to the same row of x, in place.

    `weight` and eps are those of the norm; strides are in elements.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < num_columns
    numbers = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = normed(numbers.to(tl.float32), weights, num_columns, eps, False).to(numbers.dtype)
    here = x + row * x_stride + columns
    total = tl.load(here, mask=inside, other=0.0).to(tl.float32) + result.to(tl.float32)
    tl.store(here, total.to(numbers.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_and_store_heads(  # type: ignore[no-untyped-def]
    heads,
    cosines,
    sines,
    query_weight,
    key_weight,
    slots,
    queries,
    keys,
    values,
    row_stride,
    head_stride,
    block_stride,
    token_stride,
    key_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
) -> None:
    """Norm and rotate HEADS heads of one token; write queries to `queries`, keys and values to the KV pool's slot.

    Each element is rotated with the one half a head apart, by the token's cosines and sines. HAS_NORMS: queries and
    keys are normed first, with their weights and eps. Strides are in elements.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, PADDED_DIM)[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KEYS)
    is_value = (head >= NUM_HEADS + NUM_KEYS) & (head < NUM_HEADS + 2 * NUM_KEYS)
    is_column = columns < HEAD_DIM
    inside = (is_query | is_key | is_value) & is_column
    others = (columns + HEAD_DIM // 2) % HEAD_DIM
    row = heads + token * row_stride + head * head_stride
    stored = tl.load(row + columns, mask=inside, other=0.0)
    dtype = stored.dtype
    numbers = stored.to(tl.float32)
    partners = tl.load(row + others, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        weights = head_weights(query_weight, key_weight, columns, is_query, is_column)
        of_partners = head_weights(query_weight, key_weight, others, is_query, is_column)
        scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / HEAD_DIM + eps)[:, None]
        numbers = (numbers * scale * weights).to(dtype).to(tl.float32)
        partners = (partners * scale * of_partners).to(dtype).to(tl.float32)
    cosine = tl.load(cosines + token * HEAD_DIM + columns, mask=is_column, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * HEAD_DIM + columns, mask=is_column, other=0.0).to(tl.float32)
    turned = (numbers * cosine + partners * sine).to(dtype)
    tl.store(queries + (token * NUM_HEADS + head) * HEAD_DIM + columns, turned, mask=is_query & is_column)
    slot = tl.load(slots + token)
    of_token = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    of_key = of_token + (head - NUM_HEADS) * key_head_stride + columns
    tl.store(keys + of_key, turned, mask=is_key & is_column)
    tl.store(values + of_key - NUM_KEYS * key_head_stride, stored, mask=is_value & is_column)


@triton.jit
def head_weights(query_weight, key_weight, columns, is_query, is_column):  # type: ignore[no-untyped-def]
    """Return the norm weights of each head at these columns, float32: the queries' where is_query, else the keys'.

    0 where is_column is false.
    """
    of_queries = tl.load(query_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    of_keys = tl.load(key_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    return tl.where(is_query, of_queries, of_keys)


@triton.jit  # type: ignore[untyped-decorator]
def gate_rows(  # type: ignore[no-untyped-def]
    gates_and_ups,
    outputs,
    row_stride,
    num_columns,
    IS_GELU: tl.constexpr,
    ROOT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write COLUMNS numbers of one row to `outputs`: the activation of its gates (GELU or SiLU) times its ups.

    A row of gates_and_ups has num_columns gates, then as many ups; rows are row_stride elements apart.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    here = gates_and_ups + row * row_stride + columns
    gate = tl.load(here, mask=inside, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    if IS_GELU:
        gate *= tl.sigmoid(2 * ROOT * (gate + 0.044715 * gate * gate * gate))  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    else:
        gate *= tl.sigmoid(gate)
    up = tl.load(here + num_columns, mask=inside, other=0.0).to(tl.float32)
    result = gate.to(dtype).to(tl.float32) * up
    tl.store(outputs + row * num_columns + columns, result.to(dtype), mask=inside)


class TritonOps(Ops):
    """The Triton backend. Rounds where torch does. The bits of a row do not depend on the other rows."""

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def norm(self, x: torch.Tensor, norm: Norm, delta: torch.Tensor | None = None) -> torch.Tensor:
        if not _are_rows(x, delta):
            return super().norm(x, norm, delta)
        outputs = torch.empty_like(x, memory_format=torch.contiguous_format)
        added = x if delta is None else delta
        with torch.cuda.device(x.device):
            norm_rows[(len(x),)](
                x,
                added,
                norm.weight,
                outputs,
                x.stride(0),
                added.stride(0),
                x.shape[1],
                norm.eps,
                norm.delta_scale,
                HAS_DELTA=delta is not None,
                IS_SCALED=norm.delta_scale != 1,
                CENTERS=norm.centers,
                **_columns(x.shape[1]),
            )
        return outputs

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> None:
        if not _are_rows(x, delta):
            super().add_norm(x, delta, norm)
            return
        strides = (x.stride(0), delta.stride(0))
        with torch.cuda.device(x.device):
            add_norm_rows[(len(x),)](x, delta, norm.weight, *strides, x.shape[1], norm.eps, **_columns(x.shape[1]))

    def rotate_and_store(
        self, heads: torch.Tensor, rotation: Rotation, kv: KVSlots, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        pool = kv.pool
        if pool.layout.is_quantized or heads.dtype != pool.compute_dtype or heads.stride(2) != 1:
            return super().rotate_and_store(heads, rotation, kv, norms)
        num_tokens, num_all_heads, head_dim = heads.shape
        num_kv_heads = pool.layout.num_kv_heads
        keys, values = pool.keys(kv.layer), pool.values(kv.layer)
        queries = heads.new_empty((num_tokens, num_all_heads - 2 * num_kv_heads, head_dim))
        cosines, sines = (table.contiguous() for table in rotation)
        with torch.cuda.device(heads.device):
            rotate_and_store_heads[num_tokens, triton.cdiv(num_all_heads, HEADS)](
                heads,
                cosines,
                sines,
                heads if norms is None else norms.query_weight,
                heads if norms is None else norms.key_weight,
                kv.slots,
                queries,
                keys,
                values,
                heads.stride(0),
                heads.stride(1),
                keys.stride(0),
                keys.stride(1),
                keys.stride(2),
                0.0 if norms is None else norms.eps,
                NUM_HEADS=queries.shape[1],
                NUM_KEYS=num_kv_heads,
                BLOCK_SIZE=pool.layout.block_size,
                HEAD_DIM=head_dim,
                PADDED_DIM=triton.next_power_of_2(head_dim),
                HEADS=HEADS,
                HAS_NORMS=norms is not None,
            )
        return queries

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        if gates_and_ups.stride(1) != 1 or not len(gates_and_ups):
            return super().gate(gates_and_ups, activation)
        num_rows, num_columns = gates_and_ups.shape[0], gates_and_ups.shape[1] // 2
        outputs = gates_and_ups.new_empty((num_rows, num_columns))
        with torch.cuda.device(gates_and_ups.device):
            gate_rows[num_rows, triton.cdiv(num_columns, GATES)](
                gates_and_ups,
                outputs,
                gates_and_ups.stride(0),
                num_columns,
                IS_GELU=activation == GELU_TANH,
                ROOT=ROOT_2_OVER_PI,
                COLUMNS=GATES,
            )
        return outputs


def _are_rows(x: torch.Tensor, delta: torch.Tensor | None) -> bool:
    """Return whether x and delta are non-empty rows that fit a program."""
    are_rows = all(each.dim() == 2 and each.stride(1) == 1 for each in (x, delta) if each is not None)
    return are_rows and len(x) > 0 and x.shape[1] <= LARGEST_ROW


def _columns(num_columns: int) -> dict[str, int]:
    """Return the padded number of columns of a program, and its warps."""
    columns = triton.next_power_of_2(num_columns)
    return {"COLUMNS": columns, "num_warps": min(max(1, columns // COLUMNS_OF_A_WARP), MOST_WARPS)}
