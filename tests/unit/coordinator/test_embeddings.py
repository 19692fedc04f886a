"""Embeddings: in the scheduler, and at both API servers with nodes that the test speaks for."""

import asyncio
import base64
import contextlib
import struct

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.api.http.embeddings import MAX_NUMBERS
from coordinator.api.http.request_models import MAX_INPUTS, EmbeddingsRequest
from coordinator.api.http.several import MAX_AT_ONCE
from coordinator.api.preprocess import pooling_of
from protos.inference_pb2 import AbortRequest, EmbedRequest
from serving_core.errors import RequestError
from serving_core.model_files.config import Embedder, read_model_config
from serving_core.reasons import NO_PREFILL_WORKER
from serving_core.requests import LAST, MEAN, Pooling
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, ScriptedNode, cluster, refusal_of, run
from tests.tiny_models import write_fake_model
from tests.unit.coordinator.http_kit import http_cluster, post
from tests.unit.coordinator.scheduler_kit import PROMPT, World

pytestmark = pytest.mark.usefixtures("programs_here")

# ---- the scheduler: a node that reads, none that writes ----


def test_one_node_reads_and_its_word_is_the_end():
    world = World(("p0",))
    assert world.embed(kind=LAST) == ["prefill p0"]
    [job] = world.jobs
    assert (list(job.token_ids), job.pooling.kind, job.pooling.normalizes) == (PROMPT, LAST, True)
    assert world.account("p0") == (3, 0, 0, 0)
    event = events.embedded(world.attempt, b"vector", prefill_s=0.5, num_cached_tokens=2)
    assert world.tell("p0", event, now=2.0) == ["end complete"]
    complete = world.outcome
    assert complete.embedding == b"vector"
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 0, 2)
    told = complete.timeline
    assert (told.prefill_node, told.decode_node, told.prefill_queue_s, told.prefill_s) == ("p0", "", 1.5, 0.5)
    assert (world.scheduler.num_open, world.account("p0")) == (0, (0, 0, 0, 0))
    assert (world.metrics.num_prompt_tokens, world.metrics.num_cached_tokens) == (3, 2)
    world.ledger.check_integrity()
    assert world.tell("p0", event, now=3.0) == []


def test_the_node_with_less_to_read_is_taken_one_that_does_both_too():
    world = World(("p0", "b0", "d0"))
    world.embed("a/0", [1] * 50)
    first = world.prefill_node
    world.embed("b/0", [2] * 50)
    assert {first, world.prefill_node} == {"p0", "b0"}


def test_a_word_about_an_embedding_that_nobody_asked_for_does_nothing():
    world = World()
    world.submit()
    assert world.tell("p0", events.embedded(world.attempt)) == []
    assert world.scheduler.num_open == 1


@pytest.mark.parametrize("how", ["lost", "full", "draining"])
def test_another_node_reads_it_when_the_first_does_not(how):
    world = World(("p0", "p1"), embeds=True)
    world.embed()
    one, other = (world.prefill_node, "p1" if world.prefill_node == "p0" else "p0")
    if how == "lost":
        assert world.lose(one) == [f"prefill {other}"]
    elif how == "full":
        assert world.tell(one, events.failed(world.attempt, "QUEUE_FULL")) == [f"prefill {other}"]
    else:
        assert world.drain(one, 1.0) == [f"cancel {one}", f"prefill {other}"]
    assert world.tell(other, events.embedded(world.attempt, b"v")) == ["end complete"]
    world.ledger.check_integrity()


def test_what_the_engine_fails_at_is_the_end():
    world = World(("p0",))
    world.embed()
    assert world.tell("p0", events.failed(world.attempt, "ENGINE_ERROR")) == ["end ENGINE_ERROR"]


def test_one_that_is_given_up_is_cancelled_where_it_is_read():
    world = World(("p0",))
    world.embed()
    assert world.tick(101.0) == ["cancel p0", "end DEADLINE_EXCEEDED"]


def test_without_a_node_that_reads_it_waits_for_one_or_is_refused():
    world = World(("d0",), embeds=True)
    with pytest.raises(RequestError) as caught:
        world.embed()
    assert caught.value.reason == NO_PREFILL_WORKER
    world = World((), embeds=True, node_wait_s=5.0)
    assert world.embed() == []
    assert world.tick(1.0) == []
    world.attach("p0")
    assert world.tick(2.0) == ["prefill p0"]


# ---- at the API servers ----

SERVICE = "splitserve.v1.Inference"
EMBEDDER = {"embedder": str(Embedder())}


