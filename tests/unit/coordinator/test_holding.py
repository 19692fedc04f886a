"""Requests that are held, since they would make answers late, while their first token has time."""

import pytest

from coordinator.control.placement.policy import Placed
from coordinator.control.slo import Slo
from coordinator.control.so_far import SoFar
from coordinator.control.timeline import Phase
from protos import inference_pb2
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import PROMPT, Noting, World

# A step takes 10 ms and 5 ms for each answer, a prompt 1 ms a token.
WEIGHTS = [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
TPOT_S = 0.022  # two answers keep it
TTFT_S = 10.0
MAX_TOKENS = 200
LONG_PROMPT = list(range(1000))  # a second


def slo(ttft_s=TTFT_S, tpot_s=TPOT_S, priority=0):
    return Slo("", ttft_s, tpot_s, priority)


def learn(world, name):
    told = events.heartbeat(step_weights=WEIGHTS, prefill_tokens_per_s=1000.0)
    world.registry.heartbeat(world.registry.find(name), told.heartbeat, 0.0)


def submit(world, name, limits, now=0.0, token_ids=PROMPT, **others):
    return world.submit(f"{name}/0", token_ids, max_tokens=MAX_TOKENS, slo=limits, now=now, **others)


def full_world(**settings):
    """b0 writes two answers, of which the attempts are returned too: as many as keep their limit."""
    world = World((), **settings)
    world.attach("b0", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b0")
    attempts = []
    for index in range(2):
        assert submit(world, f"running-{index}", slo()) == ["reserve b0"]
        attempts.append(world.attempt)
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)))
        assert world.step(world.attempt, 1, node="b0") == ["emit 1:101"]
    return world, attempts


def end_of(world, attempt, now):
    """The answer of the attempt has its last token."""
    return world.step(attempt, 2, events.LENGTH, node="b0", now=now)


def test_one_too_many_begins_when_another_one_has_ended():
    world, (first, second) = full_world()
    assert submit(world, "r", slo()) == []
    tracker = world.tracker
    assert (tracker.num_running, tracker.num_waiting, tracker.num_held, tracker.num_deferred) == (2, 1, 1, 0)
    assert tracker.phases() == {Phase.DECODE: 2, Phase.PREFILL_QUEUE: 1}
    assert world.tick(1.0) == []
    assert end_of(world, first, 2.0) == ["emit 2:102", "end complete", "reserve b0"]
    assert world.attempt.request_id == "r/0"
    assert end_of(world, second, 2.5) == ["emit 2:102", "end complete"]
    world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100), prefill_s=0.5), 3.0)
    assert world.step(world.attempt, 1, events.LENGTH, node="b0", now=3.0)[-1] == "end complete"
    timeline = world.outcome.timeline
    assert (timeline.ttft_s, timeline.prefill_queue_s, timeline.prefill_s) == (3.0, 2.5, 0.5)
    assert (tracker.num_open, tracker.num_held) == (0, 0)


def test_it_is_held_for_a_part_of_its_time_at_most():
    world, _ = full_world()
    assert submit(world, "r", slo(), now=1.0) == []
    assert world.tick(1.0 + 0.6 * TTFT_S - 0.26) == []
    assert world.tick(1.0 + 0.6 * TTFT_S - 0.24) == ["reserve b0"]


@pytest.mark.parametrize(
    "limits",
    [None, slo(ttft_s=None), slo(ttft_s=0.25), slo(tpot_s=0.014), slo(tpot_s=None, ttft_s=1e-3)],
    ids=["none", "no time for the first token", "little time", "less than a step alone", "none for answers"],
)
def test_nobody_is_held_who_would_gain_nothing(limits):
    world, _ = full_world()
    assert submit(world, "r", limits) == ["reserve b0"]


