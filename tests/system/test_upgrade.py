"""All nodes and the coordinator are replaced, one after the other, by processes of the next version, under load."""

import asyncio
import itertools
import random

import pytest

from serving_core.version import VERSION
from splitserve import AsyncClient
from splitserve.client.errors import Unavailable
from tests.system.cluster import wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

pytestmark = pytest.mark.nightly

DEADLINE_S = 240.0
NUM_CLIENTS = 12
MAJOR, MINOR, _ = VERSION.split(".")
NEXT, AFTER_NEXT = f"{MAJOR}.{int(MINOR) + 1}.0", f"{MAJOR}.{int(MINOR) + 2}.0"


@pytest.fixture
def cluster(start_cluster, tmp_path):
    model = write_fake_model(tmp_path / "fake", step_s=0.01)
    return start_cluster(model, num_prefill=2, num_decode=2, http=True, coordinator={"node_wait_s": 60})


async def ask_until(over, target, seed, *, at_coordinator):
    """Requests one after the other, each checked. Returns how many there were.

    A coordinator that ends refuses new calls of its own clients, which ask again; their streams they resume.
    """
    rng = random.Random(seed)
    num_whole = 0
    async with AsyncClient(target) as client:
        while not over.is_set():
            prompt, length = [rng.randrange(3, 100) for _ in range(20)], rng.randrange(20, 200)
            got = []
            asked = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "deadline_s": DEADLINE_S}
            try:
                async for chunk in client.generate(prompt, **asked, resume=at_coordinator):
                    got += chunk.token_ids
            except Unavailable:
                assert at_coordinator
                assert not got
                await asyncio.sleep(0.1)
                continue
            assert got == fake_answer(prompt, length)
            num_whole += 1
    return num_whole


async def under_load(targets, work):
    """Does the work in a thread while clients ask. Returns the number of their requests; all have to be whole."""
    over = asyncio.Event()
    asking = [
        asyncio.create_task(ask_until(over, target, number, at_coordinator=target == targets[0]))
        for number, target in zip(range(NUM_CLIENTS), itertools.cycle(targets), strict=False)
    ]
    working = asyncio.create_task(asyncio.to_thread(work))
    await asyncio.wait([working, *asking], return_when=asyncio.FIRST_COMPLETED)  # a request that fails ends it, too
    over.set()
    await working
    return sum(await asyncio.gather(*asking))


def test_no_request_is_lost_while_every_process_is_replaced_by_one_of_the_next_version(cluster):
    """A third of the clients ask the coordinator and resume by themselves, the others API servers of both versions."""
    ports = [cluster.start_api_server()[0], cluster.start_api_server(version=NEXT)[0]]
    targets = [cluster.target, *(f"127.0.0.1:{port}" for port in ports)]

    def replace():
        for name in cluster.names:
            assert cluster.children[name].stop() == 0
            cluster.start_node(name, version=NEXT)
            cluster.wait_complete()
        cluster.start_standby(version=NEXT)
        cluster.pass_on()
        cluster.wait_complete()

    num_whole = asyncio.run(under_load(targets, replace))
    assert num_whole >= NUM_CLIENTS
    assert cluster.server_info().version == NEXT
    cluster.wait_all_free()


@pytest.mark.parametrize("version", [AFTER_NEXT, "9.0.0"])
def test_a_version_further_away_is_refused_with_the_difference(cluster, version):
    node = cluster.start_intruder(cluster.model, "decode-9", version=version)
    assert node.wait(DEADLINE_S) == 2
    difference = f"version is {version} and {VERSION}, more than 1 minor apart"
    assert f"node decode-9 and the coordinator differ: {difference}" in node.output()


def test_an_api_server_of_such_a_version_says_so_and_waits_for_another_coordinator(cluster):
    child, _ = cluster.launch_api_server(version=AFTER_NEXT)
    wait_until(lambda: f"version is {AFTER_NEXT} and {VERSION}" in child.output(), "it is refused", DEADLINE_S)
    assert child.is_running
    assert child.stop() == 0


def test_a_fleet_that_drains_ends_its_requests_and_takes_no_more(cluster):
    grpc_port, _ = cluster.start_api_server()

    async def scenario():
        async with AsyncClient(cluster.target) as direct, AsyncClient(f"127.0.0.1:{grpc_port}") as behind:
            asking = [
                asyncio.create_task(_whole(client, [5, 6, number]))
                for number, client in enumerate([direct, behind] * 4)
            ]
            while cluster.loads()["decode-0"].num_running == 0:
                await asyncio.sleep(0.05)
            left = [num_left async for num_left in behind.drain(None, deadline_s=DEADLINE_S)]
            assert (len(left) > 1, left[-1]) == (True, 0)
            await asyncio.gather(*asking)
            assert not await direct.health()

    asyncio.run(scenario())
    cluster.wait_all_free()


async def _whole(client, prompt):
    got = []
    async for chunk in client.generate(prompt, max_tokens=200, temperature=0, ignore_eos=True):
        got += chunk.token_ids
    assert got == fake_answer(prompt, 200)
