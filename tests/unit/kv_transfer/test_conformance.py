"""What every transport has to carry: whole transfers, right to the byte; cancelled ones and late ones."""

import asyncio
import itertools
import random

import pytest
import uvloop

from engine.cache.kv_pool import PagedKVPool
from kv_transfer import payload
from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent, TransferFailed
from serving_core.layout import KVLayout
from tests.effort import few, pairwise
from tests.unit.kv_transfer.fabric_kinds import FABRIC_KINDS
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    BIG_NUM_BLOCKS,
    LAYOUT,
    PATIENCE_S,
    SMOLLM2,
    ByteStore,
    Fabric,
    Once,
    a_descriptor,
    check_arrived,
    grant,
    pair,
    run,
    transfer,
    until,
)

# ---- undisturbed ----

ONE_FRAME = pytest.param(LAYOUT, 7, id="11 kB")
SEVERAL_MESSAGES = pytest.param(SMOLLM2, 32, id="12 MB")


@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    few(
        [
            pytest.param(LAYOUT, 1, id="1.5 kB"),
            ONE_FRAME,
            pytest.param(SMOLLM2, 1, id="369 kB"),
            SEVERAL_MESSAGES,
            pytest.param(BIG_LAYOUT, BIG_NUM_BLOCKS, id="42 MB"),
        ],
        ONE_FRAME,
        SEVERAL_MESSAGES,
    ),
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


@pytest.mark.nightly
def test_hundreds_of_megabytes(tmp_path):
    """5120 tokens at once, 210 MB."""
    source, target = ByteStore(BIG_LAYOUT, 320, seed=1), ByteStore(BIG_LAYOUT, 320)

    async def scenario():
        async with pair(Fabric("ipc", tmp_path), source, target) as (sender, receiver):
            results = await transfer(sender, receiver, range(320), range(320))
            check_arrived(source, range(320), target, range(320), results)
            assert sender.num_bytes == 320 * BIG_LAYOUT.block_bytes > 200e6

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
            sending = sender.start(grant(receiver, ids, received).encode(), sent)
            for num_ready in (0, 3, 3, 4, 12):
                sending.blocks_ready(ids[:num_ready])
                await until(lambda num_ready=num_ready: receiver.num_bytes == num_ready * SMOLLM2.block_bytes)
            assert not received.is_done
            sending.finish(ids, b"tail")
            check_arrived(source, ids, target, ids, (await sent.result(), await received.result()))

    run(scenario())


class Flaky(ByteStore):
    """A store whose host or device has no memory left, once."""

    fails = True

    def read(self, layer, block_ids):
        self._fail()
        return super().read(layer, block_ids)

    def write(self, layer, block_ids, keys, values):
        self._fail()
        super().write(layer, block_ids, keys, values)

    def _fail(self):
        if self.fails:
            self.fails = False
            raise MemoryError("no memory left")


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_blocks_that_cannot_be_read_or_written_fail_the_transfer_and_no_other(fabric, end):
    stores = Flaky if end == "sender" else ByteStore, Flaky if end == "receiver" else ByteStore
    source, target = stores[0](LAYOUT, 8, seed=5), stores[1](LAYOUT, 8)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            results = await transfer(sender, receiver, range(8), range(8))
            assert [type(result) for result in results] == [TransferFailed, TransferFailed]
            results = await transfer(sender, receiver, range(8), range(8))
            check_arrived(source, range(8), target, range(8), results)

    run(scenario())


def test_many_transfers_at_once(fabric):
    """Three senders, two receivers, sixty transfers of different lengths."""
    rng = random.Random(4)
    num_blocks, lengths = 60, [rng.randint(1, 9) for _ in range(60)]
    sources = [ByteStore(LAYOUT, num_blocks, seed=seed) for seed in range(3)]
    targets = [ByteStore(LAYOUT, sum(lengths)) for _ in range(2)]

    async def scenario():
        receivers = [KVReceiver(fabric.listener(), target) for target in targets]
        senders = [KVSender(fabric.dialer(), source, deadline_s=PATIENCE_S) for source in sources]
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

MANY_LAYERS = KVLayout.uniform(num_layers=8, num_kv_heads=1, head_dim=16, block_size=4, dtype="bfloat16")