def test_nodes_that_have_nothing_to_do_hold_nobody():
    world = World(())
    world.attach("b0", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b0")
    assert submit(world, "r", slo(tpot_s=0.0151), token_ids=LONG_PROMPT) == ["reserve b0"]


def test_a_reader_that_has_work_is_not_a_node_that_has_nothing_to_do():
    world = World((), admits_late=False)
    for name in ("p0", "d0", "d1"):
        world.attach(name, num_blocks=10_000, max_model_len=100_000)
        learn(world, name)
    assert submit(world, "busy", None, token_ids=LONG_PROMPT) == ["reserve d0", "prefill p0"]
    with pytest.raises(RequestError, match="limits of the request"):
        submit(world, "r", slo(ttft_s=0.5), token_ids=LONG_PROMPT[::-1])


def test_it_begins_on_nodes_that_have_nothing_to_do_any_more_though_it_will_be_late():
    world, (first, second) = full_world()
    assert submit(world, "r", slo(tpot_s=0.0151)) == []
    assert end_of(world, first, 1.0) == ["emit 2:102", "end complete"]
    assert end_of(world, second, 2.0) == ["emit 2:102", "end complete", "reserve b0"]


def test_an_answer_that_goes_on_has_its_first_token_and_is_not_held():
    world, _ = full_world()
    assert submit(world, "r", slo(), so_far=SoFar((100,))) == ["reserve b0"]


def test_one_that_begins_in_time_counts_from_then_on_in_how_many_such_come():
    policy = Noting()
    world, (first, _) = full_world(policy=policy)
    assert submit(world, "r", slo()) == []
    world.tick(1.0)
    assert policy.told[-1] == 1.0
    assert end_of(world, first, 2.0)[-1] == "reserve b0"
    submit(world, "s", slo(), now=4.0)
    assert policy.told[-1] == 0.5


def test_who_makes_nobody_late_passes_those_that_would():
    world, (first, _) = full_world()
    assert end_of(world, first, 0.0) == ["emit 2:102", "end complete"]
    assert submit(world, "r", slo(tpot_s=0.016)) == []
    assert submit(world, "s", slo()) == ["reserve b0"]


def test_who_makes_others_late_is_held_too():
    world, (first, _) = full_world()
    assert submit(world, "r", slo(tpot_s=None)) == []
    assert end_of(world, first, 2.0)[-1] == "reserve b0"


@pytest.mark.parametrize(
    ("writer", "crowding", "is_easy"),
    [("d0", 0.95, True), ("d0", 0.97, False), ("b0", 1.02, True), ("b0", 1.04, False)],
)
def test_a_node_that_only_writes_is_full_before_one_whose_answers_get_ahead(writer, crowding, is_easy):
    node = World((writer,)).registry.find(writer)
    assert Placed(node, node, crowding=crowding).is_easy == is_easy


def test_one_that_another_node_can_take_goes_there():
    world, _ = full_world()
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1")
    assert submit(world, "r", slo()) == ["reserve b1"]


def test_the_more_important_go_first_then_those_that_can_wait_the_least_then_the_older():
    world, attempts = full_world()
    for name, ttft_s, priority in (("a", 9.0, 0), ("b", 8.0, 0), ("c", 8.0, 0), ("d", TTFT_S, -1)):
        assert submit(world, name, slo(ttft_s, priority=priority)) == []
    begun = []
    for _ in range(4):
        assert end_of(world, attempts.pop(0), 0.01)[-1] == "reserve b0"
        attempts.append(world.attempt)
        begun.append(world.attempt.request_id)
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)), 0.01)
        world.step(world.attempt, 1, node="b0", now=0.01)
    assert begun == ["d/0", "b/0", "c/0", "a/0"]


def test_who_can_wait_no_longer_takes_none_along_that_is_more_important_and_can():
    world, _ = full_world()
    assert submit(world, "important", slo(priority=-1)) == []
    for name, ttft_s in (("late", 5.1), ("early", 5.0)):
        assert submit(world, name, slo(ttft_s)) == []
    assert world.tick(3.0 - 0.26) == []
    assert world.tick(3.0 - 0.24) == ["reserve b0"]
    assert world.attempt.request_id == "early/0"
    assert world.tick(3.06 - 0.24) == ["reserve b0"]
    assert world.attempt.request_id == "late/0"
    assert world.tick(0.6 * TTFT_S - 0.26) == []
    assert world.tick(0.6 * TTFT_S - 0.24) == ["reserve b0"]


def test_who_can_wait_no_longer_goes_where_there_is_room_for_it():
    world = World(())
    for name, max_model_len in (("b0", MAX_TOKENS + len(PROMPT)), ("b1", 100_000)):
        world.attach(name, num_blocks=10_000, max_model_len=max_model_len)
        learn(world, name)
    for index in range(4):
        (said,) = submit(world, f"running-{index}", slo())
        name = said.removeprefix("reserve ")
        world.tell(name, events.first_token(events.sampled(world.attempt, 0, 100)))
    assert submit(world, "important", slo(priority=-1)) == []
    assert submit(world, "long", slo(ttft_s=5.0), token_ids=PROMPT * 4) == []
    assert world.tick(3.0 - 0.24) == ["reserve b1"]
    assert world.attempt.request_id == "long/0"
    assert world.tick(0.6 * TTFT_S - 0.24) == ["reserve b0"]


def full_writer(*readers):
    """d0 writes two answers, as many as keep their limit, and these nodes read."""
    world = World(())
    for name in (*readers, "d0"):
        world.attach(name, num_blocks=10_000, max_model_len=100_000)
        learn(world, name)
    for index in range(2):
        assert submit(world, f"running-{index}", slo()) == ["reserve d0", "prefill p0"]
        world.first(world.attempt)
    return world


def test_they_go_early_enough_that_all_can_be_read():
    """Three prompts of a second each take half as long again, and there is a look every 0.25 s."""
    world = full_writer("p0")
    for name in "abc":
        assert submit(world, name, slo(ttft_s=7.0), token_ids=LONG_PROMPT) == []
    assert world.tick(2.5 - 0.26) == []
    assert world.tick(2.5 - 0.24) == ["reserve d0", "prefill p0"]
    attempt = world.attempt
    assert attempt.request_id == "a/0"
    assert world.tick(7.0 - 1.5 * 2 - 0.24) == [], "the reader has work"
    world.first(attempt, now=3.8)
    assert world.tick(3.8) == ["reserve d0", "prefill p0"]
    assert world.attempt.request_id == "b/0"


