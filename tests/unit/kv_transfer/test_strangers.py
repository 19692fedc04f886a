"""What was not granted, makes no sense or goes beyond a limit is refused and harms nobody."""

import asyncio
import random
from dataclasses import replace

import pytest
import zmq

from kv_transfer import receiver as receiver_module
from kv_transfer import receiver as receiving
from kv_transfer import sender as sender_module
from kv_transfer import wire
from kv_transfer.descriptor import ChannelEnd
from kv_transfer.payload import HOST
from kv_transfer.receiver import KVReceiver
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender, Sent
from kv_transfer.transports import zmq as zmq_transport
from kv_transfer.transports.zmq import ZmqListener
from kv_transfer.transports.zmq_keys import set_key
from kv_transfer.wire import Abort, Data, Finish, Refusal, Refused, Segment
from serving_core.errors import SettingsError
from tests.unit.kv_transfer.transfer_kit import (
    LAYOUT,
    PATIENCE_S,
    ByteStore,
    Once,
    a_descriptor,
    check_arrived,
    grant,
    pair,
    run,
    transfer,
    until,
)

# ---- hostile ----


class Stranger:
    """A dialer that sends what no sender would, and the replies it gets."""

    def __init__(self, fabric, address):
        self.dialer, self._address, self.replies = fabric.dialer(), address, asyncio.Queue()
        self.dialer.start(lambda header: self.replies.put_nowait(wire.decode(header)), lambda address: None)

    async def send(self, header, *frames):
        await self.dialer.send(self._address, header, [memoryview(frame) for frame in frames])

    async def ask(self, message, *frames):
        await self.send(wire.encode(message), *frames)
        return await self.replies.get()


def crafted(source, end, blocks, epoch=1, layer=0, shift=0):
    """Data that is right to the last byte, but for what is asked for."""
    views = source.read(layer, blocks)
    segment = Segment(layer, blocks[0] + shift, len(blocks), HOST.checksum(*views))
    return Data(end.transfer_id, epoch, (segment,)), b"".join(views)


def test_what_was_not_granted_is_refused_and_never_written(fabric, stores):
    source, target = stores

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            received = Once()
            descriptor = grant(receiver, range(4), received, epoch=1)
            (end,) = descriptor.ends
            stranger = Stranger(fabric, end.address)
            refusal = Refused(end.transfer_id, 1, Refusal.MALFORMED)
            assert await stranger.ask(*crafted(source, end, range(4), shift=1)) == refusal
            assert await stranger.ask(Finish(end.transfer_id, 1, 0, 5, b"")) == refusal
            for epoch in (0, 2):
                refusal = Refused(end.transfer_id, epoch, Refusal.WRONG_EPOCH)
                assert await stranger.ask(*crafted(source, end, range(4), epoch=epoch)) == refusal
                assert await stranger.ask(Finish(end.transfer_id, epoch, 0, 4, b"")) == refusal
            unknown = ChannelEnd(b"?" * 16, end.address)
            refusal = Refused(b"?" * 16, 1, Refusal.UNKNOWN_TRANSFER)
            assert await stranger.ask(*crafted(source, unknown, range(4))) == refusal
            assert not any(target.bytes_of(range(6)))
            assert receiver.num_refused == 7
            assert receiver.num_bytes == 0
            await stranger.dialer.close()

            sent = Once()
            sender.start(descriptor.encode(), sent).finish(range(4), b"tail")
            check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))

    run(scenario())


@pytest.mark.parametrize("ending", ["commit", "cancel"])
def test_what_is_replayed_is_never_written(fabric, stores, ending):
    """After the end, the blocks may belong to somebody else."""
    source, target = stores

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            descriptor = grant(receiver, range(4), received, epoch=1)
            (end,) = descriptor.ends
            if ending == "commit":
                sender.start(descriptor.encode(), sent).finish(range(4), b"tail")
                await sent.result()
            else:
                receiver.cancel(descriptor.epoch)
            await received.result()
            frozen = target.bytes_of(range(6))
            source.flip(0, 2)
            stranger = Stranger(fabric, end.address)
            good, bad = wire.Committed(end.transfer_id, 1), Refused(end.transfer_id, 1, Refusal.CANCELLED)
            expected = good if ending == "commit" else bad
            assert await stranger.ask(*crafted(source, end, range(4))) == expected
            assert await stranger.ask(Finish(end.transfer_id, 1, 0, 4, b"tail")) == expected
            assert isinstance(await stranger.ask(Finish(end.transfer_id, 1, 0, 4, b"other")), Refused)
            assert isinstance(await stranger.ask(Finish(end.transfer_id, 2, 0, 4, b"tail")), Refused)
            await stranger.send(wire.encode(Abort(end.transfer_id, 1)))
            assert target.bytes_of(range(6)) == frozen
            await stranger.dialer.close()

    run(scenario())


