"""Clients that read slowly, or not at all, at the HTTP server with an application of the test's own."""

import asyncio
import contextlib
import socket

import pytest

from coordinator.doors.http import serving
from coordinator.doors.http.serving import HttpServer

DEADLINE_S = 20.0
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def answering(num_bytes, *, max_connections=16):
    """The port of a server that answers every call with so many bytes, through connections with small buffers."""

    async def app(_scope, _receive, send):
        length = b"%d" % num_bytes
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": bytes(num_bytes)})

    server = HttpServer(app, max_connections=max_connections)
    port = server.listen("127.0.0.1", 0)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**13)  # inherited by its connections
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.1)


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
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 0.5)

    async def scenario():
        loop = asyncio.get_running_loop()
        num_bytes, num_read = 2**22, 0
        async with answering(num_bytes) as port, asked(port, num_buffer_bytes=2**17) as client:
            while num_read < num_bytes:
                part = await loop.sock_recv(client, 2**16)
                assert part, f"cut off after {num_read} bytes"
                num_read += len(part)
                await asyncio.sleep(0.02)  # more than a second in all

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

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
