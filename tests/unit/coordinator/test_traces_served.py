"""Traces of a served coordinator, at a receiver as others have one: whose they are, which calls have one, and what an
endpoint costs that does not take them."""

import asyncio
import logging
import socket
import subprocess
import sys
import time

import httpx2
import pytest

from coordinator.traces import export
from protos import inference_pb2
from serving_core.embedders import Embedder
from tests import fleet_events as events
from tests.otlp_receiver import AT_ONCE, DEADLINE_S, receiving
from tests.scripted_nodes import begin, cluster, hand_over, read_all, refusal_of, run, step

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
SERVER_KIND = 2
SECRET = "swordfish"
PHASES = ["prefill queue", "wait for credit", "transfer", "decode queue"]  # scripted nodes compute in no time
NUM_SPANS = 3 + len(PHASES)  # of one call


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for name, value in AT_ONCE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def receiver():
    with receiving() as (receiver, endpoint):
        receiver.endpoint = endpoint
        yield receiver


async def answer(c, request_id="r", metadata=(), prompt=SECRET):
    """Of two tokens, over gRPC."""
    request = inference_pb2.GenerateRequest(request_id=request_id, text=prompt)
    call = c.stub.Generate(request, metadata=metadata)
    await write(c)
    return await read_all(call)


async def write(c):
    attempt, _ = await begin(c)
    await hand_over(c, attempt, "s", num_bytes=800)
    await step(c.nodes["d0"], attempt, 1, "w", events.LENGTH)


async def answer_over_http(c, request_id, headers=()):
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{c.server.http_port}", timeout=DEADLINE_S) as http:
        headers = [("x-request-id", request_id), *headers]
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": SECRET}, headers=headers))
        await write(c)
        return await asked


async def trace_of(receiver, request_id="r"):
    return await asyncio.to_thread(receiver.call, request_id)


def test_a_call_nobody_traces_gets_a_trace_of_its_own(tmp_path, receiver):
    async def scenario():
        before_ns = time.time_ns()
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer(c)
            root = await trace_of(receiver)
        assert (root.name, root.parent_id, root.kind) == (f"text_completion {tmp_path.name}", "", SERVER_KIND)
        assert before_ns <= root.start_ns <= root.end_ns <= time.time_ns()
        assert root.names == ["accept", "attempt"]
        assert root.children[1].names == PHASES
        assert root.attributes["gen_ai.usage.output_tokens"] == 2
        assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert receiver.resources[0]["service.name"] == "splitserve"

    run(scenario())


def test_a_caller_that_traces_is_its_parent_at_every_door(tmp_path, receiver):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint, http_port=0) as c:
            await answer(c, "g", (("traceparent", SAMPLED), ("tracestate", "a=1,b=2")))
            assert (await answer_over_http(c, "h", [("Traceparent", SAMPLED)])).status_code == 200
            over_grpc, over_http = await trace_of(receiver, "g"), await trace_of(receiver, "h")
        assert over_grpc.span_id != over_http.span_id
        assert [(root.trace_id, root.parent_id) for root in (over_grpc, over_http)] == [(TRACE, PARENT)] * 2
        assert (over_grpc.trace_state, over_http.trace_state) == ("a=1,b=2", "")

    run(scenario())


def test_a_caller_of_embeddings_is_its_parent_too(tmp_path, receiver):
    async def scenario():
        async with cluster(tmp_path, (), otlp_endpoint=receiver.endpoint, runner="pooling") as c:
            await c.attach("p0", embedder=str(Embedder()))
            request = inference_pb2.EmbedRequest(text="ab", request_id="e")
            call = c.stub.Embed(request, metadata=(("traceparent", SAMPLED),), timeout=DEADLINE_S)
            job = (await c.nodes["p0"].command("prefill")).job
            await c.nodes["p0"].send(events.embedded(job.attempt))
            assert (await call).request_id == "e"
            root = await trace_of(receiver, "e")
        assert (root.trace_id, root.parent_id) == (TRACE, PARENT)

    run(scenario())


@pytest.mark.parametrize(
    "values",
    [
        [f"00-{TRACE}-{PARENT}"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01-more"],
        ["x" * 4000],
        [SAMPLED, SAMPLED],
    ],
)
def test_a_malformed_parent_is_none(tmp_path, receiver, values):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint, http_port=0) as c:
            await answer(c, "g", [("traceparent", values[-1] + "-" * (len(values) - 1))])  # gRPC hands on one alone
            await answer_over_http(c, "h", [("traceparent", value) for value in values])
            roots = [await trace_of(receiver, "g"), await trace_of(receiver, "h")]
        assert [root.parent_id for root in roots] == ["", ""]
        assert TRACE not in {root.trace_id for root in roots}

    run(scenario())


