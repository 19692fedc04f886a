"""What control says to a door: several tokens of an answer at once where the door is behind, and never without end."""

import asyncio
from collections import defaultdict

import pytest

from coordinator import door_link
from coordinator.control.calls import CallRecord
from coordinator.door_link import DoorCall, DoorLink, DoorLost
from protos import doors_pb2, fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import DRAINING
from tests import fleet_events as events

ATTEMPT = fleet_pb2.Attempt(request_id="r/0", epoch=7)


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setattr(door_link, "BEAT_S", 0.01)
    return DoorLink(1)


def call_of(link, number=5, num_answers=2):
    return DoorCall(link, number, num_answers, CallRecord("r"))


def sampled(*token_ids, first_index=0):
    return [events.sampled(ATTEMPT, first_index + i, token_id) for i, token_id in enumerate(token_ids)]


def next_batch(link):
    async def bounded():
        async with asyncio.timeout(60):
            return await link.next()

    return asyncio.run(bounded())


def told(batch):
    """Tokens by call and answer, in the order in which a door takes them."""
    found = defaultdict(list)
    for run in batch.runs:
        for number, index, token_id in zip(run.numbers, run.indexes, run.token_ids, strict=True):
            found[number, index].append(token_id)
        for each in run.others:
            found[each.number, each.index] += [token.token_id for token in each.tokens]
    return found


def test_steps_that_wait_for_the_door_travel_together(link):
    call = call_of(link)
    call.answers[0].add(sampled(8), 3)
    assert told(next_batch(link)) == {(5, 0): [8]}
    for index, token_id in enumerate((9, 10), start=1):
        call.answers[0].add(sampled(token_id, first_index=index), None)
        call.answers[1].add(sampled(token_id + 10, first_index=index), None)
    link.taken(0.0)
    batch = next_batch(link)
    assert told(batch) == {(5, 0): [9, 10], (5, 1): [19, 20]}
    (run,) = batch.runs
    assert not run.others


def test_a_token_with_more_to_tell_is_told_whole_and_in_its_place(link):
    """What scores its prompt has a first token of which there is more to tell, and plain ones behind it."""
    answer, other = call_of(link).answers
    answer.add(sampled(8), None)
    scored = sampled(9, first_index=1)
    scored[0].logprob = -0.5
    answer.add(scored, None)
    other.add(sampled(7), None)
    answer.add(sampled(10, first_index=2), None)
    last = sampled(11, first_index=3)
    last[0].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    answer.add(last, None)
    batch = next_batch(link)
    assert told(batch) == {(5, 0): [8, 9, 10, 11], (5, 1): [7]}
    others = [token for run in batch.runs for each in run.others for token in each.tokens]
    assert [token.HasField("logprob") for token in others] == [True, False]
    assert others[1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert not any(token.HasField("attempt") for token in others)


def test_the_first_tokens_say_how_much_was_cached(link):
    call = call_of(link)
    call.answers[0].add(sampled(8), 0)
    call.answers[1].add(sampled(8), None)
    (run,) = next_batch(link).runs
    (first,) = run.others
    assert (first.index, first.HasField("num_cached_tokens")) == (0, True)
    assert list(run.indexes) == [1]


def test_an_answer_is_told_whole_in_one_batch(link):
    call = call_of(link)
    link.admitted(5, None)
    call.answers[0].add(sampled(8, 9), 0)
    call.embedding = b"1234"
    call.answers[0].end(inference_pb2.Complete(completion_tokens=2))
    call.fail(RequestError(DRAINING, "going", field="x"))
    batch = next_batch(link)
    error = doors_pb2.DoorError(reason=DRAINING, message="going", metadata={"field": "x"})
    assert list(batch.admitted) == [doors_pb2.Admitted(number=5)]
    assert told(batch) == {(5, 0): [8, 9]}
    complete = inference_pb2.Complete(completion_tokens=2)
    assert list(batch.ended) == [doors_pb2.AnswerEnded(number=5, complete=complete, embedding=b"1234")]
    assert list(batch.failed) == [doors_pb2.CallEnded(number=5, error=error)]


def test_a_stop_string_of_the_door_is_how_the_answer_has_ended(link):
    call = call_of(link)
    call.answers[1].stopped("ab", 4)
    call.answers[1].end(inference_pb2.Complete(finish_reason=inference_pb2.FINISH_REASON_LENGTH, completion_tokens=6))
    (ended,) = next_batch(link).ended
    assert (ended.index, ended.complete.completion_tokens, ended.complete.matched_stop_str) == (1, 4, "ab")
    assert ended.complete.finish_reason == inference_pb2.FINISH_REASON_STOP


def test_with_nothing_to_say_the_door_is_asked_for_a_sign(link):
    assert next_batch(link) == doors_pb2.ControlBatch()


def test_a_door_that_takes_nothing_is_lost(link, monkeypatch):
    next_batch(link)
    monkeypatch.setattr(door_link, "TAKE_DEADLINE_S", 0.01)
    with pytest.raises(DoorLost, match=r"taken nothing for 0\.01 s"):
        next_batch(link)


def test_what_a_door_leaves_is_bounded(link, monkeypatch):
    monkeypatch.setattr(door_link, "MAX_UNTAKEN_TOKENS", 3)
    call_of(link).answers[0].add(sampled(1, 2, 3, 4), None)
    with pytest.raises(DoorLost, match="4 tokens are untaken, the limit is 3"):
        next_batch(link)


def test_after_the_end_comes_nothing_but_what_was_said_before(link):
    call_of(link).answers[0].add(sampled(1), None)
    link.end()
    assert told(next_batch(link)) == {(5, 0): [1]}
    link.taken(0.0)
    assert next_batch(link) is None


def test_figures_of_each_door(link):
    other = DoorLink(2)
    other.calls[5] = call_of(other)
    link.taken(1.5)
    figures = {figure.name: figure.values for figure in door_link.door_figures([other, link])}
    assert figures == {
        "door_calls": [({"door": "1"}, 0), ({"door": "2"}, 1)],
        "door_cpu_seconds": [({"door": "1"}, 1.5), ({"door": "2"}, 0.0)],
    }