def test_messages_that_make_no_sense_are_counted_and_harm_nobody(fabric, stores):
    source, target = stores
    rng = random.Random(17)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            received, sent = Once(), Once()
            descriptor = grant(receiver, range(4), received, epoch=1)
            (end,) = descriptor.ends
            stranger = Stranger(fabric, end.address)
            header, caches = crafted(source, end, range(4))
            senseless = [b"", b"\0" * 64, rng.randbytes(100), rng.randbytes(70_000), wire.encode(header)[:-1]]
            senseless.append(wire.encode(wire.Committed(end.transfer_id, 1)))
            for odd in senseless:
                await stranger.send(odd, caches)
            for frames in ([], [caches[:-1]], [caches, b"x"], [caches[:5]] * 3):
                await stranger.send(wire.encode(header), *frames)
            await until(lambda: receiver.num_messages == len(senseless) + 4)
            assert receiver.num_malformed == len(senseless)
            assert receiver.num_corrupt_blocks == 4 * 4
            assert not any(target.bytes_of(range(6)))
            await stranger.dialer.close()

            sender.start(descriptor.encode(), sent).finish(range(4), b"tail")
            check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))

    run(scenario())


def test_frames_that_are_too_large_or_too_many_never_get_in(zmq_fabric, stores):
    source, target = stores

    async def scenario():
        async with pair(zmq_fabric, source, target) as (sender, receiver):
            received, sent = Once(), Once()
            descriptor = grant(receiver, range(4), received, epoch=1)
            (end,) = descriptor.ends
            header, _ = crafted(source, end, range(4))
            odd = wire.encode(Abort(end.transfer_id, 2))  # behind what is dropped
            context = zmq.Context()
            for number, frames in enumerate(([bytes(wire.MAX_PAYLOAD_BYTES + 1)], [b"x"] * 5000)):
                dealer = context.socket(zmq.DEALER)
                dealer.connect(set_key(dealer, end.address))
                dealer.send_multipart([wire.encode(header), *frames])
                dealer.send(odd)
                await until(lambda number=number: receiver.num_messages > number)
                dealer.close(linger=0)
            context.term()
            assert receiver.num_messages == 2
            assert receiver.num_corrupt_blocks == 0

            sender.start(descriptor.encode(), sent).finish(range(4), b"tail")
            check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))

    run(scenario())


# ---- limits and refusals ----


def test_open_transfers_are_bounded(fabric, stores, monkeypatch):
    source, target = stores
    monkeypatch.setattr(receiver_module, "MAX_OPEN", 2)
    monkeypatch.setattr(sender_module, "MAX_OPEN", 1)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            first, second = (grant(receiver, [number], Once()) for number in range(2))
            with pytest.raises(TransferError, match="2 of 2 are open"):
                grant(receiver, [2], Once())
            sent = Once()
            sender.start(first.encode(), sent).finish([0], b"")
            with pytest.raises(TransferError, match="1 of 1 are open"):
                sender.start(second.encode(), Once())
            await sent.result()
            sent = Once()
            sender.start(second.encode(), sent).finish([1], b"")
            assert isinstance(await sent.result(), Sent)
            grant(receiver, [2], Once())

    run(scenario())


