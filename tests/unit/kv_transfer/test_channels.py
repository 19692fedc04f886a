"""The channels of a transfer end together: with success when all of them have, else with what failed first."""

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.receiver import KVReceiver, ReceivingChannel
from kv_transfer.results import Received, Sent, TransferError, TransferFailed, combined
from kv_transfer.sender import KVSender
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.wire import Abort, Data, Finish, decode
from serving_core import reasons
from tests.effort import few
from tests.unit.kv_transfer.channels_kit import CANCELLED_BY_SENDER, IDS, LAYOUT, TAIL, nodes_of, sliced
from tests.unit.kv_transfer.fabric_kinds import FABRIC_KINDS
from tests.unit.kv_transfer.transfer_kit import ByteStore, Fabric, Once, run, until

CANCELLED_BY_RECEIVER = TransferFailed(reasons.TRANSFER_FAILED, "the receiver's node cancelled the transfer")
ABORTED = TransferFailed(reasons.TRANSFER_ABORTED, "the sender gave the transfer up")
over_unlike_fabrics = pytest.mark.parametrize(
    "fabric", few(FABRIC_KINDS, "loopback", "tcp", "torch_dist"), indirect=True
)


@pytest.fixture
def whole():
    return ByteStore(LAYOUT, 4, seed=1)


@pytest.fixture
def loopback(tmp_path):
    return Fabric("loopback", tmp_path)


async def check_still_works(nodes, whole, target_ids=IDS):
    attempt = nodes.begin(target_ids)
    attempt.finish(IDS)
    assert await attempt.results() == nodes.expected(len(IDS))
    assert nodes.bytes_of(target_ids) == [store.bytes_of(IDS) for store in sliced(whole, len(nodes.targets))]


# ---- results ----


def test_results_add_up():
    assert combined([Sent(0)]) == Sent(0)
    assert combined([Sent(3), Sent(4)]) == Sent(7)
    assert combined([Received(b"t", 3), Received(b"t", 4)]) == Received(b"t", 7)


def test_the_first_failure_counts():
    assert combined([Received(b"t", 3), ABORTED, CANCELLED_BY_RECEIVER]) == ABORTED
    assert combined([CANCELLED_BY_SENDER, Sent(3), ABORTED]) == CANCELLED_BY_SENDER


def test_two_tails_are_a_failure():
    assert combined([Received(b"t", 3), Received(b"u", 3)]).reason == reasons.TRANSFER_FAILED


# ---- cancelled ----


@over_unlike_fabrics
@pytest.mark.parametrize("rank", [0, 1])
def test_one_decode_rank_cancels(fabric, whole, rank):
    """Its channels end on both sides; the senders end those that go elsewhere."""

    async def scenario():
        async with nodes_of(fabric, whole, 2, 2, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS[:2])
            await until(lambda: all(receiver.num_bytes for receiver in nodes.receivers))
            nodes.receivers[rank].cancel(attempt.descriptor.epoch)
            assert await attempt.received[rank].result() == CANCELLED_BY_RECEIVER
            frozen = nodes.targets[rank].bytes_of(IDS)
            attempt.finish(IDS)
            sent, received = await attempt.results()
            assert sent[rank].message == "the receiver refused the transfer: cancelled"
            assert (sent[1 - rank], received[1 - rank]) == tuple(side[1 - rank] for side in nodes.expected(4))
            assert nodes.targets[rank].bytes_of(IDS) == frozen
            assert [end.num_failed for end in nodes.receivers] == [int(rank == 0), int(rank == 1)]
            await check_still_works(nodes, whole)

    run(scenario())


@over_unlike_fabrics
def test_a_channel_that_is_cancelled_takes_the_others_of_its_sender_along(fabric, whole):
    """One prefill rank, four decode ranks, of which one has had enough."""

    async def scenario():
        async with nodes_of(fabric, whole, 1, 4, 8) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS[:2])
            await until(lambda: all(receiver.num_bytes for receiver in nodes.receivers))
            nodes.receivers[2].cancel(attempt.descriptor.epoch)
            (sent,), received = await attempt.results()
            assert sent.message == "the receiver refused the transfer: cancelled"
            assert received == [ABORTED, ABORTED, CANCELLED_BY_RECEIVER, ABORTED]
            assert nodes.senders[0].num_failed == 1
            frozen = nodes.bytes_of(IDS)
            attempt.finish(IDS)
            await check_still_works(nodes, whole, range(4, 8))  # behind all that was on its way
            assert nodes.bytes_of(IDS) == frozen

    run(scenario())


