"""Attention on CUDA by kernels of Triton, which read the paged pool in place, in blocks of any size."""

from collections.abc import Mapping
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
DEEP_STAGES, STAGES, ONE_STAGE = 5, 3, 1
DEEP_MEMORY_BYTES: Final = 160 * 1024
COMMON_MEMORY_BYTES: Final = 99 * 1024  # of devices that do not say
SCALES_BYTES: Final = 16  # of a key and its value, while both are read
SUMS_BYTES: Final = 1024  # of rows, among the warps
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
        head_dim, properties = pool.layout.head_dim, torch.cuda.get_device_properties(pool.device)
        memory_bytes = getattr(properties, "shared_memory_per_block_optin", COMMON_MEMORY_BYTES)
        itemsizes = pool.compute_dtype.itemsize, self._planes[pool.layout.layers[0]][0][0].itemsize
        self._stages = stages_by_rows(head_dim, *itemsizes, memory_bytes)
        is_wide = pool.compute_dtype.itemsize > 2  # for whose products of many rows there are too few registers
        self._most_rows = most_rows(FEW_ROWS if is_uniform or is_wide else MANY_ROWS, self._stages)
        most_sharing = FEW_ROWS if is_wide or head_dim > SHARING_DIM else SHARING_ROWS
        self.few_tokens: Final = 0 if is_uniform else most_sharing // self._group
        """Of a request: where none of a batch has more, programs share their keys."""
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
    """How far programs of so many rows read ahead, on a device with that much memory that one may share: at least
    ONE_STAGE, though that may be too much, too. `stored_itemsize` is the pool's."""
    stages = {}
    for rows, deep_bytes in DEEP_BYTES.items():
        is_deep = memory_bytes >= DEEP_MEMORY_BYTES and head_dim * stored_itemsize <= deep_bytes
        wanted = DEEP_STAGES if is_deep else STAGES
        fits = shared_bytes(rows, wanted, head_dim, itemsize, stored_itemsize) <= memory_bytes
        stages[rows] = wanted if fits else ONE_STAGE
    return stages


def most_rows(at_most: int, stages: Mapping[int, int]) -> int:
    """The most with which a program reads ahead; where none does, the fewest."""
    return max((rows for rows in stages if rows <= at_most and stages[rows] > ONE_STAGE), default=FEW_ROWS)


def shared_bytes(rows: int, stages: int, head_dim: int, itemsize: int, stored_itemsize: int) -> int:
    """What such a program shares at most: its queries, the weights of a tile's keys, and the tiles that are read ahead,
    one less than stages; but where it reads ahead at all, one of keys and one of values. Devices of compute capability
    9.0, which have memory enough, keep some more."""
    dim, num_tiles = padded(head_dim), max(2, stages - 1) if stages > ONE_STAGE else 1
    key_bytes = dim * stored_itemsize + (SCALES_BYTES if stored_itemsize < itemsize else 0)
    return rows * (dim + TILE_KEYS) * itemsize + num_tiles * TILE_KEYS * key_bytes + SUMS_BYTES
