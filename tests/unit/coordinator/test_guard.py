"""A guard before a real gRPC server: what of a stranger ends when, and what one with a key may do."""

import asyncio
import contextlib

import grpc
import pytest

from coordinator.api import guard as guards
from coordinator.api.authentication import BearerSecrets
from coordinator.api.connections import CROWDED, GRPC, MALFORMED, OVER_ALLOWANCE, SLOW, Sheds
from coordinator.api.grpc_port import GrpcPort
from coordinator.api.http2_heads import EMPTY_SETTINGS, MAX_OPEN_CALLS
from serving_core.errors import SettingsError
from tests.strangers import END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, frame, greeting, head

DEADLINE_S = 120.0
KEY = (("authorization", "Bearer k"),)
NUM_CALLS = 2 * MAX_OPEN_CALLS


class Guarded:
    def __init__(self, port, sheds):
        self.port, self.sheds = port, sheds

    def channel(self):
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=(("grpc.use_local_subchannel_pool", 1),))

    async def until_shed(self, reason):
        async with asyncio.timeout(DEADLINE_S):
            while not self.sheds.taken()[GRPC, reason]:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def guarded(*, max_connections=100, max_per_peer=100):
    """A server that answers each call when all of NUM_CALLS are there, or at once if its message is empty."""
    everyone = asyncio.Barrier(NUM_CALLS)

    async def echo(message, context):
        if message:
            await everyone.wait()
        return message

    server, sheds = grpc.aio.server(), Sheds()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
    port = GrpcPort(
        GRPC, server, BearerSecrets({"k": ""}), sheds, max_connections=max_connections, max_per_peer=max_per_peer
    )
    number = port.listen("127.0.0.1", 0, None)
    await port.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Guarded(number, sheds)
    finally:
        await port.stop(0)


@contextlib.asynccontextmanager
async def connected(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ended(reader):
    """What still comes until the connection is closed."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


@pytest.mark.parametrize(
    "sent",
    [PREFACE[:5], greeting() + b"\0", greeting() + frame(HEADERS, END_HEADERS, 1, head("/s/Echo"))],
    ids=["preface", "frame", "request"],
)
async def test_what_a_stranger_does_not_end_is_ended(monkeypatch, sent):
    monkeypatch.setattr(guards, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(guards, "PREFACE_TIMEOUT_S", 0.2)
    async with guarded() as server, connected(server.port) as (reader, writer):
        writer.write(sent)
        await ended(reader)
        await server.until_shed(SLOW)


async def test_with_a_key_many_calls_may_be_open():
    async with guarded() as server, server.channel() as channel:
        echo = channel.unary_unary("/s/Echo")
        replies = await asyncio.gather(*(echo(b"x", metadata=KEY) for _ in range(NUM_CALLS)))
    assert replies == [b"x"] * NUM_CALLS
    assert not server.sheds.taken()


async def test_a_stranger_is_passed_on_until_its_address_has_sent_too_much():
    async with guarded() as server:
        async with server.channel() as channel:
            assert await channel.unary_unary("/s/Echo")(b"") == b""
        calls = frame(HEADERS, END_HEADERS | END_STREAM, 1, head("/s/Echo"))
        async with connected(server.port) as (reader, writer):
            writer.write(greeting() + calls * 100)
            await ended(reader)
        await server.until_shed(OVER_ALLOWANCE)
        async with server.channel() as channel:  # of the same address
            assert await channel.unary_unary("/s/Echo")(b"", metadata=KEY) == b""


async def test_strangers_make_room_and_who_has_brought_a_key_stays():
    async with guarded(max_connections=3, max_per_peer=3) as server, server.channel() as channel:
        echo = channel.unary_unary("/s/Echo")
        assert await echo(b"", metadata=KEY) == b""
        async with connected(server.port) as (first, _), connected(server.port), connected(server.port):
            assert await ended(first) == b""
            await server.until_shed(CROWDED)
            assert await echo(b"", metadata=KEY) == b""


async def test_who_speaks_something_else_hears_what_is_spoken():
    async with guarded() as server, connected(server.port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await ended(reader) == EMPTY_SETTINGS
        await server.until_shed(MALFORMED)


async def test_a_connection_without_a_call_reaches_the_server_too():
    ping = frame(PING, 0, 0, b"12345678")
    async with guarded() as server, connected(server.port) as (reader, writer):
        writer.write(greeting() + ping)
        assert await reader.readexactly(len(EMPTY_SETTINGS)) == EMPTY_SETTINGS
        await reader.readuntil(frame(PING, 1, 0, b"12345678"))


async def test_a_port_in_use_is_refused():
    async with guarded() as server:
        other = GrpcPort(GRPC, grpc.aio.server(), BearerSecrets({"k": ""}), Sheds(), max_connections=1, max_per_peer=1)
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{server.port}: port {server.port} is in"):
            other.listen("127.0.0.1", server.port, None)
        await other.stop(0)
