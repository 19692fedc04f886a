"""Small pools, and KV that is slow to come: a running answer does not stand still for prompts whose KV is not there."""

from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.settings import ADMIT_ALL
from splitserve_bench.simulate.costs import ProfileCosts
from splitserve_bench.simulate.profile import CorridorProfile
from tests.unit.splitserve_bench.goodput_kit import World, fleet_of
from tests.unit.splitserve_bench.simulate_kit import BLOCK_BYTES, BLOCK_SIZE, LATENCY_S, PROFILE, SIZES, request, step_s

BLOCK_S = 2.0  # of each block on its way
PROMPT, ANSWER = 100, 300
NUM_BYSTANDERS = 2
MOST_BLOCKS = NUM_BYSTANDERS * -(-(PROMPT + ANSWER) // BLOCK_SIZE)
SLOW = replace(PROFILE, corridor=CorridorProfile(LATENCY_S, BLOCK_BYTES / BLOCK_S))


class SlowLater(ProfileCosts):
    """The corridor is slow for what is sent once the bystanders run."""

    def __init__(self):
        super().__init__(PROFILE)
        self.num_transfers = 0

    def bytes_s(self, num_bytes):
        self.num_transfers += num_bytes > 0
        return (SLOW if self.num_transfers > NUM_BYSTANDERS else PROFILE).corridor.bytes_per_s ** -1 * num_bytes


def longest_gap_s(outcome):
    return max(after - before for before, after in pairwise(outcome.arrivals_s))


@pytest.mark.parametrize("num_spare", [0, 5, 20])
def test_a_running_answer_does_not_wait_for_kv_that_is_not_there(num_spare):
    """Prompts are granted what the pool has left, and their KV takes half a minute: what the answers need is taken
    back."""
    planned = [request(index, PROMPT, ANSWER) for index in range(NUM_BYSTANDERS)]
    planned += [request(10 + index, 240, 2, at_s=1.0 + 0.1 * index) for index in range(6)]
    planned = [replace(each, index=index) for index, each in enumerate(planned)]
    sizes = replace(SIZES, num_blocks=MOST_BLOCKS + num_spare)
    outcomes, _ = World(fleet_of((1, 1, 0), ADMIT_ALL), planned, sizes=sizes, costs=lambda number: SlowLater()).run()
    for outcome in outcomes[:NUM_BYSTANDERS]:
        assert not outcome.error
        assert longest_gap_s(outcome) <= 5 * step_s(NUM_BYSTANDERS) + 2 * LATENCY_S
    assert all(longest_gap_s(outcome) > BLOCK_S for outcome in outcomes[NUM_BYSTANDERS:]), "their KV was there in time"