@over_unlike_fabrics
def test_a_channel_that_is_aborted_takes_the_others_of_its_receiver_along(fabric, whole):
    """Four prefill ranks, one decode rank: who cancelled shows in the reason."""

    async def scenario():
        async with nodes_of(fabric, whole, 4, 1, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS[:2])
            await until(lambda: nodes.receivers[0].num_bytes == 2 * LAYOUT.block_bytes)
            attempt.sendings[1].cancel()
            assert await attempt.received[0].result() == ABORTED
            frozen = nodes.bytes_of(IDS)
            attempt.finish(IDS)
            sent, _ = await attempt.results()
            assert sent[1] == CANCELLED_BY_SENDER
            assert {sent[rank].message for rank in (0, 2, 3)} == {"the receiver refused the transfer: cancelled"}
            assert nodes.bytes_of(IDS) == frozen
            assert nodes.receivers[0].num_failed == 1
            await check_still_works(nodes, whole)

    run(scenario())


@over_unlike_fabrics
def test_a_cancel_is_told_once_to_everyone(fabric, whole):
    async def scenario():
        async with nodes_of(fabric, whole, 1, 4, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS)
            await until(lambda: all(receiver.num_bytes for receiver in nodes.receivers))
            attempt.sendings[0].cancel()
            attempt.sendings[0].cancel()
            assert await attempt.results() == ([CANCELLED_BY_SENDER], [ABORTED] * 4)
            for receiver in nodes.receivers:
                receiver.cancel(attempt.descriptor.epoch)
            await check_still_works(nodes, whole)

    run(scenario())


# ---- refused ----


@over_unlike_fabrics
def test_one_rank_was_not_granted_anything(fabric, whole):
    async def scenario():
        async with nodes_of(fabric, whole, 1, 2, 4) as nodes:
            descriptor, sent, received = nodes.descriptor(4), Once(), Once()
            nodes.receivers[0].expect(descriptor, IDS, received)
            nodes.senders[0].start(descriptor.encode(), sent).finish(IDS, TAIL)
            assert (await sent.result()).message == "the receiver refused the transfer: unknown_transfer"
            assert await received.result() in (ABORTED, Received(TAIL, 4 * LAYOUT.with_heads(2).block_bytes))
            assert not any(nodes.targets[1].bytes_of(IDS))
            await check_still_works(nodes, whole)

    run(scenario())


@over_unlike_fabrics
@pytest.mark.parametrize("epoch", [0, 2**32 - 1])
def test_another_epoch_is_refused_on_every_channel(fabric, whole, epoch):
    async def scenario():
        async with nodes_of(fabric, whole, 2, 1, 4) as nodes:
            descriptor, sent, received = nodes.descriptor(4), [Once(), Once()], Once()
            nodes.receivers[0].expect(descriptor, IDS, received)
            stale = replace(descriptor, epoch=epoch).encode()
            for sender, on_done in zip(nodes.senders, sent, strict=True):
                sender.start(stale, on_done).finish(IDS, TAIL)
            for on_done in sent:
                assert (await on_done.result()).message == "the receiver refused the transfer: wrong_epoch"
            assert not received.is_done
            assert not any(nodes.targets[0].bytes_of(IDS))
            for sender in nodes.senders:
                sender.start(descriptor.encode(), Once()).finish(IDS, TAIL)
            assert await received.result() == nodes.expected(4)[1][0]

    run(scenario())


