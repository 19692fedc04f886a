"""What every transport has to carry: whole transfers, right to the byte, however they are disturbed."""

import asyncio
import itertools
import random
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvloop
import zmq

from engine.errors import SettingsError
from engine.kv_pool import PagedKVPool
from engine.layout import KVLayout
from kv_transfer import receiver as receiver_module
from kv_transfer import sender as sender_module
from kv_transfer import wire
from kv_transfer.errors import TransferError
from kv_transfer.payload import checksums
from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent, TransferFailed
from kv_transfer.sender_session import MAX_ROUNDS
from kv_transfer.ticket import Ticket
from kv_transfer.transports import zmq as zmq_transport
from kv_transfer.transports.zmq import ZmqListener
from kv_transfer.wire import Abort, Data, Finish, Refusal, Refused, Segment
from tests.unit.transfer_kit import (
    BIG_LAYOUT,
    BIG_NUM_BLOCKS,
    LAYOUT,
    ByteStore,
    Fabric,
    Faults,
    FaultyDialer,
    Once,
    pair,
    run,
    until,
)

SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
KINDS = ["loopback", "tcp", "ipc"]


@pytest.fixture(params=KINDS)
def fabric(request, tmp_path):
    return Fabric(request.param, tmp_path)


@pytest.fixture(params=KINDS[1:])
def zmq_fabric(request, tmp_path):
    return Fabric(request.param, tmp_path)


async def transfer(sender, receiver, source_ids, target_ids, *, tail=b"tail", ttl_s=20.0, epoch=1):
    """One undisturbed transfer; its two results."""
    sent, received = Once(), Once()
    ticket = receiver.expect(target_ids, epoch, ttl_s, received)
    sender.start(ticket.encode(), sent).finish(source_ids, tail)
    return await sent.result(), await received.result()


def check_arrived(source, source_ids, target, target_ids, results, tail=b"tail"):
    num_bytes = len(source_ids) * source.layout.block_bytes
    assert results == (Sent(num_bytes), Received(tail, num_bytes))
    assert target.bytes_of(target_ids) == source.bytes_of(source_ids)


# ---- undisturbed ----


@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    [(LAYOUT, 1), (LAYOUT, 7), (SMOLLM2, 1), (SMOLLM2, 32), (BIG_LAYOUT, BIG_NUM_BLOCKS)],
    ids=["1.5 kB", "11 kB", "369 kB", "12 MB", "42 MB"],
)
def test_bytes_arrive_as_they_are(fabric, layout, num_blocks):
    source, target = ByteStore(layout, num_blocks, seed=1), ByteStore(layout, num_blocks + 2)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            target_ids = range(1, num_blocks + 1)
            results = await transfer(sender, receiver, range(num_blocks), target_ids)
            check_arrived(source, range(num_blocks), target, target_ids, results)
            assert sender.num_bytes == receiver.num_bytes == num_blocks * layout.block_bytes, "something was sent twice"
        assert not any(target.bytes_of([0, num_blocks + 1])), "a neighbour was written"

    run(scenario())


def test_block_ids_need_not_be_in_order_on_either_side(fabric):
    source, target = ByteStore(LAYOUT, 40, seed=2), ByteStore(LAYOUT, 40)
    rng = random.Random(0)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            for _ in range(5):
                source_ids, target_ids = rng.sample(range(40), 17), rng.sample(range(40), 17)
                results = await transfer(sender, receiver, source_ids, target_ids)
                check_arrived(source, source_ids, target, target_ids, results)

    run(scenario())


def test_blocks_leave_while_the_prompt_is_computed(fabric):
    source, target = ByteStore(SMOLLM2, 20, seed=3), ByteStore(SMOLLM2, 20)
    ids = random.Random(3).sample(range(20), 20)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            sending = sender.start(receiver.expect(ids, 1, 20.0, received).encode(), sent)
            for num_ready in (0, 3, 3, 4, 12):
                sending.blocks_ready(ids[:num_ready])
                await until(lambda num_ready=num_ready: receiver.num_bytes == num_ready * SMOLLM2.block_bytes)
            assert not received.is_done
            sending.finish(ids, b"tail")
            check_arrived(source, ids, target, ids, (await sent.result(), await received.result()))

    run(scenario())


