"""The trace of a request through real processes, at a receiver as collectors are, and what their logs say of it."""

import asyncio
import itertools
import json
import re

import grpc
import grpc.aio
import httpx2
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.otlp_receiver import AT_ONCE, receiving
from tests.system.answers import refusal, request, stream
from tests.system.cluster import wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

pytestmark = pytest.mark.nightly

DEADLINE_S = 240.0
GREEDY = {"temperature": 0, "ignore_eos": True}
SECRET = "swordfish and mustard"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["prefill queue", "prefill", "KV alloc", "KV transfer", "decode queue", "decode"]
MAY_TAKE_NO_TIME = {"KV transfer", "decode queue"}  # where events come together
KEYS = {"ts", "level", "role", "node", "event"}
ENDS = {
    "plain": "request finished",
    "refused": "request refused",
    "chat": "request finished",
    "no-json": "request refused",
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture(scope="module")
def receiver(num_api_servers):
    """Of one number of API servers: the tests ask for the same calls with each."""
    with receiving() as (receiver, endpoint):
        receiver.endpoint = endpoint
        yield receiver


@pytest.fixture(scope="module")
def _cluster(start_cluster, tmp_path_factory, receiver, num_api_servers):
    model = write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.01, token_s=0.0002)
    return start_cluster(
        model,
        num_prefill=1,
        num_decode=2,
        http=True,
        env=AT_ONCE,
        coordinator={
            "api_server_count": num_api_servers,
            "served_model_name": "fake",
            "otlp_endpoint": receiver.endpoint,
            "log_level": "debug",
            "keep_after_s": 600,
        },
        node={"log_level": "debug"},
        decode={"max_num_seqs": 2},
    )


@pytest.fixture
def cluster(_cluster):
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    _cluster.wait_all_free()


def check(root, cluster):
    """Children lie within their parents, and one phase follows the other."""
    for attempt in root.below("attempt"):
        phases = [child for child in attempt.children if child.name != "migration"]
        assert (phases[0].start_ns, phases[-1].end_ns) == (attempt.start_ns, attempt.end_ns)
        for before, after in itertools.pairwise(phases):
            assert before.end_ns == after.start_ns
    assert _lies_within(root)
    nodes = {value for span in _everyone(root) for key, value in span.attributes.items() if key.endswith("node")}
    assert nodes <= set(cluster.names)


def _lies_within(span):
    return all(
        span.start_ns <= child.start_ns <= child.end_ns <= span.end_ns and _lies_within(child)
        for child in span.children
    )


def _everyone(span):
    yield span
    for child in span.children:
        yield from _everyone(child)


async def trace_of(receiver, request_id):
    return await asyncio.to_thread(receiver.call, request_id)


