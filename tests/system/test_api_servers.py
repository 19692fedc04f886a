"""Two API servers and a control process: streams over both, what is lost with one of them, and who may share their
ports."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter

import grpc
import grpc.aio
import psutil
import pytest

from protos import inference_pb2, inference_pb2_grpc
from splitserve import AsyncClient
from splitserve.client.errors import ClientError
from tests.system.cluster import free_port, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

pytestmark = pytest.mark.nightly  # two API servers, three nodes, and all of them again after they were killed

DEADLINE_S = 240.0
NUM_CLIENTS = 24  # each on a connection of its own: both API servers have some of them but once in 8 million times
LENGTH = 300
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def api_servers(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model") / "fake", step_s=0.01, token_s=0.0002)
    coordinator = {"api_server_count": 2, "node_wait_s": 60}
    return start_cluster(model, num_decode=2, http=True, coordinator=coordinator)


@pytest.fixture(autouse=True)
def _whole(api_servers):
    wait_until(lambda: num_listening(api_servers) == 2, "both API servers listen", DEADLINE_S)
    yield
    api_servers.heal()
    wait_until(lambda: num_listening(api_servers) == 2, "both API servers listen again", DEADLINE_S)
    api_servers.wait_all_free()


def pids(cluster):
    """Of the API servers, in the order of their numbers."""
    coordinator = psutil.Process(cluster.children["coordinator"].process.pid)
    found = {}
    for child in coordinator.children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            line = child.cmdline()
            if "coordinator.api" in line:
                found[line[line.index("--api-server-number") + 1]] = child.pid
    return [pid for _, pid in sorted(found.items())]


def num_connections(cluster, pid, status=psutil.CONN_ESTABLISHED):
    """Of gRPC clients, at an API server."""
    everyone = psutil.Process(pid).net_connections("tcp")
    return sum(each.status == status and each.laddr.port == cluster.port for each in everyone)


def num_listening(cluster):
    """Return how many API servers listen for gRPC clients."""
    found = 0
    for pid in pids(cluster):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += num_connections(cluster, pid, psutil.CONN_LISTEN) > 0
    return found


class Asked:
    """One client's answer, as it has come so far."""

    def __init__(self, prompt):
        self.prompt = prompt
        self.token_ids = []
        self.error = None

    async def read(self, client, *, resume):
        try:
            async for chunk in client.generate(self.prompt, max_tokens=LENGTH, resume=resume, **GREEDY):
                self.token_ids += chunk.token_ids
        except ClientError as error:
            self.error = error


async def ask_all(cluster, strike, *, resume=False):
    """Answers of as many clients, all of which have begun when the fault strikes; and what the strike gives."""
    async with AsyncClient(cluster.target, num_channels=NUM_CLIENTS) as client:
        asked = [Asked([5, 6, 7 + index]) for index in range(NUM_CLIENTS)]
        tasks = [asyncio.create_task(each.read(client, resume=resume)) for each in asked]
        await until_all_stream(asked)
        struck = strike()
        await until_all_end(cluster, asked, tasks)
    return asked, struck


async def until_all_stream(asked):
    async with asyncio.timeout(DEADLINE_S):
        while not all(len(each.token_ids) >= 5 for each in asked):
            await asyncio.sleep(0.01)


async def until_all_end(cluster, asked, tasks):
    """Fails, with what the server knows of them, where some do not."""
    _, late = await asyncio.wait(tasks, timeout=DEADLINE_S)
    if late:
        async with AsyncClient(cluster.target) as client:
            live = (await client.overview(after=0)).live
        come = {each.prompt[-1]: len(each.token_ids) for each, task in zip(asked, tasks, strict=True) if task in late}
        known = [(life.completion_tokens, life.spans) for life in live]
        calls = [total(cluster, f'splitserve_api_server_calls{{api_server="{number}"}}') for number in (1, 2)]
        pytest.fail(
            f"after {DEADLINE_S} s {come} tokens have come; the server's live: {known}; API servers' calls: {calls}"
        )


def until_said(cluster, sentence):
    """By the coordinator, which may be later than what its clients notice."""
    wait_until(lambda: sentence in cluster.children["coordinator"].output(), sentence, DEADLINE_S)


def check_exact(asked):
    for each in asked:
        assert each.error is None
        assert each.token_ids == fake_answer(each.prompt, LENGTH)


def kill_api_server(cluster, number):
    """How many clients it had."""
    pid = pids(cluster)[number - 1]
    num_clients = num_connections(cluster, pid)
    os.kill(pid, signal.SIGKILL)
    return num_clients


def test_both_api_servers_serve(api_servers):
    asked, numbers = asyncio.run(
        ask_all(api_servers, lambda: [num_connections(api_servers, pid) for pid in pids(api_servers)])
    )
    check_exact(asked)
    assert sum(numbers) == NUM_CLIENTS
    assert all(numbers)


def test_a_killed_api_server_costs_its_own_streams_and_their_clients_go_on(api_servers):
    asked, num_lost = asyncio.run(ask_all(api_servers, lambda: kill_api_server(api_servers, 1), resume=True))
    check_exact(asked)
    assert num_lost
    until_said(api_servers, "API server 1 has ended with code -9")


