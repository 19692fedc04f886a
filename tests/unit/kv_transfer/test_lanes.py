"""The lanes of a transfer end together: with success when all of them have, else with what failed first."""

import asyncio
from dataclasses import replace

import pytest

from kv_transfer.errors import TransferError
from kv_transfer.results import Received, Sent, TransferFailed, combined
from serving_core import reasons
from tests.unit.kv_transfer.lanes_kit import CANCELLED_BY_SENDER, IDS, LAYOUT, TAIL, nodes_of, sliced
from tests.unit.kv_transfer.transfer_kit import ByteStore, Fabric, Once, run, until

CANCELLED_BY_RECEIVER = TransferFailed(reasons.TRANSFER_FAILED, "the receiver's node cancelled the transfer")
ABORTED = TransferFailed(reasons.TRANSFER_ABORTED, "the sender gave the transfer up")


@pytest.fixture
def whole():
    return ByteStore(LAYOUT, 4, seed=1)


@pytest.fixture
def loopback(tmp_path):
    return Fabric("loopback", tmp_path)


async def check_still_works(nodes, whole):
    attempt = nodes.begin(IDS)
    attempt.finish(IDS)
    assert await attempt.results() == nodes.expected(len(IDS))
    assert nodes.bytes_of(IDS) == [store.bytes_of(IDS) for store in sliced(whole, len(nodes.targets))]


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


@pytest.mark.parametrize("rank", [0, 1])
def test_one_decode_rank_cancels(fabric, whole, rank):
    """Its lanes end on both sides; the senders end those that go elsewhere."""

    async def scenario():
        async with nodes_of(fabric, whole, 2, 2, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS[:2])
            await until(lambda: all(receiver.num_bytes for receiver in nodes.receivers))
            nodes.receivers[rank].cancel(attempt.ticket.epoch)
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


def test_a_lane_that_is_cancelled_takes_the_others_of_its_sender_along(fabric, whole):
    """One prefill rank, four decode ranks, of which one has had enough."""

    async def scenario():
        async with nodes_of(fabric, whole, 1, 4, 4) as nodes:
            attempt = nodes.begin(IDS)
            attempt.blocks_ready(IDS[:2])
            await until(lambda: all(receiver.num_bytes for receiver in nodes.receivers))
            nodes.receivers[2].cancel(attempt.ticket.epoch)
            (sent,), received = await attempt.results()
            assert sent.message == "the receiver refused the transfer: cancelled"
            assert received == [ABORTED, ABORTED, CANCELLED_BY_RECEIVER, ABORTED]
            assert nodes.senders[0].num_failed == 1
            frozen = nodes.bytes_of(IDS)
            attempt.finish(IDS)
            await asyncio.sleep(0.02)
            assert nodes.bytes_of(IDS) == frozen
            await check_still_works(nodes, whole)

    run(scenario())


def test_a_lane_that_is_aborted_takes_the_others_of_its_receiver_along(fabric, whole):
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
                receiver.cancel(attempt.ticket.epoch)
            await check_still_works(nodes, whole)

    run(scenario())


# ---- refused ----


def test_one_rank_was_not_granted_anything(fabric, whole):
    async def scenario():
        async with nodes_of(fabric, whole, 1, 2, 4) as nodes:
            ticket, sent, received = nodes.ticket(4), Once(), Once()
            nodes.receivers[0].expect(ticket, IDS, received)
            nodes.senders[0].start(ticket.encode(), sent).finish(IDS, TAIL)
            assert (await sent.result()).message == "the receiver refused the transfer: unknown_transfer"
            assert await received.result() in (ABORTED, Received(TAIL, 4 * LAYOUT.with_heads(2).block_bytes))
            assert not any(nodes.targets[1].bytes_of(IDS))
            await check_still_works(nodes, whole)

    run(scenario())


@pytest.mark.parametrize("epoch", [0, 2**32 - 1])
def test_another_epoch_is_refused_on_every_lane(fabric, whole, epoch):
    async def scenario():
        async with nodes_of(fabric, whole, 2, 1, 4) as nodes:
            ticket, sent, received = nodes.ticket(4), [Once(), Once()], Once()
            nodes.receivers[0].expect(ticket, IDS, received)
            stale = replace(ticket, epoch=epoch).encode()
            for sender, on_done in zip(nodes.senders, sent, strict=True):
                sender.start(stale, on_done).finish(IDS, TAIL)
            for on_done in sent:
                assert (await on_done.result()).message == "the receiver refused the transfer: wrong_epoch"
            assert not received.is_done
            assert not any(nodes.targets[0].bytes_of(IDS))
            for sender in nodes.senders:
                sender.start(ticket.encode(), Once()).finish(IDS, TAIL)
            assert await received.result() == nodes.expected(4)[1][0]

    run(scenario())


def test_tickets_for_other_sizes_are_refused(loopback, whole):
    async def scenario():
        async with nodes_of(loopback, whole, 2, 2, 4) as nodes:
            sender, receiver = nodes.senders[1], nodes.receivers[1]
            good = nodes.ticket(4)
            three_lanes = (*good.ends, replace(good.ends[0], transfer_id=b"?" * 16))
            with pytest.raises(TransferError, match="a prefill node of 1 ranks, not 2"):
                sender.start(replace(good, prefill_tp=1).encode(), Once())
            with pytest.raises(TransferError, match="a decode node of 1 ranks, not 2"):
                receiver.expect(replace(good, decode_tp=1), IDS, Once())
            other = replace(good, layout=LAYOUT.with_heads(3), ends=three_lanes[:2])
            assert other.lanes_to(0)[0][1].layout.num_kv_heads == 1
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
