"""Strangers flood a port whose calls take a key: everyone who has one is served meanwhile, and nothing stays behind."""

import asyncio

import grpc
import grpc.aio
import httpx2
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from tests import strangers
from tests.effort import few
from tests.strangers import Flood
from tests.system.answers import request
from tests.system.cluster import SERVICE, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

KEY = "key-of-the-test"
BEARER = (("authorization", f"Bearer {KEY}"),)
DEADLINE_S = 240.0
NUM_CALLS = 20
MAX_GROWTH_BYTES = 100 * 2**20  # without a guard heads without end take 500 MiB and more


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory, num_api_servers):
    model = write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.002)
    coordinator = {"api_server_count": num_api_servers, "node_timeout_s": 60}
    return start_cluster(model, env={"SPLITSERVE_API_KEY": KEY}, coordinator=coordinator, http=True)


def rss_bytes(cluster):
    coordinator = psutil.Process(cluster.children["coordinator"].process.pid)
    api_servers = [each for each in coordinator.children() if "coordinator.api" in each.cmdline()]
    return sum(each.memory_info().rss for each in (coordinator, *api_servers))


def num_shed(cluster, port):
    headers = {"authorization": f"Bearer {KEY}"}
    page = httpx2.get(f"{cluster.url}/metrics", headers=headers, timeout=DEADLINE_S, trust_env=False).text
    mark = f'splitserve_connections_shed_total{{port="{port}"'
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(mark))


def channel(cluster):
    return grpc.aio.insecure_channel(cluster.target, options=(("grpc.use_local_subchannel_pool", 1),))


async def answered(stub, number, max_tokens=5):
    """One right answer."""
    message = request([number, 2, 3], max_tokens=max_tokens, temperature=0, ignore_eos=True)
    found = []
    async for response in stub.Generate(message, metadata=BEARER, timeout=DEADLINE_S):
        found += response.chunk.token_ids
    assert found == fake_answer([number, 2, 3], max_tokens)


async def everyone_is_served(cluster):
    """Over a connection that is there, and over new ones, with a long answer beside them."""
    async with channel(cluster) as kept:
        stub = inference_pb2_grpc.InferenceStub(kept)
        long = asyncio.create_task(answered(stub, 100, 500))
        for number in range(NUM_CALLS):
            await answered(stub, number)
            async with channel(cluster) as new:
                await answered(inference_pb2_grpc.InferenceStub(new), number)
        await long


async def status_at_last(method, message):
    """Of a call without a key, which is asked again while its connection is cut off."""
    while True:
        call = method(message, timeout=DEADLINE_S)
        if (code := await call.code()) is not grpc.StatusCode.UNAVAILABLE:
            return code
        await asyncio.sleep(0.5)


OF_CLIENTS = [kind for kind in strangers.KINDS if not kind.startswith("nodes")]


@pytest.mark.parametrize("kind", few(OF_CLIENTS, "calls without requests", "heads without end"))
async def test_a_flood_of_strangers_shuts_nobody_out(cluster, kind):
    await everyone_is_served(cluster)
    before, shed_before = rss_bytes(cluster), num_shed(cluster, "grpc")
    with Flood(cluster.port, kind) as flood:
        await everyone_is_served(cluster)
        await asyncio.to_thread(wait_until, lambda: flood.num_dialed > 8, "connections are cut off", DEADLINE_S)
    assert rss_bytes(cluster) - before < MAX_GROWTH_BYTES
    await asyncio.to_thread(wait_until, lambda: num_shed(cluster, "grpc") > shed_before, "it is counted", DEADLINE_S)
    cluster.wait_all_free()


async def test_crowds_that_come_and_go_shut_nobody_out(cluster):
    """As many as the port may have, and more: a stranger makes room for whoever comes."""
    with Flood(cluster.port, "pings", num_connections=400):
        await everyone_is_served(cluster)


async def test_a_flood_at_the_fleet_port_leaves_the_nodes_there(cluster):
    shed_before = num_shed(cluster, "fleet")
    with Flood(cluster.fleet_port, "nodes without requests") as flood:
        await everyone_is_served(cluster)
        await asyncio.to_thread(wait_until, lambda: flood.num_dialed > 8, "connections are cut off", DEADLINE_S)
        await asyncio.to_thread(cluster.kill, "prefill-0")
        await asyncio.to_thread(cluster.heal)
        await everyone_is_served(cluster)
    await asyncio.to_thread(wait_until, lambda: num_shed(cluster, "fleet") > shed_before, "it is counted", DEADLINE_S)


async def test_who_is_cut_off_is_logged_once_in_a_while(cluster):
    with Flood(cluster.port, "pings") as flood:
        await asyncio.to_thread(wait_until, lambda: flood.num_dialed > 200, "many are cut off", DEADLINE_S)
    assert cluster.children["coordinator"].output().count("connections without a key are closed") < 20


async def test_a_stranger_may_ask_for_health_and_hears_that_a_key_is_missing(cluster):
    """Once in a while, as probes do; where floods have used up what its address may send, a little later."""
    async with channel(cluster) as stranger:
        health, stub = health_pb2_grpc.HealthStub(stranger), inference_pb2_grpc.InferenceStub(stranger)
        check, loads = health_pb2.HealthCheckRequest(service=SERVICE), inference_pb2.GetLoadsRequest()
        async with asyncio.timeout(DEADLINE_S):
            assert await status_at_last(health.Check, check) is grpc.StatusCode.OK
            assert await status_at_last(stub.GetLoads, loads) is grpc.StatusCode.UNAUTHENTICATED
        await answered(stub, 1)  # with a key the same connection may all
