"""What the options do that the servers are made with, with the installed gRPC."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from serving_core.net.channels import fleet_options, public_options
from tests.faults.strikes import STOPPED_S

DEADLINE_S = 60.0
OPTIONS = {
    "public": lambda number: public_options(number, longest_call_s=1.0),
    "fleet": fleet_options,
}


@contextlib.asynccontextmanager
async def served(options):
    server = grpc.aio.server(options=options)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def answers(port):
    """Whether somebody new gets in."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True


@pytest.mark.parametrize("api_server", OPTIONS)
async def test_connections_beyond_the_cap_are_closed_until_others_end(api_server):
    async with asyncio.timeout(DEADLINE_S), served(OPTIONS[api_server](3)) as port:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, _ in connections:
            assert await reader.read(1)  # the server's first words: it counts
        assert not await answers(port)
        for _, writer in connections:
            writer.close()
        while not await answers(port):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("api_server", "option", "reason"),
    [
        ("public", "grpc.max_connection_idle_ms", b"connection idle"),
        ("public", "grpc.max_connection_age_ms", b"max connection age"),
        ("fleet", "grpc.max_connection_idle_ms", b"connection idle"),
    ],
)
async def test_who_has_no_call_is_asked_to_go(api_server, option, reason):
    """With a short time in place of ours."""
    options = {**dict(OPTIONS[api_server](3)), option: 1000}
    async with asyncio.timeout(DEADLINE_S), served([*options.items()]) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0")
        said = b""
        while part := await reader.read(1000):
            said += part
        writer.close()
        assert reason in said


def test_pings_end_no_connection_of_a_process_that_stands_still_for_a_while():
    """As the coordinator does in the matrix of faults. Of nodes, heartbeats tell sooner, and know how slow they are."""
    client, node = dict(public_options(3, longest_call_s=1.0)), dict(fleet_options(3))
    for option in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert min(client[option], node[option]) > 1000 * STOPPED_S


def test_nodes_stay_for_as_long_as_they_live():
    assert "grpc.max_connection_age_ms" not in dict(fleet_options(3))
