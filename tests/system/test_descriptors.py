"""Crowds that connect and want nothing, at every port of a cluster whose processes may open 1,024 files each."""

import contextlib
import resource
import socket
import threading
import time
from collections import deque

import httpx2
import pytest
import zmq

from serving_core.net.descriptors import raise_limit
from tests.system.answers import ask
from tests.system.cluster import free_port, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

NUM_DESCRIPTORS = 1024
PROMPT = list(range(100))
DEADLINE_S = 240.0
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # what an HTTP/2 client says first


@pytest.fixture(scope="module", autouse=True)
def many_descriptors():
    """For the crowds, which come from this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 6000:
        pytest.skip("the crowds need 6,000 descriptors")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def data_port():
    return free_port()


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory, data_port):
    return start_cluster(
        write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.002),
        http=True,
        num_descriptors=NUM_DESCRIPTORS,
        coordinator={"node_timeout_s": 3},
        decode={"kv_bind": f"tcp://127.0.0.1:{data_port}"},
    )


def dial(port, number):
    """So many connections, which the port may take, or leave to wait."""
    clients = [socket.socket() for _ in range(number)]
    for client in clients:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
    return clients


def hang_up(clients):
    for client in clients:
        client.close()


@contextlib.contextmanager
def crowd(port, number, *, greeting=b""):
    """So many connections, which say this and no more."""
    clients = dial(port, number)
    for client in clients if greeting else ():
        with contextlib.suppress(OSError):  # not connected yet
            client.send(greeting)
    try:
        yield clients
    finally:
        hang_up(clients)


@contextlib.contextmanager
def flood(port):
    """Silent connections, several thousand a second and never fewer than the process has descriptors."""
    stopping, crowds = threading.Event(), deque()

    def come_and_come():
        while not stopping.wait(0.2):
            crowds.append(dial(port, 800))
            if len(crowds) > 5:
                hang_up(crowds.popleft())

    thread = threading.Thread(target=come_and_come)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        for clients in crowds:
            hang_up(clients)


def num_open(clients):
    """How many of them the other end has not closed, and has taken as far as can be seen."""
    found = 0
    for client in clients:
        try:
            found += bool(client.recv(1000))
        except BlockingIOError:
            found += 1
        except OSError:
            continue
    return found


async def answers(cluster):
    """A prompt that one node reads and the other one answers."""
    async with cluster.connect() as stub:
        answer = await ask(stub, PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_answer(PROMPT, 20)


def is_healthy(cluster):
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(f"{cluster.url}/health", timeout=30, trust_env=False).status_code == 200
    return False


def completes(cluster):
    body = {"model": cluster.model.name, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    reply = httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False)
    return reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 5


@pytest.mark.nightly
async def test_2560_idle_http_connections_shut_nobody_out(cluster):
    with crowd(cluster.http_port, 2560) as clients:
        wait_until(lambda: num_open(clients) < 2400, "the oldest make room", DEADLINE_S)
        for _ in range(3):
            assert is_healthy(cluster)
            assert completes(cluster)
        await answers(cluster)
    assert cluster.attached() == {"prefill-0", "decode-0"}


async def test_an_answer_under_way_is_not_what_makes_room(cluster):
    body = {"model": cluster.model.name, "prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    body["stream"] = True
    url = f"{cluster.url}/v1/completions"
    with httpx2.stream("POST", url, json=body, timeout=DEADLINE_S, trust_env=False) as reply:
        lines = reply.iter_lines()
        next(lines)
        with crowd(cluster.http_port, 1500) as clients:
            wait_until(lambda: num_open(clients) < 1400, "the oldest make room", DEADLINE_S)
            assert "data: [DONE]" in list(lines)


@pytest.mark.nightly
async def test_1200_idle_http_connections_do_not_stop_grpc(cluster):
    with crowd(cluster.http_port, 1200) as clients:
        wait_until(lambda: num_open(clients) < 1150, "all have come, and those beyond the limit are closed", DEADLINE_S)
        for _ in range(3):
            await answers(cluster)
        assert cluster.is_serving()


@pytest.mark.nightly
@pytest.mark.parametrize("greeting", [b"", HTTP2], ids=["silent", "HTTP/2"])
async def test_1200_idle_grpc_connections_stop_nothing_else_and_go(cluster, greeting):
    """Those that say nothing, and those that begin in HTTP/2 and answer no ping."""
    with crowd(cluster.port, 1200, greeting=greeting):
        wait_until(lambda: not cluster.is_serving(), "the port is full", DEADLINE_S)
        for _ in range(3):
            assert is_healthy(cluster)
            assert completes(cluster)
            assert is_serving_for_the_fleet(cluster)
        wait_until(cluster.is_serving, "the idle have made room", DEADLINE_S)
        await answers(cluster)


@pytest.mark.nightly
async def test_1200_idle_connections_to_the_fleets_port_stop_nothing_else(cluster):
    with crowd(cluster.fleet_port, 1200):
        wait_until(lambda: not is_serving_for_the_fleet(cluster), "the port is full", DEADLINE_S)
        await answers(cluster)
        assert is_healthy(cluster)
        assert completes(cluster)
        assert cluster.attached() == {"prefill-0", "decode-0"}
        wait_until(lambda: is_serving_for_the_fleet(cluster), "the silent have made room", DEADLINE_S)


def is_serving_for_the_fleet(cluster):
    return cluster.is_serving(port=cluster.fleet_port)


# ---- the data plane ----


@pytest.mark.nightly
async def test_1000_dealers_at_the_data_port_harm_nobody(cluster, data_port):
    """Of libzmq's own kind, which dial again and again."""
    await answers(cluster)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        context.set(zmq.MAX_SOCKETS, 2000)
        for _ in range(1000):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, 1000)
            dealer.connect(f"tcp://127.0.0.1:{data_port}")
            dealer.send(b"hello")
        end = time.monotonic() + 3.0  # for some rounds, and heartbeats
        while time.monotonic() < end:
            await answers(cluster)
        cluster.kill("prefill-0")
        cluster.heal()
        await answers(cluster)  # over a new connection
    is_unharmed(cluster)


@pytest.mark.nightly
async def test_more_silent_connections_than_descriptors_harm_nobody(cluster, data_port):
    """They have all that are left, and as soon as one is cut off another one comes; then they go."""
    await answers(cluster)
    with flood(data_port):
        wait_until(lambda: "descriptors are in use" in cluster.children["decode-0"].output(), "a shortage", DEADLINE_S)
        for _ in range(5):
            await answers(cluster)
    cluster.kill("prefill-0")
    cluster.heal()
    await answers(cluster)
    is_unharmed(cluster)


@pytest.mark.nightly
async def test_a_flood_of_silent_connections_leaves_the_node_in_the_fleet(cluster, data_port):
    await answers(cluster)
    with flood(data_port):
        end = time.monotonic() + 15.0
        while time.monotonic() < end:
            await answers(cluster)
            assert cluster.attached() == {"prefill-0", "decode-0"}
    is_unharmed(cluster)


def is_unharmed(cluster):
    """The node is the process that it was, and its log does not grow with the crowd."""
    node = cluster.children["decode-0"]
    assert node.is_running
    assert cluster.attached() == {"prefill-0", "decode-0"}
    assert node.output().count("descriptors are in use") < 20
    assert node.output().count("without the key") < 20
    cluster.wait_all_free()
