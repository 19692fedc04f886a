"""Whatever a network does, never a wrong byte is accepted and no wait is without end."""

import asyncio
import random

import pytest

from kv_transfer import payload
from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender, Sent, TransferFailed
from kv_transfer.sessions.sender_session import MAX_ROUNDS
from kv_transfer.transports import zmq
from kv_transfer.wire import Abort, Data, Finish, decode
from tests.effort import effort, few
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    LAYOUT,
    PATIENCE_S,
    SMOLLM2,
    ByteStore,
    Fabric,
    Faults,
    FaultyDialer,
    Once,
    a_descriptor,
    check_arrived,
    grant,
    pair,
    run,
    skip,
    transfer,
    until,
)

# ---- disturbed ----


@pytest.mark.parametrize("seed", few(range(3)))
def test_faults_cost_time_but_never_a_byte(fabric, seed):
    """Messages and replies are dropped, doubled, overtaken, cut and flipped. As long as that happens no more often
    than the sender repeats, every transfer succeeds."""
    source, target = ByteStore(LAYOUT, 32, seed=seed), ByteStore(LAYOUT, 32)
    rates = {"drop": 0.1, "duplicate": 0.2, "delay": 0.2, "truncate": 0.1, "flip": 0.1}
    faults = Faults(random.Random(seed), **rates, num_per_transfer=MAX_ROUNDS)
    rng = random.Random(seed)

    async def one(sender, receiver, target_ids):
        source_ids = rng.sample(range(32), len(target_ids))
        sent, received = Once(), Once()
        sending = sender.start(grant(receiver, target_ids, received).encode(), sent)
        for num_ready in range(len(source_ids)):
            sending.blocks_ready(source_ids[:num_ready])
            await asyncio.sleep(0.001)
        sending.finish(source_ids, b"tail")
        check_arrived(source, source_ids, target, target_ids, (await sent.result(), await received.result()))

    async def scenario():
        async with pair(fabric, source, target, wrap=lambda dialer: FaultyDialer(dialer, faults)) as ends:
            await asyncio.gather(*(one(*ends, range(first, first + 8)) for first in range(0, 32, 8)))

    run(scenario())


class HoldingDialer:
    """A Dialer that keeps messages, frames and all, until it is told to let them go."""

    def __init__(self, inner):
        self._inner = inner
        self._held = []
        self.holds = False
        self.payload = inner.payload
        self.start, self.connect = inner.start, inner.connect

    @property
    def kinds(self):
        return [type(decode(header)) for _, header, _, _ in self._held]

    def send(self, address, header, frames=()):
        released = asyncio.get_running_loop().create_future()
        self._held.append((address, header, frames, released))
        if not self.holds:
            self.let_go()
        return released

    def let_go(self, *kinds):
        """Sends those of these kinds, by default of all, and forgets the rest."""
        held, self._held = self._held, []
        for address, header, frames, released in held:
            if not kinds or type(decode(header)) in kinds:
                self._inner.send(address, header, frames)
            released.set_result(None)

    async def close(self):
        self.let_go()
        await self._inner.close()


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("kinds", [(), (Data, Finish), (Data, Abort)], ids=["all", "no Abort", "no Finish"])
def test_what_changes_on_its_way_after_a_cancel_is_never_taken(kinds, changes, tmp_path, monkeypatch):
    """An answer that was to move and is kept: its last block changes while the transport still holds it."""
    monkeypatch.setattr(payload, "MIN_FRAME_BYTES", 0)  # every frame is a view of the sender's own blocks
    source, target = ByteStore(LAYOUT, 4, seed=5), ByteStore(LAYOUT, 4)
    ids = range(4)

    async def scenario():
        dialers = []

        def wrap(dialer):
            dialers.append(HoldingDialer(dialer))
            return dialers[0]

        async with pair(Fabric("loopback", tmp_path), source, target, wrap=wrap) as (sender, receiver):
            sent, received = Once(), Once()
            sending = sender.start(grant(receiver, ids, received).encode(), sent)
            sending.blocks_ready(ids[:3])
            await until(lambda: receiver.num_bytes == 3 * LAYOUT.block_bytes)
            dialers[0].holds = True
            sending.finish(ids, b"tail")
            await until(lambda: Finish in dialers[0].kinds)
            sending.cancel()
            assert [*dict.fromkeys(dialers[0].kinds)] == [Data, Finish, Abort]  # Finish again, where that took long
            before = source.bytes_of(ids)
            if changes:
                for layer in range(LAYOUT.num_layers):
                    source.flip(layer, 3)
            dialers[0].let_go(*kinds)
            assert type(await sent.result()) is TransferFailed
            is_committed = not changes and Finish in (kinds or [Finish])
            if changes and kinds and Abort not in kinds:
                await until(lambda: receiver.num_corrupt_blocks)
                skip(PATIENCE_S)  # it hears nothing more
            result = await received.result()
            assert type(result) is (Received if is_committed else TransferFailed)
            if is_committed:
                assert target.bytes_of(ids) == before
            elif changes:
                assert not any(target.bytes_of([3]))

    run(scenario())