def test_a_malformed_state_costs_the_state_alone(tmp_path, receiver, caplog):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer(c, "r", (("traceparent", SAMPLED), ("tracestate", SECRET)))
            root = await trace_of(receiver)
        assert (root.trace_id, root.parent_id, root.trace_state) == (TRACE, PARENT, "")

    run(scenario())
    assert SECRET not in caplog.text


def test_a_caller_that_does_not_sample_gets_no_spans(tmp_path, receiver, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer(c, "quiet", (("traceparent", f"00-{TRACE}-{PARENT}-00"),))
            await answer(c, "loud")
            await trace_of(receiver, "loud")
        assert receiver.num_spans == NUM_SPANS  # of the second call alone

    run(scenario())
    ended = [record for record in caplog.records if record.getMessage() == "request finished"]
    assert [(record.request_id, "trace_id" in record.fields) for record in ended] == [("quiet", False), ("loud", True)]


def test_lines_about_a_traced_request_tell_the_trace(tmp_path, receiver, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer(c, "r", (("traceparent", SAMPLED),))
            await refusal_of(c.generate(SECRET, request_id="bad", temperature=-1.0))

    run(scenario())
    told = {record.request_id: record.fields["trace_id"] for record in caplog.records if hasattr(record, "fields")}
    assert told["r"] == TRACE
    assert len(told["bad"]) == 32


def test_no_word_of_a_prompt_is_in_a_span(tmp_path, receiver):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            call = c.generate(SECRET, stop=[SECRET], max_tokens=2, temperature=0.5)
            await write(c)
            await read_all(call)
            await refusal_of(c.generate(SECRET, request_id="bad", stop=[SECRET] * 99))
            roots = [await trace_of(receiver), await trace_of(receiver, "bad")]
        assert SECRET not in repr(roots)
        assert roots[0].attributes["gen_ai.request.temperature"] == 0.5
        assert (roots[1].is_error, roots[1].attributes["error.type"], roots[1].names) == (True, "BAD_PARAM", ["accept"])

    run(scenario())


def test_an_endpoint_that_is_not_there_costs_answers_nothing(tmp_path, caplog):
    async def scenario(port):
        async with cluster(tmp_path, otlp_endpoint=f"http://127.0.0.1:{port}") as c:
            assert (await answer(c))[0] == "sw"

    with socket.socket() as taken:  # so that nobody listens there
        taken.bind(("127.0.0.1", 0))
        run(scenario(taken.getsockname()[1]))
    [told] = [record for record in caplog.records if record.getMessage() == "not all spans were sent"]
    assert told.fields == {"lost_spans": NUM_SPANS}


def test_an_endpoint_that_takes_nothing_costs_answers_nothing(tmp_path, receiver, monkeypatch, caplog):
    """Its traces are lost whole when too many wait, which is told once, and the end does not wait for it."""
    monkeypatch.setattr(export, "MAX_UNSENT_SPANS", 2 * NUM_SPANS)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    receiver.takes.clear()

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            for number in range(5):
                assert (await answer(c, f"r{number}"))[0] == "sw"
            assert await asyncio.to_thread(receiver.was_asked.wait, DEADLINE_S)
            assert (c.server._traces.num_unsent, c.server._traces.num_lost) == (2 * NUM_SPANS, 3 * NUM_SPANS)

    run(scenario())
    assert [record.getMessage() for record in caplog.records if record.name == export.__name__] == [
        export.TOO_MANY,
        export.NOT_TAKEN,
        "not all spans were sent",
    ]
    assert caplog.records[-1].fields == {"lost_spans": 5 * NUM_SPANS}


def test_what_waits_is_sent_at_the_end(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setattr(export, "FLUSH_S", DEADLINE_S)

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer(c)
            assert receiver.num_spans == 0
        assert (await trace_of(receiver)).names == ["accept", "attempt"]

    run(scenario())


def test_the_environment_names_the_service_and_samples(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer(c, "untraced")
            await answer(c, "traced", (("traceparent", SAMPLED),))
            await trace_of(receiver, "traced")
        assert receiver.num_spans == NUM_SPANS
        told = receiver.resources[0]
        assert (told["service.name"], told["deployment.environment.name"]) == ("front", "test")

    run(scenario())


def test_without_an_endpoint_nothing_of_it_is_imported():
    code = "import sys, coordinator.process; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == "[]\n"