async def writer_of(cluster, request_id):
    """The name of the node that writes this answer, as its log says."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for name in cluster.names:
                for line in cluster.children[name].lines():
                    if line.get("request_id") == request_id and line["event"] == "event: committed":
                        return name
            await asyncio.sleep(0.05)


async def test_every_phase_of_a_request_is_in_its_trace(cluster, receiver):
    """Two running slots on each node that writes are taken, so it waits for credit too."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "waits"}
    async with cluster.connect() as stub, httpx2.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as http:
        others = [stream(stub, request([1, 2, number], max_tokens=500, **GREEDY)) for number in range(4)]
        for other in others:
            await other.tokens(2)
        body = {"model": "fake", "prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        for other in others:
            await other.complete()
    root = await trace_of(receiver, "waits")
    check(root, cluster)
    assert (root.trace_id, root.parent_id, root.names) == (TRACE, PARENT, ["accept", "attempt"])
    [attempt] = root.below("attempt")
    assert [name for name in PHASES if name in attempt.names or name not in MAY_TAKE_NO_TIME] == attempt.names
    reader, writer = (attempt.attributes[f"splitserve.{role}_node"] for role in ("prefill", "decode"))
    where = dict(zip(PHASES, [reader, reader, None, None, writer, writer], strict=True))
    for phase in attempt.children:
        assert phase.attributes.get("splitserve.node") == where[phase.name]
    [waits] = attempt.below("KV alloc")
    assert waits.attributes == {"splitserve.from_node": reader, "splitserve.to_node": writer}
    assert root.attributes["gen_ai.request.model"] == "fake"
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.usage.output_tokens"]) == (40, 5)


async def test_a_drain_is_a_move_within_the_attempt(cluster, receiver):
    async with cluster.connect() as stub, grpc.aio.insecure_channel(cluster.target) as channel:
        answering = stream(stub, request([5, 6], request_id="migrations", max_tokens=800, **GREEDY))
        await answering.tokens(5)
        source = await writer_of(cluster, "migrations")
        admin = inference_pb2_grpc.AdminStub(channel)
        async for _ in admin.Drain(inference_pb2.DrainRequest(node=source), timeout=DEADLINE_S):
            pass
        answer = await answering.complete()
        await admin.SetRole(inference_pb2.SetRoleRequest(node=source, role="decode"), timeout=DEADLINE_S)
    assert answer.token_ids == fake_answer([5, 6], 800)
    root = await trace_of(receiver, "migrations")
    check(root, cluster)
    [attempt] = root.below("attempt")
    [migration] = attempt.below("migration")
    target = answer.complete.timeline.decode_node
    assert target != source
    assert (migration.attributes["splitserve.from_node"], migration.attributes["splitserve.to_node"]) == (
        source,
        target,
    )
    assert migration.attributes["splitserve.outcome"] == "migrated"
    assert [each.attributes["splitserve.node"] for each in attempt.below("decode")] == [source, target]
    assert root.attributes["splitserve.migrations"] == 1


async def test_a_node_that_dies_is_an_attempt_that_failed(cluster, receiver):
    async with cluster.connect() as stub:
        answering = stream(stub, request([8, 9], request_id="restarts", max_tokens=500, **GREEDY))
        await answering.tokens(5)
        lost = await writer_of(cluster, "restarts")
        cluster.kill(lost)
        answer = await answering.complete()
    assert answer.token_ids == fake_answer([8, 9], 500)
    root = await trace_of(receiver, "restarts")
    check(root, cluster)
    first, second = root.below("attempt")
    assert (first.attributes["splitserve.decode_node"], first.attributes["error.type"]) == (lost, "WORKER_LOST")
    assert (first.is_error, second.is_error, root.is_error) == (True, False, False)
    assert second.attributes["splitserve.decode_node"] == answer.complete.timeline.decode_node != lost
    assert second.names[-1] == "decode"
    assert root.attributes["splitserve.restarts"] == 1


async def test_every_line_is_json_and_bears_its_request(cluster):
    """Also at the level that tells most."""
    async with cluster.connect() as stub, httpx2.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as http:
        await stream(stub, request(SECRET, request_id="plain", max_tokens=5, **GREEDY)).complete()
        await refusal(stub, request(SECRET, request_id="refused", stop=[SECRET] * 99))
        chat = {"model": "fake", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "color": SECRET}
        reply = await http.post("/v1/chat/completions", json=chat, headers={"x-request-id": "chat"})
        assert reply.status_code == 200
        broken = {"x-request-id": "no-json", "content-type": "application/json"}
        await http.post("/v1/chat/completions", content=SECRET, headers=broken)
    await asyncio.to_thread(wait_until, lambda: ends(cluster).keys() >= ENDS.keys(), "all have ended", DEADLINE_S)
    found = {name: child.lines() for name, child in cluster.children.items()}
    for lines in found.values():
        for line in lines:
            assert line.keys() >= KEYS, line
            assert TIME.fullmatch(line["ts"]), line
    assert SECRET not in json.dumps(found)
    ended = ends(cluster)
    assert {name: ended[name]["event"] for name in ENDS} == ENDS
    assert len(ended["plain"]["trace_id"]) == 32
    at_nodes = {
        role: {
            line["event"] for name in found if name.startswith(role) for line in found[name] if _is_of(line, "plain")
        }
        for role in ("prefill", "decode")
    }
    assert {"command: prefill", "event: first_token"} <= at_nodes["prefill"]
    assert {"command: reserve", "event: reserved", "event: committed"} <= at_nodes["decode"]


def ends(cluster):
    """The last line of each request, which can come after its answer."""
    lines = cluster.children["coordinator"].lines()
    return {line["request_id"]: line for line in lines if line["event"].startswith("request ")}


def _is_of(line, request_id):
    return line.get("request_id") == request_id