def test_many_transfers_at_once(fabric):
    """Three senders, two receivers, sixty transfers of different lengths."""
    rng = random.Random(4)
    num_blocks, lengths = 60, [rng.randint(1, 9) for _ in range(60)]
    sources = [ByteStore(LAYOUT, num_blocks, seed=seed) for seed in range(3)]
    targets = [ByteStore(LAYOUT, sum(lengths)) for _ in range(2)]

    async def scenario():
        receivers = [KVReceiver(fabric.listener(), target) for target in targets]
        senders = [KVSender(fabric.dialer(), source, deadline_s=20.0) for source in sources]
        places = itertools.accumulate(lengths, initial=0)
        jobs = [
            (number % 3, number % 2, rng.sample(range(num_blocks), length), range(place, place + length))
            for number, (length, place) in enumerate(zip(lengths, places, strict=False))
        ]
        results = await asyncio.gather(*(transfer(senders[s], receivers[r], have, want) for s, r, have, want in jobs))
        for (s, r, have, want), result in zip(jobs, results, strict=True):
            check_arrived(sources[s], have, targets[r], want, result)
        for end in (*senders, *receivers):
            assert end.num_open == 0
            await end.close()

    run(scenario())


def test_the_pool_of_the_engine(fabric):
    """bf16, scattered blocks, the real store on both sides."""
    torch = pytest.importorskip("torch")
    source, target = (PagedKVPool(SMOLLM2, 24, torch.device("cpu")) for _ in range(2))
    for layer in range(SMOLLM2.num_layers):
        source.keys(layer).normal_()
        source.values(layer).normal_()
    have, want = [5, 6, 7, 20, 1], [0, 9, 10, 11, 3]

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = await transfer(sender, receiver, have, want)
            assert (type(sent), type(received)) == (Sent, Received)

    run(scenario())
    for layer in range(SMOLLM2.num_layers):
        assert torch.equal(target.keys(layer)[want], source.keys(layer)[have])
        assert torch.equal(target.values(layer)[want], source.values(layer)[have])
        assert not target.keys(layer)[[1, 2, 4]].any()


def test_the_faster_event_loop(fabric):
    source, target = ByteStore(SMOLLM2, 8, seed=5), ByteStore(SMOLLM2, 8)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            check_arrived(source, range(8), target, range(8), await transfer(sender, receiver, range(8), range(8)))

    run(scenario(), uvloop.run)


# ---- cancelled ----

MOMENTS = ["start", "some blocks", "finish", "finish and a little later"]


