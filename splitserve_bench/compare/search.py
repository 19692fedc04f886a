"""Search the highest request rate that a system serves well: a bisection over log rate that reckons with noise.

1. Bracket: from a first rate, doubled (or times another step) while probes pass, divided while they fail.
2. Bisect: the geometric mean of the highest passing and the lowest failing rate, until they are close enough.
3. Confirm: an end of the bracket that may have passed or failed by chance is probed again with another seed, and its
   counts are pooled. When that turns it, the bracket opens again. A rate that fails below one that passes is probed
   again too.

Whether a rate passes is read from a curve that falls with the rate: where the counts rise, neighbors are pooled until
they do not (isotonic regression), so that one unlucky probe does not hide what passes above it.

Intervals reckon with the clusters in which misses come (serve/metrics.py). The knee is the rate at which the share of
good requests falls below the goal, in runs as long as the probes, which begin with an idle system: a queue that grows
slowly is not yet long when a short run ends.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from splitserve_bench.serve.metrics import interval

STEP: Final = 2.0
MOST_SEEDS: Final = 3  # probes of one rate


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched for, and how closely. Rates are in requests per second."""

    first_rate: float
    attainment: float = 0.9  # share of requests that must be good
    tolerance: float = 0.1  # the lowest failing rate may be so much above the highest passing one
    max_probes: int = 12
    step: float = STEP  # factor between rates while there is no bracket
    most_seeds: int = MOST_SEEDS  # probes of one rate


@dataclass(frozen=True, slots=True)
class Probe:
    """A load to run: its rate in requests per second, and how many probes of that rate came before."""

    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Counted:
    """How many of a rate's requests were good.

    As their misses cluster, they say as much as num_effective independent ones.
    """

    rate: float
    num_good: int
    num_total: int
    num_effective: float

    @property
    def attainment(self) -> float:
        """Return the share of good requests."""
        return self.num_good / self.num_total

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the attainment."""
        return interval(self.attainment, self.num_effective)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search. Rates are in requests per second; None where no probe shows one.

    best_rate is the highest that passed, failing_rate the lowest above it that did not. The knee, where attainment
    crosses the goal, lies from knee_low to knee_high with 95 % confidence: rates below surely pass, rates above surely
    fail. num_good, num_total and the attainment with its 95 % interval are those of all probes at best_rate.
    """

    best_rate: float | None
    failing_rate: float | None
    knee_low: float | None
    knee_high: float | None
    num_good: int
    num_total: int
    attainment: float | None
    attainment_low: float | None
    attainment_high: float | None
    num_probes: int
    is_settled: bool  # the bracket is as narrow as wanted


class RateSearch:
    """Search the knee of one system: take the next probe, run it, and record its counts, until there is none.

    With `at_rates` nothing is searched: each of these rates is probed once, in their order.
    """

    def __init__(self, goal: Goal, at_rates: Sequence[float] = ()) -> None:
        self._goal = goal
        self.at_rates = tuple(dict.fromkeys(at_rates))
        self._counts: dict[float, list[Counted]] = {}

    def next_probe(self) -> Probe | None:
        """Return the probe to run next; None when the search is over."""
        if self.at_rates:
            return next((Probe(rate, 0) for rate in self.at_rates if rate not in self._counts), None)
        if sum(map(len, self._counts.values())) >= self._goal.max_probes:
            return None
        rate = self._next_rate()
        return None if rate is None else Probe(rate, len(self._counts.get(rate, ())))

    def record(self, counted: Counted) -> None:
        """Add the counts of a probe of at least one request."""
        assert 0 <= counted.num_good <= counted.num_total > 0, counted
        self._counts.setdefault(counted.rate, []).append(counted)

    def result(self) -> SearchResult:
        """Return what is known now."""
        return settle(self.curve(), self._goal, sum(map(len, self._counts.values())))

    def curve(self) -> list[Counted]:
        """Return the counts of every probed rate, those of its probes added up, ascending by rate."""
        return [_pooled(self._counts[rate]) for rate in sorted(self._counts)]

    def _next_rate(self) -> float | None:
        curve = self.curve()
        if not curve:
            return self._goal.first_rate
        best, failing = bracket(curve, self._goal.attainment)
        if best is None:
            return self._doubtful(curve[:1]) or curve[0].rate / self._goal.step
        if failing is None:
            return best.rate * self._goal.step
        if hidden := self._hidden(curve, best):
            return hidden
        if failing.rate > best.rate * (1 + self._goal.tolerance):
            return math.sqrt(best.rate * failing.rate)
        return self._doubtful([best, failing])

    def _hidden(self, curve: Sequence[Counted], best: Counted) -> float | None:
        """Return a rate below the best that fails by its own counts and may be probed again, else None."""
        below = [each for each in curve if each.rate < best.rate and each.attainment < self._goal.attainment]
        return self._doubtful(below)

    def _doubtful(self, candidates: Iterable[Counted]) -> float | None:
        """Return the least probed of these rates that may be on the other side of the goal; None if none may."""
        rates = [
            each.rate
            for each in candidates
            if _is_doubtful(each, self._goal.attainment) and len(self._counts[each.rate]) < self._goal.most_seeds
        ]
        return min(rates, key=lambda rate: len(self._counts[rate]), default=None)


