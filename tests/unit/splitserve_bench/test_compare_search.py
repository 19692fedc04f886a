import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.compare.search import Counted, Goal, RateSearch, falling, settle
from tests.effort import few

GOAL = Goal(first_rate=1.0, max_probes=20)
knees = st.floats(-6, 6).map(lambda exponent: 2**exponent)


def counted(rate, num_good, num_total):
    """Of independent requests."""
    return Counted(rate, num_good, num_total, num_total)


def search(goal, measure):
    """Runs a search; `measure` tells good and total of a probe. Returns the result and the probes."""
    searching, probes = RateSearch(goal), []
    while probe := searching.next_probe():
        assert probe.seed == sum(each.rate == probe.rate for each in probes), "a seed is used once for each rate"
        searching.record(counted(probe.rate, *measure(probe)))
        probes.append(probe)
    return searching.result(), probes


def attainment(rate, knee, steepness=8.0):
    """Falls from 1 to 0 and is 0.9 at the knee."""
    return 1 / (1 + (rate / knee) ** steepness / 9)


def noisy(knee, seed, total=200, steepness=8.0):
    rng = random.Random(seed)
    return lambda probe: (sum(rng.random() < attainment(probe.rate, knee, steepness) for _ in range(total)), total)


@given(knees, st.sampled_from([0.05, 0.1, 0.3]))
def test_without_noise_the_knee_is_between_two_rates_as_close_as_wanted(knee, tolerance):
    goal = Goal(first_rate=1.0, tolerance=tolerance, max_probes=30)
    result, probes = search(goal, lambda probe: (10_000 if probe.rate <= knee else 0, 10_000))
    assert result.best_rate <= knee < result.failing_rate <= result.best_rate * (1 + tolerance)
    assert (result.knee_low, result.knee_high) == (result.best_rate, result.failing_rate)
    assert result.is_settled
    assert result.num_probes == len(probes) <= 7 + math.ceil(math.log2(math.log(2) / math.log(1 + tolerance))) + 1


@given(knees, st.integers(0, 2**32))
def test_with_noise_the_search_ends_in_its_budget_with_a_result_that_holds_together(knee, seed):
    goal = Goal(first_rate=1.0, max_probes=14)
    result, probes = search(goal, noisy(knee, seed))
    assert len(probes) <= 14
    assert {probe.seed for probe in probes} <= {0, 1, 2}
    if result.best_rate is not None:
        assert result.attainment_low <= result.attainment <= result.attainment_high
        assert result.failing_rate is None or result.best_rate < result.failing_rate
        assert result.knee_high is None or result.knee_low is None or result.knee_low < result.knee_high
        # Far off only when very unlucky: at half the knee attainment is 0.9999, at twice it is 0.034.
        assert knee / 2 <= result.best_rate <= knee * 2


@pytest.mark.parametrize("steepness", few([3.0, 8.0, 30.0]))
def test_the_interval_covers_the_knee_as_often_as_it_says(steepness):
    rng, num_covered, num_near, num_searches = random.Random(0), 0, 0, 300
    for seed in range(num_searches):
        knee = 2 ** rng.uniform(-3, 3)
        result, _ = search(Goal(first_rate=1.0, max_probes=16), noisy(knee, seed, steepness=steepness))
        num_covered += (result.knee_low or 0) <= knee <= (result.knee_high or math.inf)
        num_near += 0.75 * knee <= result.best_rate <= 1.25 * knee
    assert num_covered >= 0.95 * num_searches
    assert num_near >= (0.95 if steepness > 5 else 0.75) * num_searches


def test_the_interval_is_of_use():
    widths = []
    for seed in range(100):
        result, _ = search(Goal(first_rate=1.0, max_probes=16), noisy(3.0, seed))
        widths.append(result.knee_high / result.knee_low)
    assert sorted(widths)[50] < 1.5


def test_an_unlucky_probe_does_not_end_the_search_far_below_the_knee():
    def unlucky_once(probe):
        return (85, 100) if (probe.rate, probe.seed) == (2.0, 0) else (100 if probe.rate <= 10 else 0, 100)

    result, probes = search(Goal(first_rate=1.0, max_probes=20), unlucky_once)
    assert result.best_rate <= 10 < result.failing_rate <= 1.1 * result.best_rate
    assert [probe.seed for probe in probes if probe.rate == 2.0] == [0, 1]


def test_a_failure_below_a_pass_is_probed_again_with_another_seed():
    searching = RateSearch(GOAL)
    for rate, good in [(1.0, 100), (2.0, 88), (4.0, 100), (8.0, 0)]:
        searching.record(counted(rate, good, 100))
    probe = searching.next_probe()
    assert (probe.rate, probe.seed) == (2.0, 1)


def test_a_first_rate_that_fails_by_chance_is_probed_again_before_lower_ones():
    searching = RateSearch(GOAL)
    searching.record(counted(1.0, 88, 100))
    probe = searching.next_probe()
    assert (probe.rate, probe.seed) == (1.0, 1)


def test_nothing_passes_and_everything_passes():
    nothing, probes = search(Goal(first_rate=1.0, max_probes=5), lambda probe: (0, 50))
    assert (nothing.best_rate, nothing.failing_rate) == (None, 1 / 16)
    assert (nothing.knee_low, nothing.knee_high) == (None, 1 / 16)
    assert [probe.rate for probe in probes] == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    everything, probes = search(Goal(first_rate=1.0, max_probes=4), lambda probe: (50, 50))
    assert (everything.best_rate, everything.failing_rate) == (8.0, None)
    assert (everything.knee_low, everything.knee_high) == (8.0, None)
    assert not nothing.is_settled
    assert not everything.is_settled


def test_before_any_probe_nothing_is_known():
    result = RateSearch(GOAL).result()
    assert (result.best_rate, result.failing_rate, result.attainment, result.num_probes) == (None, None, None, 0)


def test_the_same_measurements_lead_to_the_same_probes():
    first, second = (search(GOAL, noisy(3.0, seed=7)) for _ in range(2))
    assert first == second


def test_the_counts_at_the_best_rate_are_pooled():
    result = settle([counted(1.0, 190, 200), counted(2.0, 10, 200)], GOAL, 3)
    assert (result.num_good, result.num_total, result.attainment) == (190, 200, 0.95)
    assert (result.attainment_low, result.attainment_high) == pytest.approx((0.9104, 0.9726), abs=1e-4)  # by hand


counts = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8)


@given(counts)
def test_the_falling_curve_falls_keeps_the_total_and_leaves_falling_counts_alone(pairs):
    curve = [counted(float(i + 1), min(good, total), total) for i, (good, total) in enumerate(pairs)]
    fitted = falling(curve)
    assert all(above >= below for above, below in pairwise(fitted))
    expected_good = sum(each * point.num_total for each, point in zip(fitted, curve, strict=True))
    assert expected_good == pytest.approx(sum(point.num_good for point in curve))
    if all(a.attainment >= b.attainment for a, b in pairwise(curve)):
        assert fitted == pytest.approx([point.attainment for point in curve])


@given(counts, st.integers(0, 2**32))
def test_no_other_falling_curve_is_closer_to_the_counts(pairs, seed):
    curve = [counted(float(i + 1), min(good, total), total) for i, (good, total) in enumerate(pairs)]

    def distance(values):
        return sum(each.num_total * (value - each.attainment) ** 2 for value, each in zip(values, curve, strict=True))

    rng = random.Random(seed)
    best = distance(falling(curve))
    for _ in range(20):
        assert best <= distance(sorted((rng.random() for _ in curve), reverse=True)) + 1e-9