async def reach(moment, sending, ids):
    if moment != "start":
        sending.blocks_ready(ids[: len(ids) // 2])
        await asyncio.sleep(0.002)
    if moment.startswith("finish"):
        sending.finish(ids, b"tail")
    if moment.endswith("later"):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_cancel(fabric, side, moment):
    """Each side ends once. The source is free after on_done, and the target is not written after on_done."""
    source, target = ByteStore(SMOLLM2, 32, seed=6), ByteStore(SMOLLM2, 32)
    ids = range(32)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            ticket = receiver.expect(ids, 1, 20.0, received)
            sending = sender.start(ticket.encode(), sent)
            await reach(moment, sending, ids)
            if side == "sender":
                sending.cancel()
                sent_result = await sent.result()
                received_result = await received.result()
            else:
                receiver.cancel(ticket.transfer_id)
                received_result = await received.result()
                sending.finish(ids, b"tail")
                sent_result = await sent.result()
            frozen = target.bytes_of(ids)
            sending.cancel()
            receiver.cancel(ticket.transfer_id)
            await asyncio.sleep(0.02)
            assert target.bytes_of(ids) == frozen
            if isinstance(received_result, Received):
                assert frozen == source.bytes_of(ids)
            if isinstance(sent_result, Sent):
                assert isinstance(received_result, Received)
            results = await transfer(sender, receiver, ids, ids)
            check_arrived(source, ids, target, ids, results)

    run(scenario())


def test_a_cancelled_ticket_stays_cancelled(fabric):
    source, target = ByteStore(LAYOUT, 4, seed=7), ByteStore(LAYOUT, 4)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            ticket = receiver.expect(range(4), 1, 20.0, received)
            receiver.cancel(ticket.transfer_id)
            sender.start(ticket.encode(), sent).finish(range(4), b"")
            assert "cancelled" in (await sent.result()).message
            assert "cancelled" in (await received.result()).message
            assert not any(target.bytes_of(range(4)))

    run(scenario())


# ---- too late ----


def test_a_grant_expires(fabric):
    source, target = ByteStore(LAYOUT, 4, seed=8), ByteStore(LAYOUT, 4)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            sending = sender.start(receiver.expect(range(4), 1, 0.1, received).encode(), sent)
            sending.blocks_ready(range(2))
            assert "0.1 s" in (await received.result()).message
            frozen = target.bytes_of(range(4))
            sending.finish(range(4), b"")
            assert isinstance(await sent.result(), TransferFailed)
            assert target.bytes_of(range(4)) == frozen

    run(scenario())


def test_a_receiver_that_never_answers_is_given_up(fabric):
    async def scenario():
        mute = fabric.listener()
        mute.start(lambda peer, header, frames: None)
        sender, sent = KVSender(fabric.dialer(), ByteStore(LAYOUT, 4, seed=9), deadline_s=0.4), Once()
        sender.start(a_ticket(mute.address).encode(), sent).finish(range(4), b"")
        assert "time is over" in (await sent.result()).message
        await sender.close()
        await mute.close()

    run(scenario())


def a_ticket(address, transfer_id=bytes(16), num_blocks=4):
    return Ticket(transfer_id, 1, address, LAYOUT, num_blocks, 0, 20.0)


# ---- disturbed ----


@pytest.mark.parametrize("seed", range(3))
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
        sending = sender.start(receiver.expect(target_ids, seed, 20.0, received).encode(), sent)
        for num_ready in range(len(source_ids)):
            sending.blocks_ready(source_ids[:num_ready])
            await asyncio.sleep(0.001)
        sending.finish(source_ids, b"tail")
        check_arrived(source, source_ids, target, target_ids, (await sent.result(), await received.result()))

    async def scenario():
        async with pair(fabric, source, target, wrap=lambda dialer: FaultyDialer(dialer, faults)) as ends:
            await asyncio.gather(*(one(*ends, range(first, first + 8)) for first in range(0, 32, 8)))

    run(scenario())


@pytest.mark.parametrize("rates", [{"flip": 0.6}, {"drop": 0.6}, {"truncate": 0.5, "duplicate": 0.5, "delay": 0.5}])
def test_hopeless_faults_end_and_are_never_taken_for_success(fabric, rates):
    source = ByteStore(LAYOUT, 8, seed=10)

    async def one(seed):
        target = ByteStore(LAYOUT, 8)
        faults = Faults(random.Random(seed), **rates)
        async with pair(fabric, source, target, deadline_s=0.4, wrap=lambda d: FaultyDialer(d, faults)) as ends:
            sender, receiver = ends
            sent, received = Once(), Once()
            sender.start(receiver.expect(range(8), 1, 0.5, received).encode(), sent).finish(range(8), b"tail")
            sent_result, received_result = await sent.result(), await received.result()
            if isinstance(received_result, Received):
                check_arrived(source, range(8), target, range(8), (Sent(8 * LAYOUT.block_bytes), received_result))
            if isinstance(sent_result, Sent):
                assert isinstance(received_result, Received)

    async def scenario():
        await asyncio.gather(*(one(seed) for seed in range(12)))

    run(scenario())


class FlipOnce(FaultyDialer):
    """Flips a bit in the first layer's block 1, the first time it passes."""

    def __init__(self, inner):
        super().__init__(inner, Faults(random.Random(0), num_per_transfer=1))

    def _spoilt(self, parts):
        if len(parts) == 1:
            return parts
        flipped = bytearray(parts[1])
        flipped[LAYOUT.plane_bytes] ^= 1
        return [parts[0], memoryview(flipped)]


def test_a_block_that_changes_on_its_way_is_counted_and_sent_again(fabric):
    source, target = ByteStore(LAYOUT, 4, seed=11), ByteStore(LAYOUT, 4)

    async def scenario():
        async with pair(fabric, source, target, wrap=FlipOnce) as (sender, receiver):
            check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
            assert receiver.num_corrupt_blocks == 1
            assert sender.num_bytes == 4 * LAYOUT.block_bytes + 2 * LAYOUT.plane_bytes
            assert receiver.num_bytes == 4 * LAYOUT.block_bytes

    run(scenario())


# ---- gone ----


def test_the_receiver_closes_in_the_middle(fabric):
    source, target = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=12), ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS)
    ids = range(BIG_NUM_BLOCKS)

    async def scenario():
        receiver = KVReceiver(fabric.listener(), target)
        sender = KVSender(fabric.dialer(), source, deadline_s=20.0)
        sent, received = Once(), Once()
        sending = sender.start(receiver.expect(ids, 1, 20.0, received).encode(), sent)
        sending.finish(ids, b"tail")
        await until(lambda: receiver.num_bytes)
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
        sender = KVSender(fabric.dialer(), source, deadline_s=20.0)
        sent, received = Once(), Once()
        sending = sender.start(receiver.expect(range(32), 1, 0.5, received).encode(), sent)
        sending.blocks_ready(range(16))
        await asyncio.sleep(0)
        await sender.close()
        assert "cancelled" in (await sent.result()).message
        assert isinstance(await received.result(), TransferFailed)
        assert (sender.num_open, receiver.num_open) == (0, 0)
        with pytest.raises(TransferError):
            sender.start(a_ticket("nowhere").encode(), sent)
        await receiver.close()

    run(scenario())


