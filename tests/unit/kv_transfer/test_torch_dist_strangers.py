"""What comes to the signalling port from others than senders with a descriptor is turned away, and harms nobody."""

import asyncio
import resource
import socket
import struct
import threading
from contextlib import asynccontextmanager, suppress

import pytest
import torch

from kv_transfer.transports import dist_stream, torch_dist, torch_link
from kv_transfer.transports.dist_stream import (
    MAX_BODY_BYTES,
    PROTOCOL,
    DistAddress,
    Kind,
    Stream,
    pack_key,
    pack_sizes,
    unpack_key,
)
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.transports.torch_pair import SENDER_RANK, Pair
from kv_transfer.transports.transport import MAX_FRAMES
from kv_transfer.wire import MAX_PAYLOAD_BYTES
from tests.unit.kv_transfer.torch_dist_kit import CPU
from tests.unit.kv_transfer.transfer_kit import run, until

FRAME = torch.arange(200, dtype=torch.uint8)


@asynccontextmanager
async def listening():
    """A listener, its address, and the headers it was given. In the end it still takes what a sender sends."""
    listener, headers = TorchDistListener("dist://127.0.0.1:*", CPU), []

    def take(peer, header, frames):
        assert all(torch.equal(frame, FRAME) for frame in frames)
        headers.append(bytes(header))

    listener.start(take)
    try:
        yield DistAddress.parse(listener.address), headers
        dialer = TorchDistDialer(CPU)
        dialer.start(lambda _: None, lambda _: None)
        await dialer.send(listener.address, b"of a sender", [FRAME])
        await until(lambda: b"of a sender" in headers)
        await dialer.close()
    finally:
        await listener.close()


async def is_cut_off(reader):
    """True when the other end has closed, sooner or later."""
    with suppress(ConnectionError):
        while await reader.read(1000):
            pass
    return True


async def is_ended(stream):
    """Returns when the other end has closed, sooner or later."""
    with suppress(EOFError, ConnectionError):
        while True:
            await stream.read()
    stream.close()


