"""An API server and the coordinator, which tell each other over a stream: the messages, what is in one batch, each end
of the stream, and calls that go on at another coordinator."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from coordinator.api import remote
from coordinator.api.generation import Generation
from coordinator.api.messages import (
    Situation,
    call_to_wire,
    error_from_wire,
    error_to_wire,
    info_from_wire,
    info_to_wire,
    plan_from_wire,
    situation_from_wire,
    situation_to_wire,
)
from coordinator.api.remote import RemoteControl
from coordinator.api.validation import Limits, RequestPlan, plan_request
from coordinator.api_server_service import MAX_BATCH_TOKENS, ApiServerLink, TokenOutput, api_server_figures
from coordinator.control.instructions import chunk_of
from coordinator.control.nodes import Capacity
from coordinator.control.request import NOTHING, SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answers import AnswerText, TextOptions
from protos import api_servers_pb2, api_servers_pb2_grpc, fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.net.channels import API_SERVER_OPTIONS
from serving_core.net.numbering import MessageLost, Numbering
from serving_core.reasons import DRAINING, NO_PREFILL_WORKER, QUEUE_FULL
from serving_core.requests import Pooling, SamplingParams
from serving_core.version import VERSION
from tests import fleet_events as events
from tests.scripted_nodes import cluster

DEADLINE_S = 60.0

# ---- the messages ----

SAMPLING = SamplingParams(
    max_tokens=9, temperature=0.5, stop_token_ids=(1, 2), logit_bias=((3, -1.0),), seed=2**63 - 1, grammar="g"
)
SAMPLING_FIELDS = {name: getattr(SAMPLING, name) for name in SamplingParams.__dataclass_fields__}


def sent(message):
    """As it comes out at the other side."""
    return type(message).FromString(message.SerializeToString())


def plan(**changes):
    samplings = (SAMPLING, SamplingParams(**{**SAMPLING_FIELDS, "seed": -(2**63)}))  # the seed after the greatest
    fields = {"request_id": "r", "prompt": [5, 6], "cache_salt": "s", "samplings": samplings, "text": TextOptions()}
    return RequestPlan(**{**fields, **changes})


@pytest.mark.parametrize(
    ("given", "so_fars"),
    [
        (plan(), [NOTHING, NOTHING]),
        (plan(adapter="a"), [SoFar((7, 8), 0, inference_pb2.FINISH_REASON_STOP, 1.5, False), SoFar(has_ended=True)]),
        (plan(samplings=(SAMPLING,), pooling=Pooling("mean", False, 4)), [NOTHING]),
        (plan(num_behind=5, call_number=2), [NOTHING, NOTHING]),
    ],
)
def test_a_call(given, so_fars):
    asked = inference_pb2.GenerateRequest(text="never told", ttft_ms=0.0, slo_class="c", priority=-1)
    asked.sampling_params.stop.append("never told")
    wire = sent(call_to_wire("17", given, asked, so_fars))
    assert plan_from_wire(wire) == (given, so_fars)
    request = wire.request
    assert (wire.id, request.ttft_ms, request.slo_class, request.priority) == ("17", 0.0, "c", -1)
    assert request.HasField("ttft_ms")
    assert not request.HasField("tpot_ms")
    assert b"never told" not in wire.SerializeToString()


def test_what_is_known_of_a_call():
    """Ages travel: the clocks of two machines differ."""
    record = CallRecord("r", "asker", operation="chat", model="m", arrived_s=1.5)
    carrier = {"traceparent": ["00-1"], "tracestate": ["a=1", "b=2"]}
    wire = sent(info_to_wire(record, carrier, 2.0))
    assert wire.age_s == 0.5
    record.arrived_s = 99.5
    assert info_from_wire(wire, 100.0) == (record, carrier)
    assert info_from_wire(sent(info_to_wire(record, {}, 100.0)), 100.0) == (record, {})


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


# ---- the coordinator's end: what has come since the batch before is one batch ----

ATTEMPT = fleet_pb2.Attempt(request_id="r/0", epoch=7)


@pytest.fixture
def link():
    return ApiServerLink("1")


def outputs_of(link, call_id="5", num_outputs=2):
    generation = Generation("r", num_outputs, wake=link.wake(call_id), deliver=link.deliver(call_id))
    return [TokenOutput(generation, index, 0) for index in range(num_outputs)]


def sampled(*token_ids, first_index=0):
    return [events.sampled(ATTEMPT, first_index + i, token_id) for i, token_id in enumerate(token_ids)]


def next_batch(link):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await link.next()

    return asyncio.run(bounded())


def told(batch):
    """Chunks by call and sequence."""
    plain = zip(batch.calls, batch.outputs, batch.indexes, batch.token_ids, strict=True)
    return [(str(call), index, first, [token_id]) for call, index, first, token_id in plain] + [
        (each.request_id, each.index, each.chunk.first_token_index, list(each.chunk.token_ids))
        for each in batch.responses
        if each.HasField("chunk")
    ]


def test_steps_that_wait_for_the_api_server_travel_together(link):
    first, second = outputs_of(link)
    first.add(chunk_of(sampled(8), 3))
    assert told(next_batch(link)) == [("5", 0, 0, [8])]
    (other,) = outputs_of(link, "6", 1)
    for index, token_id in enumerate((9, 10), start=1):
        first.add(chunk_of(sampled(token_id, first_index=index), None))
    other.add(chunk_of(sampled(7), None))
    second.add(chunk_of(sampled(19, 20), None))
    assert told(next_batch(link)) == [
        *(("5", 0, 1, [9]), ("5", 0, 2, [10]), ("6", 0, 0, [7])),
        *(("5", 1, 0, [19]), ("5", 1, 1, [20])),
    ]
    second.end(inference_pb2.Complete(completion_tokens=2))
    assert [each.request_id for each in next_batch(link).responses] == ["5"]


def test_nothing_overtakes_a_message_that_is_more_than_its_tokens(link):
    first, second = outputs_of(link)
    first.add(chunk_of(sampled(8), 3))
    second.add(chunk_of(sampled(9), None))
    first.add(chunk_of(sampled(10, first_index=1), None))
    assert told(next_batch(link)) == [("5", 0, 0, [8]), ("5", 1, 0, [9]), ("5", 0, 1, [10])]


def test_a_token_is_told_with_all_that_belongs_to_it(link):
    output, _ = outputs_of(link)
    scored = sampled(9)
    scored[0].logprob = -0.5
    scored[0].top.add(token_id=4, logprob=-0.25)
    scored[0].prompt_logprobs.add(token_id=3, logprob=-1.0)
    output.add(chunk_of(scored, 2))
    last = sampled(11, first_index=1)
    last[0].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    output.add(chunk_of(last, None))
    (response,) = next_batch(link).responses
    top = inference_pb2.TopLogprob(token_id=4, logprob=-0.25)
    assert response.chunk == inference_pb2.Chunk(
        token_ids=[9, 11],
        logprobs=[inference_pb2.TokenLogprobs(token_id=9, logprob=-0.5, top=[top])],
        prompt_logprobs=[inference_pb2.TokenLogprobs(token_id=3, logprob=-1.0)],
        cached_tokens=2,
        finish_reason=inference_pb2.FINISH_REASON_LENGTH,
    )


def test_a_call_is_told_whole_in_one_batch(link):
    output, other = outputs_of(link)
    link.begun("5")
    output.add(chunk_of(sampled(8, 9), 0))
    output.end(inference_pb2.Complete(completion_tokens=2, embedding=b"1234"))
    other.generation.fail(RequestError(DRAINING, "going", field="x"))
    batch = next_batch(link)
    assert list(batch.begun) == ["5"]
    assert told(batch) == [("5", 0, 0, [8, 9])]
    assert batch.responses[-1].complete == inference_pb2.Complete(completion_tokens=2, embedding=b"1234")
    error = api_servers_pb2.CallError(reason=DRAINING, message="going", metadata={"field": "x"})
    assert list(batch.failed) == [api_servers_pb2.FailedCall(id="5", error=error)]


def test_what_an_api_server_leaves_is_bounded(link):
    output, _ = outputs_of(link)
    for other in outputs_of(link, "6", 64):
        other.add(chunk_of(sampled(*range(MAX_BATCH_TOKENS // 64)), None))
    output.add(chunk_of(sampled(*range(2048)), None))  # for both outputs of the call
    with pytest.raises(RequestError, match="the reader is 2049 tokens behind, the limit is 2048"):
        output.add(chunk_of(sampled(1, first_index=2048), None))
    assert len(next_batch(link).token_ids) == MAX_BATCH_TOKENS + 2048
    output.add(chunk_of(sampled(1, first_index=2049), None))


def test_a_lost_token_is_not_passed_over(link):
    output, _ = outputs_of(link)
    output.add(chunk_of(sampled(8), None))
    with pytest.raises(RequestError, match="token 2 came in place of token 1"):
        output.add(chunk_of(sampled(9, first_index=2), None))


def test_after_the_end_comes_nothing_but_what_was_said_before(link):
    outputs_of(link)[0].add(chunk_of(sampled(1), None))
    link.end()
    assert told(next_batch(link)) == [("5", 0, 0, [1])]
    assert next_batch(link) is None


def test_figures_of_each_api_server(link):
    other = ApiServerLink("2")
    other.calls["5"] = object()
    link.cpu_s = 1.5
    figures = {figure.name: figure.values for figure in api_server_figures([other, link])}
    assert figures == {
        "api_server_calls": [({"api_server": "1"}, 0), ({"api_server": "2"}, 1)],
        "api_server_cpu_seconds": [({"api_server": "1"}, 1.5), ({"api_server": "2"}, 0.0)],
    }


# ---- the API server's end, of a coordinator that the test speaks for ----

LIMITS = Limits(("m",), 260, 1000, 20, 900, 900)


class Coordinator(api_servers_pb2_grpc.ApiServersServicer):
    """Serves one API server at a socket; each attachment is a list of events and a queue of batches."""

    def __init__(self):
        self.heard = asyncio.Queue()
        self.sheds = asyncio.Queue()
        self._batches = asyncio.Queue()
        self._number = 0

    async def Attach(self, events_of, _context):
        self._number = 0
        reading = asyncio.create_task(self._read(events_of))
        try:
            while (batch := await self._batches.get()) is not None:
                yield batch
        finally:
            reading.cancel()

    async def _read(self, events_of):
        async for event in events_of:
            for shed in event.heartbeat.sheds:
                self.sheds.put_nowait(shed)
            if not event.HasField("heartbeat"):
                self.heard.put_nowait(event)

    def send(self, number=None, **fields):
        self._number = number or self._number + 1
        self._batches.put_nowait(api_servers_pb2.ApiServerBatch(number=self._number, **fields))

    def leave(self):
        """Ends the stream."""
        self._batches.put_nowait(None)

    async def next(self, kind):
        async with asyncio.timeout(DEADLINE_S):
            event = await self.heard.get()
        assert event.WhichOneof("event") == kind
        return getattr(event, kind)


@asynccontextmanager
async def api_server(folder, *, outlives=False):
    """An API server that is attached, its coordinator, and the task that keeps it attached."""
    server, coordinator = grpc.aio.server(), Coordinator()
    api_servers_pb2_grpc.add_ApiServersServicer_to_server(coordinator, server)
    server.add_insecure_port(f"unix:{folder}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/socket", options=API_SERVER_OPTIONS) as channel:
        control = RemoteControl(api_servers_pb2_grpc.ApiServersStub(channel), "1")
        running = asyncio.create_task(control.run_again() if outlives else control.run())
        try:
            assert (await coordinator.next("hello")).name == "1"
            yield control, coordinator, running
        finally:
            running.cancel()
            await asyncio.wait([running])
            await server.stop(None)


async def test_an_api_server_waits_for_the_coordinator_that_has_started_it(tmp_path):
    """On a busy machine it may have to dial more than once."""
    coordinator = Coordinator()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket", options=API_SERVER_OPTIONS) as channel:
        running = asyncio.create_task(RemoteControl(api_servers_pb2_grpc.ApiServersStub(channel), "1").run())
        async with asyncio.timeout(DEADLINE_S):
            while channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(0.01)
        server = grpc.aio.server()
        api_servers_pb2_grpc.add_ApiServersServicer_to_server(coordinator, server)
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        assert (await coordinator.next("hello")).name == "1"
        coordinator.leave()
        await running
        await server.stop(None)


class Letters:
    """A detokenizer for which a token is its character."""

    ahead = ""

    def add(self, token_id):
        return chr(token_id)

    def flush(self):
        return ""


def ask(control, *, num_outputs=1, **options):
    """A call that begins."""
    params = inference_pb2.SamplingParams(max_tokens=20, n=num_outputs, seed=3)
    request = inference_pb2.GenerateRequest(request_id="r", sampling_params=params)
    plan = plan_request(request, [1, 2], LIMITS, inference_pb2.SamplingParams())
    texts = [(NOTHING, AnswerText(Letters(), TextOptions(**options))) for _ in range(num_outputs)]
    return asyncio.create_task(control.begin(plan, texts, request, deadline_s=1e9, record=CallRecord("r")))


def chunk(call, index, first, text):
    token_ids = [ord(char) for char in text]
    return inference_pb2.GenerateResponse(
        request_id=call.id, index=index, chunk=inference_pb2.Chunk(first_token_index=first, token_ids=token_ids)
    )


def complete(call, index, **fields):
    fields = {"finish_reason": inference_pb2.FINISH_REASON_LENGTH, **fields}
    return inference_pb2.GenerateResponse(request_id=call.id, index=index, complete=inference_pb2.Complete(**fields))


async def read(generation):
    """Text by output to the end, and the completes."""
    texts, completes = {}, {}
    async with asyncio.timeout(DEADLINE_S):
        while (message := await generation.next()) is not None:
            if message.chunk is None:
                completes[message.index] = message.complete
            else:
                texts[message.index] = texts.get(message.index, "") + message.chunk.text
    return texts, completes


async def test_tokens_become_text_and_a_stop_string_is_reported(tmp_path):
    async with api_server(tmp_path) as (control, coordinator, _):
        asked = ask(control, stop=("de",))
        call = await coordinator.next("call")
        coordinator.send(begun=[call.id], responses=[chunk(call, 0, 0, "abc")])
        generation = await asked
        coordinator.send(responses=[chunk(call, 0, 3, "defg")])
        stopped = await coordinator.next("stopped")
        assert (stopped.id, stopped.index) == (call.id, 0)
        coordinator.send(responses=[chunk(call, 0, 7, "h"), complete(call, 0, completion_tokens=8)])
        texts, completes = await read(generation)
        assert texts == {0: "abc"}
        end = completes[0]
        assert (end.matched_stop_str, end.completion_tokens) == ("de", 5)
        assert end.finish_reason == inference_pb2.FINISH_REASON_STOP


async def test_a_call_goes_on_at_another_coordinator_by_what_has_come(tmp_path):
    async with api_server(tmp_path, outlives=True) as (control, coordinator, _):
        asked = ask(control, num_outputs=3)
        call = await coordinator.next("call")
        responses = [chunk(call, 0, 0, "abc"), chunk(call, 1, 0, "x"), complete(call, 1, completion_tokens=1)]
        coordinator.send(begun=[call.id], responses=responses)
        generation = await asked
        coordinator.leave()
        await coordinator.next("hello")
        again = await coordinator.next("call")
        assert (again.id, again.request.tokenized, again.request.sampling_params) == (
            call.id, call.request.tokenized, call.request.sampling_params)  # fmt: skip
        so_far = [(list(each.token_ids), each.has_ended) for each in again.request.so_far]
        assert so_far == [([ord(char) for char in "abc"], False), ([], True), ([], False)]
        coordinator.send(responses=[chunk(call, 0, 0, "lost")])  # of before: not of the call that is to begin
        responses = [chunk(call, 0, 3, "de"), chunk(call, 2, 0, "yz")]
        responses += [complete(call, 0, completion_tokens=5, resumed_tokens=3), complete(call, 2, completion_tokens=2)]
        coordinator.send(begun=[call.id], responses=responses)
        texts, completes = await read(generation)
        assert texts == {0: "abcde", 1: "x", 2: "yz"}
        assert [completes[index].completion_tokens for index in range(3)] == [5, 1, 2]
        assert completes[0].resumed_tokens == 0  # of its client's view there was one call


async def test_a_call_asks_again_while_the_nodes_are_not_back(tmp_path):
    async with api_server(tmp_path, outlives=True) as (control, coordinator, _):
        asked = ask(control)
        call = await coordinator.next("call")
        coordinator.send(begun=[call.id], responses=[chunk(call, 0, 0, "a")])
        generation = await asked
        coordinator.leave()
        await coordinator.next("hello")
        await coordinator.next("call")
        error = api_servers_pb2.CallError(reason=NO_PREFILL_WORKER, message="none yet")
        coordinator.send(failed=[api_servers_pb2.FailedCall(id=call.id, error=error)])
        await coordinator.next("call")
        coordinator.send(begun=[call.id], responses=[chunk(call, 0, 1, "b"), complete(call, 0)])
        assert (await read(generation))[0] == {0: "ab"}


async def test_a_call_fails_for_which_no_coordinator_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RESUME_DEADLINE_S", 0.0)
    async with api_server(tmp_path, outlives=True) as (control, coordinator, _):
        asked = ask(control)
        call = await coordinator.next("call")
        coordinator.send(begun=[call.id])
        generation = await asked
        coordinator.leave()
        with pytest.raises(RequestError, match="no coordinator has come back"):
            await read(generation)


async def test_tokens_that_do_not_follow_are_never_passed_on(tmp_path):
    async with api_server(tmp_path) as (control, coordinator, _):
        asked = ask(control)
        call = await coordinator.next("call")
        coordinator.send(begun=[call.id], responses=[chunk(call, 0, 0, "a"), chunk(call, 0, 2, "c")])
        with pytest.raises(RequestError, match="token 2 came in place of token 1"):
            await read(await asked)
        assert (await coordinator.next("failed")).id == call.id


async def test_a_call_that_is_not_admitted_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ADMIT_DEADLINE_S", 0.05)
    async with api_server(tmp_path) as (control, *_):
        for _ in range(2):
            with pytest.raises(RequestError, match=r"the coordinator has not answered within 0.05 s"):
                await ask(control)


async def test_an_api_server_whose_coordinator_has_lost_a_batch_ends(tmp_path):
    async with api_server(tmp_path) as (_, coordinator, running):
        coordinator.send(number=2)
        with pytest.raises(MessageLost, match="message 1 was lost"):
            await running


async def test_an_api_server_ends_with_the_coordinator_that_has_started_it_and_so_do_its_calls(tmp_path):
    async with api_server(tmp_path) as (control, coordinator, running):
        asked = ask(control)
        await coordinator.next("call")
        coordinator.leave()
        await running
        with pytest.raises(RequestError, match="the server has stopped"):
            await asked


async def test_nothing_is_kept_of_a_client_that_leaves_before(tmp_path):
    async with api_server(tmp_path) as (control, *_):
        calls = [ask(control) for _ in range(2)]  # of one id: which may live the coordinator says
        await asyncio.sleep(0)
        assert control.num_calls == 2
        for call in calls:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert control.num_calls == 0
        assert not control._ids  # nothing tells of it: what stayed there would only take memory


async def test_what_was_counted_without_a_coordinator_is_told_to_the_next_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(remote, "MAX_OWED_EVENTS", 3)
    async with api_server(tmp_path, outlives=True) as (control, coordinator, _):
        ended = asyncio.Event()
        monkeypatch.setattr(control, "_give_up_late", ended.set)  # called when the stream has ended
        coordinator.leave()
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        control.refused(CallRecord("r", arrived_s=0.0), RequestError(QUEUE_FULL, "full"))
        for number in range(5):
            control.count_call("h", "GET", 200 + number, 0.1)
        control.sheds.count("http", "slow", 4)
        control.opened()
        await coordinator.next("hello")
        refused = await coordinator.next("refused")
        assert (refused.info.request_id, refused.error.reason) == ("r", QUEUE_FULL)
        assert refused.info.age_s >= 0
        assert [(await coordinator.next("http_call")).status for _ in range(2)] == [200, 201]
        async with asyncio.timeout(DEADLINE_S):
            assert (await coordinator.sheds.get()).number == 4
        assert "3 counts of calls and refusals are lost: 3 were kept while no coordinator was there" in caplog.text
        control.count_call("h", "GET", 299, 0.1)
        assert (await coordinator.next("http_call")).status == 299  # and nothing twice


async def test_an_api_server_ends_whose_coordinator_reads_nothing(tmp_path, monkeypatch):
    async with api_server(tmp_path) as (control, _, running):
        monkeypatch.setattr(remote, "MAX_UNSENT_EVENTS", 3)
        for _ in range(4):
            control.count_call("h", "GET", 200, 0.1)  # all at once: none has left yet
        await running


OLDER = api_servers_pb2.ApiServerHello(name="older", version=VERSION, protocol_version="1")


async def test_an_api_server_of_another_version_is_refused(tmp_path):
    event = api_servers_pb2.ApiServerEvent(hello=OLDER)
    Numbering().stamp(event)
    async with (
        asyncio.timeout(DEADLINE_S),
        cluster(tmp_path, nodes=()) as c,
        grpc.aio.insecure_channel(f"127.0.0.1:{c.server.fleet_port}") as channel,
    ):
        stream = api_servers_pb2_grpc.ApiServersStub(channel).Attach()
        await stream.write(event)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.read()
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "API server older has protocol_version 1 and not" in refusal.value.details()