def test_nobody_is_at_the_tickets_address(fabric):
    async def scenario():
        vacant = fabric.listener()
        vacant.start(lambda peer, header, frames: None)
        address = vacant.address
        await vacant.close()
        sender, sent = KVSender(fabric.dialer(), ByteStore(LAYOUT, 4, seed=14), deadline_s=20.0), Once()
        sender.start(a_ticket(address).encode(), sent).finish(range(4), b"")
        assert (await sent.result()).message == "the receiver is gone"
        await sender.close()

    run(scenario())


@asynccontextmanager
async def peer_process(*arguments):
    command = [sys.executable, "-m", "tests.unit.transfer_peer", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def receiving_process(fabric):
    """The process and its ticket."""
    endpoint = "tcp://127.0.0.1:*" if fabric.kind == "tcp" else f"ipc://{fabric.folder}/peer"
    async with peer_process("receive", endpoint) as process:
        yield process, bytes.fromhex((await process.stdout.readline()).decode())


def test_the_receiving_process_is_killed(zmq_fabric):
    """Stopped first, so that frames are stuck on their way, which the sender must get back."""
    source, ids = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=15), range(BIG_NUM_BLOCKS)

    async def scenario():
        async with receiving_process(zmq_fabric) as (process, ticket):
            sender, sent = KVSender(zmq_fabric.dialer(), source, deadline_s=30.0), Once()
            sending = sender.start(ticket, sent)
            sending.blocks_ready(ids[:1])
            await until(lambda: sender.num_messages)
            process.send_signal(signal.SIGSTOP)
            sending.finish(ids, b"tail")
            await asyncio.sleep(0.02)
            assert not sent.is_done
            process.kill()
            assert (await sent.result()).message == "the receiver is gone"
            await sender.close()
            assert sender.num_open == 0

    run(scenario())


def test_the_receiving_process_hangs(zmq_fabric, monkeypatch):
    """A cancelled transfer waits for its frames, and gets them back when nothing has moved for a while."""
    monkeypatch.setattr(zmq_transport, "TIMEOUT_MS", 300)
    source, ids = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=15), range(BIG_NUM_BLOCKS)

    async def scenario():
        async with receiving_process(zmq_fabric) as (process, ticket):
            held = []
            sender, sent = KVSender(zmq_fabric.dialer(), source, deadline_s=30.0), Once()
            sending = sender.start(ticket, lambda result: (held.append(source.is_held), sent(result)))
            sending.blocks_ready(ids[:1])
            await until(lambda: sender.num_messages)
            process.send_signal(signal.SIGSTOP)
            sending.finish(ids, b"tail")
            await asyncio.sleep(0.1)
            assert source.is_held
            sending.cancel()
            assert "cancelled" in (await sent.result()).message
            assert held == [False]
            await sender.close()

    run(scenario())


def test_the_sending_process_is_killed(zmq_fabric):
    target, ids = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS), range(BIG_NUM_BLOCKS)

    async def scenario():
        receiver, received = KVReceiver(zmq_fabric.listener(), target), Once()
        ticket = receiver.expect(ids, 1, 30.0, received)
        async with peer_process("send", ticket.encode().hex()):
            await until(lambda: receiver.num_bytes)
        receiver.cancel(ticket.transfer_id)
        assert isinstance(await received.result(), TransferFailed)
        frozen = target.bytes_of(ids)
        await asyncio.sleep(0.02)
        assert target.bytes_of(ids) == frozen
        await receiver.close()
        assert receiver.num_open == 0

    run(scenario())


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


def crafted(source, ticket, blocks, epoch=1, layer=0, shift=0):
    """Data that is right to the last byte, but for what is asked for."""
    planes = b"".join(source.read(layer, blocks))
    crcs = checksums([memoryview(planes)], source.layout.plane_bytes)
    return Data(ticket.transfer_id, epoch, (Segment(layer, blocks[0] + shift, crcs),)), planes


