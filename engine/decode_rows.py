"""The batch of decode steps in a row: from one to the next only that is written which has changed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from engine.forward_batch import ForwardBatch
from serving_core.requests import Work

SPARE_COLUMNS: Final = 8  # of block tables, beyond those in use


class DecodeRows:
    """One engine's, on a CPU, whose pool is not quantized: that one knows slots by their tensor, which here is the same
    in each step. A batch is good until the next call.

    Invariant: while there are works, the arrays are the memory of the batch's tensors, and hold what build_batch makes
    of the works. A step follows on that when it computes the one token behind each of the same works, in their order.
    Then positions and lengths are one more, and so is a slot, but of a row whose token begins a block. A work is the
    same while its request and its list of blocks are: that one grows in place for as long as anything is held by it
    (serving_core/blocks.py).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._works: Sequence[Work] = ()
        self._batch: ForwardBatch
        self._token_ids: np.ndarray[Any, Any]
        self._places: np.ndarray[Any, Any]  # positions, then slots
        self._lengths: np.ndarray[Any, Any]
        self._tables: np.ndarray[Any, Any]  # of blocks, with spare columns

    def take(self, works: Sequence[Work], batch: ForwardBatch) -> ForwardBatch:
        """The batch that was built of these works, in memory that `follow` may write to."""
        self._works = ()
        if not all(map(_is_decode, works)):
            return batch
        self._tables = np.pad(batch.block_tables.numpy(), ((0, 0), (0, SPARE_COLUMNS)))
        places = torch.stack((batch.positions, batch.slots))
        self._token_ids, self._lengths, self._places = batch.token_ids.numpy(), batch.kv_lengths.numpy(), places.numpy()
        self._works, self._batch = works, replace(batch, positions=places[0], slots=places[1])
        self._show(batch.block_tables.shape[1])
        return self._batch

    def follow(self, works: Sequence[Work]) -> ForwardBatch | None:
        """The batch of a step that follows on the last one; None of any other, which is to be built and taken."""
        if not self._is_next(works):
            self._works = ()
            return None
        self._works = works
        self._token_ids[:] = [work.request.token_ids[-1] for work in works]
        self._places += 1
        self._lengths += 1
        block_size, num_columns = self._block_size, self._batch.block_tables.shape[1]
        for row, work in enumerate(works):
            if not work.start % block_size:
                column = work.start // block_size
                self._tables[row, column] = block = work.block_ids[column]
                self._places[1, row] = block * block_size
                num_columns = max(num_columns, column + 1)
        if num_columns > self._batch.block_tables.shape[1]:
            self._show(num_columns)
        return self._batch

    def _is_next(self, works: Sequence[Work]) -> bool:
        if not self._works or len(works) != len(self._works):
            return False
        most_tokens = self._tables.shape[1] * self._block_size
        return all(
            work.request is last.request
            and work.block_ids is last.block_ids
            and last.start + 1 == work.start < most_tokens
            and work.num_tokens == 1
            and work.samples
            and not work.candidates
            for work, last in zip(works, self._works, strict=True)
        )

    def _show(self, num_columns: int) -> None:
        """Lets the batch have so many columns of the tables: contexts are no longer than these."""
        longest = num_columns * self._block_size
        block_tables = torch.from_numpy(self._tables)[:, :num_columns]
        self._batch = replace(self._batch, block_tables=block_tables, longest_context=longest)


def _is_decode(work: Work) -> bool:
    """Whether it is one token of the model alone, behind which one is sampled."""
    is_one = work.num_tokens == 1 and work.samples and not work.candidates
    return is_one and not work.num_scored and not work.request.adapter
