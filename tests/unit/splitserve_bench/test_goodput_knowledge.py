"""What the coordinator hears late and nodes learn from noise costs little, as own assignments count and costs are
fitted to many steps."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from coordinator.settings import ADMIT_ALL, ADMIT_TIMELY
from splitserve_bench.simulate.costs import ProfileCosts
from tests.unit.splitserve_bench.goodput_kit import KNEES, ApiServer, World, attainment, fleet_of
from tests.unit.splitserve_bench.simulate_kit import PROFILE, request

pytestmark = pytest.mark.nightly

# Where time is short, more is lost: two mixed nodes lose 4.5 points at 1.5 times the knee.
MOST_LOST_TO_AGE = {0.8: 0.03, 1.5: 0.06}
SEEDS_OF_AGE = 12
# Nodes reckon with steps as long as all but a few have been, so that answers keep their limits: where prompts are read
# beside answers there is less time for them, which shows where time is short.
MOST_LOST_TO_NOISE = {0.8: 0.02, 1.5: 0.1}
SEEDS = 4
cells = pytest.mark.parametrize(
    ("counts", "admission", "times"),
    [
        (counts, admission, times)
        for counts, admission in zip(KNEES, [ADMIT_ALL, ADMIT_TIMELY] * 2, strict=True)
        for times in (0.8, 1.5)
    ],
    ids=str,
)


class Noisy(ProfileCosts):
    """Steps take up to a fifth more or less than their profile says."""

    def __init__(self, seed):
        super().__init__(PROFILE)
        self._random = Random(seed)

    def step_s(self, load):
        return super().step_s(load) * self._random.uniform(0.8, 1.2)


@cells
def test_heartbeats_that_are_a_second_old_cost_little(counts, admission, times):
    size, rate = fleet_of(counts, admission), times * KNEES[counts]
    often, seldom = (
        attainment(size, rate, SEEDS_OF_AGE, settings=replace(size.settings, heartbeat_s=seconds))
        for seconds in (0.05, 1.0)
    )
    assert seldom >= often - MOST_LOST_TO_AGE[times]


class Watched(ApiServer):
    """Knows where each answer was written first."""

    def ended(self, request_id, outcome):
        self.nodes = [*getattr(self, "nodes", ()), outcome.timeline.decode_node]
        super().ended(request_id, outcome)


@pytest.mark.parametrize("counts", [(0, 0, 8), (4, 8, 0)], ids=str)
def test_a_crowd_is_shared_out_though_no_heartbeat_comes_in_between(counts):
    """What is assigned counts at once, so 80 who come at one moment do not herd to where there was least to do."""
    planned = [request(index, 64, 8) for index in range(80)]
    outcomes, api_server = World(fleet_of(counts, ADMIT_ALL), planned, api_server=Watched).run()
    assert [each.error for each in outcomes] == [""] * 80
    assert set(Counter(api_server.nodes).values()) == {10}


@cells
def test_learning_from_steps_that_vary_costs_little(counts, admission, times):
    size, rate = fleet_of(counts, admission), times * KNEES[counts]
    noisy, exact = attainment(size, rate, SEEDS, costs=Noisy), attainment(size, rate, SEEDS)
    assert noisy >= exact - MOST_LOST_TO_NOISE[times]