def test_descriptors_for_other_sizes_are_refused(loopback, whole):
    async def scenario():
        async with nodes_of(loopback, whole, 2, 2, 4) as nodes:
            sender, receiver = nodes.senders[1], nodes.receivers[1]
            good = nodes.descriptor(4)
            three_channels = (*good.ends, replace(good.ends[0], transfer_id=b"?" * 16))
            with pytest.raises(TransferError, match="a prefill node of 1 ranks, not 2"):
                sender.start(replace(good, prefill_tp=1).encode(), Once())
            with pytest.raises(TransferError, match="a decode node of 1 ranks, not 2"):
                receiver.expect(replace(good, decode_tp=1), IDS, Once())
            other = replace(good, layout=LAYOUT.with_heads(3), ends=three_channels[:2])
            assert other.channels_to(0)[0][1].layout.num_kv_heads == 1
            for node in nodes.senders[:1]:
                with pytest.raises(TransferError, match=r"and 1 heads of .*; it has .* and 2 heads of "):
                    node.start(other.encode(), Once())
            for node in nodes.receivers[:1]:
                with pytest.raises(TransferError, match=r"and 1 heads of .*; it has .* and 2 heads of "):
                    node.expect(other, IDS, Once())
            with pytest.raises(TransferError, match="4 blocks, not 3"):
                receiver.expect(good, IDS[:3], Once())
            receiver.expect(good, IDS, Once())
            with pytest.raises(TransferError, match="in use already"):
                receiver.expect(good, IDS, Once())
            with pytest.raises(TransferError, match="in use already"):
                receiver.expect(replace(good, epoch=good.epoch + 1000), IDS, Once())
            sender.start(good.encode(), Once())
            with pytest.raises(TransferError, match="in use already"):
                sender.start(good.encode(), Once())
            with pytest.raises(TransferError, match="in use already"):
                sender.start(replace(good, epoch=good.epoch + 1000).encode(), Once())
            assert [end.num_open for end in (sender, receiver)] == [1, 1]

    run(scenario())


# ---- prefill ranks that disagree ----


@over_unlike_fabrics
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([(IDS, b"a"), (IDS, b"b")], "do not agree on the end"),
        ([(IDS, b"a"), (IDS[:3], b"a")], "different numbers of blocks"),
    ],
)
def test_ranks_that_do_not_send_the_same_request_send_nothing_usable(fabric, whole, ends, message):
    async def scenario():
        async with nodes_of(fabric, whole, 2, 1, 4) as nodes:
            attempt = nodes.begin(IDS)
            for sending, (block_ids, tail) in zip(attempt.sendings, ends, strict=True):
                sending.finish(block_ids, tail)
            (received,) = (await attempt.results())[1]
            assert received.reason == reasons.TRANSFER_FAILED
            assert message in received.message
            assert nodes.receivers[0].num_failed == 1
            await check_still_works(nodes, whole)

    run(scenario())


# ---- ranks with nothing to send ----


def test_a_rank_without_channels_is_done_when_it_is_finished(loopback):
    """One head, four prefill ranks that all hold it: one sends."""
    whole = ByteStore(LAYOUT.with_heads(1), 4, seed=2)

    async def scenario():
        async with nodes_of(loopback, whole, 4, 1, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS)
            await until(lambda: nodes.receivers[0].num_bytes == 4 * whole.layout.block_bytes)
            assert not any(sent.is_done for sent in attempt.sent)
            for sending in attempt.sendings[1:]:
                sending.finish(IDS, TAIL)
                sending.cancel()
            assert [await sent.result() for sent in attempt.sent[1:]] == [Sent(0)] * 3
            assert [sender.num_open for sender in nodes.senders] == [1, 0, 0, 0]
            attempt.sendings[0].finish(IDS, TAIL)
            assert await attempt.results() == nodes.expected(4)
            assert [sender.num_messages > 0 for sender in nodes.senders] == [True, False, False, False]

    run(scenario())


