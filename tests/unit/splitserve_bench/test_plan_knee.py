"""The knee of a plan from all its probes: against attainments whose knee is known."""

import math
from random import Random

import pytest

from splitserve_bench.compare.search import Counted, Goal
from splitserve_bench.plan.race import KneeSearch, knee_of
from tests.effort import effort

KNEE = 10.0


def falling(slope):
    """The log odds fall straight with the log of the rate, through 0.9 at the knee."""
    return lambda rate: 1 / (1 + math.exp(slope * math.log(rate / KNEE) - math.log(9)))


def cliff(rate):
    return 0.99 if rate <= KNEE else 0.5


def search(attainment_at, first_rate, seed=None, *, tolerance=0.03, most=12):
    """Probes of 400 independent requests: as many are good as are expected, or as a seed draws."""
    found = KneeSearch(Goal(first_rate, 0.9, tolerance, most, 1.1))
    num, rng = 0, Random(seed)
    while probe := found.next_probe():
        share = attainment_at(probe.rate)
        good = sum(rng.random() < share for _ in range(400)) if seed is not None else round(400 * share)
        found.record(Counted(probe.rate, good, 400, 400.0))
        num += 1
    return found.result(), num


@pytest.mark.parametrize("first_rate", [5.0, 9.3, 10.1, 15.0])
@pytest.mark.parametrize("attainment_at", [falling(10), falling(30), falling(100), cliff])
def test_the_best_rate_is_within_the_tolerance_of_the_knee(attainment_at, first_rate):
    result, num = search(attainment_at, first_rate, most=30)
    assert result.is_settled
    assert KNEE / 1.03 <= result.best_rate <= KNEE * 1.005
    assert num < 20


@pytest.mark.parametrize("slope", [10, 30])
def test_the_knee_is_in_its_interval_mostly(slope):
    """As often as 95 % confidence says, but for what chance does to so many searches."""
    num = effort(40, 200, 1000)
    results = [search(falling(slope), 9.0, seed)[0] for seed in range(num)]
    held = [result.knee_low <= KNEE <= result.knee_high for result in results if result.knee_low and result.knee_high]
    assert len(held) > 0.9 * num
    assert sum(held) > 0.85 * len(held)
    widths = sorted(result.knee_high / result.knee_low for result in results if result.is_settled)
    assert widths[-1] <= 1.03**3  # the line on either side, and the best rate, which is in it too


def test_what_one_side_alone_has_is_no_knee():
    assert knee_of([Counted(9.0, 390, 400, 400.0), Counted(9.5, 380, 400, 400.0)], 0.9) is None
    assert knee_of([Counted(11.0, 90, 400, 400.0)], 0.9) is None


def test_too_few_requests_tell_no_interval():
    knee = knee_of([Counted(9.0, 10, 10, 10.0), Counted(11.0, 8, 10, 10.0)], 0.9)
    assert (knee.low, knee.high) == (None, None)
    assert 9 < knee.rate < 11