async def reach(moment, sending, receiver, ids):
    """Return at a moment of a transfer, in the same turn of the loop."""
    if moment != "start":
        sending.blocks_ready(ids[: len(ids) // 2])
        await turns_until(lambda: receiver.num_bytes)
    if moment.startswith("finish"):
        sending.finish(ids, b"tail")
    if moment.endswith("later"):
        await turns_until(lambda: receiver.num_bytes > 0.6 * len(ids) * MANY_LAYERS.block_bytes)


async def turns_until(condition):
    while not condition():
        await asyncio.sleep(0)


@pairwise(
    kind=FABRIC_KINDS,
    side=["sender", "receiver"],
    moment=["start", "some blocks", "finish", "finish and a little later"],
)
def test_cancel(tmp_path, monkeypatch, kind, side, moment):
    """Each side ends once. The source is free after on_done, and the target is not written after on_done."""
    monkeypatch.setattr(payload, "MESSAGE_BYTES", 2048)  # 32 messages
    monkeypatch.setattr(payload, "MIN_FRAME_BYTES", 512)
    source, target = ByteStore(MANY_LAYERS, 32, seed=6), ByteStore(MANY_LAYERS, 64)
    ids, other_ids = range(32), range(32, 64)

    async def scenario():
        async with pair(Fabric(kind, tmp_path), source, target) as (sender, receiver):
            sent, received = Once(), Once()
            descriptor = grant(receiver, ids, received)
            sending = sender.start(descriptor.encode(), sent)
            await reach(moment, sending, receiver, ids)
            if side == "sender":
                sending.cancel()
                sent_result = await sent.result()
                received_result = await received.result()
            else:
                receiver.cancel(descriptor.epoch)
                received_result = await received.result()
                sending.finish(ids, b"tail")
                sent_result = await sent.result()
            frozen = target.bytes_of(ids)
            sending.cancel()
            receiver.cancel(descriptor.epoch)
            results = await transfer(sender, receiver, ids, other_ids)  # behind all that was on its way
            check_arrived(source, ids, target, other_ids, results)
            assert target.bytes_of(ids) == frozen
            if isinstance(received_result, Received):
                assert frozen == source.bytes_of(ids)
            if isinstance(sent_result, Sent):
                assert isinstance(received_result, Received)
            check_arrived(source, ids, target, ids, await transfer(sender, receiver, ids, ids))

    run(scenario())


def test_a_cancelled_descriptor_stays_cancelled(fabric):
    source, target = ByteStore(LAYOUT, 4, seed=7), ByteStore(LAYOUT, 4)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            sent, received = Once(), Once()
            descriptor = grant(receiver, range(4), received)
            receiver.cancel(descriptor.epoch)
            sender.start(descriptor.encode(), sent).finish(range(4), b"")
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
            sending = sender.start(grant(receiver, range(4), received, ttl_s=0.1).encode(), sent)
            sending.blocks_ready(range(2))
            assert "0.1 s" in (await received.result()).message
            frozen = target.bytes_of(range(4))
            sending.finish(range(4), b"")
            assert isinstance(await sent.result(), TransferFailed)
            assert target.bytes_of(range(4)) == frozen

    run(scenario())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_every_grant_expires(runner):
    """On either event loop: uvloop's timers may ring up to a millisecond early."""
    num_credits = 100

    async def grant_and_wait():
        receiver = KVReceiver(Fabric("loopback", None).listener(), ByteStore(LAYOUT, 1))
        results = []
        for _ in range(num_credits):
            grant(receiver, [0], results.append, ttl_s=0.3)
            await asyncio.sleep(0.0007)
        async with asyncio.timeout(60):
            while receiver.num_open:
                await asyncio.sleep(0.01)
        await receiver.close()
        return results

    assert [result.reason for result in runner(grant_and_wait())] == ["TRANSFER_FAILED"] * num_credits


def test_a_receiver_that_never_answers_is_given_up(fabric):
    async def scenario():
        mute = fabric.listener()
        mute.start(lambda peer, header, frames: None)
        sender, sent = KVSender(fabric.dialer(), ByteStore(LAYOUT, 4, seed=9), deadline_s=0.4), Once()
        sender.start(a_descriptor(mute.address).encode(), sent).finish(range(4), b"")
        assert "time is over" in (await sent.result()).message
        await sender.close()
        await mute.close()

    run(scenario())
