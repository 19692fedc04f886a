"""The coordinator's and the nodes' own decisions, whatever the load, the pools, the order of things and what befalls
them: every request ends once, its tokens are there once and in order (the simulated clients check each), every block
comes back, and nobody waits for ever."""

from collections import Counter

import pytest

from splitserve_bench.serve.records import PlannedRequest
from tests.unit.splitserve_bench.simulated_world import BLOCK_SIZE, FLEETS, World

TROUBLES = ("cancel", "lose", "flip", "drain")


def test_without_trouble_everyone_gets_the_whole_answer():
    seen = Counter()
    for seed in range(150):
        world = World(seed)
        outcomes = world.run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        seen += world.seen
    assert seen["whole"] == 150 * 20
    assert min(seen[each] for each in ("preempted", "kept", "moved", "handed over")) > 5, seen


@pytest.mark.parametrize("trouble", TROUBLES)
def test_one_kind_of_trouble(trouble):
    seen = Counter()
    for seed in range(60):
        world = World(seed, troubles=(trouble,))
        outcomes = world.run()
        if trouble != "lose":
            assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        seen += world.seen
    happened = {"cancel": "cut", "lose": "lost", "flip": "flipped", "drain": "drained"}[trouble]
    assert seen[happened] > 10, seen


def test_all_kinds_of_trouble_together():
    seen = Counter()
    for seed in range(150):
        world = World(seed, troubles=TROUBLES * 2)
        world.run()
        seen += world.seen
    names = ("cut", "lost", "flipped", "drained", "moved", "kept", "preempted", "restarted", "whole")
    assert min(seen[each] for each in names) > 10, seen


@pytest.mark.parametrize("troubles", [(), TROUBLES], ids=["calm", "trouble"])
def test_streaks_change_nothing(troubles):
    """Steps that are taken in for less give what single steps give, to the last bit of every time."""
    for seed in range(60):
        one, other = (World(seed, troubles=troubles, takes_streaks=takes) for takes in (True, False))
        assert one.run() == other.run(), f"seed {seed}"
        assert one.agenda.now == other.agenda.now
        loads = [[node.load for node in world.fleet.coordinator.registry.nodes] for world in (one, other)]
        assert loads[0] == loads[1]


@pytest.mark.parametrize("fleet", FLEETS, ids="+".join)
def test_the_oldest_finishes_though_younger_ones_come_without_end(fleet):
    """It needs the whole pool of each node."""
    for seed in range(6):
        world = World(seed, fleet=fleet, num_blocks=10, num_requests=80)
        room = 10 * BLOCK_SIZE
        oldest = PlannedRequest(0, 0.0, tuple(range(room // 2)), room // 2)
        world.planned[0] = oldest
        outcomes = world.run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        assert outcomes[0].ended_s < sorted(outcome.ended_s for outcome in outcomes)[40]
