"""Counts of observations by size, for metrics of every role. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

# From a step of a GPU to a long answer of a CPU; dense where limits of TTFT and TPOT lie.
SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKENS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
ANSWERS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # of one request
BATCH: Final = tuple(float(2**power) for power in range(15))  # what one step holds


class Histogram:
    """How many observations fell between which bounds, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """`bounds` ascend; an observation counts below the first that is not less."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last is of those beyond the last bound
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value
