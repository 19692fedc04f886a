"""Divide the residual stream over ranks (sequence parallelism)."""

from dataclasses import dataclass

import torch

from engine.forward_batch import ForwardBatch
from engine.parallel import RankGroup
from serving_core.sharding import share_of


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of one pass: whole on every rank or, divided, a share of its rows on each (arXiv 2205.05198).
    The sums of a row and their dtype are the same either way.
    """

    group: RankGroup
    num_rows: int
    is_divided: bool

    @property
    def own(self) -> range:
        """Return the rows of this rank."""
        whole = range(self.num_rows)
        return share_of(self.num_rows, self.group.rank, self.group.size) if self.is_divided else whole

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over the ranks of `partial` [T, E], which must not be used afterwards."""
        if self.is_divided:
            return self.group.reduce_scatter(partial)
        self.group.all_reduce(partial)
        return partial

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return all rows [T, E], gathered from every rank's rows."""
        return self.group.all_gather(x, self.num_rows) if self.is_divided else x

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of x [T, E]."""
        return x[self.own.start : self.own.stop].clone() if self.is_divided else x

    def picked(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return these rows [S, E] on every rank, from each rank's rows x."""
        if not self.is_divided:
            return x.index_select(0, rows)
        at = rows - self.own.start
        elsewhere = (at < 0) | (at >= len(self.own))
        picked = x.index_select(0, at.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0)
        self.group.all_reduce(picked)
        return picked


def residual_of(batch: ForwardBatch, group: RankGroup, min_tokens: int) -> Residual:
    """Return the residual stream of a batch: divided if the batch has prefill and at least min_tokens tokens; 0:
    never.
    """
    num_rows = len(batch.token_ids)
    is_large = 0 < min_tokens <= num_rows and num_rows >= group.size
    return Residual(group, num_rows, group.size > 1 and is_large and batch.longest_query > 1)
