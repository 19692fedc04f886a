"""Traces of calls: their spans worked out by hand, and those of a served coordinator at a receiver."""

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
import time

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from coordinator.control.request import MAX_MARKS, Mark, Phase, Timeline
from coordinator.control.request_log import MAX_MIGRATIONS, CallRecord, SequenceRecord, sequence_index
from coordinator.traces import export
from coordinator.traces.spans import call_span
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.model_files.config import Embedder
from serving_core.requests import SamplingParams
from tests import fleet_events as events
from tests.otlp_receiver import AT_ONCE, DEADLINE_S, receiving
from tests.scripted_nodes import begin_to_write, cluster, read_all, refusal_of, run, step
from tests.unit.coordinator.http_kit import plain_client, url_of
from tests.unit.coordinator.scheduler_kit import MigratingWorld, World

pytestmark = pytest.mark.usefixtures("programs_here")

# ---- spans ----


def record(world, **known):
    """What is written down of a call whose one answer has ended in this world."""
    end = world.end_of_answer
    answer = SequenceRecord(sequence_index(end.request_id)[1], end.outcome, end.timeline, end.ended_s)
    call = CallRecord("r", operation="chat", model="m", answers=[answer], **known)
    for migration in world.migrations:
        call.migrated(migration)
    return call


def told(span):
    """A span in short, with those below."""
    about = {key.removeprefix("splitserve."): value for key, value in span.attributes.items()}
    below = [told(child) for child in span.children]
    return (span.name, span.start_s, span.end_s, about, *([span.failure] if span.failure else []), *below)


def phase(name, start_s, end_s, **about):
    return (name, start_s, end_s, about)


def attempt(number, start_s, end_s, prefill_node, decode_node, *below, sequence=0):
    about = {"sequence": sequence, "attempt": number, "prefill_node": prefill_node, "decode_node": decode_node}
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
            phase("KV alloc", 13.0, 14.0, from_node="p0", to_node="d0"),
            phase("KV transfer", 14.0, 15.0, from_node="p0", to_node="d0"),
            phase("decode queue", 15.0, 16.0, node="d0"),
            phase("decode", 16.0, 18.0, node="d0"),
        ),
    ]  # fmt: skip


def test_the_call_tells_what_conventions_have_names_for():
    sampling = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=7)
    call = record(live(World()), arrived_s=10.0, begun_s=10.5, num_prompt_tokens=3, sampling=sampling, num_sequences=2)
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
        "splitserve.migrations": 0,
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
        phase("KV alloc", 2.0, 3.0, from_node="p0", to_node="d0"),
    )  # fmt: skip
    assert second == attempt(
        2, 3.0, 6.0, "p0", "d1",
        phase("prefill queue", 3.0, 4.5, node="p0"),
        phase("prefill", 4.5, 5.0, node="p0"),
        phase("KV alloc", 5.0, 6.0, from_node="p0", to_node="d1"),
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
        phase("wait for a node", 1.5, 3.0, sequence=0),
        attempt(
            1, 3.0, 4.0, "b0", "b0",
            phase("prefill queue", 3.0, 3.5, node="b0"),
            phase("prefill", 3.5, 4.0, node="b0"),
        ),
    ]  # fmt: skip


def test_a_move_is_part_of_its_attempt():
    world = MigratingWorld()
    world.migrate()
    world.commit(now=4.0, num_bytes=50)
    world.step(world.source, 2, now=4.5)
    world.end()
    [_, only] = call_span(record(world, begun_s=0.0), 9.0).children
    assert [told(child) for child in only.children][-3:] == [
        phase("decode", 0.0, 4.0, node="d0"),
        phase("decode", 4.0, 9.0, node="d1"),
        phase("migration", 1.0, 4.0, from_node="d0", to_node="d1", outcome="migrated", kv_bytes=50),
    ]


def test_a_move_that_fails_says_so():
    world = MigratingWorld()
    world.migrate()
    world.tell("d1", events.failed(world.target, "TRANSFER_FAILED"), 3.0)
    world.step(world.source, 2, events.LENGTH, now=5.0)
    [_, only] = call_span(record(world, begun_s=0.0), 5.0).children
    [migration] = [span for span in only.children if span.name == "migration"]
    assert (migration.start_s, migration.end_s, migration.failure) == (1.0, 3.0, "failed")


@pytest.mark.parametrize("failure", ["", "SLOW_PREFILL_NODE"])
def test_an_answer_that_fails_is_the_failure_of_its_call(failure):
    world = World()
    world.submit(now=0.0)
    world.first(world.attempt, now=2.0)
    world.short(world.scheduler.fail("r/0", RequestError("SLOW_PREFILL_NODE", "it reads nothing"), 3.0))
    root = call_span(record(world, begun_s=0.0, failure=failure), 3.0)
    assert root.failure == "SLOW_PREFILL_NODE"
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
    world = MigratingWorld()
    world.migrate()
    world.commit()
    call = CallRecord("r")
    for _ in range(1000):
        call.migrated(world.migrations[0])
    assert len(call.migrations) == MAX_MIGRATIONS


# ---- served ----

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
SERVER_KIND = 2
SECRET = "swordfish"
PHASES = ["prefill queue", "KV alloc", "KV transfer", "decode queue"]  # scripted nodes compute in no time
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


async def answer_over_grpc(c, request_id="r", metadata=(), prompt=SECRET):
    """Of two tokens, over gRPC."""
    request = inference_pb2.GenerateRequest(request_id=request_id, text=prompt)
    call = c.stub.Generate(request, metadata=metadata)
    await write(c)
    return await read_all(call)


