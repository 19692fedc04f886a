"""The race of plans: their knees from all their probes, against attainments whose knee is known; and who is probed."""

import math
from itertools import product
from random import Random

import pytest

from splitserve_bench.compare.search import Counted, Goal
from splitserve_bench.plan.fleets import Played
from splitserve_bench.plan.race import KneeSearch, Race, Turns, knee_of
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


# ---- the race ----


def run(knees, promises, **options):
    """A race of plans that pass up to their knees, with probes that tell all: how often each was probed in the survey
    and in the race, and its best."""
    race = Race([(Goal(0.7 * each, tolerance=0.05, step=1.3), 1.0, each) for each in promises], **options)
    while chosen := race.next():
        index, probe = chosen
        share = 0.99 if probe.rate <= knees[index] else 0.5
        race.record(index, Played(probe.rate, round(share * 1000), 1000, 1000.0, [0.1], [0.1], {}, False))
    quick = [len((runner.survey or runner).played) for runner in race.runners]
    whole = [len(runner.played) if runner.survey is not None else 0 for runner in race.runners]
    reached = [runner.reached if runner.survey is not None else 0.0 for runner in race.runners]
    return list(zip(quick, whole, strict=True)), reached


def test_the_best_two_are_found_and_the_others_cost_little():
    probes, reached = run([10.0, 8.0, 3.0, 2.0, 1.0], [10.0, 9.0, 8.0, 4.0, 3.0])
    assert reached[0] == pytest.approx(10, rel=0.06)
    assert reached[1] == pytest.approx(8, rel=0.06)
    assert all(num_quick <= 2 and not num_whole for num_quick, num_whole in probes[2:])


def test_a_plan_close_to_the_second_best_is_in_the_race():
    probes, reached = run([10.0, 8.0, 7.5, 7.0], [10.0, 9.0, 8.0, 8.0])
    assert reached[:2] == [pytest.approx(10, rel=0.06), pytest.approx(8, rel=0.06)]
    assert all(num_whole >= 1 for _, num_whole in probes[:3])


def test_neither_the_number_of_processes_nor_which_is_faster_decides_anything():
    """What each plan's probes are, and found, on so many of which any may be the next to end."""
    knees, promises, found = [10.0, 9.0, 8.0, 7.0, 3.0, 2.0, 1.0], [8.0, 11.0, 7.0, 9.0, 4.0, 3.0, 3.0], set()
    for seed, num_workers in product(range(effort(3, 10, 30)), (1, 2, 3, 16)):
        race = Race([(Goal(0.7 * each, tolerance=0.05, step=1.3), 1.0, each) for each in promises])
        turns, random, under_way, recorded = Turns(race), Random(seed), [], []
        while True:
            while len(under_way) < num_workers and (chosen := turns.next()):
                under_way.append(chosen)
            if not under_way:
                break
            index, probe = under_way.pop(random.randrange(len(under_way)))
            good = Random(f"{index} {probe}").gauss(900 if probe.rate <= knees[index] else 800, 40)
            recorded += turns.record(index, Played(probe.rate, round(good), 1000, 1000.0, [0.1], [0.1], {}, False))
        assert not race.is_survey
        surveys = [runner.survey for runner in race.runners if runner.survey is not None]
        found.add((tuple(recorded), *(repr(runner.played) for runner in (*surveys, *race.runners))))
    assert len(found) == 1


def test_a_plan_that_passes_is_not_left_alone_for_its_promise():
    """It is probed first while the others have hardly begun, and passes."""
    knees, promises = [10.0, 9.0, 9.9], [10.0, 9.0, 1.0]
    race = Race([(Goal(0.7 * each, tolerance=0.05, step=1.3), 1.0, each) for each in promises])
    turns = Turns(race)
    while chosen := turns.next():
        index, probe = chosen
        share = 0.99 if probe.rate <= knees[index] else 0.5
        turns.record(index, Played(probe.rate, round(share * 1000), 1000, 1000.0, [0.1], [0.1], {}, False))
    assert race.runners[2].survey is not None
    assert race.runners[2].reached == pytest.approx(9.9, rel=0.06)


def test_wrong_promises_do_not_decide():
    _, reached = run([1.0, 2.0, 9.0, 10.0], [10.0, 9.0, 2.0, 1.0])
    assert sorted(range(4), key=lambda index: -reached[index])[:2] == [3, 2]
    assert reached[3] == pytest.approx(10, rel=0.06)


def test_all_knees_are_found_when_asked_for():
    _, reached = run([10.0, 8.0, 3.0], [10.0, 9.0, 8.0], leaders=3)
    assert reached == [pytest.approx(10, rel=0.06), pytest.approx(8, rel=0.06), pytest.approx(3, rel=0.06)]
