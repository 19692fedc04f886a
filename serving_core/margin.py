"""The margin that a decision leaves for the errors of its prediction. Pure.

A prediction of seconds is an expectation: half of what is planned to end exactly on a deadline ends after it. So each
kind of prediction has a Margin, which learns from that kind's own errors, and decisions use the predicted seconds times
its factor: a high quantile of actual / predicted over the latest predictions. The factor grows within some samples when
a machine becomes slower or less even, and shrinks when those samples have left the window.
"""

from collections import deque
from typing import Final

QUANTILE: Final = 0.97
WINDOW: Final = 64  # predictions
NUM_PRIOR: Final = 32  # samples that the window begins with, so that of the first ones a rare one is known as such
PRIOR_FACTOR: Final = 1.1
MAX_FACTOR: Final = 2.0  # with more nothing would be planned from which to learn


class Margin:
    """The latest errors of one kind of prediction."""

    def __init__(self, prior_factor: float = PRIOR_FACTOR, quantile: float = QUANTILE) -> None:
        self._quantile = quantile
        self._ratios: deque[float] = deque([prior_factor] * NUM_PRIOR, maxlen=WINDOW)
        self._factor: float | None = prior_factor  # None: to be worked out anew

    def note(self, predicted_s: float, actual_s: float) -> None:
        """Take in what became of a prediction; one of no time says nothing."""
        if predicted_s > 0:
            self._ratios.append(actual_s / predicted_s)
            self._factor = None

    @property
    def factor(self) -> float:
        """Return the factor from a prediction to the seconds that it rarely exceeds, from 1 to MAX_FACTOR."""
        if self._factor is None:
            ordered = sorted(self._ratios)
            self._factor = min(MAX_FACTOR, max(1.0, ordered[int(self._quantile * len(ordered))]))
        return self._factor
