"""Simulated fleets: the coordinator's and the nodes' own decisions, whatever the load, the pools, the order of things
and what befalls them; and nodes of one machine, added up on paper.

Of the first every request ends once, its tokens are there once and in order (the simulated clients check each), every
block comes back, and nobody waits for ever.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.costs import Progress
from splitserve_bench.simulate.fleet import FleetSize, simulate
from tests.effort import effort, few
from tests.unit.splitserve_bench.simulate_kit import (
    API_SERVER_S,
    BLOCK_BYTES,
    BYTES_PER_S,
    LATENCY_S,
    MESSAGE_S,
    NUM_LAYERS,
    PROFILE,
    chunk_s,
    request,
    step_s,
)
from tests.unit.splitserve_bench.simulated_world import BLOCK_SIZE, FLEETS, World

TROUBLES = ("cancel", "lose", "flip", "drain")
PRIORITIES = (-1, 0, 1)


def test_without_trouble_everyone_gets_the_whole_answer():
    seen, num_seeds = Counter(), effort(5, 50, 150)
    for seed in range(num_seeds):
        world = World(seed)
        outcomes = world.run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        seen += world.seen
    assert seen["whole"] == num_seeds * 20
    assert min(seen[each] for each in ("preempted", "kept", "handed over")) > num_seeds // 20, seen


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("has_limits", "priorities"),
    [
        (True, (0,)),
        (False, PRIORITIES),
        (True, PRIORITIES),
    ],
    ids=["l", "p", "l+p"],
)
def test_limits_and_priorities_let_nobody_wait_for_ever(has_limits, priorities):
    for seed in range(100):
        outcomes = World(seed, has_limits=has_limits, priorities=priorities).run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"


@pytest.mark.parametrize("trouble", few(TROUBLES))
def test_one_kind_of_trouble(trouble):
    seen, num_seeds = Counter(), effort(5, 20, 60)
    for seed in range(num_seeds):
        world = World(seed, troubles=(trouble,))
        outcomes = world.run()
        if trouble != "lose":
            assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        seen += world.seen
    happened = {"cancel": "cut", "lose": "lost", "flip": "flipped", "drain": "drained"}[trouble]
    assert seen[happened] > num_seeds // 2, seen


@pytest.mark.nightly
def test_all_kinds_of_trouble_together():
    seen = Counter()
    for seed in range(150):
        world = World(seed, troubles=TROUBLES * 2)
        world.run()
        seen += world.seen
    names = ("cut", "lost", "flipped", "drained", "migrated", "kept", "preempted", "restarted", "whole")
    assert min(seen[each] for each in names) > 10, seen


def test_nodes_and_coordinator_have_the_same_deadlines_and_priorities():
    """Later or, of what a node begins itself, earlier by a message at most; over attempts and moves too. A late request
    that is placed after its first token was due has no deadline for it any more."""
    seen = Counter()
    for seed in effort((3, 11, 12, 17), range(20), range(60)):  # requests move with 12 and 17
        world = World(seed, troubles=TROUBLES, has_limits=True, priorities=PRIORITIES)
        world.watch(lambda world=world: seen.update(compare_deadlines(world)))
        world.run()
    assert min(seen[each] for each in ("begun", "to begin", "again", "after a move")) > 20, seen


def compare_deadlines(world):
    """What has been seen, by kind."""
    known = {(request.request_id, request.attempt.epoch): request for request in world.tracked}
    for node in world.fleet.nodes.values():
        for node_request in node.scheduler.node_requests:
            request = known.get(node_request.key)
            assert request is None or node_request.priority == request.priority
            if request is None or request.due is None:
                assert request is None or node_request.due is None
                continue
            here, there = request.due, node_request.due
            assert here.tpot_s == there.tpot_s
            if here.began_s is None and there.began_s is None:
                is_over = request.is_late and request.attempt.started_s > here.first_s
                due_s = math.inf if is_over else here.first_s
                late_s = 0.0 if due_s == there.first_s else there.first_s - due_s
                assert -1e-9 <= late_s <= world.costs.most_message_s + 1e-9
                yield "to begin"
            elif here.tpot_s < math.inf and here.began_s is not None and there.began_s is not None:
                assert abs(there.began_s - here.began_s) <= world.costs.most_message_s + 1e-9
                yield "begun"
                if request.attempt.first_index:
                    yield "again"
                if request.num_migrations:
                    yield "after a move"


def test_neighbours_that_make_no_difference_change_nothing():
    for seed in range(effort(2, 20, 60)):
        asked = {"troubles": TROUBLES, "has_limits": True, "priorities": PRIORITIES}
        one, other = World(seed, alone_factor=1.0, **asked), World(seed, **asked)
        assert one.run() == other.run(), f"seed {seed}"
        assert one.agenda.now == other.agenda.now


@pytest.mark.parametrize(
    "priorities",
    [pytest.param((0,), marks=pytest.mark.nightly), PRIORITIES],
    ids=["equal", "it is the least important"],
)
@pytest.mark.parametrize("fleet", few(FLEETS), ids="+".join)
def test_the_oldest_finishes_though_younger_ones_come_without_end(fleet, priorities):
    """It needs the whole pool of each node."""
    for seed in range(effort(1, 6, 6)):
        world = World(seed, fleet=fleet, num_blocks=10, num_requests=80, priorities=priorities)
        room = 10 * BLOCK_SIZE
        oldest = PlannedRequest(0, 0.0, tuple(range(room // 2)), room // 2)
        world.planned[0] = oldest
        outcomes = world.run()
        assert not [outcome.error for outcome in outcomes if outcome.error], f"seed {seed}"
        assert outcomes[0].ended_s < sorted(outcome.ended_s for outcome in outcomes)[40]


# ---- nodes of one machine, one of which works while the other one rests, or works too ----

PROMPTS, ANSWERS = 0.5, 0.8  # of what steps take beside another node, alone
NEIGHBOURS = replace(PROFILE, steps=replace(PROFILE.steps, prompts_alone_factor=PROMPTS, answers_alone_factor=ANSWERS))
PAIR = FleetSize(0, 0, 2, policy="never")
START_S = API_SERVER_S / 2 + MESSAGE_S  # from a client to the first step
BACK_S = API_SERVER_S / 2 + MESSAGE_S


def outcomes_of(size, *planned, profile=NEIGHBOURS):
    return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=100.0).outcomes


def left_s(seconds, *, done_s, of_s):
    """Of what takes so long at the rate of now, when so much of it was done at a rate at which it would take of_s."""
    return seconds * (1 - done_s / of_s)


@pytest.mark.parametrize("size", [FleetSize(0, 0, 1), PAIR, FleetSize(0, 0, 4), replace(PAIR, nodes_per_machine=1)])
def test_who_is_alone_on_a_machine_is_as_fast_as_that(size):
    (outcome,) = outcomes_of(size, request(0, 100, 4))
    first_s = START_S + chunk_s(100) * PROMPTS + BACK_S
    assert outcome.arrivals_s == pytest.approx([first_s + index * step_s(1) * ANSWERS for index in range(4)])


def test_a_node_that_has_handed_over_rests():
    (outcome,) = outcomes_of(FleetSize(1, 1), request(0, 100, 3))
    first_s = START_S + chunk_s(100) * PROMPTS + BACK_S
    second_s = first_s + 7 * BLOCK_BYTES / BYTES_PER_S / NUM_LAYERS + LATENCY_S + step_s(1) * ANSWERS
    assert outcome.arrivals_s == pytest.approx([first_s, second_s, second_s + step_s(1) * ANSWERS])


def test_both_at_work_all_the_time_take_what_was_measured():
    outcomes = outcomes_of(PAIR, request(0, 100, 1), request(1, 100, 1))
    assert [each.arrivals_s[0] for each in outcomes] == pytest.approx([START_S + chunk_s(100) + BACK_S] * 2)


def test_two_prompts_that_overlap_in_part():
    """257 ms alone, of which 100 are over when the other one comes, for 102 ms; then it is alone again."""
    one, other = outcomes_of(PAIR, request(0, 512, 1), request(1, 100, 1, at_s=0.1))
    other_s = chunk_s(100)
    first_s = chunk_s(512) * (1 - 0.1 / (chunk_s(512) * PROMPTS) - other_s / chunk_s(512)) * PROMPTS
    assert other.arrivals_s[0] == pytest.approx(START_S + 0.1 + other_s + BACK_S)
    assert one.arrivals_s[0] == pytest.approx(START_S + 0.1 + other_s + first_s + BACK_S)
    assert first_s == pytest.approx(0.106)


def test_the_one_that_comes_later_may_end_later():
    """The first ends beside the other one, which goes on alone."""
    one, other = outcomes_of(PAIR, request(0, 100, 1), request(1, 512, 1, at_s=0.021))
    rest_s = left_s(chunk_s(100), done_s=0.021, of_s=chunk_s(100) * PROMPTS)
    assert rest_s == pytest.approx(0.060)
    other_s = left_s(chunk_s(512) * PROMPTS, done_s=rest_s, of_s=chunk_s(512))
    assert other_s == pytest.approx(0.227)
    assert one.arrivals_s[0] == pytest.approx(START_S + 0.021 + rest_s + BACK_S)
    assert other.arrivals_s[0] == pytest.approx(START_S + 0.021 + rest_s + other_s + BACK_S)


def test_an_answer_beside_which_a_prompt_is_read():
    """Steps of 16.8 ms, of 21 while the prompt is read: the one in which it begins and the one in which it ends are of
    both kinds."""
    one, other = outcomes_of(PAIR, request(0, 8, 20), request(1, 98, 1, at_s=0.1))
    began_s, read_s = chunk_s(8) * PROMPTS, chunk_s(98)
    num_before = (0.1 - began_s) / (step_s(1) * ANSWERS)  # 5.655 steps
    num_beside = read_s / step_s(1)  # 4.762 steps

    def ends_s(num_steps):
        """When so many steps are over, after the start of the first prompt."""
        if num_steps <= num_before:
            return began_s + num_steps * step_s(1) * ANSWERS
        if num_steps <= num_before + num_beside:
            return 0.1 + (num_steps - num_before) * step_s(1)
        return 0.1 + read_s + (num_steps - num_before - num_beside) * step_s(1) * ANSWERS

    assert one.arrivals_s == pytest.approx([START_S + ends_s(index) + BACK_S for index in range(20)])
    assert other.arrivals_s[0] == pytest.approx(START_S + 0.1 + read_s + BACK_S)


def test_a_step_of_both_kinds_shrinks_by_both_factors():
    """While the answer of one prompt is written, another prompt comes to the only node."""
    one, other = outcomes_of(FleetSize(0, 0, 1), request(0, 8, 3), request(1, 50, 1, at_s=0.007))
    first_s = START_S + chunk_s(8) * PROMPTS + BACK_S
    assert one.arrivals_s[:2] == pytest.approx([first_s, first_s + step_s(1) * ANSWERS])
    both_s = step_s(1) * ANSWERS + (chunk_s(51) - chunk_s(1)) * PROMPTS
    assert one.arrivals_s[2] == other.arrivals_s[0] == pytest.approx(first_s + step_s(1) * ANSWERS + both_s)


def test_nodes_of_another_machine_are_no_neighbours():
    """Two machines: the first two prompts are read each on its own, if the coordinator takes every second node."""
    apart = FleetSize(1, 0, 1, nodes_per_machine=1)
    outcomes = outcomes_of(apart, request(0, 512, 1), request(1, 512, 1))
    assert min(each.arrivals_s[0] for each in outcomes) == pytest.approx(START_S + chunk_s(512) * PROMPTS + BACK_S)


def busy(size, profile=NEIGHBOURS):
    num_requests = effort(20, 60, 60)
    planned = [
        request(index, 20 + 37 * index % 400, 5 + 11 * index % 60, index * 0.05) for index in range(num_requests)
    ]
    return outcomes_of(size, *planned, profile=profile)


@pytest.mark.parametrize("size", few([FleetSize(1, 1), FleetSize(2, 1, 2, nodes_per_machine=3)]))
def test_the_same_is_simulated_again(size):
    assert busy(size) == busy(size)


@pytest.mark.parametrize("nodes_per_machine", few([1, 2, 4], 2))
def test_a_profile_that_knows_no_difference_makes_none(nodes_per_machine):
    size = FleetSize(1, 1, 2)
    assert busy(replace(size, nodes_per_machine=nodes_per_machine), PROFILE) == busy(size, PROFILE)


def test_a_machine_of_its_own_is_faster_than_a_shared_one_and_that_than_one_that_is_always_busy():
    size = FleetSize(0, 0, 2)
    alone, shared, beside = busy(replace(size, nodes_per_machine=1)), busy(size), busy(size, PROFILE)
    ends_s = [sum(each.ended_s for each in outcomes) for outcomes in (alone, shared, beside)]
    assert ends_s == sorted(set(ends_s))


@given(
    st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.01, 2.0)), min_size=1, max_size=8),
    st.floats(0, 1000),
)
def test_what_is_done_of_a_step_stays_done(changes, start_s):
    """At the end the parts that were done at each of its rates are a whole step."""
    progress, now, done, before_s = Progress(start_s, 1.0), start_s, 0.0, 1.0
    for after_s, seconds in changes:
        if now + after_s >= progress.ends_s:
            break
        now, done = now + after_s, done + after_s / before_s
        progress.go_on(now, seconds)
        before_s = seconds
    assert done + (progress.ends_s - now) / before_s == pytest.approx(1.0)


def test_what_is_over_stays_over():
    progress = Progress(5.0, 2.0)
    progress.go_on(7.0, 100.0)
    assert progress.ends_s == 7.0
