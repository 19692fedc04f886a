"""The spans of a call, from what the tracker saw of it: worked out by hand."""

import itertools

import pytest

from coordinator.control.calls import MAX_MOVES, AnswerRecord, CallRecord, answer_index
from coordinator.control.timeline import MAX_MARKS, Mark, Phase, Timeline
from coordinator.traces.spans import call_span
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from tests import fleet_events as events
from tests.unit.coordinator.test_moves import MovingWorld
from tests.unit.coordinator.tracker_kit import World


def record(world, **known):
    """What is written down of a call whose one answer has ended in this world."""
    end = world.end_of_answer
    answer = AnswerRecord(answer_index(end.request_id)[1], end.outcome, end.timeline, end.ended_s)
    call = CallRecord("r", operation="chat", model="m", answers=[answer], **known)
    for move in world.moves:
        call.moved(move)
    return call


def told(span):
    """A span in short, with those below."""
    about = {key.removeprefix("splitserve."): value for key, value in span.attributes.items()}
    below = [told(child) for child in span.children]
    return (span.name, span.start_s, span.end_s, about, *([span.failure] if span.failure else []), *below)


def phase(name, start_s, end_s, **about):
    return (name, start_s, end_s, about)


def attempt(number, start_s, end_s, reader, writer, *below, answer=0):
    about = {"answer": answer, "attempt": number, "prefill_node": reader, "decode_node": writer}
    return ("attempt", start_s, end_s, about, *below)


def live(world):
    """An answer from 10 to 18, which goes through every phase."""
    world.submit(now=10.0)
    attempt = world.attempt
    world.first(attempt, now=13.0, prefill_s=1.0)
    world.tell("d0", events.reserved(attempt), 14.0)
    world.tell("d0", events.committed(attempt, num_bytes=70), 15.0)
    world.step(attempt, 1, now=17.0, step_s=1.0)
    world.step(attempt, 2, events.STOP, now=18.0)
    return world


def test_every_phase_is_below_its_attempt():
    call = record(live(World()), arrived_s=10.0, begun_s=10.5, num_prompt_tokens=3)
    root = call_span(call, 18.25)
    assert (root.name, root.start_s, root.end_s, root.failure) == ("chat m", 10.0, 18.25, "")
    assert [told(child) for child in root.children] == [
        phase("accept", 10.0, 10.5),
        attempt(
            1, 10.5, 18.0, "p0", "d0",
            phase("prefill queue", 10.5, 12.0, node="p0"),
            phase("prefill", 12.0, 13.0, node="p0"),
            phase("wait for credit", 13.0, 14.0, from_node="p0", to_node="d0"),
            phase("transfer", 14.0, 15.0, from_node="p0", to_node="d0"),
            phase("decode queue", 15.0, 16.0, node="d0"),
            phase("decode", 16.0, 18.0, node="d0"),
        ),
    ]  # fmt: skip


def test_the_call_tells_what_conventions_have_names_for():
    sampling = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=7)
    call = record(live(World()), arrived_s=10.0, begun_s=10.5, num_prompt_tokens=3, sampling=sampling, num_answers=2)
    assert call_span(call, 18.25).attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "splitserve",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 3.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "splitserve.request_id": "r",
        "splitserve.kv_bytes": 70,
        "splitserve.restarts": 0,
        "splitserve.moves": 0,
    }


def test_a_restart_is_another_attempt():
    world = World(nodes=("p0", "d0", "d1"))
    world.submit(now=0.0)
    world.first(world.attempt, now=2.0, prefill_s=1.0)
    world.lose("d0", now=3.0, has_died=True)
    assert world.tell("p0", events.first_token(events.sampled(world.attempt, 1, 9), 0.5), 5.0) == [
        "emit 1:9",
        "begun d1",
    ]
    world.step(world.attempt, 2, events.LENGTH, node="d1", now=6.0)
    root = call_span(record(world, begun_s=0.0), 6.0)
    first, second = [told(child) for child in root.children][1:]
    about = attempt(1, 0.0, 3.0, "p0", "d0")
    assert first == (
        *about, "WORKER_LOST",
        phase("prefill queue", 0.0, 1.0, node="p0"),
        phase("prefill", 1.0, 2.0, node="p0"),
        phase("wait for credit", 2.0, 3.0, from_node="p0", to_node="d0"),
    )  # fmt: skip
    assert second == attempt(
        2, 3.0, 6.0, "p0", "d1",
        phase("prefill queue", 3.0, 4.5, node="p0"),
        phase("prefill", 4.5, 5.0, node="p0"),
        phase("wait for credit", 5.0, 6.0, from_node="p0", to_node="d1"),
    )  # fmt: skip
    assert (root.failure, root.attributes["splitserve.restarts"]) == ("", 1)


