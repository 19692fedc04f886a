"""Attend on CUDA with torch's varlen_attn (FlashAttention), which reads the paged pool in place."""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.attention.varlen import varlen_attn

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch

NO_LIMIT = -1
BLOCK_TOKENS: Final = 256  # FlashAttention 2 requires blocks of a multiple of 256 tokens


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: ForwardBatch
    window: tuple[int, int]  # tokens seen to the left and to the right


class VarlenAttention:
    """Attends on CUDA in float16 and bfloat16 pools with blocks of a multiple of BLOCK_TOKENS.

    Further support depends on the GPU, so a trial must precede its use.
    """

    name = "varlen_attn"

    def __init__(self, pool: PagedKVPool, score_scale: float | None = None) -> None:
        self.pool = pool
        self.score_scale = score_scale
        self.softcap: float | None = None

    def plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        return _Plan(batch, window=(NO_LIMIT if window is None else window - 1, 0))

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