@pytest.fixture
def stores():
    return ByteStore(LAYOUT, 4, seed=16), ByteStore(LAYOUT, 6)


def test_what_was_not_granted_is_refused_and_never_written(fabric, stores):
    source, target = stores

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            received = Once()
            ticket = receiver.expect(range(4), 1, 20.0, received)
            stranger = Stranger(fabric, ticket.address)
            refusal = Refused(ticket.transfer_id, 1, Refusal.MALFORMED)
            assert await stranger.ask(*crafted(source, ticket, range(4), shift=1)) == refusal
            assert await stranger.ask(Finish(ticket.transfer_id, 1, 0, 5, b"")) == refusal
            for epoch in (0, 2):
                refusal = Refused(ticket.transfer_id, epoch, Refusal.WRONG_EPOCH)
                assert await stranger.ask(*crafted(source, ticket, range(4), epoch=epoch)) == refusal
                assert await stranger.ask(Finish(ticket.transfer_id, epoch, 0, 4, b"")) == refusal
            unknown = a_ticket(ticket.address, b"?" * 16)
            refusal = Refused(b"?" * 16, 1, Refusal.UNKNOWN_TRANSFER)
            assert await stranger.ask(*crafted(source, unknown, range(4))) == refusal
            assert not any(target.bytes_of(range(6)))
            assert receiver.num_refused == 7
            assert receiver.num_bytes == 0
            await stranger.dialer.close()

            sent = Once()
            sender.start(ticket.encode(), sent).finish(range(4), b"tail")
            check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))

    run(scenario())


@pytest.mark.parametrize("ending", ["commit", "cancel"])
def test_what_is_replayed_is_never_written(fabric, stores, ending):
    """After the end, the blocks may belong to somebody else."""
    source, target = stores

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            ticket = receiver.expect(range(4), 1, 20.0, received)
            if ending == "commit":
                sender.start(ticket.encode(), sent).finish(range(4), b"tail")
                await sent.result()
            else:
                receiver.cancel(ticket.transfer_id)
            await received.result()
            frozen = target.bytes_of(range(6))
            source.flip(0, 2)
            stranger = Stranger(fabric, ticket.address)
            good, bad = wire.Committed(ticket.transfer_id, 1), Refused(ticket.transfer_id, 1, Refusal.CANCELLED)
            expected = good if ending == "commit" else bad
            assert await stranger.ask(*crafted(source, ticket, range(4))) == expected
            assert await stranger.ask(Finish(ticket.transfer_id, 1, 0, 4, b"tail")) == expected
            assert isinstance(await stranger.ask(Finish(ticket.transfer_id, 1, 0, 4, b"other")), Refused)
            assert isinstance(await stranger.ask(Finish(ticket.transfer_id, 2, 0, 4, b"tail")), Refused)
            await stranger.send(wire.encode(Abort(ticket.transfer_id, 1)))
            assert target.bytes_of(range(6)) == frozen
            await stranger.dialer.close()

    run(scenario())


def test_messages_that_make_no_sense_are_counted_and_harm_nobody(fabric, stores):
    source, target = stores
    rng = random.Random(17)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            received, sent = Once(), Once()
            ticket = receiver.expect(range(4), 1, 20.0, received)
            stranger = Stranger(fabric, ticket.address)
            header, planes = crafted(source, ticket, range(4))
            senseless = [b"", b"\0" * 64, rng.randbytes(100), rng.randbytes(70_000), wire.encode(header)[:-1]]
            senseless.append(wire.encode(wire.Committed(ticket.transfer_id, 1)))
            for odd in senseless:
                await stranger.send(odd, planes)
            for frames in ([], [planes[:-1]], [planes, b"x"], [planes[:5]] * 3):
                await stranger.send(wire.encode(header), *frames)
            await until(lambda: receiver.num_messages == len(senseless) + 4)
            assert receiver.num_malformed == len(senseless)
            assert receiver.num_corrupt_blocks == 4 * 4
            assert not any(target.bytes_of(range(6)))
            await stranger.dialer.close()

            sender.start(ticket.encode(), sent).finish(range(4), b"tail")
            check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))

    run(scenario())


