"""Answers that leave a node on which they fall behind their limit, for one on which they do not."""

import pytest

from coordinator.control.balance import REST_S
from coordinator.control.slo import Slo
from serving_core.due import Due
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import World

MAX_TOKENS = 200
# A step takes 10 ms and 5 ms for each answer.
WEIGHTS = [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
QUICK = [0.001, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0]


def learn(world, name, weights=WEIGHTS):
    told = events.heartbeat(step_weights=weights, prefill_tokens_per_s=1000.0)
    world.registry.heartbeat(world.registry.find(name), told.heartbeat, 0.0)


def write(world, request_id, tpot_s):
    """An answer that d0 writes, which has two tokens since 0.0 s; its attempt."""
    slo = None if tpot_s is None else Slo("", None, tpot_s)
    assert world.submit(request_id, max_tokens=MAX_TOKENS, slo=slo)[0] == "reserve d0"
    attempt, reader = world.attempt, world.reader
    world.tell(reader, events.first_token(events.sampled(attempt, 0, 100)))
    world.tell("d0", events.reserved(attempt))
    world.tell("d0", events.committed(attempt))
    world.tell(reader, events.transferred(attempt))
    assert world.step(attempt, 1) == ["emit 1:101"]
    return attempt


def written_on_d0(*tpots_s, weights=WEIGHTS):
    """A World in which d0 writes these answers, and d1 has come since."""
    world = World(("p0", "d0"))
    for index, tpot_s in enumerate(tpots_s):
        write(world, f"{index}/0", tpot_s)
    world.attach("d1")
    learn(world, "p0")
    learn(world, "d0")
    learn(world, "d1", weights)
    return world


def moved_id(world):
    return world.attempt.request_id


def test_an_answer_whose_limit_is_shorter_than_a_step_moves():
    world = written_on_d0(0.024, 0.1, 0.1)  # 25 ms here, 15 ms there
    assert world.tick(0.03) == ["reserve d1"]
    assert moved_id(world) == "0/0"
    assert world.tick(0.05) == []  # one at a time


def test_an_answer_that_is_ahead_until_its_end_stays():
    world = World(("p0", "d0"))
    attempts = [write(world, f"{index}/0", tpot_s) for index, tpot_s in enumerate((0.024, 0.1, 0.1))]
    for index in range(2, 101):
        world.step(attempts[0], index)
    world.attach("d1")
    for name in ("p0", "d0", "d1"):
        learn(world, name)
    assert world.tick(0.03) == []  # 99 tokens in steps of 25 ms, and the last one is due in 4.7 s
    late_s = 199 * 0.024 - 99 * 0.025
    assert world.tick(late_s + 0.01) == ["reserve d1"]


@pytest.mark.parametrize("tpots_s", [(0.026, 0.1, 0.1), (None, None, None), (0.024,)])
def test_who_keeps_its_limit_stays(tpots_s):
    assert written_on_d0(*tpots_s).tick(0.03) == []


def test_nobody_moves_to_where_it_would_be_late_too():
    slow = [0.020, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
    assert written_on_d0(0.024, 0.1, 0.1, weights=slow).tick(0.03) == []


def test_nobody_moves_to_where_it_makes_another_one_late():
    world = written_on_d0(0.024, 0.1, 0.1)
    d1 = world.registry.find("d1")
    due = Due(tpot_s=0.016)
    world.ledger.owe("there", due, 0, 10)
    world.ledger.write("there", d1, 10)
    assert world.tick(0.03) == []
    due.tpot_s = 0.021
    assert world.tick(0.03) == ["reserve d1"]


def written_on_b0(*tpots_s, num_left, ttft_s=10.0):
    """A World in which b0 writes these answers, which came within 30 ms, and b1 one that has so many tokens to come."""
    world = World(("b0",))
    learn(world, "b0", QUICK)
    for index, tpot_s in enumerate(tpots_s):
        assert world.submit(f"{index}/0", max_tokens=MAX_TOKENS, slo=Slo("", ttft_s, tpot_s)) == ["reserve b0"]
        attempt = world.attempt
        world.tell("b0", events.first_token(events.sampled(attempt, 0, 100)))
        assert world.step(attempt, 1, node="b0") == ["emit 1:101"]
    b1 = world.attach("b1")
    learn(world, "b0")  # that its steps take longer, when it has been given too much
    learn(world, "b1")
    world.ledger.owe("there", Due(tpot_s=0.1), 0, num_left)
    world.ledger.write("there", b1, 10)
    return world


@pytest.mark.parametrize(("num_left", "moved"), [(10, []), (150, []), (198, ["reserve b1"])])
def test_nobody_moves_to_where_it_would_keep_prompts_waiting_for_longer_than_answers_there_do(num_left, moved):
    assert written_on_b0(0.024, 0.1, 0.1, num_left=num_left).tick(0.03) == moved


@pytest.mark.parametrize(("tpots_s", "moved"), [((0.024, 0.1, 0.1), []), ((0.024, 0.024, 0.024), ["reserve b1"])])
def test_unless_more_are_late_here_than_prompts_would_be_there(tpots_s, moved):
    """One step more there, of 20 ms: twice what comes of 67 requests a second, which is two."""
    assert written_on_b0(*tpots_s, num_left=196).tick(0.03) == moved


@pytest.mark.parametrize("ttft_s", [1e-6, None])
def test_prompts_to_come_that_would_be_late_anyway_or_cannot_be_do_not_count(ttft_s):
    assert written_on_b0(0.024, 0.1, 0.1, num_left=10, ttft_s=ttft_s).tick(0.03) == ["reserve b1"]


def test_the_one_that_is_least_behind_goes_first():
    world = written_on_d0(0.020, 0.024, 0.1)
    assert world.tick(0.03) == ["reserve d1"]
    assert moved_id(world) == "1/0"


def test_who_cannot_be_in_time_any_more_stays():
    """198 more steps of 15 ms take 2.97 s, and the last token is due at 199 * 24 ms."""
    late_s = 199 * 0.024 - 198 * 0.015
    assert written_on_d0(0.024, 0.1, 0.1).tick(late_s + 0.01) == []
    assert written_on_d0(0.024, 0.1, 0.1).tick(late_s - 0.01) == ["reserve d1"]


def test_what_has_moved_rests():
    world = written_on_d0(0.024, 0.1, 0.1)
    world.tick(0.03)
    assert world.tell("d1", events.failed(world.attempt, "QUEUE_FULL"), 0.04) == ["refused"]
    assert world.tick(0.05) == []
    assert REST_S > 199 * 0.024  # by then it is over, one way or the other
