"""A coordinator that is killed, its standby, and API servers that outlive both: their clients see a pause and then the
same tokens."""

import asyncio
import json

import httpx2
import pytest

from splitserve import AsyncClient
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

DEADLINE_S = 240.0
LENGTH = 400
NUM_STREAMS = 8  # of each kind
PROMPTS = [[5, 6, 7 + index] for index in range(NUM_STREAMS)]
SAMPLED = {"temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model") / "fake", step_s=0.01)
    return start_cluster(model, http=True, coordinator={"node_wait_s": 60})


class Stream:
    """One client's stream: its token ids or its text, as far as they have come."""

    def __init__(self):
        self.got = []
        self.is_whole = False

    async def over_grpc(self, client, prompt, seed, *, resume):
        async for chunk in client.generate(prompt, max_tokens=LENGTH, seed=seed, resume=resume, **SAMPLED):
            self.got += chunk.token_ids
            self.is_whole = chunk.completion is not None

    async def over_http(self, client, prompt, seed):
        body = {"prompt": prompt, "max_tokens": LENGTH, "seed": seed, "stream": True, **SAMPLED}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.is_whole = True
                elif line:
                    self.got.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])


async def stream_all(cluster, ports, strike=None):
    """Returns what the clients of all kinds get; the strike comes when all of their streams are under way."""
    grpc_port, http_port = ports
    async with (
        AsyncClient(cluster.target) as direct,
        AsyncClient(f"127.0.0.1:{grpc_port}") as behind,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=DEADLINE_S) as http,
    ):
        streams = [Stream() for _ in range(3 * NUM_STREAMS)]
        kinds = (
            lambda stream, *asked: stream.over_grpc(direct, *asked, resume=True),
            lambda stream, *asked: stream.over_grpc(behind, *asked, resume=False),
            lambda stream, *asked: stream.over_http(http, *asked),
        )
        tasks = [
            asyncio.create_task(kinds[number % 3](stream, PROMPTS[number // 3], number))
            for number, stream in enumerate(streams)
        ]
        async with asyncio.timeout(DEADLINE_S):
            if strike is not None:
                while not all(len(stream.got) >= 5 for stream in streams):
                    assert not any(task.done() for task in tasks), "a stream was over before the strike"
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(strike)
            await asyncio.gather(*tasks)
    assert all(stream.is_whole for stream in streams)
    return [stream.got if number % 3 < 2 else "".join(stream.got) for number, stream in enumerate(streams)]


@pytest.mark.parametrize("strike", ["take_over", "pass_on"], ids=["killed", "stopped"])
def test_no_stream_notices_that_its_coordinator_is_gone(cluster, strike):
    """24 streams: of clients that resume, and of an API server that does, over gRPC and over HTTP. When the coordinator
    is stopped, its own clients' streams end with it; those of the API server go on at the standby."""
    ports = cluster.start_api_server()
    undisturbed = asyncio.run(stream_all(cluster, ports))
    cluster.start_standby()
    assert asyncio.run(stream_all(cluster, ports, getattr(cluster, strike))) == undisturbed
    cluster.wait_complete()
    cluster.wait_all_free()


def test_a_standby_ends_when_it_is_told_to(cluster):
    assert cluster.start_standby().stop() == 0
    assert cluster.is_serving()


def test_a_call_waits_at_the_api_server_until_a_coordinator_is_there(cluster):
    grpc_port, _ = cluster.start_api_server()

    async def scenario():
        async with AsyncClient(f"127.0.0.1:{grpc_port}") as client:
            asked = asyncio.create_task(anext(client.generate([5, 6, 7], max_tokens=1, temperature=0)))
            await asyncio.sleep(0)
            await asyncio.to_thread(cluster.heal)
            return (await asked).token_ids

    cluster.kill("coordinator")
    assert list(asyncio.run(scenario())) == fake_answer([5, 6, 7], 1)