@pytest.mark.parametrize(
    "rates", few([{"flip": 0.6}, {"drop": 0.6}, {"truncate": 0.5, "duplicate": 0.5, "delay": 0.5}], {"flip": 0.6})
)
def test_hopeless_faults_end_and_are_never_taken_for_success(fabric, rates):
    source = ByteStore(LAYOUT, 8, seed=10)

    async def one(seed):
        target = ByteStore(LAYOUT, 8)
        faults = Faults(random.Random(seed), **rates)
        async with pair(fabric, source, target, deadline_s=0.4, wrap=lambda d: FaultyDialer(d, faults)) as ends:
            sender, receiver = ends
            sent, received = Once(), Once()
            sender.start(grant(receiver, range(8), received, ttl_s=0.5).encode(), sent).finish(range(8), b"tail")
            sent_result, received_result = await sent.result(), await received.result()
            if isinstance(received_result, Received):
                check_arrived(source, range(8), target, range(8), (Sent(8 * LAYOUT.block_bytes), received_result))
            if isinstance(sent_result, Sent):
                assert isinstance(received_result, Received)

    async def scenario():
        await asyncio.gather(*(one(seed) for seed in range(effort(6, 12, 24))))

    run(scenario())


class FlipOnce(FaultyDialer):
    """Flips a bit in the first layer's block 1, the first time it passes."""

    def __init__(self, inner):
        super().__init__(inner, Faults(random.Random(0), num_per_transfer=1))

    def _spoilt(self, parts):
        if len(parts) == 1:
            return parts
        flipped = bytearray(parts[1])
        flipped[LAYOUT.cache_shape.num_bytes] ^= 1
        return [parts[0], memoryview(flipped)]


def test_blocks_that_change_on_their_way_are_counted_and_sent_again(fabric):
    source, target = ByteStore(LAYOUT, 4, seed=11), ByteStore(LAYOUT, 4)

    async def scenario():
        async with pair(fabric, source, target, wrap=FlipOnce) as (sender, receiver):
            check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
            assert receiver.num_corrupt_blocks == 4, "a layer's blocks share a checksum, other layers' do not"
            assert sender.num_bytes == 4 * LAYOUT.block_bytes + 2 * 4 * LAYOUT.cache_shape.num_bytes
            assert receiver.num_bytes == 4 * LAYOUT.block_bytes

    run(scenario())


# ---- gone ----


def test_the_receiver_closes_in_the_middle(fabric):
    source, target = ByteStore(BIG_LAYOUT, 16, seed=12), ByteStore(BIG_LAYOUT, 16)
    ids = range(16)

    async def scenario():
        receiver = KVReceiver(fabric.listener(), target)
        sender = KVSender(fabric.dialer(), source, deadline_s=PATIENCE_S)
        sent, received = Once(), Once()
        sending = sender.start(grant(receiver, ids, received).encode(), sent)
        sending.blocks_ready(ids[:8])
        await until(lambda: receiver.num_bytes)
        sending.finish(ids, b"tail")
        await receiver.close()
        assert isinstance(await received.result(), TransferFailed)
        frozen = target.bytes_of(ids)
        assert isinstance(await sent.result(), TransferFailed)
        assert target.bytes_of(ids) == frozen
        await sender.close()
        assert (sender.num_open, receiver.num_open) == (0, 0)

    run(scenario())


def test_the_sender_closes_in_the_middle(fabric):
    source, target = ByteStore(SMOLLM2, 32, seed=13), ByteStore(SMOLLM2, 32)

    async def scenario():
        receiver = KVReceiver(fabric.listener(), target)
        sender = KVSender(fabric.dialer(), source, deadline_s=PATIENCE_S)
        sent, received = Once(), Once()
        sending = sender.start(grant(receiver, range(32), received).encode(), sent)
        sending.blocks_ready(range(16))
        await asyncio.sleep(0)
        await sender.close()
        assert "cancelled" in (await sent.result()).message
        skip(PATIENCE_S)  # its Abort may have been lost
        assert isinstance(await received.result(), TransferFailed)
        assert (sender.num_open, receiver.num_open) == (0, 0)
        with pytest.raises(TransferError):
            sender.start(a_descriptor("nowhere").encode(), sent)
        await receiver.close()

    run(scenario())


def test_nobody_is_at_the_descriptors_address(fabric):
    async def scenario():
        vacant = fabric.listener()
        vacant.start(lambda peer, header, frames: None)
        address = vacant.address
        await vacant.close()
        sender, sent = KVSender(fabric.dialer(), ByteStore(LAYOUT, 4, seed=14), deadline_s=PATIENCE_S), Once()
        sender.start(a_descriptor(address).encode(), sent).finish(range(4), b"")
        assert (await sent.result()).message == "the receiver is gone"
        await sender.close()

    run(scenario())


def test_a_receiver_that_takes_nothing_is_noticed_though_headers_follow(zmq_fabric, monkeypatch):
    """Frames are stuck, and a header that joins the queue behind them is no sign of life."""
    monkeypatch.setattr(zmq, "TIMEOUT_MS", 500)

    async def scenario():
        listener, dialer, lost = zmq_fabric.listener(), zmq_fabric.dialer(), []  # it listens, and reads nothing
        dialer.start(lambda header: None, lost.append)
        frames = [memoryview(bytes(8 * 2**20)) for _ in range(2 * zmq.RECEIVE_QUEUE_MESSAGES)]
        held = [dialer.send(listener.address, b"header", [frame]) for frame in frames]
        while not lost:
            dialer.send(listener.address, b"header")
            await asyncio.sleep(0.1)
        await asyncio.wait(held)
        assert lost == [listener.address]
        await dialer.close()
        listener.start(lambda *_: None)
        await listener.close()

    run(scenario())