@contextlib.asynccontextmanager
async def embedding_cluster(folder, **settings):
    """With one node, that reads."""
    async with http_cluster(folder, (), runner="pooling", **settings) as (c, client):
        await c.attach("p0", **EMBEDDER)
        yield c, client


def vector(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


async def job_of(c):
    return (await c.nodes["p0"].command("prefill")).job


def embed(client, **fields):
    """A call under way."""
    return post(client, "/v1/embeddings", messages=None, **fields)


def test_vectors_keep_the_order_of_their_inputs_whichever_comes_first(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, client):
            call = embed(client, input=["ab", "c", "d"], dimensions=None)
            jobs = [await job_of(c) for _ in range(3)]
            for job in reversed(jobs):
                told = vector(len(job.token_ids), job.token_ids[0])
                await c.nodes["p0"].send(events.embedded(job.attempt, told, num_cached_tokens=1))
            reply = (await call).json()
            vectors = [[2.0, 97.0], [1.0, 99.0], [1.0, 100.0]]
            assert reply == {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)
                ],
                "model": "m",
                "usage": {"prompt_tokens": 4, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
            }
            assert {job.pooling.kind for job in jobs} == {LAST}

    run(scenario())


def test_base64(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, client):
            call = embed(client, input=[97], encoding_format="base64", priority=7, cache_salt="s", normalize=False)
            job = await job_of(c)
            assert (list(job.token_ids), job.priority, job.cache_salt, job.pooling.normalizes) == ([97], 7, "s", False)
            await c.nodes["p0"].send(events.embedded(job.attempt, vector(0.5, -2.0)))
            [item] = (await call).json()["data"]
            assert base64.b64decode(item["embedding"]) == vector(0.5, -2.0)

    run(scenario())


def test_over_grpc(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, _):
            call = c.stub.Embed(EmbedRequest(text="hey", truncate_prompt_tokens=2))
            job = await job_of(c)
            assert bytes(job.token_ids) == b"he"
            await c.nodes["p0"].send(events.embedded(job.attempt, vector(1.0), prefill_s=0.1, num_cached_tokens=1))
            reply = await call
            assert (reply.embedding, reply.prompt_tokens, reply.cached_tokens) == (vector(1.0), 2, 1)
            assert reply.timeline.prefill_node == "p0"

    run(scenario())


def test_of_many_inputs_some_are_read_at_a_time(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, client):
            call = embed(client, input=["a"] * (MAX_AT_ONCE + 1))
            jobs = [await job_of(c) for _ in range(MAX_AT_ONCE)]
            loads = await c.stub.GetLoads(events.inference_pb2.GetLoadsRequest())
            assert loads.num_live_requests == MAX_AT_ONCE
            await c.nodes["p0"].send(events.embedded(jobs[0].attempt))
            jobs = [*jobs[1:], await job_of(c)]
            for job in jobs:
                await c.nodes["p0"].send(events.embedded(job.attempt))
            assert len((await call).json()["data"]) == MAX_AT_ONCE + 1

    run(scenario())


def test_one_input_that_fails_fails_the_call_and_gives_the_others_up(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, client):
            call = embed(client, input=["a", "b"])
            first, second = [await job_of(c) for _ in range(2)]
            await c.nodes["p0"].send(events.failed(second.attempt, "ENGINE_ERROR"))
            await c.nodes["p0"].answer_cancel(first.attempt)
            reply = await call
            assert reply.status_code == 500
            assert reply.json()["error"]["message"] == "the engine of the prefill node failed: what happened"
            await c.until_nothing_is_live()

    run(scenario())


