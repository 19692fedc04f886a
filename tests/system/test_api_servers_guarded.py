"""Two API servers over TLS, with certificates of clients and API keys: who gets in at either, and what can be exchanged
while both serve; and what one hears of all at whichever API server one asks."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving_core.net.tls import TlsFiles, client_context
from splitserve import AsyncClient
from splitserve.client.errors import ClientError
from tests.system.cluster import wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model
from tests.tls_kit import authority, files_of, serial_of, shown_at

pytestmark = pytest.mark.nightly  # a whole cluster over TLS

DEADLINE_S = 240.0
NUM_CLIENTS = 20  # each on a connection of its own: both API servers have some of them but once in 500,000 times
KEY, NEXT_KEY = "key-of-ann", "another-key-of-ann"
LENGTH = 3000  # more than there is time for
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("tls") / "certs")


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"ann {KEY}\n")
    return path


@pytest.fixture(scope="module")
def api_servers(start_cluster, tmp_path_factory, certs, keys_file):
    model = write_fake_model(tmp_path_factory.mktemp("model") / "fake", step_s=0.1)
    coordinator = {"api_server_count": 2, "tls_verify_clients": True, "api_keys_file": keys_file, "drain_s": 2}
    env = {"SPLITSERVE_API_KEY": "root", "SPLITSERVE_FLEET_SECRET": "of-the-fleet"}
    return start_cluster(
        model, http=True, certs=certs, coordinator=coordinator, node={"block_size": 8, "drain_s": 2}, env=env
    )


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_an_api_server_is_told_the_secrets_of_clients_alone(api_servers):
    coordinator = psutil.Process(api_servers.children["coordinator"].process.pid)
    environments = [child.environ() for child in coordinator.children() if "coordinator.api" in child.cmdline()]
    assert [each["SPLITSERVE_API_KEY"] for each in environments] == ["root", "root"]
    assert not [each for each in environments if "of-the-fleet" in each.values()]


def asking(api_servers, certs, role="client"):
    """One connection, so one API server."""
    files = files_of(certs, role)
    return httpx2.Client(base_url=api_servers.url, verify=client_context(files), timeout=DEADLINE_S)


def statuses(api_servers, certs, key):
    """What as many connections hear."""
    found = set()
    for _ in range(NUM_CLIENTS):
        with asking(api_servers, certs) as client:
            found.add(client.get("/v1/models", headers=bearer(key)).status_code)
    return found


def samples(api_servers, certs):
    with asking(api_servers, certs) as client:
        text = client.get("/metrics", headers=bearer(KEY)).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def by_api_server(found, name):
    return {labels[0]: value for (each, *labels), value in found.items() if each == name}


def test_nobody_gets_in_without_certificate_and_key(api_servers, certs):
    assert statuses(api_servers, certs, KEY) == {200}
    assert statuses(api_servers, certs, "wrong") == {401}
    bare = client_context(TlsFiles(ca=str(certs / "ca.crt")))
    for _ in range(NUM_CLIENTS):
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{api_servers.url}/v1/models", headers=bearer(KEY), verify=bare, timeout=DEADLINE_S)


def test_both_api_servers_read_the_keys_again(api_servers, certs, keys_file):
    keys_file.write_text(f"ann {NEXT_KEY}\n")
    api_servers.children["coordinator"].send(signal.SIGHUP)
    try:
        wait_until(lambda: statuses(api_servers, certs, NEXT_KEY) == {200}, "the new key is in force", DEADLINE_S)
        assert statuses(api_servers, certs, KEY) == {401}
    finally:
        keys_file.write_text(f"ann {KEY}\n")
        api_servers.children["coordinator"].send(signal.SIGHUP)
    wait_until(lambda: statuses(api_servers, certs, KEY) == {200}, "the old key is in force again", DEADLINE_S)


async def read(client, prompt, came):
    named = {"request_id": f"stream-{prompt[-1]}", "resume": False}
    async for chunk in client.generate(prompt, max_tokens=LENGTH, **named, **GREEDY):
        came += chunk.token_ids


@asynccontextmanager
async def streams(api_servers, certs):
    """Answers of as many connections, all of which are under way; they are aborted in the end, and must be right."""
    files = files_of(certs, "client")
    tls = {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    async with AsyncClient(api_servers.target, api_key=KEY, num_channels=NUM_CLIENTS, **tls) as client:
        came = {number: [] for number in range(NUM_CLIENTS)}
        reading = [asyncio.create_task(read(client, [5, 6, number], tokens)) for number, tokens in came.items()]
        async with asyncio.timeout(DEADLINE_S):
            while not all(came.values()):
                await asyncio.sleep(0.01)
            yield
            await client.abort([f"stream-{number}" for number in came])
            await asyncio.gather(*reading)
    for number, tokens in came.items():
        assert len(tokens) < LENGTH
        assert tokens == fake_answer([5, 6, number], len(tokens))


async def test_at_whichever_api_server_one_hears_of_all(api_servers, certs):
    async with streams(api_servers, certs):
        everyone = await asyncio.gather(*(asyncio.to_thread(samples, api_servers, certs) for _ in range(NUM_CLIENTS)))
        for found in everyone:
            calls = by_api_server(found, "splitserve_api_server_calls")
            assert calls.keys() == {"1", "2"}
            assert all(calls.values())
            assert sum(calls.values()) == found["splitserve_requests_running",] == NUM_CLIENTS
            assert all(by_api_server(found, "splitserve_api_server_cpu_seconds_total").values())
        await asyncio.to_thread(check_pages, api_servers, certs)
        shown = await asyncio.to_thread(top, api_servers, certs)
    assert "prefill-0" in shown
    assert "decode-0" in shown


def check_pages(api_servers, certs):
    for _ in range(NUM_CLIENTS):
        with asking(api_servers, certs) as client:
            overview = client.get("/ui/overview", params={"after": 0}, headers=bearer(KEY)).json()
            assert client.get("/ui").status_code == 200
        assert {life["sequence_id"] for life in overview["live"]} == {f"stream-{i}/0" for i in range(NUM_CLIENTS)}
        assert len(overview["nodes"]) == len(api_servers.names)


def top(api_servers, certs):
    files = files_of(certs, "client")
    tls = ("--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key)
    command = [sys.executable, "-m", "splitserve", "top", "--once", "--server", api_servers.target, *tls]
    environment = {**os.environ, "SPLITSERVE_API_KEY": KEY}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


async def test_certificates_are_exchanged_at_both_while_streams_run(api_servers, certs):
    async with streams(api_servers, certs):
        authority(certs)
        after = serial_of(certs / "coordinator.crt")
        for port, protocol in ((api_servers.port, "h2"), (api_servers.http_port, "http/1.1")):
            await asyncio.to_thread(
                wait_until, lambda at=(port, protocol): is_everywhere(certs, after, *at), "it is new", DEADLINE_S
            )
    assert api_servers.attached() == set(api_servers.names)


def is_everywhere(certs, serial, port, protocol):
    return all(shown_at(port, certs, "client", protocol) == serial for _ in range(NUM_CLIENTS))


async def test_all_end_in_time_that_are_told_to_at_once(api_servers, certs):
    """With streams under way at both API servers, which no drain can wait for. The last test: nothing runs after it."""
    files = files_of(certs, "client")
    tls = {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    coordinator = psutil.Process(api_servers.children["coordinator"].process.pid)
    processes = coordinator.children(recursive=True)
    assert len([each for each in processes if "coordinator.api" in each.cmdline()]) == 2
    async with AsyncClient(api_servers.target, api_key=KEY, num_channels=NUM_CLIENTS, **tls) as client:
        came = [[] for _ in range(NUM_CLIENTS)]
        reading = [asyncio.create_task(read(client, [5, 6, number], came[number])) for number in range(NUM_CLIENTS)]
        async with asyncio.timeout(DEADLINE_S):
            while not all(came):
                await asyncio.sleep(0.01)
        for child in api_servers.children.values():
            child.send(signal.SIGTERM)
        ended = await asyncio.gather(*reading, return_exceptions=True)
    assert all(isinstance(error, ClientError) for error in ended)
    codes = [await asyncio.to_thread(child.wait, DEADLINE_S) for child in api_servers.children.values()]
    assert codes == [0, 0, 0]
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive
