"""The receiving half of a transfer, without a network and without a clock."""

from dataclasses import replace

import pytest

from kv_transfer.results import Received, TransferFailed
from kv_transfer.sessions import receiver_session as receiving
from kv_transfer.sessions.receiver_session import Write
from kv_transfer.wire import Abort, BlockRange, Finish, Refusal
from serving_core import reasons
from tests.unit.kv_transfer.session_kit import (
    CHANNEL,
    COMMIT,
    LATER_LAYERS,
    LAYOUT,
    NAMES,
    data,
    deliver,
    make_receiver,
    missing,
    refused,
)


def test_everything_and_then_finish_commits():
    session = make_receiver()
    assert deliver(session, (0, 0, 5)) == [Write(BlockRange(0, 0, 5), 0, range(5))]
    assert deliver(session, (1, 0, 5)) == [Write(BlockRange(1, 0, 5), 0, range(5))]
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == COMMIT


def test_layers_are_counted_over_the_whole_model():
    session = make_receiver(LATER_LAYERS)
    assert deliver(session, (6, 0, 5)) == [Write(BlockRange(6, 0, 5), 0, range(5))]
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == missing(0, 0, (5, 0, 5))
    for layer in (0, 1, 4, 7):
        assert session.handle(data((layer, 0, 5)), 0.0) == refused(Refusal.MALFORMED)
    assert deliver(session, (5, 0, 5)) == [Write(BlockRange(5, 0, 5), 0, range(5)), *COMMIT]


def test_finish_and_then_the_rest_commits():
    session = make_receiver()
    deliver(session, (0, 0, 5))
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == missing(0, 0, (1, 0, 5))
    assert deliver(session, (1, 0, 5)) == [Write(BlockRange(1, 0, 5), 0, range(5)), *COMMIT]


@pytest.mark.parametrize("is_last", [False, True])
def test_what_could_not_be_written_is_never_committed(is_last):
    session = make_receiver()
    assert deliver(session, (0, 0, 5)) != []
    if is_last:
        session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0)
        assert deliver(session, (1, 0, 5))[-2:] == COMMIT
    reply, conclude = session.handle(receiving.WriteFailed(), 0.0)
    assert [reply] == refused(Refusal.CANCELLED)
    assert isinstance(conclude.result, TransferFailed)
    assert not session.is_open
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == refused(Refusal.CANCELLED)
    assert session.handle(receiving.WriteFailed(), 0.0) == []


def test_the_blocks_of_a_corrupt_segment_count_as_not_arrived():
    session = make_receiver()
    writes = deliver(session, (0, 0, 3), (1, 0, 2), (0, 3, 2), (1, 2, 3), corrupt={0, 3})
    assert writes == [Write(BlockRange(1, 0, 2), 1, range(2)), Write(BlockRange(0, 3, 2), 2, range(2))]
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == missing(0, 6, (0, 0, 3), (1, 2, 3))
    assert deliver(session, (0, 0, 3), corrupt={0}) == []
    assert session.handle(Finish(*NAMES, 1, 5, b"t"), 0.0) == missing(1, 9, (0, 0, 3), (1, 2, 3))
    assert deliver(session, (1, 2, 3), (0, 0, 3))[-2:] == COMMIT


def test_blocks_that_have_arrived_stay_so_when_a_segment_with_them_is_corrupt():
    session = make_receiver()
    deliver(session, (0, 1, 2))
    assert deliver(session, (0, 0, 5), corrupt={0}) == []
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == missing(0, 5, (0, 0, 1), (0, 3, 2), (1, 0, 5))


def test_a_block_is_written_once():
    session = make_receiver()
    deliver(session, (0, 1, 2))
    assert deliver(session, (0, 0, 5)) == [
        Write(BlockRange(0, 0, 1), 0, range(1)),
        Write(BlockRange(0, 3, 2), 0, range(3, 5)),
    ]
    assert deliver(session, (0, 0, 5)) == []


def test_cached_blocks_are_neither_awaited_nor_taken():
    session = make_receiver(replace(CHANNEL, num_cached_blocks=4))
    assert session.handle(data((0, 3, 2)), 0.0) == refused(Refusal.MALFORMED)
    deliver(session, (0, 4, 1), (1, 4, 1))
    *_, conclude = session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0)
    assert conclude.result == Received(b"t", LAYOUT.block_bytes)


