"""Ranks of a node as threads of one process, for models that take long to import."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import torch

TIMEOUT_S = 240


class RanksInThreads:
    """What the threads share."""

    def __init__(self, size):
        self.size = size
        self._given = [None] * size
        self._barrier = Barrier(size, timeout=TIMEOUT_S)

    def run(self, of_rank):
        """Return what `of_rank` gives for the group of each rank, all at the same time."""
        with ThreadPoolExecutor(self.size) as pool:
            runs = [pool.submit(self._aborting, of_rank, Rank(self, rank)) for rank in range(self.size)]
            errors = [error for each in runs if (error := each.exception()) is not None]
            for error in errors:
                if not isinstance(error, BrokenBarrierError) or error is errors[-1]:
                    raise error
            return [each.result() for each in runs]

    def _aborting(self, of_rank, group):
        try:
            return of_rank(group)
        except BaseException:
            self._barrier.abort()
            raise

    def exchange(self, rank, given):
        self._given[rank] = given
        self._barrier.wait()
        taken = list(self._given)
        self._barrier.wait()
        return taken


class Rank:
    """A RankGroup."""

    adds_alike = True

    def __init__(self, ranks, rank):
        self.rank, self.size, self._ranks = rank, ranks.size, ranks

    def all_reduce(self, tensor):
        tensor.copy_(torch.stack(self._ranks.exchange(self.rank, tensor.clone())).sum(0))

    def exchange(self, data):
        return self._ranks.exchange(self.rank, data)

    def close(self):
        pass