def test_one_that_is_aborted_is_no_embedding(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, _):
            call = c.stub.Embed(EmbedRequest(text="hey", request_id="r"))
            job = await job_of(c)
            reply = await c.stub.Abort(AbortRequest(request_ids=["r"]))
            assert reply.aborted == ["r"]
            code, info, details = await refusal_of(call)
            assert (code.name, info.reason, details) == ("ABORTED", "ABORTED", "request r was aborted")
            await c.nodes["p0"].answer_cancel(job.attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_a_client_that_leaves_is_not_embedded_for(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, client):
            call = embed(client, input="a")
            job = await job_of(c)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await c.nodes["p0"].answer_cancel(job.attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_the_other_kind_of_call_is_refused_by_name(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (c, client):
            reply = await post(client)
            message = "the model makes embeddings, and generates no text"
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)
            _, info, details = await refusal_of(c.generate())
            assert (info.reason, details) == ("BAD_PARAM", message)
        async with http_cluster(tmp_path) as (c, client):
            reply = await embed(client, input="a")
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith("the model generates text, and makes no embeddings")

    run(scenario())


def test_nodes_of_the_other_kind_do_not_belong(tmp_path):
    async def scenario():
        async with cluster(tmp_path, (), runner="pooling") as c:
            node = await ScriptedNode.dial(c.server.fleet_port, events.hello("p0"))
            refusal = await node.command("refusal")
            assert f"embedder is None and {EMBEDDER['embedder']}"[:80] in refusal.message
            await node.close()

    run(scenario())


def test_a_node_that_reads_makes_the_service_ready(tmp_path):
    async def scenario():
        async with cluster(tmp_path, (), runner="pooling") as c:
            stub = health_pb2_grpc.HealthStub(c.channel)
            told = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S)
            assert (await told.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await c.attach("p0", **EMBEDDER)
            assert (await told.read()).status == health_pb2.HealthCheckResponse.SERVING
            told.cancel()

    run(scenario())


def test_every_api_server_says_ready_of_a_node_that_reads(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (_, client):
            assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
            figures = (await client.get("/metrics")).text.splitlines()
            assert "splitserve_ready 1.0" in figures
            assert sum(line.startswith("vllm:engine_sleep_state{") and line.endswith(" 1.0") for line in figures) == 1
            assert any('sleep_state="awake"} 1.0' in line for line in figures)

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"input has {MAX_INPUTS + 1} entries, the limit is {MAX_INPUTS}"),
        ({"input": [[1]] * (MAX_INPUTS + 1)}, f"input has {MAX_INPUTS + 1} entries, the limit is {MAX_INPUTS}"),
        ({"input": [[1], "a"]}, 'input[1] must be a list, not "a"'),
        ({"input": [[1], ["a"]]}, 'input[1][0] must be an integer, not "a"'),
        ({"input": 7}, "input must be a string, token ids, or a list of either, not 7"),
        ({}, "input is missing"),
        ({"input": []}, "input is empty: send a string, token ids, or a list of either"),
        ({"input": [-1]}, "input[0] must be at least 0, not -1"),
        ({"input": "a", "dimensions": -1}, "dimensions must be at least 0, not -1"),
    ],
)
def test_bodies_that_are_refused(fields, message):
    with pytest.raises(RequestError) as caught:
        EmbeddingsRequest.read(fields)
    assert str(caught.value) == message


def test_what_is_too_much_as_text_is_refused_before_anything_is_read(tmp_path):
    async def scenario():
        async with embedding_cluster(tmp_path) as (_, client):
            reply = await embed(client, input=["a"] * MAX_INPUTS, dimensions=2 * MAX_NUMBERS // MAX_INPUTS)
            assert reply.status_code == 400
            told = f"encoding_format float of {2 * MAX_NUMBERS} numbers is over the limit of {MAX_NUMBERS}"
            assert reply.json()["error"]["message"] == f"{told}: ask for base64, or for fewer inputs"

    run(scenario())


class Config:
    """As much of one as matters."""

    hidden_size = 8

    def __init__(self, **fields):
        self.embedder = Embedder(**fields)


def test_dimensions_are_for_models_that_were_trained_for_them():
    def asked(config, **fields):
        return pooling_of(EmbedRequest(**fields), config)

    plain, cut, some = Config(), Config(may_be_cut=True), Config(may_be_cut=True, lengths=(2, 4), kind=MEAN)
    assert asked(plain) == asked(plain, dimensions=8) == Pooling(LAST)
    assert asked(cut, dimensions=3, normalize=False) == Pooling(LAST, normalizes=False, num_dimensions=3)
    assert asked(some, dimensions=4) == Pooling(MEAN, num_dimensions=4)
    for config, dimensions, message in (
        (plain, 4, r"dimensions \(4\) is not supported by the model, which has 8: its config.json names neither"),
        (cut, 0, r"dimensions must be within \[1, 8\], not 0"),
        (cut, 9, r"dimensions must be within \[1, 8\], not 9"),
        (some, 3, "dimensions must be one of 2, 4, not 3"),
    ):
        with pytest.raises(RequestError, match=message):
            asked(config, dimensions=dimensions)


def test_the_folder_says_what_a_request_leaves_open(tmp_path):
    config = read_model_config(write_fake_model(tmp_path), runner="pooling")
    assert pooling_of(EmbedRequest(), config) == Pooling(LAST, normalizes=True)