def test_a_request_may_need_fewer_blocks_than_were_granted():
    session = make_receiver()
    deliver(session, (0, 0, 3), (1, 0, 3))
    *_, conclude = session.handle(Finish(*NAMES, 0, 3, b""), 0.0)
    assert conclude.result == Received(b"", 3 * LAYOUT.block_bytes)


@pytest.mark.parametrize("odd", [(2, 0, 1), (0, 5, 1), (0, 0, 6), (0, 4, 2)])
def test_data_outside_the_grant_is_refused(odd):
    session = make_receiver()
    assert session.handle(data((0, 0, 1), odd), 0.0) == refused(Refusal.MALFORMED)
    assert session.is_open


def test_a_finish_that_changes_its_mind_is_refused():
    session = make_receiver()
    assert session.handle(Finish(*NAMES, 0, 6, b"t"), 0.0) == refused(Refusal.MALFORMED)
    session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0)
    assert session.handle(Finish(*NAMES, 1, 4, b"t"), 0.0) == refused(Refusal.MALFORMED)
    assert session.handle(Finish(*NAMES, 1, 5, b"u"), 0.0) == refused(Refusal.MALFORMED)
    deliver(session, (0, 0, 5), (1, 0, 5))
    assert session.handle(Finish(*NAMES, 1, 5, b"u"), 0.0) == refused(Refusal.MALFORMED)


def test_another_epoch_is_refused_and_changes_nothing():
    session = make_receiver()
    for message in (replace(data((0, 0, 5)), epoch=6), Finish(CHANNEL.transfer_id, 8, 0, 5, b"t")):
        assert session.handle(message, 0.0) == refused(Refusal.WRONG_EPOCH, message.epoch)
    assert session.handle(Abort(CHANNEL.transfer_id, 6), 0.0) == []
    deliver(session, (0, 0, 5), (1, 0, 5))
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == COMMIT


def test_after_a_commit_every_question_has_the_same_answer():
    session = make_receiver()
    deliver(session, (0, 0, 5), (1, 0, 5))
    session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0)
    for message in (Finish(*NAMES, 0, 5, b"t"), Finish(*NAMES, 1, 5, b"t"), data((0, 0, 1))):
        assert session.handle(message, 0.0) == COMMIT[:1]
    for event in (Abort(*NAMES), receiving.Cancel(), receiving.Tick()):
        assert session.handle(event, 1e9) == []


@pytest.mark.parametrize(
    ("event", "now", "refusal", "reason", "message"),
    [
        (receiving.Cancel(), 0.0, Refusal.CANCELLED, "TRANSFER_FAILED", "the receiver's node cancelled the transfer"),
        (Abort(*NAMES), 0.0, Refusal.ABORTED, "TRANSFER_ABORTED", "the sender gave the transfer up"),
        (receiving.Tick(), 100.0, Refusal.EXPIRED, "TRANSFER_FAILED", "the blocks did not come within 100 s"),
    ],
)
def test_after_a_failure_nothing_is_taken(event, now, refusal, reason, message):
    session = make_receiver()
    deliver(session, (0, 0, 5))
    conclude = receiving.Conclude(TransferFailed(reason, message))
    assert session.handle(event, now) == [*refused(refusal), conclude]
    for late in (data((1, 0, 5)), Finish(*NAMES, 0, 5, b"t")):
        assert session.handle(late, now) == refused(refusal)
    for event in (Abort(*NAMES), receiving.Cancel(), receiving.Tick()):
        assert session.handle(event, 1e9) == []


def test_a_failure_over_damaged_blocks_says_so():
    session = make_receiver()
    deliver(session, (0, 0, 5), corrupt={0})
    session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0)
    *_, conclude = session.handle(Abort(*NAMES), 0.0)
    assert conclude.result.reason == reasons.KV_CHECKSUM_MISMATCH


def test_a_clock_that_rings_early_changes_nothing():
    session = make_receiver()
    assert session.handle(receiving.Tick(), 99.9) == []
    assert session.is_open


def test_when_every_block_is_cached_finish_commits():
    session = make_receiver(replace(CHANNEL, num_cached_blocks=5))
    assert session.handle(data((0, 4, 1)), 0.0) == refused(Refusal.MALFORMED)
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == [COMMIT[0], receiving.Conclude(Received(b"t", 0))]