def test_an_attempt_on_the_same_nodes_is_another_one_all_the_same():
    world = World(nodes=("p0", "d0"))
    world.submit(now=0.0)
    world.tell("d0", events.failed(world.attempt, "TRANSFER_FAILED"), 1.0)
    world.first(world.attempt, finish_reason=events.LENGTH, now=3.0, prefill_s=1.0)
    root = call_span(record(world, begun_s=0.0), 3.0)
    assert [(span.attributes["splitserve.attempt"], span.failure) for span in root.children[1:]] == [
        (1, "WORKER_LOST"), (2, ""),
    ]  # fmt: skip


def test_a_wait_for_nodes_is_nobodys_attempt():
    world = World(nodes=(), node_wait_s=60.0)
    world.submit(now=1.0)
    world.attach("b0")
    world.tick(3.0)
    token = events.sampled(world.attempt, 0, 100, events.STOP)
    world.tell("b0", events.first_token(token, prefill_s=0.5), 4.0)
    root = call_span(record(world, arrived_s=1.0, begun_s=1.5), 4.0)
    assert [told(child) for child in root.children[1:]] == [
        phase("wait for a node", 1.5, 3.0, answer=0),
        attempt(
            1, 3.0, 4.0, "b0", "b0",
            phase("prefill queue", 3.0, 3.5, node="b0"),
            phase("prefill", 3.5, 4.0, node="b0"),
        ),
    ]  # fmt: skip


def test_a_move_is_part_of_its_attempt():
    world = MovingWorld()
    world.migrate()
    world.commit(now=4.0, num_bytes=50)
    world.step(world.source, 2, now=4.5)
    world.end()
    [_, only] = call_span(record(world, begun_s=0.0), 9.0).children
    assert [told(child) for child in only.children][-3:] == [
        phase("decode", 0.0, 4.0, node="d0"),
        phase("decode", 4.0, 9.0, node="d1"),
        phase("move", 1.0, 4.0, from_node="d0", to_node="d1", outcome="moved", kv_bytes=50),
    ]


def test_a_move_that_fails_says_so():
    world = MovingWorld()
    world.migrate()
    world.tell("d1", events.failed(world.target, "TRANSFER_FAILED"), 3.0)
    world.step(world.source, 2, events.LENGTH, now=5.0)
    [_, only] = call_span(record(world, begun_s=0.0), 5.0).children
    [move] = [span for span in only.children if span.name == "move"]
    assert (move.start_s, move.end_s, move.failure) == (1.0, 3.0, "failed")


@pytest.mark.parametrize("failure", ["", "SLOW_READER"])
def test_an_answer_that_fails_is_the_failure_of_its_call(failure):
    world = World()
    world.submit(now=0.0)
    world.first(world.attempt, now=2.0)
    world.short(world.tracker.fail("r/0", RequestError("SLOW_READER", "it reads nothing"), 3.0))
    root = call_span(record(world, begun_s=0.0, failure=failure), 3.0)
    assert root.failure == "SLOW_READER"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 1


def test_a_call_that_is_refused_has_a_trace_too():
    call = CallRecord("r", operation="text_completion", model="m" * 1000, arrived_s=1.0, failure="PROMPT_TOO_LONG")
    root = call_span(call, 1.5)
    assert (root.name, root.failure) == (f"text_completion {'m' * 128}", "PROMPT_TOO_LONG")
    assert [told(child) for child in root.children] == [phase("accept", 1.0, 1.5)]
    assert root.attributes.keys() == {
        "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "splitserve.request_id",
    }  # fmt: skip


def test_what_is_kept_of_a_long_life_is_bounded():
    timeline = Timeline(0.0)
    for second in range(1, 1000):
        timeline.placed(float(second), "p0", "d0", begins=True)
        timeline.failed("WORKER_LOST")
    spans = list(timeline.spans(1000.0))
    assert len(spans) == MAX_MARKS
    assert len(timeline.failures) == MAX_MARKS
    assert spans[0] == (Mark(0.0, Phase.PREFILL_QUEUE), 1.0)
    assert spans[-1][1] == 1000.0
    assert all(end_s == following[0].at_s for (_, end_s), following in itertools.pairwise(spans))
    world = MovingWorld()
    world.migrate()
    world.commit()
    call = CallRecord("r")
    for _ in range(1000):
        call.moved(world.moves[0])
    assert len(call.moves) == MAX_MOVES
