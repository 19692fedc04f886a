"""An API server and control, which tell each other over a stream: the messages, how tokens are joined, and each end of
it."""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager

import pytest

from coordinator import api_server_link
from coordinator.api import messages, remote
from coordinator.api.messages import (
    Situation,
    call_to_wire,
    error_from_wire,
    error_to_wire,
    framed,
    info_from_wire,
    info_to_wire,
    plan_from_wire,
    read_frame,
    situation_from_wire,
    situation_to_wire,
)
from coordinator.api.remote import RemoteControl
from coordinator.api.validation import AnswerPlan, Limits, plan_answers
from coordinator.api_server_link import ApiServerCall, ApiServerLink, ApiServerLost
from coordinator.control.nodes import Capacity
from coordinator.control.request import NOTHING, SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answers import TextOptions
from protos import api_servers_pb2, fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.net.numbering import MessageLost
from serving_core.reasons import DRAINING
from serving_core.requests import Pooling, SamplingParams
from tests import fleet_events as events

# ---- the messages ----

SAMPLING = SamplingParams(
    max_tokens=9, temperature=0.5, stop_token_ids=(1, 2), logit_bias=((3, -1.0),), seed=-(2**63), grammar="g"
)


def sent(message):
    """As it comes out at the other side."""
    return type(message).FromString(message.SerializeToString())


def plan(**changes):
    samplings = (SAMPLING, SamplingParams(**{**SAMPLING_FIELDS, "seed": 2**63 - 1}))
    fields = {"request_id": "r", "prompt": [5, 6], "cache_salt": "s", "samplings": samplings, "text": TextOptions()}
    return AnswerPlan(**{**fields, **changes})


SAMPLING_FIELDS = {name: getattr(SAMPLING, name) for name in SamplingParams.__dataclass_fields__}


@pytest.mark.parametrize(
    ("given", "so_fars"),
    [
        (plan(), [NOTHING, NOTHING]),
        (plan(adapter="a"), [SoFar((7, 8), 0, inference_pb2.FINISH_REASON_STOP, 1.5, False), SoFar(has_ended=True)]),
        (plan(samplings=(SAMPLING,), pooling=Pooling("mean", False, 4)), [NOTHING]),
        (plan(num_behind=5), [NOTHING, NOTHING]),
    ],
)
def test_a_call(given, so_fars):
    asked = inference_pb2.GenerateRequest(text="never told", ttft_ms=0.0, slo_class="c", priority=-1)
    wire = sent(
        call_to_wire(info_to_wire(CallRecord("r"), {}), given, so_fars, asked, number=4, begun_s=1.25, deadline_s=2.5)
    )
    assert plan_from_wire(wire) == (given, so_fars)
    assert (wire.number, wire.begun_s, wire.deadline_s) == (4, 1.25, 2.5)
    assert wire.limits == inference_pb2.GenerateRequest(ttft_ms=0.0, slo_class="c", priority=-1)


def test_what_is_known_of_a_call():
    record = CallRecord("r", "asker", operation="chat", model="m", arrived_s=1.5)
    carrier = {"traceparent": ["00-1"], "tracestate": ["a=1", "b=2"]}
    assert info_from_wire(sent(info_to_wire(record, carrier))) == (record, carrier)
    assert info_from_wire(sent(info_to_wire(record, {}))) == (record, {})


def test_an_error():
    error = error_from_wire(sent(error_to_wire(RequestError("BAD_PARAM", "no", field="x"))))
    assert (error.reason, str(error), error.metadata) == ("BAD_PARAM", "no", {"field": "x"})


@pytest.mark.parametrize(
    "situation",
    [
        Situation(),
        Situation(Capacity(0, 5, None, ()), True, "", frozenset({"a", "b"}), 3),
        Situation(Capacity(9, None, 6, ("x", "y")), False, "why", frozenset(), 0),
    ],
)
def test_the_situation(situation):
    assert situation_from_wire(sent(situation_to_wire(situation))) == situation


def read_all(*pieces):
    async def scenario():
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        found = []
        while (message := await read_frame(reader)) is not None:
            found.append(message)
        return found

    return asyncio.run(scenario())


def test_frames_are_read_as_they_were_written():
    messages = [
        b"",
        b"one",
        api_servers_pb2.ApiServerEvent(hello=api_servers_pb2.ApiServerHello(number=3)).SerializeToString(),
    ]
    stream = b"".join(map(framed, messages))
    assert read_all(stream) == messages
    assert read_all(*(stream[i : i + 1] for i in range(len(stream)))) == messages


def test_a_frame_that_breaks_off_or_is_too_large_is_an_error(monkeypatch):
    for cut in (1, 4, 6):
        with pytest.raises(ConnectionError, match="broke off"):
            read_all(framed(b"hello")[:cut])
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 4)
    with pytest.raises(ConnectionError, match="a message of 5 bytes, the limit is 4"):
        read_all(framed(b"hello"))


# ---- control's end: several tokens at once where the API server is behind, and never without end ----

ATTEMPT = fleet_pb2.Attempt(request_id="r/0", epoch=7)


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setattr(api_server_link, "BEAT_S", 0.01)
    return ApiServerLink(1)


def call_of(link, number=5, num_answers=2):
    return ApiServerCall(link, number, num_answers, CallRecord("r"))


def sampled(*token_ids, first_index=0):
    return [events.sampled(ATTEMPT, first_index + i, token_id) for i, token_id in enumerate(token_ids)]


def next_batch(link):
    async def bounded():
        async with asyncio.timeout(60):
            return await link.next()

    return asyncio.run(bounded())