def test_frames_that_are_too_large_or_too_many_never_get_in(zmq_fabric, stores):
    source, target = stores

    async def scenario():
        async with pair(zmq_fabric, source, target) as (sender, receiver):
            received, sent = Once(), Once()
            ticket = receiver.expect(range(4), 1, 20.0, received)
            header, _ = crafted(source, ticket, range(4))
            context = zmq.Context()
            for frames in ([bytes(wire.MAX_PAYLOAD_BYTES + 1)], [b"x"] * 5000):
                dealer = context.socket(zmq.DEALER)
                dealer.connect(ticket.address)
                dealer.send_multipart([wire.encode(header), *frames])
                await asyncio.sleep(0.1)
                dealer.close(linger=0)
            context.term()
            assert receiver.num_messages == 0

            sender.start(ticket.encode(), sent).finish(range(4), b"tail")
            check_arrived(source, range(4), target, range(4), (await sent.result(), await received.result()))

    run(scenario())


# ---- limits and refusals ----


def test_open_transfers_are_bounded(fabric, stores, monkeypatch):
    source, target = stores
    monkeypatch.setattr(receiver_module, "MAX_OPEN", 2)
    monkeypatch.setattr(sender_module, "MAX_OPEN", 1)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            first, second = (receiver.expect([number], 1, 20.0, Once()) for number in range(2))
            with pytest.raises(TransferError, match="2 of 2 are open"):
                receiver.expect([2], 1, 20.0, Once())
            sent = Once()
            sender.start(first.encode(), sent).finish([0], b"")
            with pytest.raises(TransferError, match="1 of 1 are open"):
                sender.start(second.encode(), Once())
            await sent.result()
            sent = Once()
            sender.start(second.encode(), sent).finish([1], b"")
            assert isinstance(await sent.result(), Sent)
            receiver.expect([2], 1, 20.0, Once())

    run(scenario())


def test_what_has_ended_is_forgotten_in_the_end(fabric, stores, monkeypatch):
    source, target = stores
    monkeypatch.setattr(receiver_module, "MAX_ENDED", 2)

    async def scenario():
        async with pair(fabric, source, target) as (_, receiver):
            tickets = [receiver.expect([0], 1, 20.0, Once()) for _ in range(3)]
            for ticket in tickets:
                receiver.cancel(ticket.transfer_id)
            stranger = Stranger(fabric, tickets[0].address)
            answers = [await stranger.ask(Finish(ticket.transfer_id, 1, 0, 1, b"")) for ticket in tickets]
            expected = [Refusal.UNKNOWN_TRANSFER, Refusal.CANCELLED, Refusal.CANCELLED]
            assert [answer.refusal for answer in answers] == expected
            await stranger.dialer.close()

    run(scenario())


def test_connections_are_bounded_and_made_again(zmq_fabric, monkeypatch):
    """Five receivers over two connections: whoever is cut off is dialled again."""
    monkeypatch.setattr(zmq_transport, "MAX_CONNECTIONS", 2)
    source, targets = ByteStore(LAYOUT, 4, seed=18), [ByteStore(LAYOUT, 4) for _ in range(5)]

    async def scenario():
        sender = KVSender(zmq_fabric.dialer(), source, deadline_s=20.0)
        receivers = [KVReceiver(zmq_fabric.listener(), target) for target in targets]
        for receiver, target in zip(receivers * 2, targets * 2, strict=True):
            check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
        for end in (sender, *receivers):
            await end.close()

    run(scenario())


def test_tickets_that_do_not_fit_are_refused(fabric, stores):
    source, target = stores

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            ticket = receiver.expect(range(4), 1, 20.0, Once())
            with pytest.raises(TransferError):
                sender.start(b"not a ticket", Once())
            other = replace(ticket, layout=replace(LAYOUT, num_kv_heads=4))
            with pytest.raises(TransferError, match=r"num_kv_heads=4.*num_kv_heads=2"):
                sender.start(other.encode(), Once())
            sender.start(ticket.encode(), Once())
            with pytest.raises(TransferError, match="in use already"):
                sender.start(ticket.encode(), Once())

    run(scenario())


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "pgm://127.0.0.1:1", "ipc://" + "x" * 200])
def test_addresses_that_cannot_be_dialled_are_refused(stores, address):
    async def scenario():
        sender = KVSender(zmq_transport.ZmqDialer(), stores[0], deadline_s=20.0)
        with pytest.raises(TransferError, match="cannot be dialled"):
            sender.start(a_ticket(address).encode(), Once())
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
            ZmqListener(listener.address)
        await listener.close()

    run(scenario())


async def test_a_closed_listener_leaves_no_socket_behind(tmp_path):
    listener = ZmqListener(f"ipc://{tmp_path}/socket")
    listener.start(lambda *_: None)
    assert (tmp_path / "socket").exists()
    await listener.close()
    assert not (tmp_path / "socket").exists()
