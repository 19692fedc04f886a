"""The knee of a plan from all its probes at once, and the search that narrows it. Pure.

Near the knee the log odds of a good request fall about straight with the log of the rate. A line through the probes
(weighted by the independent requests that each stands for) crosses the goal at the knee; the interval is Fieller's, of
all rates at which the line may cross it. So each probe says something of the knee, wherever it is, while those of two
rates alone would have to be told apart from the goal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from splitserve_bench.compare.search import MOST_SEEDS, Counted, Probe, RateSearch, SearchResult, bracket
from splitserve_bench.serve.spread import Z

ROUNDS: Final = 30  # of Newton's, which ends long before
NARROW: Final = 1e-9
HALF: Final = 0.5  # good and bad requests that each rate is given, so that odds are finite
FAR: Final = 1.3  # a rate that is so many times off the bracket says nothing of the slope in it


@dataclass(frozen=True, slots=True)
class Knee:
    """Where attainment crosses the goal; ends are None where no probe says so."""

    rate: float
    low: float | None
    high: float | None

    def is_within(self, tolerance: float) -> bool:
        """Whether the interval ends so close to the rate on either side, as a share of it."""
        factor = 1 + tolerance
        return bool(self.low and self.high and self.high <= self.rate * factor and self.low * factor >= self.rate)


class KneeSearch(RateSearch):
    """Brackets the knee as RateSearch does, and narrows the bracket to the tolerance about the place where the line
    crosses the goal; then probes go on near there until the line's interval is as narrow on either side. Neither alone
    would do: an attainment that falls off a cliff is no line, and a bracket may be one by chance."""

    def next_probe(self) -> Probe | None:
        found, knee = super().next_probe(), self._knee()
        best, failing = bracket(self.curve(), self._goal.attainment)
        if knee is None or best is None or failing is None or self._num_probes >= self._goal.max_probes:
            return found
        if failing.rate > best.rate * (1 + self._goal.tolerance):
            return Probe(self._between(best.rate, failing.rate, knee.rate), 0)
        return None if knee.is_within(self._goal.tolerance) else self._near(knee.rate)

    def result(self) -> SearchResult:
        found, knee = super().result(), self._knee()
        if knee is None:
            return found
        assert found.best_rate is not None
        is_settled = found.is_settled and knee.is_within(self._goal.tolerance)
        low, high = knee.low and min(knee.low, found.best_rate), knee.high and max(knee.high, found.best_rate)
        return replace(found, knee_low=low, knee_high=high, is_settled=is_settled)

    @property
    def _num_probes(self) -> int:
        return sum(map(len, self._counts.values()))

    def _knee(self) -> Knee | None:
        return knee_of(self.curve(), self._goal.attainment)

    def _between(self, low: float, high: float, knee: float) -> float:
        """A rate on that side of the knee on which the bracket is wider; half way where the line has none."""
        side = self._goal.tolerance / 2.5
        rate = knee * (1 + side) if high / knee > knee / low else knee / (1 + side)
        return rate if low * (1 + side / 2) < rate < high / (1 + side / 2) else math.sqrt(low * high)

    def _near(self, rate: float) -> Probe:
        """At a rate that was probed, if there is one close by, so that its requests are many."""
        close = math.log1p(self._goal.tolerance / 2)
        known = min(self._counts, key=lambda each: abs(math.log(each / rate)))
        num_seeds = len(self._counts[known])
        if abs(math.log(known / rate)) > close or num_seeds >= MOST_SEEDS:
            return Probe(rate, len(self._counts.get(rate, ())))
        return Probe(known, num_seeds)


def knee_of(curve: Sequence[Counted], attainment: float) -> Knee | None:
    """The knee by these counts, ascending by rate; None unless one rate passes and a higher one fails, on a line that
    falls."""
    best, failing = bracket(curve, attainment)
    if best is None or failing is None or attainment == 1:
        return None
    near = [each for each in curve if best.rate / FAR <= each.rate <= failing.rate * FAR]
    middle = math.log(best.rate)
    line = _line([(math.log(each.rate) - middle, each.attainment, each.num_effective) for each in near])
    if line is None:
        return None
    start, slope, variance = line
    start -= math.log(attainment / (1 - attainment))
    if slope >= 0:
        return None
    at = -start / slope
    low, high = _fieller(start, slope, variance)
    return Knee(
        math.exp(middle + at),
        None if low is None else math.exp(middle + low),
        None if high is None else math.exp(middle + high),
    )


def _line(places: Sequence[tuple[float, float, float]]) -> tuple[float, float, tuple[float, float, float]] | None:
    """The log odds at 0 and their slope, with the variances of both and their covariance between; None of one rate."""
    places = [(x, (share * size + HALF) / (size + 2 * HALF), size + 2 * HALF) for x, share, size in places]
    start, slope = 0.0, 0.0
    for _ in range(ROUNDS):
        odds = [1 / (1 + math.exp(-max(-30.0, min(30.0, start + slope * x)))) for x, _, _ in places]
        weights = [size * odd * (1 - odd) for odd, (_, _, size) in zip(odds, places, strict=True)]
        off = [size * (share - odd) for odd, (_, share, size) in zip(odds, places, strict=True)]
        one, x1, x2 = (sum(w * x**power for w, (x, _, _) in zip(weights, places, strict=True)) for power in (0, 1, 2))
        spread = one * x2 - x1 * x1
        if spread <= NARROW * one * one:
            return None
        along, across = sum(off), sum(each * x for each, (x, _, _) in zip(off, places, strict=True))
        change, turn = (x2 * along - x1 * across) / spread, (one * across - x1 * along) / spread
        start, slope = start + change, slope + turn
        if abs(change) + abs(turn) < NARROW:
            break
    return start, slope, (x2 / spread, -x1 / spread, one / spread)


def _fieller(start: float, slope: float, variance: tuple[float, float, float]) -> tuple[float | None, float | None]:
    """Where a falling line may cross 0 with 95 % confidence."""
    of_start, both, of_slope = (Z * Z * each for each in variance)
    square, half, rest = slope * slope - of_slope, start * slope - both, start * start - of_start
    if square <= 0:
        return None, None
    root = math.sqrt(max(0.0, half * half - square * rest))
    return (-half - root) / square, (-half + root) / square
