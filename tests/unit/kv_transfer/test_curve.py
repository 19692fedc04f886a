"""Encrypted connections of the data plane: who gets in, what a message may hold, what an eavesdropper sees."""

import asyncio
import re
from contextlib import asynccontextmanager

import pytest
import zmq

from kv_transfer import wire
from kv_transfer.receiver import KVReceiver
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender, TransferFailed
from kv_transfer.transports import zmq_keys
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring
from tests.unit.kv_transfer.transfer_kit import (
    LAYOUT,
    PATIENCE_S,
    ByteStore,
    Fabric,
    Once,
    a_descriptor,
    check_arrived,
    grant,
    pair,
    run,
    transfer,
    try_to_send,
    until,
)

SECRET = b"what nobody else may read" * 100


def raw_dealer(context, endpoint, **options):
    """A socket of a stranger's own, by ZeroMQ's own names of options."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        dealer.setsockopt(getattr(zmq, name), value)
    dealer.connect(endpoint)
    return dealer


def keys_of_a_stranger():
    public, secret = zmq.curve_keypair()
    return {"CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret}


def test_dealers_without_a_known_key_get_nothing(tmp_path, caplog):
    """Not even one that knows the server's key, and all that a grant holds; the sender that is known does."""
    fabric = Fabric("curve", tmp_path)
    source, target = ByteStore(LAYOUT, 4, seed=1), ByteStore(LAYOUT, 4)

    async def scenario():
        heard = []

        def hear(take, peer, header, frames):
            heard.append(wire.decode(header))
            take(peer, header, frames)

        async with pair(fabric, source, target, tap=hear) as (sender, receiver):
            received, sent = Once(), Once()
            descriptor = grant(receiver, range(4), received)
            (end,) = descriptor.ends
            place, _, key = end.address.removeprefix("curve://").partition("/")
            header = wire.encode(wire.Finish(end.transfer_id, descriptor.epoch, 0, 4, b""))
            server_key = {"CURVE_SERVERKEY": bytes.fromhex(key)}
            with zmq.Context() as context:
                strangers = [
                    raw_dealer(context, f"tcp://{place}"),
                    raw_dealer(context, f"tcp://{place}", **server_key, **keys_of_a_stranger()),
                    raw_dealer(context, f"tcp://{place}", CURVE_SERVERKEY=Keyring().public, **keys_of_a_stranger()),
                ]
                for dealer in strangers:
                    try_to_send(dealer, header)
                await until(lambda: caplog.messages)
                sender.start(descriptor.encode(), sent).finish(range(4), b"tail")
                check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))
                assert not any(dealer.poll(100) for dealer in strangers)
                for dealer in strangers:
                    dealer.close()
            assert {message.tail for message in heard if isinstance(message, wire.Finish)} == {b"tail"}

    run(scenario())
    assert caplog.messages[0] == "1 times somebody dialled with an unknown key, and was sent away"


def test_a_sender_that_is_not_known_fails_and_is_let_in_once_it_is(stores):
    source, target = stores
    theirs, ours = Keyring(), Keyring()

    async def scenario():
        receiver = KVReceiver(ZmqListener("tcp://127.0.0.1:*", theirs), target)
        sender = KVSender(ZmqDialer(ours), source, deadline_s=PATIENCE_S)
        sent = Once()
        descriptor = grant(receiver, range(4), Once())
        sender.start(descriptor.encode(), sent).finish(range(4), b"tail")
        assert isinstance(await sent.result(), TransferFailed)
        assert receiver.num_messages == 0
        receiver.cancel(descriptor.epoch)
        assert theirs.allow([ours.public]) == [ours.public]
        check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
        for end in (sender, receiver):
            await end.close()

    run(scenario())


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_travels_can_be_read_by_nobody_else(is_encrypted):
    """A listener in the middle of the line: what is written in the open it would find."""

    async def scenario():
        keyring, dialers = Keyring(), Keyring()
        keyring.allow([dialers.public])
        listener = ZmqListener("tcp://127.0.0.1:*", keyring if is_encrypted else None)
        arrived = asyncio.get_running_loop().create_future()
        listener.start(lambda peer, header, frames: arrived.set_result((bytes(header), *map(bytes, frames))))
        before, own_port, after = re.fullmatch(r"(.*127\.0\.0\.1:)(\d+)(.*)", listener.address).groups()
        seen = bytearray()
        async with line_to(int(own_port), seen) as port:
            dialer = ZmqDialer(dialers)
            dialer.start(lambda header: None, lambda address: None)
            await dialer.send(f"{before}{port}{after}", SECRET, [memoryview(SECRET)])
            assert await arrived == (SECRET, SECRET)
            await dialer.close()
        await listener.close()
        assert len(seen) > 2 * len(SECRET)
        assert (SECRET in seen) is not is_encrypted
        assert (SECRET[:25] in seen) is not is_encrypted

    run(scenario())


@asynccontextmanager
async def line_to(port, seen):
    """A port that passes everything on to another and notes it."""
    lines = []

    async def copy(reader, writer, note):
        while data := await reader.read(2**16):
            note(data)
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def connect(reader, writer):
        lines.append(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, far_writer, seen.extend), copy(far_reader, writer, lambda _: None))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait(lines)


def test_the_largest_frame_gets_through_and_a_larger_one_does_not():
    async def scenario():
        keyring, dialers = Keyring(), Keyring()
        keyring.allow([dialers.public])
        listener = ZmqListener("tcp://127.0.0.1:*", keyring)
        sizes = asyncio.Queue()
        listener.start(lambda peer, header, frames: sizes.put_nowait([len(frame) for frame in frames]))
        dialer, lost = ZmqDialer(dialers), []
        dialer.start(lambda header: None, lost.append)
        too_many = wire.MAX_PAYLOAD_BYTES + zmq_keys.OVERHEAD_BYTES
        await dialer.send(listener.address, b"header", [memoryview(bytes(wire.MAX_PAYLOAD_BYTES))])
        assert await sizes.get() == [wire.MAX_PAYLOAD_BYTES]
        await dialer.send(listener.address, b"header", [memoryview(bytes(too_many))])
        await until(lambda: lost)
        await dialer.send(listener.address, b"header", [])
        assert await sizes.get() == []
        await dialer.close()
        await listener.close()

    run(scenario())


@pytest.mark.parametrize("key", ["", "00" * 31, "00" * 33, "XY" * 32])
def test_addresses_with_odd_keys_cannot_be_dialled(stores, key):
    async def scenario():
        sender = KVSender(ZmqDialer(), stores[0], deadline_s=20.0)
        with pytest.raises(TransferError, match="cannot be dialled"):
            sender.start(a_descriptor(f"curve://127.0.0.1:5600/{key}").encode(), Once())
        await sender.close()

    run(scenario())


def test_a_keyring_takes_keys_alone_tells_new_ones_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(zmq_keys, "MAX_KEYS", 2)
    first, second, third = (bytes([number]) * 32 for number in range(3))
    keyring = Keyring()
    assert keyring.allow([first, second, first, b"short"]) == [first, second]
    assert keyring.allow([second]) == []
    assert keyring.allow([third]) == [third]
    assert keyring.allow([second, third]) == []
    assert keyring.allow([first]) == [first]
