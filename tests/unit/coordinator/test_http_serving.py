"""Clients that read slowly or nothing, or are too many, at the HTTP server with an application of the test's own."""

import asyncio
import contextlib
import socket

import pytest
import uvloop

from coordinator.api.connections import Sheds
from coordinator.api.http import serving
from coordinator.api.http.serving import HttpServer
from coordinator.api.tls import ServerTls
from serving_core.net.tls import TlsFiles, client_context
from tests.tls_kit import authority, files_of

DEADLINE_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving_app(app, *, num_buffer_bytes=None, **options):
    """The port of a server of this application."""
    server = HttpServer(app, Sheds(), **options)
    port = server.listen("127.0.0.1", 0)
    if num_buffer_bytes is not None:  # inherited by its connections
        server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_buffer_bytes)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.1)


@contextlib.asynccontextmanager
async def answering(num_bytes, *, num_pieces=1, max_connections=16, tls=None):
    """The port of a server that answers every call with so many bytes, through connections with small buffers."""

    async def app(_scope, _receive, send):
        length = b"%d" % num_bytes
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        for left in reversed(range(num_pieces)):
            await send({"type": "http.response.body", "body": bytes(num_bytes // num_pieces), "more_body": left > 0})

    limits = {"max_connections": max_connections, "max_per_peer": max_connections}
    async with serving_app(app, num_buffer_bytes=2**13, tls=tls, **limits) as port:
        yield port


@contextlib.asynccontextmanager
async def asked(port, *, num_buffer_bytes):
    """A socket that has sent a request."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_buffer_bytes)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, REQUEST)
        yield client


def test_a_client_that_reads_slowly_but_does_read_gets_everything(monkeypatch):
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 1.0)

    async def scenario():
        loop = asyncio.get_running_loop()
        num_bytes, num_read = 2**22, 0
        async with answering(num_bytes) as port, asked(port, num_buffer_bytes=2**17) as client:
            while num_read < num_bytes:
                part = await loop.sock_recv(client, 2**16)
                assert part, f"cut off after {num_read} bytes"
                num_read += len(part)
                await asyncio.sleep(0.04)  # more than two seconds in all

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("num_bytes", [2**15, 2**20])
def test_a_client_that_reads_nothing_does_not_keep_its_connection(monkeypatch, num_bytes):
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 0.2)

    async def scenario():
        loop = asyncio.get_running_loop()
        async with answering(num_bytes, max_connections=1) as port, asked(port, num_buffer_bytes=2**12):
            admitted = b""
            while not admitted:
                async with asked(port, num_buffer_bytes=2**12) as other:
                    with contextlib.suppress(ConnectionError):
                        admitted = await loop.sock_recv(other, 1)
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_long_answer_over_tls_is_whole_and_who_stops_reading_it_is_cut_off(monkeypatch, tmp_path, caplog, runner):
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 2.0)
    files, num_bytes = files_of(authority(tmp_path), "coordinator"), 2**22
    ours, theirs = ServerTls(files, verifies_clients=False), client_context(TlsFiles(ca=files.ca))

    async def scenario():
        async with answering(num_bytes, num_pieces=2**6, tls=ours.http_context()) as port:
            for is_whole in (True, False):
                async with asked_over_tls(port, theirs) as reader:
                    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                    if is_whole:
                        assert await reader.readexactly(num_bytes) == bytes(num_bytes)
                    else:
                        while "a client has read nothing for 2 s" not in caplog.messages:
                            await asyncio.sleep(0.05)

    runner(asyncio.wait_for(scenario(), DEADLINE_S))


@contextlib.asynccontextmanager
async def asked_over_tls(port, context):
    """What comes through a connection with a small buffer that has sent a request."""
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=client, ssl=context, server_hostname="127.0.0.1")
        writer.write(REQUEST)
        yield reader
        writer.transport.abort()


# ---- crowds ----


@contextlib.asynccontextmanager
async def connected(port, host="127.0.0.1"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def empty(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def answer(reader):
    """The status line of an answer without a body."""
    return (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_the_connection_that_was_idle_for_longest_makes_room(loop, caplog):
    async def scenario():
        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(empty, max_connections=3, max_per_peer=3) as port,
            connected(port) as (first, first_writer),
            connected(port) as (second, _),
            connected(port) as (third, third_writer),
        ):
            for reader, writer in ((third, third_writer), (first, first_writer)):
                writer.write(REQUEST)
                assert await answer(reader) == b"HTTP/1.1 204 No Content"
            async with connected(port), connected(port) as (reader, writer):  # for the second and the third
                assert await second.read() == b""
                assert await third.read() == b""
                for each, each_writer in ((first, first_writer), (reader, writer)):
                    each_writer.write(REQUEST)
                    assert await answer(each) == b"HTTP/1.1 204 No Content"

    loop(scenario())
    assert caplog.text.count("connections are closed at the HTTP port (crowded)") == 1


def test_an_answer_under_way_keeps_its_connection():
    async def scenario():
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            if scope["path"] == "/slow":
                begun.set()
                await may_end.wait()
            await empty(scope, receive, send)

        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(app, max_connections=2, max_per_peer=2) as port,
            connected(port) as (slow, writer),
        ):
            writer.write(REQUEST.replace(b"/", b"/slow", 1))
            await begun.wait()
            for _ in range(5):
                async with connected(port) as (reader, writer), connected(port) as (other, other_writer):
                    assert await reader.read() == b""
                    other_writer.write(REQUEST)
                    assert await answer(other) == b"HTTP/1.1 204 No Content"
            may_end.set()
            assert await answer(slow) == b"HTTP/1.1 204 No Content"

    asyncio.run(scenario())


def test_where_all_have_something_to_do_the_new_one_goes():
    async def scenario():
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            begun.set()
            await may_end.wait()
            await empty(scope, receive, send)

        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(app, max_connections=1, max_per_peer=1) as port,
            connected(port) as (busy, writer),
        ):
            writer.write(REQUEST)
            await begun.wait()
            async with connected(port) as (refused, _):
                assert await refused.read() == b""
            may_end.set()
            assert await answer(busy) == b"HTTP/1.1 204 No Content"

    asyncio.run(scenario())


def test_a_crowd_from_one_address_does_not_shut_out_another():
    async def scenario():
        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(empty, max_connections=10, max_per_peer=3) as port,
            connected(port, "127.0.0.2") as (theirs, their_writer),
            contextlib.AsyncExitStack() as stack,
        ):
            crowd = [await stack.enter_async_context(connected(port)) for _ in range(8)]
            for reader, _ in crowd[:5]:
                assert await reader.read() == b""
            for reader, writer in [*crowd[5:], (theirs, their_writer)]:
                writer.write(REQUEST)
                assert await answer(reader) == b"HTTP/1.1 204 No Content"

    asyncio.run(scenario())


# ---- requests that uvicorn's parser would take ----


async def read_all(scope, receive, send):
    """Answer once the body is there; /early answers before."""
    while scope["path"] != "/early" and (await receive()).get("more_body"):
        pass
    await empty(scope, receive, send)


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\na: b\r\n\r\n", [b"204"]),
        (
            b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000 + REQUEST,
            [b"204", b"204"],
        ),
    ],
    ids=["a trailer", "a body that nobody reads"],
)
def test_what_is_sent_is_answered_and_the_connection_goes_on(sent, statuses):
    async def scenario():
        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(read_all, max_connections=3, max_per_peer=3) as port,
            connected(port) as (reader, writer),
        ):
            writer.write(sent)
            for status in statuses:
                assert (await answer(reader)).split()[1] == status

    asyncio.run(scenario())


def test_who_offers_another_protocol_is_answered_and_may_ask_again():
    async def scenario():
        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(empty, max_connections=3, max_per_peer=3) as port,
            connected(port) as (reader, writer),
        ):
            for headers in (b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"\r\n"):
                writer.write(REQUEST[:-2] + headers)
                assert await answer(reader) == b"HTTP/1.1 204 No Content"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n",
    ],
    ids=["trailers", "trailers that nobody waits for", "headers of a second request"],
)
def test_fields_without_end_end_the_connection(sent):
    async def scenario():
        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(read_all, max_connections=3, max_per_peer=3) as port,
            connected(port) as (reader, writer),
        ):
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"a: b\r\n" * 1000)
                    await writer.drain()
                    await asyncio.sleep(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_bytes", [10, 2**20])
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_body_that_comes_while_the_call_before_it_is_served_is_read(loop, num_bytes):
    async def scenario():
        begun, may_end, read = asyncio.Event(), asyncio.Event(), []

        async def app(scope, receive, send):
            num_read, more = 0, True
            while more:
                message = await receive()
                num_read, more = num_read + len(message["body"]), message["more_body"]
            read.append(num_read)
            if scope["path"] == "/slow":
                begun.set()
                await may_end.wait()
            await empty(scope, receive, send)
            await asyncio.sleep(0.01)  # the next call begins before this one has ended

        async with (
            asyncio.timeout(DEADLINE_S),
            serving_app(app, max_connections=3, max_per_peer=3) as port,
            connected(port) as (reader, writer),
        ):
            head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % num_bytes
            writer.write(REQUEST.replace(b"/", b"/slow", 1) + head + b"x")
            await begun.wait()
            writer.write(b"x" * (num_bytes - 1) + REQUEST)
            await asyncio.sleep(0.05)  # it has come before the first call ends
            may_end.set()
            for _ in range(3):
                assert await answer(reader) == b"HTTP/1.1 204 No Content"
            assert read == [0, num_bytes, 0]

    loop(scenario())