def settle(curve: Sequence[Counted], goal: Goal, num_probes: int) -> SearchResult:
    """Return the result of these counts, ascending by rate, after so many probes."""
    best, failing = bracket(curve, goal.attainment)
    low, high = best.interval if best is not None else (None, None)
    return SearchResult(
        best_rate=best.rate if best is not None else None,
        failing_rate=failing.rate if failing is not None else None,
        knee_low=max(_sure_passes(curve, goal.attainment), default=None),
        knee_high=min(_sure_failures(curve, goal.attainment), default=None),
        num_good=best.num_good if best is not None else 0,
        num_total=best.num_total if best is not None else 0,
        attainment=best.attainment if best is not None else None,
        attainment_low=low,
        attainment_high=high,
        num_probes=num_probes,
        is_settled=best is not None and failing is not None and failing.rate <= best.rate * (1 + goal.tolerance),
    )


def bracket(curve: Sequence[Counted], attainment: float) -> tuple[Counted | None, Counted | None]:
    """Return the counts at the highest rate that passes, and those at the next rate; None where there is none.

    Whether a rate passes is read from the falling curve through all counts, which ascend by rate.
    """
    num_passing = sum(fitted >= attainment for fitted in falling(curve))
    best = curve[num_passing - 1] if num_passing else None
    return best, curve[num_passing] if num_passing < len(curve) else None


def falling(curve: Sequence[Counted]) -> list[float]:
    """Return the attainment at each rate on the curve that never rises and is closest to these counts.

    It is found by pooling adjacent violators.
    """
    pools: list[tuple[int, int, int]] = []  # good, total, rates
    for each in curve:
        pool = (each.num_good, each.num_total, 1)
        while pools and pools[-1][0] * pool[1] < pool[0] * pools[-1][1]:
            good, total, rates = pools.pop()
            pool = (good + pool[0], total + pool[1], rates + pool[2])
        pools.append(pool)
    return [good / total for good, total, rates in pools for _ in range(rates)]


def plain(rate: float) -> str:
    """Format a rate with three digits, and without an exponent."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def _sure_passes(curve: Sequence[Counted], attainment: float) -> list[float]:
    """Return the rates that surely pass.

    Attainment falls with the rate: the share that a rate and those above it reach together it reaches itself at least.
    """
    return [
        each.rate
        for index, each in enumerate(curve)
        if any(pooled.interval[0] >= attainment for pooled in accumulate(curve[index:], _together))
    ]


def _sure_failures(curve: Sequence[Counted], attainment: float) -> list[float]:
    """Return the rates that surely fail: what a rate and those below it together miss, it misses itself."""
    return [
        each.rate
        for index, each in enumerate(curve)
        if any(pooled.interval[1] < attainment for pooled in accumulate(curve[index::-1], _together))
    ]


def _pooled(counts: Sequence[Counted]) -> Counted:
    return functools.reduce(_together, counts)


def _together(one: Counted, other: Counted) -> Counted:
    """Return the counts of two probes added up, at the rate of the first."""
    return Counted(
        one.rate,
        one.num_good + other.num_good,
        one.num_total + other.num_total,
        one.num_effective + other.num_effective,
    )


def _is_doubtful(counted: Counted, attainment: float) -> bool:
    low, high = counted.interval
    return low < attainment <= high