def test_two_nodes_that_are_ready_read_them_in_half_the_time():
    world = full_writer("p0", "p1", "p2")
    assert world.drain("p2", 0.0) == []
    for name in "abc":
        assert submit(world, name, slo(ttft_s=5.0), token_ids=LONG_PROMPT) == []
    assert world.tick(5.0 - 1.5 * 3 / 2 - 0.26) == []
    assert world.tick(5.0 - 1.5 * 3 / 2 - 0.24) == ["reserve d0", "prefill p0"]


def test_of_many_that_can_wait_no_longer_some_begin_with_each_look():
    """So that nodes are heard meanwhile."""
    world, _ = full_world(max_live=100)
    for index in range(60):
        assert submit(world, f"r{index}", slo()) == []
    assert world.tick(6.0) == world.tick(6.25) == ["reserve b0"] * 16
    assert world.attempt.request_id == "r31/0"
    told = world.drain("b0", 6.5)
    assert told.count("end NO_PREFILL_WORKER") == 28, "that is nothing to work out"


def test_a_client_may_give_up_one_that_is_held():
    world, (first, _) = full_world()
    assert submit(world, "r", slo()) == []
    assert world.short(world.tracker.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 1.0)) == ["end complete"]
    assert end_of(world, first, 2.0) == ["emit 2:102", "end complete"]
    assert world.tracker.num_open == 1


def test_one_that_is_held_ends_at_its_deadline():
    world, _ = full_world()
    assert submit(world, "r", slo(ttft_s=1000.0)) == []
    assert "end DEADLINE_EXCEEDED" in world.tick(100.5)


@pytest.mark.parametrize(("held_s", "reason"), [(0.0, "DEADLINE_EXCEEDED"), (1.0, "NO_PREFILL_WORKER")])
def test_it_ends_once_where_its_node_drains_and_the_time_of_others_is_over(held_s, reason):
    world, _ = full_world()
    assert submit(world, "r", slo(ttft_s=1000.0), now=held_s) == []
    told = world.drain("b0", 100.0)
    assert told == ["cancel b0", "end DEADLINE_EXCEEDED"] * 2 + [f"end {reason}"]
    assert world.tracker.num_held == 0
    assert world.tick(100.1) == []


def test_who_waits_for_nodes_in_vain_and_who_is_held_end_once_each():
    world, (first, _) = full_world()
    world.tell("b0", events.failed(first, "QUEUE_FULL"))
    assert submit(world, "r", slo(ttft_s=100.0), now=0.5) == []
    assert world.tracker.num_deferred == world.tracker.num_held == 1
    assert world.drain("b0", 2.0) == ["end NO_PREFILL_WORKER"] * 2


def test_one_that_is_held_waits_for_nodes_where_there_are_none_and_is_held_where_they_are_full():
    world, _ = full_world(node_wait_s=5.0)
    assert submit(world, "r", slo()) == []
    world.lose("b0", now=1.0)
    world.tick(1.1)
    assert (world.tracker.num_deferred, world.tracker.num_held) == (3, 0)
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1")
    assert world.tick(2.0) == ["reserve b1"] * 2, "those that have tokens"
    assert (world.tracker.num_deferred, world.tracker.num_held) == (0, 1)
    assert world.tick(0.6 * TTFT_S - 0.26) == []
    assert world.tick(0.6 * TTFT_S - 0.24) == ["reserve b1"]


def test_what_a_node_has_had_is_not_held():
    world, _ = full_world(node_wait_s=5.0)
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1")
    assert submit(world, "r", slo()) == ["reserve b1"]
    assert world.tell("b1", events.failed(world.attempt, "QUEUE_FULL")) == ["reserve b0"]
    assert world.tell("b0", events.failed(world.attempt, "QUEUE_FULL")) == []
    world.lose("b1", now=0.5)
    assert (world.tracker.num_deferred, world.tracker.num_held) == (1, 0)
    assert world.tick(1.1) == ["reserve b0"]


def test_without_a_wait_for_nodes_it_ends_with_them():
    world, _ = full_world(max_restarts=0)
    assert submit(world, "r", slo()) == []
    assert world.lose("b0", now=1.0) == ["end WORKER_LOST", "end NO_PREFILL_WORKER", "end WORKER_LOST"]
    assert world.tracker.num_open == 0


def test_what_would_be_late_still_is_refused_then_where_such_are():
    world, (first, _) = full_world(admits_late=False)
    assert submit(world, "r", slo()) == []
    assert submit(world, "s", slo(), now=0.5) == []
    assert end_of(world, first, 2.0)[-1] == "reserve b0"
    assert world.tick(6.0) == []
    assert world.tick(6.5 - 0.24) == ["end WOULD_BE_LATE"]
