"""Nodes of one machine, one of which works while the other one rests, or works too: added up on paper."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.machine import Progress
from tests.unit.splitserve_bench.simulate_kit import (
    BLOCK_BYTES,
    BYTES_PER_S,
    DOOR_S,
    LATENCY_S,
    MESSAGE_S,
    NUM_LAYERS,
    PROFILE,
    chunk_s,
    request,
    step_s,
)

PROMPTS, ANSWERS = 0.5, 0.8  # of what steps take beside another node, alone
NEIGHBOURS = replace(PROFILE, steps=replace(PROFILE.steps, prompts_alone_factor=PROMPTS, answers_alone_factor=ANSWERS))
PAIR = FleetSize(0, 0, 2, policy="never")
START_S = DOOR_S / 2 + MESSAGE_S  # from a client to the first step
BACK_S = DOOR_S / 2 + MESSAGE_S


def outcomes_of(size, *planned, profile=NEIGHBOURS):
    return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=100.0)


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
    planned = [request(index, 20 + 37 * index % 400, 5 + 11 * index % 60, index * 0.05) for index in range(60)]
    return outcomes_of(size, *planned, profile=profile)


@pytest.mark.parametrize("size", [FleetSize(1, 1), FleetSize(2, 1, 2, nodes_per_machine=3)])
def test_the_same_is_simulated_again(size):
    assert busy(size) == busy(size)


@pytest.mark.parametrize("nodes_per_machine", [1, 2, 4])
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
