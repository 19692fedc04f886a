"""The tracker where one node reads the prompt and writes the answer: no ticket, no transfer."""

import pytest

from protos import inference_pb2
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import PROMPT, World


@pytest.fixture
def world():
    return World(nodes=("b0", "b1"))


def first(world, name="b0", index=0, finish_reason=0, now=0.0, **fields):
    token = events.sampled(world.attempt, index, 100 + index, finish_reason)
    return world.tell(name, events.first_token(token, **fields), now)


def test_the_life_of_a_request_on_one_node_and_its_timeline(world):
    assert world.submit(now=10.0) == ["reserve b0"]
    attempt = world.attempt
    assert (world.is_local, world.prefill_tp_size) == (True, 0)
    assert [list(job.token_ids) for job in world.jobs] == [PROMPT]
    assert world.account("b0") == (3, 3, 1, 0)
    assert first(world, now=12.0, prefill_s=0.5, num_cached_tokens=2) == ["emit 0:100"]
    assert world.account("b0") == (0, 4, 1, 0)
    assert world.step(attempt, 1, now=13.0, step_s=0.25, node="b0") == ["emit 1:101"]
    assert world.step(attempt, 2, events.STOP, now=14.0, node="b0") == ["emit 2:102", "end complete"]
    assert world.outcome == inference_pb2.Complete(
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        matched_token_id=102,
        prompt_tokens=3,
        completion_tokens=3,
        cached_tokens=2,
        timeline=inference_pb2.Timeline(
            prefill_queue_s=1.5, prefill_s=0.5, decode_queue_s=0.75, decode_s=1.25, e2e_s=4.0, ttft_s=2.0,
            prefill_node="b0", decode_node="b0",
        ),
    )  # fmt: skip
    assert world.tracker.num_open == 0
    assert world.account("b0") == (0, 0, 0, 0)


def test_an_answer_of_one_token_is_over_with_the_first(world):
    world.submit()
    assert first(world, finish_reason=events.LENGTH) == ["emit 0:100", "end complete"]
    assert world.tracker.num_open == 0


def test_what_belongs_to_a_transfer_is_not_expected_and_does_nothing(world):
    world.submit()
    attempt = world.attempt
    for event in (events.reserved(attempt), events.committed(attempt, 5, 6), events.transferred(attempt)):
        assert world.tell("b0", event) == []
    first(world)
    assert world.lose("b0") == ["reserve b1"]  # it is still the node's
    assert first(world, "b1", index=1, finish_reason=events.LENGTH) == ["emit 1:101", "end complete"]
    assert (world.outcome.kv_bytes, world.outcome.kv_bytes_saved) == (0, 0)


@pytest.mark.parametrize("num_steps", [None, 0, 2])
def test_a_lost_node_moves_the_request_in_every_phase(world, num_steps):
    world.submit()
    attempt, answered = world.attempt, []
    if num_steps is not None:
        first(world)
        answered = [100 + index for index in range(num_steps + 1)]
        for index in range(1, num_steps + 1):
            world.step(attempt, index, node="b0")
    assert world.lose("b0", now=1.0) == ["reserve b1"]
    assert world.is_local
    assert list(world.jobs[-1].token_ids) == [*PROMPT, *answered]
    index = len(answered)
    assert first(world, "b1", index=index, now=2.0) == [f"emit {index}:{100 + index}"]
    last = world.step(world.attempt, index + 1, events.LENGTH, now=3.0, node="b1")
    assert last == [f"emit {index + 1}:{101 + index}", "end complete"]
    timeline = world.outcome.timeline
    assert (timeline.num_restarts, timeline.prefill_node, timeline.decode_node) == (1, "b1", "b1")
    assert world.tracker.num_open == 0


def test_a_node_that_does_not_know_the_request_loses_it(world):
    world.submit()
    assert world.tell("b0", events.cancelled(world.attempt)) == ["reserve b1"]


def test_a_node_is_asked_once_to_let_go(world):
    world.submit()
    attempt = world.attempt
    ended = world.tracker.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 1.0)
    assert world.short(ended) == ["cancel b0", "end complete"]
    assert world.tracker.num_open == 1
    world.tell("b0", events.cancelled(attempt))
    assert world.tracker.num_open == 0


def test_a_failure_ends_the_request_and_nothing_is_left_to_cancel(world):
    world.submit()
    assert world.tell("b0", events.failed(world.attempt, "ENGINE_ERROR")) == ["end ENGINE_ERROR"]
    assert world.tracker.num_open == 0


def test_prompts_go_where_fewer_tokens_wait_to_be_computed(world):
    assert world.submit("a/0") == ["reserve b0"]
    assert world.submit("b/0") == ["reserve b1"]
    assert world.submit("c/0", token_ids=[1]) == ["reserve b0"]
    assert world.submit("d/0") == ["reserve b1"]


def test_the_writer_reads_when_the_last_other_reader_is_lost_and_no_more_when_there_is_one():
    world = World(nodes=("p0", "b0"))
    assert world.submit("a/0") == ["reserve b0", "prefill p0"]  # no rate is known yet
    old = world.attempt
    assert world.lose("p0") == ["cancel b0", "reserve b0"]
    assert world.is_local
    assert first(world) == ["emit 0:100"]
    world.tell("b0", events.cancelled(old))
    world.attach("p0")
    assert world.submit("b/0") == ["reserve b0", "prefill p0"]


def test_it_learns_what_a_handover_takes():
    """Moving takes 1 s; p0 has 0.3 s to compute, b0 0.6 s."""
    world = World(nodes=("p0", "b0"))
    for name, rate in (("p0", 10.0), ("b0", 5.0)):
        beat = events.heartbeat(prefill_tokens_per_s=rate)
        world.registry.heartbeat(world.registry.find(name), beat.heartbeat, 0.0)
    for number in range(3):
        assert world.submit(f"{number}/0", now=number) == ["reserve b0", "prefill p0"]
        world.tell("b0", events.reserved(world.attempt), number)
        world.first(world.attempt, now=number + 0.25)
        world.step(world.attempt, 1, events.LENGTH, now=number + 1.5, node="b0", step_s=0.25)
    assert world.submit("3/0", now=4.0) == ["reserve b0"]
    first(world, finish_reason=events.LENGTH, now=5.0)
    assert world.submit("4/0", now=100.0) == ["reserve b0", "prefill p0"]  # what is old counts no more
