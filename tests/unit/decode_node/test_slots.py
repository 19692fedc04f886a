"""How many answers may be written at once, by hand."""

import math

import pytest

from decode_node.scheduler import STRETCH, slots_in_time
from serving_core.node.requests import RequestState
from serving_core.slo import Due
from tests.unit.serving_node.node_requests_kit import House
from tests.unit.serving_node.slack_kit import ExactCosts

# A step takes 10 ms, 2 ms for each answer, and 10 µs for each token before.
COSTS = ExactCosts((0.010, 0.002, 1e-5, 0.0, 0.001, 0.0))


def running(*tpots_s, num_cached=0):
    house = House(400)
    return [
        house.add(
            f"r{index}",
            index,
            RequestState.RUNNING,
            max(1, num_cached),
            num_computed=num_cached,
            due=None if tpot_s is None else Due(tpot_s=tpot_s),
        )
        for index, tpot_s in enumerate(tpots_s)
    ]


def test_without_limits_there_is_no_end():
    assert slots_in_time([], COSTS) == math.inf
    assert slots_in_time(running(None, None), COSTS) == math.inf
    assert slots_in_time(running(math.inf), COSTS) == math.inf


@pytest.mark.parametrize(("tpot_s", "num_cached"), [(0.020, 0), (0.030, 0), (0.030, 100)])
def test_the_tightest_limit_counts(tpot_s, num_cached):
    each_s = 0.002 + 1e-5 * num_cached
    most = slots_in_time(running(0.5, tpot_s, None, num_cached=num_cached), COSTS)
    assert 0.010 + most * each_s <= STRETCH * tpot_s < 0.010 + (most + 1) * each_s


def test_who_would_be_late_alone_holds_nobody_up():
    assert slots_in_time(running(0.011), COSTS) == math.inf
    assert slots_in_time(running(0.011, 0.020), COSTS) == slots_in_time(running(0.020, None), COSTS)
    assert slots_in_time(running(0.0125), ExactCosts((0.010, 0.002, 0, 0, 0, 0))) == 3
