"""Define the flat tensors of one step. Prefill, chunked prefill and decode differ only in shapes."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from serving_core.requests import Share, Work


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T tokens of B requests that one step computes; request r owns the rows query_starts[r] : query_starts[r + 1].

    The rows of request r are the last of its kv_lengths[r] tokens, whose KV its blocks hold after this step.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, block id * block_size + offset in the block
    query_starts: torch.Tensor  # [B + 1] int32
    kv_lengths: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32, padded with 0
    state_blocks: Sequence[Sequence[int]]  # to which each request's fixed state is written; empty without one
    state_sources: Sequence[Sequence[int]]  # from which it is read
    logit_rows: torch.Tensor  # [S] int64, the rows whose logits are wanted
    adapted_rows: Mapping[str, torch.Tensor]  # [rows] int64, the rows of each LoRA adapter in use
    starts: Sequence[int]  # query_starts as numbers, since reading a tensor would synchronize with the device
    longest_query: int  # tokens; the most of any request
    context_lengths: list[int]  # kv_lengths as numbers

    @property
    def longest_context(self) -> int:
        """Return the largest kv_length, in tokens."""
        return max(self.context_lengths)

    def know(self, token_ids: Sequence[int]) -> None:
        """Set the tokens of a batch that was built before they were known."""
        if self.token_ids.is_cpu:  # without a tensor of their own
            (ctypes.c_int64 * len(token_ids)).from_address(self.token_ids.data_ptr())[:] = [*token_ids]
        else:
            self.token_ids.copy_(torch.tensor(token_ids, device="cpu"))

    def look_ahead(self, works: Sequence[Work], block_size: int) -> bool:
        """Add the next token of each request to context_lengths and the block tables of a decode step on the CPU.

        Returns False, with nothing added, if the tables have too few columns. `works` are the next tokens. The batch
        may be in use: a step reads neither context_lengths nor the columns behind its tokens.
        """
        new = [(row, work.start // block_size) for row, work in enumerate(works) if work.start % block_size == 0]
        if any(column >= self.block_tables.shape[1] for _, column in new):
            return False
        for row, column in new:
            self.block_tables[row, column] = works[row].block_ids[column]
        self.context_lengths[:] = [length + 1 for length in self.context_lengths]
        return True

    def wanting(self, rows: torch.Tensor) -> "ForwardBatch":
        """Return a copy of this batch whose logits are wanted for `rows` ([S] int64); it shares the other tensors."""
        return replace(self, logit_rows=rows)

    def part(self, first: int, end: int) -> "ForwardBatch":
        """Return a batch of the requests first : end alone, without wanted logits and without adapters.

        All its tensors but query_starts are views.
        """
        first_row = self.starts[first]
        rows, requests = slice(first_row, self.starts[end]), slice(first, end)
        starts = [start - first_row for start in self.starts[first : end + 1]]
        return ForwardBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            query_starts=self.query_starts[first : end + 1] - first_row,
            kv_lengths=self.kv_lengths[requests],
            block_tables=self.block_tables[requests],
            state_blocks=self.state_blocks[requests],
            state_sources=self.state_sources[requests],
            logit_rows=self.logit_rows[:0],
            adapted_rows={},
            starts=starts,
            longest_query=max(end - start for start, end in pairwise(starts)),
            context_lengths=self.context_lengths[requests],
        )


def build_batch(
    shares: Sequence[Share], block_size: int, device: torch.device, num_state_blocks: int = 0
) -> ForwardBatch:
    """Build the batch of one step from the scheduled tokens of each request (`shares`), in this order, on `device`.

    Of each request logits are wanted for its first num_scored tokens, then for its last token if it samples. The first
    `num_state_blocks` of each request's blocks hold its fixed state, the others KV; block_size is in tokens. `shares`
    must not be empty.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    logit_rows: list[int] = []
    adapted_rows: dict[str, list[int]] = {}
    for share in shares:
        end = share.start + len(share.token_ids)
        token_ids += share.token_ids
        positions += range(share.start, end)
        blocks = share.block_ids[num_state_blocks:] if num_state_blocks else share.block_ids
        slots += [blocks[at // block_size] * block_size + at % block_size for at in range(share.start, end)]
        logit_rows += range(query_starts[-1], query_starts[-1] + share.num_scored)
        if share.adapter:
            adapted_rows.setdefault(share.adapter, []).extend(range(query_starts[-1], len(token_ids)))
        query_starts.append(len(token_ids))
        if share.samples:
            logit_rows.append(len(token_ids) - 1)

    def tensor(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _moved(torch.tensor(values, dtype=dtype, device="cpu"), device)

    kv_lengths = [share.start + len(share.token_ids) for share in shares]
    return ForwardBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        query_starts=tensor(query_starts, torch.int32),
        kv_lengths=tensor(kv_lengths, torch.int32),
        block_tables=_moved(_block_tables(shares, kv_lengths, block_size, num_state_blocks), device),
        state_blocks=[share.block_ids[:num_state_blocks] for share in shares],
        state_sources=[share.state_ids or share.block_ids[:num_state_blocks] for share in shares],
        logit_rows=tensor(logit_rows, torch.int64),
        adapted_rows={adapter: tensor(rows, torch.int64) for adapter, rows in adapted_rows.items()},
        starts=query_starts,
        longest_query=max(len(share.token_ids) for share in shares),
        context_lengths=kv_lengths,
    )


def next_batch(
    before: ForwardBatch, tables: Sequence[Sequence[int]], block_size: int, device: torch.device
) -> ForwardBatch:
    """Build the batch behind a decode step: the next token, not known yet, of each request of `before`.

    `before` has one token of each request and wants the logits of all; without a fixed state. `tables` are the block
    tables, which hold the next token too. The result is as `build_batch` makes it, but only what differs is made.
    """
    slots, block_tables = before.slots + 1, before.block_tables
    lengths = [length + 1 for length in before.context_lengths]
    if rows := [row for row, length in enumerate(lengths) if (length - 1) % block_size == 0]:
        columns = [(lengths[row] - 1) // block_size for row in rows]
        new = _moved(
            torch.tensor(
                [rows, columns, [tables[row][column] for row, column in zip(rows, columns, strict=True)]], device="cpu"
            ),
            device,
        )
        missing = max(columns) + 1 - block_tables.shape[1]
        block_tables = functional.pad(block_tables, (0, missing)) if missing > 0 else block_tables.clone()
        block_tables[new[0], new[1]] = new[2].int()
        slots[new[0]] = new[2] * block_size
    return ForwardBatch(
        token_ids=torch.empty_like(before.token_ids),
        positions=before.positions + 1,
        slots=slots,
        query_starts=before.query_starts,
        kv_lengths=before.kv_lengths + 1,
        block_tables=block_tables,
        state_blocks=before.state_blocks,
        state_sources=before.state_sources,
        logit_rows=before.logit_rows,
        adapted_rows=before.adapted_rows,
        starts=before.starts,
        longest_query=1,
        context_lengths=lengths,
    )


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device; the host does not wait for the copy to a CUDA device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _block_tables(
    shares: Sequence[Share], kv_lengths: Sequence[int], block_size: int, num_state_blocks: int
) -> torch.Tensor:
    counts = [-(-length // block_size) for length in kv_lengths]
    tables = np.zeros((len(shares), max(counts)), dtype=np.int32)
    for row, share, count in zip(tables, shares, counts, strict=True):
        row[:count] = share.block_ids[num_state_blocks : num_state_blocks + count]
    return torch.from_numpy(tables)
