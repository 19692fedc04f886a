"""The coordinator's and the nodes' own decisions, whatever the load, the pools, the order of things and what befalls
them: every request ends once, its tokens are there once and in order (the simulated clients check each), every block
comes back, and nobody waits for ever."""

import math
from collections import Counter
from random import Random

import pytest

from splitserve_bench.serve.records import PlannedRequest
from tests.effort import few
from tests.unit.splitserve_bench.simulated_world import BLOCK_SIZE, FLEETS, World

TROUBLES = ("cancel", "lose", "flip", "drain")
PRIORITIES = (-1, 0, 1)
seeds_of_60 = pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.nightly)], ids=["20", "40 more"]
)


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 150), marks=pytest.mark.nightly)], ids=["50", "100 more"]
)
def test_without_trouble_everyone_gets_the_whole_answer(seeds):
    seen = Counter()
    for seed in seeds:
        world = World(seed)
        outcomes = world.run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        seen += world.seen
    assert seen["whole"] == len(seeds) * 20
    assert min(seen[each] for each in ("preempted", "kept", "handed over")) > len(seeds) // 20, seen


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("has_limits", "priorities"),
    [
        pytest.param(True, (0,), marks=pytest.mark.nightly),
        pytest.param(False, PRIORITIES, marks=pytest.mark.nightly),
        (True, PRIORITIES),
    ],
    ids=["l", "p", "l+p"],
)
def test_limits_and_priorities_let_nobody_wait_for_ever(has_limits, priorities):
    for seed in range(100):
        outcomes = World(seed, has_limits=has_limits, priorities=priorities).run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"


@seeds_of_60
@pytest.mark.parametrize("trouble", few(TROUBLES))
def test_one_kind_of_trouble(trouble, seeds):
    seen = Counter()
    for seed in seeds:
        world = World(seed, troubles=(trouble,))
        outcomes = world.run()
        if trouble != "lose":
            assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        seen += world.seen
    happened = {"cancel": "cut", "lose": "lost", "flip": "flipped", "drain": "drained"}[trouble]
    assert seen[happened] > 10, seen


@pytest.mark.nightly
def test_all_kinds_of_trouble_together():
    seen = Counter()
    for seed in range(150):
        world = World(seed, troubles=TROUBLES * 2)
        world.run()
        seen += world.seen
    names = ("cut", "lost", "flipped", "drained", "moved", "kept", "preempted", "restarted", "whole")
    assert min(seen[each] for each in names) > 10, seen


@seeds_of_60
def test_nodes_and_coordinator_have_the_same_deadlines_and_priorities(seeds):
    """Later or, of what a node begins itself, earlier by a message at most; over attempts and moves too."""
    seen = Counter()
    for seed in seeds:
        world = World(seed, troubles=TROUBLES, has_limits=True, priorities=PRIORITIES)
        world.watch(lambda world=world: seen.update(compare_deadlines(world)))
        world.run()
    assert min(seen[each] for each in ("begun", "to begin", "again", "after a move")) > 20, seen


def compare_deadlines(world):
    """What has been seen, by kind."""
    known = {(request.request_id, request.attempt.epoch): request for request in world.tracked}
    for node in world.fleet.nodes.values():
        for resident in node.logic.residents:
            request = known.get(resident.key)
            assert request is None or resident.priority == request.priority
            if request is None or request.due is None:
                assert request is None or resident.due is None
                continue
            here, there = request.due, resident.due
            assert here.tpot_s == there.tpot_s
            if here.began_s is None and there.began_s is None:
                late_s = 0.0 if here.first_s == there.first_s else there.first_s - here.first_s
                assert -1e-9 <= late_s <= world.costs.most_message_s + 1e-9
                yield "to begin"
            elif here.tpot_s < math.inf and here.began_s is not None and there.began_s is not None:
                assert abs(there.began_s - here.began_s) <= world.costs.most_message_s + 1e-9
                yield "begun"
                if request.attempt.first_index:
                    yield "again"
                if request.num_moves:
                    yield "after a move"


@pytest.mark.nightly
@seeds_of_60
@pytest.mark.parametrize(
    "limits", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["no limits", "limits and priorities"]
)
@pytest.mark.parametrize("troubles", [pytest.param((), marks=pytest.mark.nightly), TROUBLES], ids=["calm", "trouble"])
def test_streaks_change_nothing(troubles, limits, seeds):
    """Steps that are taken in for less give what single steps give, to the last bit of every time."""
    asked = {"has_limits": True, "priorities": PRIORITIES} if limits else {}
    for seed in seeds:
        one, other = (World(seed, troubles=troubles, takes_streaks=takes, **asked) for takes in (True, False))
        assert one.run() == other.run(), f"seed {seed}"
        assert one.agenda.now == other.agenda.now
        loads = [[node.load for node in world.fleet.coordinator.registry.nodes] for world in (one, other)]
        assert loads[0] == loads[1]


@pytest.mark.nightly
@seeds_of_60
@pytest.mark.parametrize("troubles", [pytest.param((), marks=pytest.mark.nightly), TROUBLES], ids=["calm", "trouble"])
def test_streaks_change_nothing_beside_neighbours_that_come_and_go(troubles, seeds):
    seen = Counter()
    for seed in seeds:
        random = Random(seed)
        asked = {"troubles": troubles, "has_limits": seed % 2 == 0, "alone_factor": random.uniform(0.3, 1.0)}
        one, other = (World(seed, takes_streaks=takes, **asked) for takes in (True, False))
        assert one.run() == other.run(), f"seed {seed}"
        assert one.agenda.now == other.agenda.now
        loads = [[node.load for node in world.fleet.coordinator.registry.nodes] for world in (one, other)]
        assert loads[0] == loads[1]
        by_itself = World(seed, **{**asked, "alone_factor": None})
        seen["others"] += by_itself.run() != one.clients.outcomes
    assert seen["others"] > len(seeds) // 2, "neighbours bear on each other"


@seeds_of_60
def test_neighbours_that_make_no_difference_change_nothing(seeds):
    for seed in seeds:
        asked = {"troubles": TROUBLES, "has_limits": True, "priorities": PRIORITIES}
        one, other = World(seed, alone_factor=1.0, **asked), World(seed, **asked)
        assert one.run() == other.run(), f"seed {seed}"
        assert one.agenda.now == other.agenda.now


@pytest.mark.parametrize(
    "priorities",
    [pytest.param((0,), marks=pytest.mark.nightly), PRIORITIES],
    ids=["equal", "it is the least important"],
)
@pytest.mark.parametrize("fleet", few(FLEETS, *FLEETS[:2]), ids="+".join)
def test_the_oldest_finishes_though_younger_ones_come_without_end(fleet, priorities):
    """It needs the whole pool of each node."""
    for seed in range(6):
        world = World(seed, fleet=fleet, num_blocks=10, num_requests=80, priorities=priorities)
        room = 10 * BLOCK_SIZE
        oldest = PlannedRequest(0, 0.0, tuple(range(room // 2)), room // 2)
        world.planned[0] = oldest
        outcomes = world.run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        assert outcomes[0].ended_s < sorted(outcome.ended_s for outcome in outcomes)[40]