def told(batch):
    """Tokens by call and answer, in the order in which an API server takes them."""
    found = defaultdict(list)
    for run in batch.runs:
        for number, index, token_id in zip(run.numbers, run.indexes, run.token_ids, strict=True):
            found[number, index].append(token_id)
        for each in run.others:
            found[each.number, each.index] += [token.token_id for token in each.tokens]
    return found


def test_steps_that_wait_for_the_api_server_travel_together(link):
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
    error = api_servers_pb2.ApiServerError(reason=DRAINING, message="going", metadata={"field": "x"})
    assert list(batch.admitted) == [api_servers_pb2.Admitted(number=5)]
    assert told(batch) == {(5, 0): [8, 9]}
    complete = inference_pb2.Complete(completion_tokens=2)
    assert list(batch.ended) == [api_servers_pb2.AnswerEnded(number=5, complete=complete, embedding=b"1234")]
    assert list(batch.failed) == [api_servers_pb2.CallEnded(number=5, error=error)]


def test_a_stop_string_of_the_api_server_is_how_the_answer_has_ended(link):
    call = call_of(link)
    call.answers[1].stopped("ab", 4)
    call.answers[1].end(inference_pb2.Complete(finish_reason=inference_pb2.FINISH_REASON_LENGTH, completion_tokens=6))
    (ended,) = next_batch(link).ended
    assert (ended.index, ended.complete.completion_tokens, ended.complete.matched_stop_str) == (1, 4, "ab")
    assert ended.complete.finish_reason == inference_pb2.FINISH_REASON_STOP


def test_with_nothing_to_say_the_api_server_is_asked_for_a_sign(link):
    assert next_batch(link) == api_servers_pb2.ControlBatch()


def test_an_api_server_that_takes_nothing_is_lost(link, monkeypatch):
    next_batch(link)
    monkeypatch.setattr(api_server_link, "TAKE_DEADLINE_S", 0.01)
    with pytest.raises(ApiServerLost, match=r"taken nothing for 0\.01 s"):
        next_batch(link)


def test_what_a_api_server_leaves_is_bounded(link, monkeypatch):
    monkeypatch.setattr(api_server_link, "MAX_UNTAKEN_TOKENS", 3)
    call_of(link).answers[0].add(sampled(1, 2, 3, 4), None)
    with pytest.raises(ApiServerLost, match="4 tokens are untaken, the limit is 3"):
        next_batch(link)


def test_after_the_end_comes_nothing_but_what_was_said_before(link):
    call_of(link).answers[0].add(sampled(1), None)
    link.end()
    assert told(next_batch(link)) == {(5, 0): [1]}
    link.taken(0.0)
    assert next_batch(link) is None


def test_figures_of_each_api_server(link):
    other = ApiServerLink(2)
    other.calls[5] = call_of(other)
    link.taken(1.5)
    figures = {figure.name: figure.values for figure in api_server_link.api_server_figures([other, link])}
    assert figures == {
        "api_server_calls": [({"api_server": "1"}, 0), ({"api_server": "2"}, 1)],
        "api_server_cpu_seconds": [({"api_server": "1"}, 1.5), ({"api_server": "2"}, 0.0)],
    }


# ---- the API server's end, of a control that answers nothing ----

DEADLINE_S = 60.0
LIMITS = Limits(("m",), 260, 1000, 20, 900, 900)


@asynccontextmanager
async def api_server(tmp_path, said=b""):
    """Attached to a control that takes everything and says nothing else."""
    taken = asyncio.Event()

    async def control(reader, writer):
        writer.write(said)
        while await reader.read(2**16):
            taken.set()
        writer.close()

    server = await asyncio.start_unix_server(control, tmp_path / "control.sock")
    made = RemoteControl(str(tmp_path / "control.sock"), number=1, stream_interval=1)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await taken.wait()
            yield made, running
    finally:
        running.cancel()
        await asyncio.wait([running])
        server.close()


def asked(control):
    """A call that begins."""
    request = inference_pb2.GenerateRequest(request_id="r", sampling_params=inference_pb2.SamplingParams(max_tokens=2))
    plan = plan_answers(request, [1, 2], LIMITS, inference_pb2.SamplingParams())
    return control.begin(plan, [], request, deadline_s=1e9, record=CallRecord("r"))


async def test_a_call_that_is_not_admitted_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ADMIT_DEADLINE_S", 0.05)
    async with api_server(tmp_path) as (control, _):
        for _ in range(2):  # the id is free again
            with pytest.raises(RequestError, match=r"control has not answered within 0.05 s"):
                await asked(control)


async def test_an_api_server_whose_control_has_lost_a_batch_ends(tmp_path):
    second = api_servers_pb2.ControlBatch(number=2)
    async with api_server(tmp_path, framed(second.SerializeToString())) as (_, running):
        with pytest.raises(MessageLost, match="message 1 was lost"):
            await running


async def test_nothing_is_kept_of_a_client_that_leaves_before(tmp_path):
    async with api_server(tmp_path) as (control, _):
        calls = [asyncio.create_task(asked(control)) for _ in range(2)]  # of one id: which may live control says
        await asyncio.sleep(0)
        assert control.num_calls == 2
        for call in calls:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert control.num_calls == 0
        assert not control._by_generation  # nothing tells of it: what stayed there would only take memory


async def test_an_api_server_ends_whose_control_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MAX_UNSENT_EVENTS", 3)
    async with api_server(tmp_path) as (control, running):
        for _ in range(4):
            control.count_call("h", "GET", 200, 0.1)  # all at once: none has left yet
        await running