def test_what_has_ended_is_forgotten_in_the_end(fabric, stores, monkeypatch):
    source, target = stores
    monkeypatch.setattr(receiving, "MAX_ENDED", 2)

    async def scenario():
        async with pair(fabric, source, target) as (_, receiver):
            descriptors = [grant(receiver, [0], Once()) for _ in range(3)]
            for descriptor in descriptors:
                receiver.cancel(descriptor.epoch)
            stranger = Stranger(fabric, receiver.address)
            answers = [
                await stranger.ask(Finish(descriptor.ends[0].transfer_id, descriptor.epoch, 0, 1, b""))
                for descriptor in descriptors
            ]
            expected = [Refusal.UNKNOWN_TRANSFER, Refusal.CANCELLED, Refusal.CANCELLED]
            assert [answer.refusal for answer in answers] == expected
            await stranger.dialer.close()

    run(scenario())


def test_connections_are_bounded_and_made_again(zmq_fabric, monkeypatch):
    """Five receivers over two connections: whoever is cut off is dialled again."""
    monkeypatch.setattr(zmq_transport, "MAX_CONNECTIONS", 2)
    source, targets = ByteStore(LAYOUT, 4, seed=18), [ByteStore(LAYOUT, 4) for _ in range(5)]

    async def scenario():
        sender = KVSender(zmq_fabric.dialer(), source, deadline_s=PATIENCE_S)
        receivers = [KVReceiver(zmq_fabric.listener(), target) for target in targets]
        for receiver, target in zip(receivers * 2, targets * 2, strict=True):
            check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
        for end in (sender, *receivers):
            await end.close()

    run(scenario())


def test_descriptors_that_do_not_fit_are_refused(fabric, stores):
    source, target = stores

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            descriptor = grant(receiver, range(4), Once())
            with pytest.raises(TransferError):
                sender.start(b"not a descriptor", Once())
            other = replace(descriptor, layout=replace(LAYOUT, num_kv_heads=4))
            with pytest.raises(TransferError, match=r"and 4 heads of .*; it has .* and 2 heads of "):
                sender.start(other.encode(), Once())
            sender.start(descriptor.encode(), Once())
            with pytest.raises(TransferError, match="in use already"):
                sender.start(descriptor.encode(), Once())

    run(scenario())


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "pgm://127.0.0.1:1", "ipc://" + "x" * 200])
def test_addresses_that_cannot_be_dialled_are_refused(stores, address):
    async def scenario():
        sender = KVSender(zmq_transport.ZmqDialer(), stores[0], deadline_s=PATIENCE_S)
        with pytest.raises(TransferError, match="cannot be dialled"):
            sender.start(a_descriptor(address).encode(), Once())
        assert sender.num_open == 0
        await sender.close()

    run(scenario())


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("tcp://*:*", "names no host"),
        ("tcp://0.0.0.0:5600", "names no host"),
        ("tcp://[::]:*", "names no host"),
        ("tcp://203.0.113.9:*", "cannot listen"),
        ("ipc:///nowhere/at/all", "cannot listen"),
        ("ipc:///tmp/" + "x" * 200, "longer than 107 characters"),
        ("127.0.0.1:5600", "cannot listen"),
        ("", "cannot listen"),
    ],
)
def test_endpoints_that_cannot_be_bound_are_refused(bind, message):
    with pytest.raises(SettingsError, match=message):
        ZmqListener(bind)


def test_a_port_in_use_is_refused():
    async def scenario():
        listener = ZmqListener("tcp://127.0.0.1:*")
        listener.start(lambda peer, header, frames: None)
        with pytest.raises(SettingsError, match="in use"):
            ZmqListener(listener.address.partition("#")[0])
        await listener.close()

    run(scenario())


async def test_a_listener_leaves_the_socket_of_the_next_one(tmp_path):
    """As of a node that drains while the one in its place has begun."""
    path = tmp_path / "socket"
    old, new = (ZmqListener(f"ipc://{path}") for _ in range(2))
    for each in (old, new):
        each.start(lambda peer, header, frames: None)
    await old.close()
    assert path.exists()
    await new.close()
    assert not path.exists()


async def test_a_closed_listener_leaves_no_socket_behind(tmp_path):
    listener = ZmqListener(f"ipc://{tmp_path}/socket")
    listener.start(lambda *_: None)
    assert (tmp_path / "socket").exists()
    await listener.close()
    assert not (tmp_path / "socket").exists()
