"""What one step computes, as flat tensors: prefill, chunked prefill and decode differ in their shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.requests import Work


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B requests; request r owns the rows query_starts[r] : query_starts[r + 1].

    Its tokens are the last ones of the kv_lengths[r] tokens that its blocks hold after this step.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, block id * block_size + offset in the block
    query_starts: torch.Tensor  # [B + 1] int32
    kv_lengths: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32, padded with 0
    logit_rows: torch.Tensor  # [S] int64, the rows whose logits are wanted


def build_batch(works: Sequence[Work], block_size: int, device: torch.device) -> ForwardBatch:
    """The batch of these shares of work, in order; logits are wanted for the last row of each that samples."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    logit_rows: list[int] = []
    for work in works:
        end = work.start + work.num_tokens
        token_ids += work.request.token_ids[work.start : end]
        positions += range(work.start, end)
        blocks = work.block_ids
        slots += [blocks[at // block_size] * block_size + at % block_size for at in range(work.start, end)]
        query_starts.append(len(token_ids))
        if work.samples:
            logit_rows.append(len(token_ids) - 1)

    def tensor(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        query_starts=tensor(query_starts, torch.int32),
        kv_lengths=tensor([work.start + work.num_tokens for work in works], torch.int32),
        block_tables=_block_tables(works, block_size).to(device),
        logit_rows=tensor(logit_rows, torch.int64),
    )


def _block_tables(works: Sequence[Work], block_size: int) -> torch.Tensor:
    counts = [-(-(work.start + work.num_tokens) // block_size) for work in works]
    tables = np.zeros((len(works), max(counts)), dtype=np.int32)
    for row, work, count in zip(tables, works, counts, strict=True):
        row[:count] = work.block_ids[:count]
    return torch.from_numpy(tables)
