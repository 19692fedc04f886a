"""When a rank's part of a transfer is over: also for ranks with nothing to send, and for frames that are stuck."""

import asyncio
import gc
import weakref

import pytest

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.results import Received, Sent, TransferFailed
from kv_transfer.ticket import Ticket
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.wire import Abort, Data, Finish, decode
from tests.unit.kv_transfer.lanes_kit import CANCELLED_BY_SENDER, IDS, LAYOUT, TAIL, nodes_of, sliced
from tests.unit.kv_transfer.transfer_kit import ByteStore, Fabric, Once, run, until


@pytest.fixture
def loopback(tmp_path):
    return Fabric("loopback", tmp_path)


# ---- ranks with nothing to send ----


def test_a_rank_without_lanes_is_done_when_it_is_finished(loopback):
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


def test_a_rank_without_lanes_can_be_cancelled_and_closed(loopback):
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


def test_a_rank_without_lanes_does_not_wait_forever(loopback):
    whole = ByteStore(LAYOUT.with_heads(1), 4, seed=4)

    async def scenario():
        async with nodes_of(loopback, whole, 2, 1, 4) as nodes:
            attempt = nodes.begin(IDS, ttl_s=0.05)
            sent, received = await attempt.results()
            assert [result.message for result in sent] == ["the transfer's time is over"] * 2
            assert [type(result) for result in received] == [TransferFailed]

    run(scenario())


# ---- timers ----


def test_lanes_that_have_ended_leave_nothing_behind(loopback):
    """One is committed, then another is aborted, which cancels all: no timer may hold them any more."""
    whole = ByteStore(LAYOUT, 4, seed=5)

    async def scenario():
        async with nodes_of(loopback, whole, 4, 1, 4) as nodes:
            attempt = nodes.begin(IDS)
            lanes = [weakref.ref(lane) for lane in nodes.receivers[0]._lanes.values()]
            attempt.sendings[0].finish(IDS, TAIL)
            assert isinstance(await attempt.sent[0].result(), Sent)
            attempt.sendings[1].cancel()
            assert isinstance(await attempt.received[0].result(), TransferFailed)
            gc.collect()
            assert [lane() for lane in lanes] == [None] * 4

    run(scenario())


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


def test_when_one_lane_fails_the_others_end_at_once_and_blocks_are_given_back_last():
    """Not even the frames of a receiver that hangs delay the end of the other lanes."""
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
        ticket = Ticket.draw(epoch=1, layout=LAYOUT, prefill_tp=1, decode_tp=2, addresses=addresses, **sizes)
        sender.start(ticket.encode(), sent).blocks_ready(IDS)
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
