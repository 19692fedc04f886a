"""Compute the deadlines of an output's tokens, the jobs that can be in time, and the margin for errors of a prediction.
Pure; no clock.

A predicted time is an expectation: half of the work planned to end exactly on a deadline ends after it. So each kind of
prediction has a Margin, which learns from that kind's own errors, and decisions multiply the predicted seconds by its
factor: a high quantile of actual / predicted over the latest predictions. The factor grows within some samples when a
machine becomes slower or less even, and shrinks when those samples have left the window.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import le
from typing import Final

PROMPT_TIME_SHARE: Final = 0.05  # of a node's time, for prompts that running sequences hold back


@dataclass(slots=True)
class Due:
    """The deadlines of one output, by the owner's clock; inf is no limit.

    Meeting every deadline meets the limit on the mean TPOT, wherever the output ends.
    """

    first_s: float = math.inf  # of the first token
    tpot_s: float = math.inf  # time per output token: token k after the first is due k times this after the first
    began_s: float | None = None  # when the first token came
    refuses_late: bool = False  # refuse a prompt that cannot meet its deadline, unless half of it is prefilled

    def token_s(self, index: int) -> float:
        """Return the deadline of the token with this index, 0 for the first; inf while the first token has not come."""
        if index == 0:
            return self.first_s
        return math.inf if self.began_s is None else self.began_s + index * self.tpot_s


def timely(seconds: Sequence[float], dues_s: Sequence[float], priorities: Sequence[int] = ()) -> list[int]:
    """Return the indices of the most jobs that can be done in time one after the other, in order of execution.

    Job i takes `seconds[i]` and is due `dues_s[i]` seconds from the start; equal deadlines keep their order. With
    `priorities` the number of jobs is maximized for the lowest value first, then for the next value in the remaining
    time, and so on.
    """
    by_due = sorted(range(len(dues_s)), key=dues_s.__getitem__)
    if all(map(le, accumulate([seconds[index] for index in by_due]), [dues_s[index] for index in by_due])):
        return by_due
    priorities = priorities or [0] * len(dues_s)
    chosen: set[int] = set()
    for priority in sorted(set(priorities)):
        passed_s, longest = 0.0, list[tuple[float, int]]()
        for index in by_due:
            if index not in chosen and priorities[index] != priority:
                continue
            passed_s += seconds[index]
            if index not in chosen:
                heappush(longest, (-seconds[index], -index))
            while longest and passed_s > dues_s[index]:
                passed_s += heappop(longest)[0]
        chosen.update(-index for _, index in longest)
    return [index for index in by_due if index in chosen]


QUANTILE: Final = 0.97
WINDOW: Final = 64  # predictions
NUM_PRIOR: Final = 32  # samples at the start of the window, so that a rare sample among the first ones counts as rare
PRIOR_FACTOR: Final = 1.1
MAX_FACTOR: Final = 2.0  # with a larger factor nothing would be planned to learn from


class Margin:
    """Learn a factor from the latest errors of one kind of prediction.

    It starts at `prior_factor`, and is the quantile `quantile` of actual / predicted.
    """

    def __init__(self, prior_factor: float = PRIOR_FACTOR, quantile: float = QUANTILE) -> None:
        self._quantile = quantile
        self._ratios: deque[float] = deque([prior_factor] * NUM_PRIOR, maxlen=WINDOW)
        self._factor: float | None = prior_factor  # None: to be recomputed

    def note(self, predicted_s: float, actual_s: float) -> None:
        """Add the outcome of a prediction; a prediction of 0 s is ignored."""
        if predicted_s > 0:
            self._ratios.append(actual_s / predicted_s)
            self._factor = None

    @property
    def factor(self) -> float:
        """Return the factor, 1 to MAX_FACTOR: actual times rarely exceed the predicted seconds times this factor."""
        if self._factor is None:
            ordered = sorted(self._ratios)
            self._factor = min(MAX_FACTOR, max(1.0, ordered[int(self._quantile * len(ordered))]))
        return self._factor
