"""The port of a node's figures: real sockets, clients that hang, an event loop that is busy."""

import asyncio
import contextlib
import errno
import gzip
import socket
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from serving_core.errors import SettingsError
from serving_core.figures import counter, gauge
from serving_node import metrics
from serving_node.metrics import MetricsServer

HOST = "127.0.0.1"
DEADLINE_S = 60.0


@contextlib.asynccontextmanager
async def server_of(figures, host=HOST):
    server = MetricsServer(host, 0, figures)
    try:
        yield server
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await server.stop()


def three():
    return [gauge("three", "3", [({"node": "n"}, 3)])]


async def ask(port, head="GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", host=HOST):
    """The status and the body of one call."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode())
    async with asyncio.timeout(DEADLINE_S):
        reply = await reader.read()
    writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_figures_are_taken_on_the_loop_and_told():
    loops = []

    def figures():
        loops.append(asyncio.get_running_loop())
        return [gauge("figures", "Asked for.", [({}, len(loops))]), counter("things", "All.", [({"kind": "a"}, 4)])]

    async with server_of(figures) as server:
        for number in (1, 2):
            status, body = await ask(server.port)
            told = {sample.name: sample.value for family in text_string_to_metric_families(body.decode())
                    for sample in family.samples}  # fmt: skip
            assert (status, told["splitserve_figures"], told["splitserve_things_total"]) == (200, number, 4)
            assert told["process_open_fds"] > 0
    assert loops == [asyncio.get_running_loop()] * 2


async def test_open_metrics_and_gzip_where_they_are_asked_for():
    async with server_of(three) as server:
        accept = "Accept: application/openmetrics-text; version=1.0.0\r\nAccept-Encoding: gzip"
        _, body = await ask(server.port, f"GET /metrics HTTP/1.1\r\n{accept}\r\n\r\n")
        names = [family.name for family in openmetrics_families(gzip.decompress(body).decode())]
        assert "splitserve_three" in names
        _, body = await ask(server.port, "GET /metrics?name[]=splitserve_three HTTP/1.1\r\n\r\n")
        assert [family.name for family in text_string_to_metric_families(body.decode())] == ["splitserve_three"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", 404),
        ("GET /metrics/x HTTP/1.1\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 501),
        ("BREW /metrics HTTP/1.1\r\n\r\n", 501),
    ],
)
async def test_what_is_no_call_for_figures_gets_none(head, status):
    async with server_of(three) as server:
        assert (await ask(server.port, head))[0] == status
        assert (await ask(server.port))[0] == 200


async def test_clients_that_hang_are_cut_off_and_others_get_their_turn(monkeypatch):
    monkeypatch.setattr(metrics, "CALL_S", 1.5)
    async with server_of(three) as server:
        hanging = [await asyncio.open_connection(HOST, server.port) for _ in range(2)]
        for _, writer in hanging:
            writer.write(b"GET /metrics HTTP/1.1\r\nX: ")  # and no end of it

        async def drip(writer):
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.05)

        dripping = [asyncio.create_task(drip(writer)) for _, writer in hanging]
        status, _ = await ask(server.port)
        for task in dripping:
            task.cancel()
        await asyncio.gather(*dripping, return_exceptions=True)
        for _, writer in hanging:
            writer.close()
    assert status == 200


async def test_a_loop_that_is_busy_costs_the_call_alone(monkeypatch):
    monkeypatch.setattr(metrics, "FIGURES_S", 0.1)
    async with server_of(three) as server:
        with socket.create_connection((HOST, server.port), timeout=DEADLINE_S) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            head = client.recv(64)  # the loop has no turn meanwhile
        assert head.split()[1] == b"503"
        monkeypatch.setattr(metrics, "FIGURES_S", DEADLINE_S)
        assert (await ask(server.port))[0] == 200


async def test_without_descriptors_it_waits_and_goes_on(monkeypatch):
    monkeypatch.setattr(metrics, "SHORTAGE_S", 0.01)
    async with server_of(three) as server:
        accept, refused = socket.socket.accept, []

        def scarce(listening):
            if len(refused) < 3:
                refused.append(time.monotonic())
                raise OSError(errno.EMFILE, "no descriptor left")
            return accept(listening)

        monkeypatch.setattr(socket.socket, "accept", scarce)
        assert (await ask(server.port))[0] == 200
    assert len(refused) == 3


async def test_a_port_that_is_taken_is_said_so():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--metrics-port {port} cannot be listened on at {HOST}: "):
            MetricsServer(HOST, port, three)
    with pytest.raises(SettingsError, match=r"--metrics-port 0 cannot be listened on at 192\.0\.2\.1"):
        MetricsServer("192.0.2.1", 0, three)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_addresses_of_version_six():
    try:
        async with server_of(three, "[::1]") as server:
            assert (await ask(server.port, host="::1"))[0] == 200
    except SettingsError:
        pytest.skip("this machine has no IPv6 loopback")