def test_streams_of_the_other_api_server_are_unharmed(api_servers):
    asked, num_lost = asyncio.run(ask_all(api_servers, lambda: kill_api_server(api_servers, 2)))
    assert len([each for each in asked if each.error is not None]) == num_lost
    check_exact([each for each in asked if each.error is None])


def test_an_api_server_that_hangs_is_given_up_and_its_clients_go_on(api_servers):
    asked, _ = asyncio.run(ask_all(api_servers, lambda: os.kill(pids(api_servers)[0], signal.SIGSTOP), resume=True))
    check_exact(asked)
    until_said(api_servers, "API server 1 is given up: it has been silent for 20 s")


def test_answers_survive_the_node_that_writes_them(api_servers):
    asked, _ = asyncio.run(ask_all(api_servers, lambda: api_servers.kill("decode-0")))
    check_exact(asked)


def test_a_call_can_be_aborted_and_named_once_at_any_api_server(api_servers):
    async def scenario():
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [grpc.aio.insecure_channel(api_servers.target, options=options) for _ in range(NUM_CLIENTS)]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        request = inference_pb2.GenerateRequest(request_id="the-one", text="hello")
        request.sampling_params.max_tokens = 3000
        request.sampling_params.ignore_eos = True
        call = stubs[0].Generate(request, timeout=DEADLINE_S)
        assert (await call.read()).chunk.token_ids
        codes = Counter()
        for stub in stubs[1:]:  # which both API servers have some of
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, timeout=DEADLINE_S).read()
            codes[caught.value.code()] += 1
        assert codes == {grpc.StatusCode.ALREADY_EXISTS: NUM_CLIENTS - 1}
        abort = inference_pb2.AbortRequest(request_ids=["the-one", "another"])
        aborted = await stubs[1].Abort(abort, timeout=DEADLINE_S)
        assert (list(aborted.aborted), list(aborted.unknown)) == (["the-one"], ["another"])
        while not (response := await call.read()).HasField("complete"):
            pass
        assert response.complete.finish_reason == inference_pb2.FINISH_REASON_ABORT
        await check_that_later_calls_take_the_place(stubs, request)
        for channel in channels:
            await channel.close()

    asyncio.run(scenario())


async def check_that_later_calls_take_the_place(stubs, request):
    """Of the one before each, whichever API server that is at."""
    calls = []
    for number, stub in enumerate(stubs):
        request.call_number = number
        calls.append(stub.Generate(request, timeout=DEADLINE_S))
        assert (await calls[-1].read()).chunk.token_ids
    await stubs[0].Abort(inference_pb2.AbortRequest(request_ids=[request.request_id]), timeout=DEADLINE_S)
    codes = []
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        codes.append(await call.code())
    assert codes == [*[grpc.StatusCode.ABORTED] * (len(stubs) - 1), grpc.StatusCode.OK]


def post(cluster, path, body):
    request = urllib.request.Request(
        cluster.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return json.loads(response.read())


def get(cluster, path):
    with urllib.request.urlopen(cluster.url + path, timeout=DEADLINE_S) as response:
        return response.read().decode()


def total(cluster, sample):
    lines = [line for line in get(cluster, "/metrics").splitlines() if line.startswith(sample)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_http_counts_refusals_and_stops_are_one_account(api_servers):
    finished, refused, called = (
        'splitserve_requests_finished_total{finished_reason="stop"}',
        "splitserve_requests_refused_total",
        'http_requests_total{handler="/v1/completions"',
    )
    before = [total(api_servers, sample) for sample in (finished, refused, called)]
    prompt = [5, 6, 7]
    text = post(
        api_servers, "/v1/completions", {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    )
    text = text["choices"][0]["text"]
    stop = text[20:23]
    asked = {"prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stop": stop}
    for _ in range(NUM_CLIENTS):
        choice = post(api_servers, "/v1/completions", asked)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(api_servers, "/v1/completions", {**asked, "prompt": [10**6]})
        assert caught.value.code == 400
        caught.value.close()

    def gained():
        after = [total(api_servers, sample) for sample in (finished, refused, called)]
        return [now - then for now, then in zip(after, before, strict=True)]

    # A call is counted when it is over, and its client may know before.
    wait_until(lambda: gained()[2] >= 2 * NUM_CLIENTS + 1, "all calls are counted", DEADLINE_S)
    assert gained() == [NUM_CLIENTS, NUM_CLIENTS, 2 * NUM_CLIENTS + 1]
    assert json.loads(get(api_servers, "/ready")) == {"ready": True}
    assert len(json.loads(get(api_servers, "/ui/overview"))["nodes"]) == 3


def test_nobody_else_can_have_the_ports(api_servers, tmp_path):
    for flags in ([], ["--api-server-count", "2"]):
        command = [
            sys.executable,
            "-m",
            "coordinator",
            str(api_servers.model),
            "--grpc-port",
            str(api_servers.port),
            *flags,
        ]
        command += ["--fleet-port", str(free_port()), "--http-port", "-1"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path, check=False)
        assert ended.returncode == 2
        assert f"coordinator: --grpc-port {api_servers.port} is in use on 127.0.0.1" in ended.stderr