def test_a_rank_without_channels_can_be_cancelled_and_closed(loopback):
    whole = ByteStore(LAYOUT.with_heads(1), 4, seed=3)

    async def scenario():
        async with nodes_of(loopback, whole, 3, 1, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.sendings[1].cancel()
            attempt.sendings[1].finish(IDS, TAIL)
            assert await attempt.sent[1].result() == CANCELLED_BY_SENDER
            assert nodes.senders[1].num_failed == 1
            await nodes.senders[2].close()
            assert await attempt.sent[2].result() == CANCELLED_BY_SENDER
            attempt.sendings[0].finish(IDS, TAIL)
            assert isinstance(await attempt.received[0].result(), Received)

    run(scenario())


def test_a_rank_without_channels_does_not_wait_forever(loopback):
    whole = ByteStore(LAYOUT.with_heads(1), 4, seed=4)

    async def scenario():
        async with nodes_of(loopback, whole, 2, 1, 4) as nodes:
            attempt = nodes.begin(IDS, ttl_s=0.05)
            sent, received = await attempt.results()
            assert [result.message for result in sent] == ["the transfer's time is over"] * 2
            assert [type(result) for result in received] == [TransferFailed]

    run(scenario())


# ---- timers ----


def test_channels_that_have_ended_leave_nothing_behind(loopback):
    """One is committed, then another is aborted, which cancels all: no timer may hold them any more."""
    whole = ByteStore(LAYOUT, 4, seed=5)

    async def scenario():
        async with nodes_of(loopback, whole, 4, 1, 4) as nodes:
            others = receiving_channels()
            attempt = nodes.begin(IDS)
            channels = [weakref.ref(channel) for channel in receiving_channels() - others]
            others.clear()
            attempt.sendings[0].finish(IDS, TAIL)
            assert isinstance(await attempt.sent[0].result(), Sent)
            attempt.sendings[1].cancel()
            assert isinstance(await attempt.received[0].result(), TransferFailed)
            gc.collect()
            assert [channel() for channel in channels] == [None] * 4

    run(scenario())


def receiving_channels():
    return {each for each in gc.get_objects() if isinstance(each, ReceivingChannel)}


# ---- the sender's blocks ----


class HoldingDialer:
    """A Dialer that delivers to nobody and holds every frame until it is told to let go."""

    def __init__(self, inner):
        self._inner, self.payload = inner, inner.payload
        self.held, self.messages = [], []

    def start(self, on_reply, on_lost):
        self._inner.start(on_reply, on_lost)
        self.on_lost = on_lost

    def connect(self, address):
        pass

    def send(self, address, header, frames=()):
        released = asyncio.get_running_loop().create_future()
        self.messages.append((address, decode(header)))
        if frames:
            self.held.append((address, released))
        else:
            released.set_result(None)
        return released

    def let_go(self, address):
        for at, released in self.held:
            if at == address and not released.done():
                released.set_result(None)

    async def close(self):
        await self._inner.close()


def test_when_one_channel_fails_the_others_end_at_once_and_blocks_are_given_back_last():
    """Not even the frames of a receiver that hangs delay the end of the other channels."""
    network, whole = LoopbackNetwork(), ByteStore(LAYOUT, 4, seed=1)

    async def scenario():
        dialer = HoldingDialer(network.dialer())
        sender, sent = KVSender(dialer, whole, deadline_s=20.0), Once()
        receivers = [
            KVReceiver(network.listener(f"decode-{rank}"), store, rank=rank, tp_size=2)
            for rank, store in enumerate(sliced(ByteStore(LAYOUT, 4), 2))
        ]
        addresses = [receiver.address for receiver in receivers]
        sizes = {"num_blocks": 4, "num_cached_blocks": 0, "ttl_s": 20.0}
        descriptor = TransferDescriptor.draw(
            epoch=1, layout=LAYOUT, prefill_tp=1, decode_tp=2, addresses=addresses, **sizes
        )
        sender.start(descriptor.encode(), sent).blocks_ready(IDS)
        await until(lambda: len(dialer.held) == 2)
        assert {type(message) for _, message in dialer.messages} == {Data}
        for _ in range(4):
            dialer.on_lost(addresses[0])
        aborted = [address for address, message in dialer.messages if isinstance(message, Abort)]
        assert sorted(aborted) == addresses
        for address in addresses:
            assert not sent.is_done
            dialer.let_go(address)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert (await sent.result()).message == "the receiver is gone"
        assert not any(isinstance(message, Finish) for _, message in dialer.messages)
        for end in (sender, *receivers):
            await end.close()

    run(scenario())