@asynccontextmanager
async def connection(address):
    reader, writer = await asyncio.open_connection(address.ip, address.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


# ---- without a descriptor ----


@pytest.mark.parametrize(
    "greeting",
    [
        lambda token: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda token: bytes(1000),
        lambda token: PROTOCOL + bytes(16),
        lambda token: PROTOCOL + token[:-1] + bytes([token[-1] ^ 1]),
        lambda token: PROTOCOL.upper() + token,
    ],
    ids=["http", "zeros", "no token", "a wrong token", "another protocol"],
)
def test_who_has_no_descriptor_is_cut_off(greeting, caplog):
    async def scenario():
        async with listening() as (address, headers), connection(address) as (reader, writer):
            writer.write(greeting(address.token))
            assert await is_cut_off(reader)
            assert not headers
            await until(lambda: "turned away" in caplog.text)

    run(scenario())


def test_who_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(dist_stream, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def scenario():
        async with listening() as (address, _):
            async with connection(address) as (silent, _), connection(address) as (slow, writer):
                writer.write(PROTOCOL)
                assert await is_cut_off(silent)
                assert await is_cut_off(slow)
            monkeypatch.undo()

    run(scenario())


def test_those_who_say_nothing_are_few(monkeypatch):
    """The oldest makes room, so that they keep no sender out."""
    monkeypatch.setattr(torch_dist, "MAX_GREETING", 2)

    async def scenario():
        async with (
            listening() as (address, _),
            connection(address) as (oldest, _),
            connection(address),
            connection(address),
        ):
            assert await is_cut_off(oldest)

    run(scenario())


def test_senders_are_bounded(monkeypatch, caplog):
    monkeypatch.setattr(torch_dist, "MAX_PEERS", 2)

    async def scenario():
        async with listening() as (address, _):
            streams = [await Stream.dial(address) for _ in range(2)]
            with pytest.raises((EOFError, ConnectionError)):
                await Stream.dial(address)
            assert "2 senders are connected already" in caplog.text
            for stream in streams:
                stream.close()
            monkeypatch.undo()

    run(scenario())


def test_a_process_without_file_descriptors_listens_on(caplog):
    """It takes no connection until there are some again."""

    async def scenario():
        async with listening() as (address, _):
            late = socket.socket()
            late.setblocking(False)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # all that are open stay open
            try:
                with suppress(BlockingIOError):
                    late.connect((address.ip, address.port))
                await until(lambda: "no connection is taken for a while" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            late.close()

    run(scenario())


# ---- with a descriptor ----

SENSELESS = {
    "a long body": struct.pack(">BI", Kind.MESSAGE, MAX_BODY_BYTES + 1),
    "the longest body": struct.pack(">BI", Kind.MESSAGE, 2**32 - 1),
    "an unknown kind": struct.pack(">BI", 9, 0),
    "a reply": struct.pack(">BI", Kind.REPLY, 0),
    "an empty message": struct.pack(">BI", Kind.MESSAGE, 0),
    "too many frames": struct.pack(">BI", Kind.MESSAGE, 1000) + bytes([MAX_FRAMES + 1]) + bytes(999),
    "fewer sizes than frames": struct.pack(">BI", Kind.MESSAGE, 4) + bytes([1, 0, 0, 0]),
    "too many bytes": struct.pack(">BI", Kind.MESSAGE, 9) + pack_sizes([MAX_PAYLOAD_BYTES, 1]),
    "frames before there is a group": struct.pack(">BI", Kind.MESSAGE, 5) + pack_sizes([1]),
    "a key without a value": struct.pack(">BI", Kind.KEY, 4) + b"name",
    "a long key": struct.pack(">BI", Kind.KEY, 1000) + b"n" * 999 + b"\0",
    "a long value": struct.pack(">BI", Kind.KEY, 9002) + b"n\0" + bytes(9000),
}


@pytest.mark.parametrize("sent", SENSELESS.values(), ids=SENSELESS.keys())
def test_what_makes_no_sense_ends_the_connection(sent, monkeypatch, caplog):
    def allocate(*_, **__):
        raise AssertionError("something was allocated")

    async def scenario():
        async with listening() as (address, headers), connection(address) as (reader, writer):
            monkeypatch.setattr(torch, "empty", allocate)
            writer.write(PROTOCOL + address.token + sent)
            assert await is_cut_off(reader)
            assert not headers
            await until(lambda: "a connection between two ranks ended" in caplog.text)
            assert before.issuperset(threading.enumerate()), "somebody began to make a group"
            monkeypatch.undo()

    before = {*threading.enumerate()}
    run(scenario())


def test_a_message_that_never_ends_ends_the_connection(monkeypatch):
    monkeypatch.setattr(dist_stream, "TIMEOUT_S", 0.1)

    async def scenario():
        async with listening() as (address, _), connection(address) as (reader, writer):
            writer.write(PROTOCOL + address.token + struct.pack(">BI", Kind.MESSAGE, 100) + bytes(99))
            assert await is_cut_off(reader)
            monkeypatch.undo()

    run(scenario())


@pytest.mark.parametrize("num_keys", [1, 100])
def test_a_group_that_the_sender_never_makes_is_given_up(num_keys, monkeypatch):
    async def scenario():
        async with listening() as (address, _):
            stream = await Stream.dial(address)
            monkeypatch.setattr(dist_stream, "TIMEOUT_S", 0.1)
            for number in range(num_keys):
                stream.write(Kind.KEY, pack_key(f"odd {number}", b"value"))
            await is_ended(stream)
            monkeypatch.undo()

    run(scenario())


def test_frames_that_never_come_are_given_up(monkeypatch):
    """Announced by somebody who has made the group, and then sends nothing."""

    async def scenario():
        async with listening() as (address, headers):
            stream = await Stream.dial(address)
            pair = Pair(SENDER_RANK, CPU, stream.local_ip, lambda *parts: stream.write(Kind.KEY, pack_key(*parts)))
            _, body = await stream.read()
            pair.put(*unpack_key(body))
            await pair.ready
            monkeypatch.setattr(dist_stream, "TIMEOUT_S", 0.1)
            stream.write(Kind.MESSAGE, pack_sizes([100]), b"header")
            await is_ended(stream)
            pair.stop()
            await pair.ended
            assert not headers
            monkeypatch.undo()

    run(scenario())


def test_replies_that_nobody_reads_are_dropped(monkeypatch, caplog):
    """Instead of piling up."""
    monkeypatch.setattr(dist_stream, "MAX_WAITING_BYTES", 1000)

    async def scenario():
        listener = TorchDistListener("dist://127.0.0.1:*", CPU)

        def answer(peer, header, frames):
            for _ in range(1000):
                listener.reply(peer, bytes(60_000))

        listener.start(answer)
        stream = await Stream.dial(DistAddress.parse(listener.address))
        stream.write(Kind.MESSAGE, pack_sizes([]), b"header")
        await until(lambda: "it reads nothing" in caplog.text)
        stream.close()
        await listener.close()

    run(scenario())


def test_a_reply_to_a_sender_that_is_gone_is_lost():
    async def scenario():
        peers = []
        listener = TorchDistListener("dist://127.0.0.1:*", CPU)
        listener.start(lambda peer, header, frames: peers.append(peer))
        stream = await Stream.dial(DistAddress.parse(listener.address))
        stream.write(Kind.MESSAGE, pack_sizes([]), b"header")
        await until(lambda: peers)
        stream.close()
        await until(lambda: peers[0].ended.done())
        listener.reply(peers[0], b"reply")
        await listener.close()

    run(scenario())


def test_messages_to_a_receiver_that_does_not_answer_are_bounded(monkeypatch):
    monkeypatch.setattr(torch_link, "SEND_QUEUE_MESSAGES", 3)

    async def scenario():
        async with listening() as (address, headers):
            dialer = TorchDistDialer(CPU)
            dialer.start(lambda _: None, lambda _: None)
            released = [dialer.send(str(address), str(number).encode(), [FRAME]) for number in range(5)]
            assert [future.done() for future in released] == [False] * 3 + [True] * 2
            await asyncio.gather(*released)
            await until(lambda: headers == [b"0", b"1", b"2"])
            await dialer.close()

    run(scenario())
