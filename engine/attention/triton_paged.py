"""Attention on CUDA by kernels of Triton, which read the paged pool in place, in blocks of any size."""

from dataclasses import dataclass
from typing import Final

import torch
import triton

from engine.attention.triton_kernels import (
    ALONE,
    FEW_ROWS,
    LEAST_TILES,
    LOG2_E,
    MANY_ROWS,
    NOTHING,
    SHARING_ROWS,
    SMALLEST,
    TILE_KEYS,
    UNCAPPED,
    attend,
    merge,
)
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch

# Where keys are no wider than this, by the rows of a program, more tiles of them are read ahead, which else are waited
# for; it takes a device with so much memory that a program may share.
DEEP_BYTES: Final = {FEW_ROWS: 512, SHARING_ROWS: 256, MANY_ROWS: 256}
DEEP_STAGES, STAGES = 5, 3
DEEP_MEMORY_BYTES: Final = 160 * 1024
SHARING_DIM: Final = 128  # of heads, up to which SHARING_ROWS of 16 bits leave registers enough
PROGRAMS: Final = 128  # that a step of one request should have, to fill a device
FEWEST_SPLITS, MOST_SPLITS = 16, 64


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: ForwardBatch
    window: int | None
    rows: int  # of a program
    programs: int  # of each request and key head
    splits: int  # how many at most share keys; ALONE: none do, and each has rows of its own


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
        """`is_uniform`: prompts are computed as steps are, and no keys are shared among programs, so that the bits of a
        row may depend on it and its keys alone."""
        self.pool = pool
        self.score_scale = score_scale
        self.softcap = softcap
        self._planes = {layer: pool.scaled_planes(layer) for layer in pool.layout.layers}
        self._group = num_heads // pool.layout.num_kv_heads
        is_wide = pool.compute_dtype.itemsize > 2  # for whose products of many rows there are too few registers
        self._most_rows = FEW_ROWS if is_uniform or is_wide else MANY_ROWS
        most_sharing = FEW_ROWS if is_wide or pool.layout.head_dim > SHARING_DIM else SHARING_ROWS
        self.few_tokens: Final = 0 if is_uniform else most_sharing // self._group
        """Of a request: where none of a batch has more, programs share their keys."""
        properties = torch.cuda.get_device_properties(pool.device)
        self._may_be_deep = getattr(properties, "shared_memory_per_block_optin", 0) >= DEEP_MEMORY_BYTES
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
        with torch.cuda.device(query.device):  # that of the pool, which need not be the thread's
            return self._attend(query.contiguous(), layer, plan)

    def _attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        batch, layout = plan.batch, self.pool.layout
        (keys, key_scales), (values, value_scales) = self._planes[layer]
        num_requests, head_dim = len(batch.kv_lengths), query.shape[-1]
        attended = torch.empty_like(query)
        shared = (*query.shape[:2], plan.splits) if plan.splits > ALONE else (0,)
        part_sizes = query.new_empty(shared, dtype=torch.float32)
        parts = part_sizes.new_empty((*shared, head_dim))
        scale = head_dim**-0.5 if self.score_scale is None else self.score_scale
        window = 0 if plan.window is None else plan.window
        is_deep = self._may_be_deep and head_dim * keys.itemsize <= DEEP_BYTES[plan.rows]
        constants = {
            "GROUP": self._group,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
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
            num_stages=DEEP_STAGES if is_deep else STAGES,
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