async def write(c):
    attempt = await begin_to_write(c, "s", num_bytes=800)
    await step(c.nodes["d0"], attempt, 1, "w", events.LENGTH)


async def answer_over_http(c, request_id, headers=()):
    async with plain_client(base_url=url_of(c)) as http:
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
            await answer_over_grpc(c)
            root = await trace_of(receiver)
        assert (root.name, root.parent_id, root.kind) == (f"text_completion {tmp_path.name}", "", SERVER_KIND)
        assert before_ns <= root.start_ns <= root.end_ns <= time.time_ns()
        assert root.names == ["accept", "attempt"]
        assert root.children[1].names == PHASES
        assert root.attributes["gen_ai.usage.output_tokens"] == 2
        assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert receiver.resources[0]["service.name"] == "splitserve"

    run(scenario())


def test_attributes_have_names_values_and_types_of_the_conventions(tmp_path, receiver):
    """By the package that OpenTelemetry makes of its conventions."""
    names = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    types = {"usage": int, "operation": str, "provider": str}

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint, http_port=0) as c:
            await answer_over_grpc(c, "g")
            await answer_over_http(c, "h")
            for request_id in ("g", "h"):
                root = await trace_of(receiver, request_id)
                told = {key: value for key, value in root.attributes.items() if key.startswith("gen_ai.")}
                assert set(told) <= names
                assert root.name == f"{told['gen_ai.operation.name']} {told['gen_ai.request.model']}"
                assert told["gen_ai.operation.name"] in operations
                for key, value in told.items():
                    assert isinstance(value, types.get(key.split(".")[1], object)), key

    run(scenario())


def test_a_caller_that_traces_is_its_parent_at_every_api_server(tmp_path, receiver):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint, http_port=0) as c:
            await answer_over_grpc(c, "g", (("traceparent", SAMPLED), ("tracestate", "a=1,b=2")))
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


MALFORMED_PARENTS = [
    [f"00-{TRACE}-{PARENT}"],
    [f"00-{'0' * 32}-{PARENT}-01"],
    [f"00-{TRACE}-{'0' * 16}-01"],
    [f"00-{TRACE.upper()}-{PARENT}-01"],
    [f"ff-{TRACE}-{PARENT}-01"],
    [f"00-{TRACE}-{PARENT}-01-more"],
    ["x" * 4000],
    [SAMPLED, SAMPLED],
]


def test_a_malformed_parent_is_none(tmp_path, receiver):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint, http_port=0) as c:
            for number, values in enumerate(MALFORMED_PARENTS):
                alone = values[-1] + "-" * (len(values) - 1)  # as gRPC hands on one alone
                await answer_over_grpc(c, f"g{number}", [("traceparent", alone)])
                await answer_over_http(c, f"h{number}", [("traceparent", value) for value in values])
                for name in (f"g{number}", f"h{number}"):
                    root = await trace_of(receiver, name)
                    assert (root.parent_id, root.trace_id == TRACE) == ("", False), values

    run(scenario())


def test_a_malformed_state_costs_the_state_alone(tmp_path, receiver, caplog):
    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer_over_grpc(c, "r", (("traceparent", SAMPLED), ("tracestate", SECRET)))
            root = await trace_of(receiver)
        assert (root.trace_id, root.parent_id, root.trace_state) == (TRACE, PARENT, "")

    run(scenario())
    assert SECRET not in caplog.text


def test_a_caller_that_does_not_sample_gets_no_spans(tmp_path, receiver, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer_over_grpc(c, "quiet", (("traceparent", f"00-{TRACE}-{PARENT}-00"),))
            await answer_over_grpc(c, "loud")
            await trace_of(receiver, "loud")
        assert receiver.num_spans == NUM_SPANS  # of the second call alone

    run(scenario())
    ended = [record for record in caplog.records if record.getMessage() == "request finished"]
    assert [(record.request_id, "trace_id" in record.fields) for record in ended] == [("quiet", False), ("loud", True)]


def test_lines_about_a_traced_request_tell_the_trace(tmp_path, receiver, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer_over_grpc(c, "r", (("traceparent", SAMPLED),))
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
            assert (await answer_over_grpc(c))[0] == "sw"

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
    made, make = [], export.Traces

    def noting(endpoint):
        made.append(make(endpoint))
        return made[-1]

    monkeypatch.setattr(export, "Traces", noting)

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            for number in range(5):
                assert (await answer_over_grpc(c, f"r{number}"))[0] == "sw"
            assert await asyncio.to_thread(receiver.was_asked.wait, DEADLINE_S)
            [traces] = made
            assert (traces.num_unsent, traces.num_lost) == (2 * NUM_SPANS, 3 * NUM_SPANS)

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
            await answer_over_grpc(c)
            assert receiver.num_spans == 0
        assert (await trace_of(receiver)).names == ["accept", "attempt"]

    run(scenario())


def test_the_environment_names_the_service_and_samples(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")

    async def scenario():
        async with cluster(tmp_path, otlp_endpoint=receiver.endpoint) as c:
            await answer_over_grpc(c, "untraced")
            await answer_over_grpc(c, "traced", (("traceparent", SAMPLED),))
            await trace_of(receiver, "traced")
        assert receiver.num_spans == NUM_SPANS
        told = receiver.resources[0]
        assert (told["service.name"], told["deployment.environment.name"]) == ("front", "test")

    run(scenario())


@pytest.mark.nightly
def test_without_an_endpoint_nothing_of_it_is_imported():
    code = "import sys, coordinator.process; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == "[]\n"
