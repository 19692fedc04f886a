"""The sending half of a transfer, without a network and without a clock."""

from dataclasses import replace

import pytest

from kv_transfer.results import Sent
from kv_transfer.sessions import sender_session as sending
from kv_transfer.sessions.sender_session import AllReady, BlocksReady, CaughtUp, PeerLost, Released, SendBlocks, Turn
from kv_transfer.wire import Committed, Missing, Refusal, Refused
from serving_core import reasons
from tests.unit.kv_transfer.session_kit import (
    CHANNEL,
    LATER_LAYERS,
    LAYOUT,
    NAMES,
    drain,
    failed,
    finish,
    make_sender,
    ranges,
)


def test_a_whole_request_at_once():
    session = make_sender()
    assert session.handle(AllReady(5, b"t"), 1.0) == []
    assert drain(session) == [SendBlocks(ranges((0, 0, 5), (1, 0, 5))), finish()]
    assert session.handle(Committed(*NAMES), 1.0) == [sending.Conclude(Sent(5 * LAYOUT.block_bytes))]
    assert session.wake_at is None


def test_blocks_leave_as_they_become_ready():
    session = make_sender()
    session.handle(BlocksReady(2, 2), 0.0)
    assert drain(session) == [SendBlocks(ranges((0, 0, 2), (1, 0, 2)))]
    session.handle(BlocksReady(2, 2), 0.0)
    assert drain(session) == []
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [SendBlocks(ranges((0, 2, 3), (1, 2, 3))), finish()]


def test_blocks_leave_layer_by_layer():
    session = make_sender()
    session.handle(BlocksReady(2, 1), 0.0)
    assert drain(session) == [SendBlocks(ranges((0, 0, 2)))]
    session.handle(BlocksReady(2, 2), 0.0)
    assert drain(session) == [SendBlocks(ranges((1, 0, 2)))]
    session.handle(BlocksReady(5, 1), 0.0)
    assert drain(session) == [SendBlocks(ranges((0, 2, 3)))]
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [SendBlocks(ranges((1, 2, 3))), finish()]


def test_layers_are_counted_over_the_whole_model():
    session = make_sender(LATER_LAYERS)
    session.handle(BlocksReady(2, 0), 0.0)
    assert drain(session) == []
    session.handle(BlocksReady(2, 1), 0.0)
    assert drain(session) == [SendBlocks(ranges((5, 0, 2)))]
    session.handle(BlocksReady(2, 2), 0.0)
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [SendBlocks(ranges((6, 0, 2), (5, 2, 3), (6, 2, 3))), finish()]
    assert session.handle(Missing(*NAMES, 0, 0, ranges((6, 0, 5))), 0.0) == []
    assert drain(session) == [SendBlocks(ranges((6, 0, 5))), finish(1)]


@pytest.mark.parametrize("layer", [0, 4, 7])
def test_a_receiver_cannot_miss_layers_that_are_not_the_channels(layer):
    session = make_sender(LATER_LAYERS)
    session.handle(AllReady(5, b"t"), 0.0)
    drain(session)
    message = "the receiver misses blocks that are not part of the transfer"
    assert session.handle(Missing(*NAMES, 0, 0, ranges((layer, 0, 1))), 0.0) == failed(message)


def test_finish_with_nothing_left_to_send_goes_out_at_once():
    session = make_sender()
    session.handle(BlocksReady(5, 2), 0.0)
    drain(session)
    assert session.handle(AllReady(5, b"t"), 0.0) == [finish()]


def test_it_has_caught_up_once_when_the_transport_has_let_go_of_all_that_was_ready():
    session = make_sender(blocks_per_message=1)
    assert session.handle(BlocksReady(1, 2), 0.0) == []
    for _ in range(2):
        assert CaughtUp() not in session.handle(Turn(), 0.0)
    assert session.handle(Released(), 0.0) == []
    session.handle(BlocksReady(2, 1), 0.0)
    assert session.handle(Released(), 0.0) == [], "more has become ready meanwhile"
    session.handle(Turn(), 0.0)
    assert session.handle(Released(), 0.0) == [CaughtUp()]
    session.handle(BlocksReady(2, 2), 0.0)
    assert CaughtUp() not in drain(session)
    assert [type(action) for action in session.handle(BlocksReady(2, 2), 0.0)] == []


@pytest.mark.parametrize(("num_cached", "num_ready"), [(0, 0), (3, 2), (3, 3)])
def test_with_nothing_to_send_it_has_caught_up_at_once(num_cached, num_ready):
    session = make_sender(replace(CHANNEL, num_cached_blocks=num_cached))
    assert session.handle(BlocksReady(num_ready, 2), 0.0) == [CaughtUp()]
    assert session.handle(BlocksReady(num_ready, 2), 0.0) == []


@pytest.mark.parametrize("end", [AllReady(5, b"t"), sending.Cancel()])
def test_what_is_finished_or_has_ended_need_not_catch_up(end):
    session = make_sender()
    session.handle(BlocksReady(5, 2), 0.0)
    session.handle(Turn(), 0.0)
    session.handle(end, 0.0)
    assert session.handle(Released(), 0.0) == []


def test_cached_blocks_stay_at_home():
    session = make_sender(replace(CHANNEL, num_cached_blocks=3))
    session.handle(BlocksReady(2, 2), 0.0)
    assert not session.wants_turn
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [SendBlocks(ranges((0, 3, 2), (1, 3, 2))), finish()]
    assert session.handle(Committed(*NAMES), 0.0) == [sending.Conclude(Sent(2 * LAYOUT.block_bytes))]


def test_messages_hold_whole_ranges_and_only_long_ones_are_cut_into_equal_parts():
    session = make_sender(blocks_per_message=3)
    session.handle(BlocksReady(1, 2), 0.0)
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [
        SendBlocks(ranges((0, 0, 1), (1, 0, 1))),
        SendBlocks(ranges((0, 1, 2))),
        SendBlocks(ranges((0, 3, 2))),
        SendBlocks(ranges((1, 1, 2))),
        SendBlocks(ranges((1, 3, 2))),
        finish(),
    ]


def test_the_window_closes_until_the_transport_lets_go():
    session = make_sender(blocks_per_message=1)
    session.handle(AllReady(5, b"t"), 0.0)
    for _ in range(sending.WINDOW):
        assert len(session.handle(Turn(), 0.0)) == 1
    assert not session.wants_turn
    assert session.handle(Turn(), 0.0) == []
    session.handle(Released(), 0.0)
    assert session.wants_turn


def awaiting(**kwargs):
    session = make_sender(**kwargs)
    session.handle(AllReady(5, b"t"), 0.0)
    drain(session)
    return session


def test_what_is_missing_is_sent_again_and_the_round_grows():
    session = awaiting()
    assert session.handle(Missing(*NAMES, 0, 1, ranges((1, 2, 2))), 0.0) == []
    assert drain(session) == [SendBlocks(ranges((1, 2, 2))), finish(1)]
    assert session.handle(Missing(*NAMES, 0, 1, ranges((1, 2, 2))), 0.0) == []
    assert not session.wants_turn, "an answer to the first Finish, told twice, was heeded twice"
    assert session.handle(Committed(*NAMES), 0.0) == [sending.Conclude(Sent(5 * LAYOUT.block_bytes))]


@pytest.mark.parametrize(("num_corrupt", "reason"), [(0, reasons.TRANSFER_FAILED), (3, reasons.KV_CHECKSUM_MISMATCH)])
def test_rounds_are_bounded(num_corrupt, reason):
    session = awaiting()
    for round_ in range(sending.MAX_ROUNDS):
        session.handle(Missing(*NAMES, round_, num_corrupt, ranges((0, 0, 1))), 0.0)
        drain(session)
    actions = session.handle(Missing(*NAMES, sending.MAX_ROUNDS, num_corrupt, ranges((0, 0, 1))), 0.0)
    assert actions == failed("blocks are still missing after 4 repeats", reason)


@pytest.mark.parametrize("odd", [(2, 0, 1), (0, 4, 2), (0, 0, 6)])
def test_a_receiver_cannot_miss_what_was_never_part(odd):
    actions = awaiting().handle(Missing(*NAMES, 0, 0, ranges(odd)), 0.0)
    assert actions == failed("the receiver misses blocks that are not part of the transfer")


def test_finish_is_repeated_ever_more_slowly_and_the_deadline_ends_it():
    session, times = awaiting(), []
    while session.wake_at is not None:
        now = session.wake_at
        assert session.handle(sending.Tick(), now - 1e-6) == [], "a clock that rings early must change nothing"
        assert session.wake_at == now
        actions = session.handle(sending.Tick(), now)
        times.append(now)
    assert times == [0.25, 0.75, 1.75, 3.75, 5.75, 7.75, 9.75, 10.0]
    assert actions == failed("the transfer's time is over")


def hang_ups(session, until):
    """When it hangs up, and is told that the connection is lost."""
    times = []
    while (now := session.wake_at) is not None and now < until:
        actions = session.handle(sending.Tick(), now)
        if sending.HangUp() in actions:
            assert actions == [sending.HangUp(), finish()]
            assert session.handle(PeerLost(), now) == [finish()]
            times.append(now)
    return times


def test_a_connection_is_made_anew_when_nothing_answers():
    """3 s after all has left, and not while the transport still holds some of it."""
    session = make_sender(deadline_s=100.0)
    session.handle(AllReady(5, b"t"), 0.0)
    session.handle(Turn(), 0.0)
    assert hang_ups(session, until=9.0) == []
    session.handle(Released(), 9.0)
    assert hang_ups(session, until=12.0) == []
    assert hang_ups(session, until=14.0) == [13.75]  # with the first Finish that is due then


def test_a_receiver_that_stays_silent_is_gone():
    session = make_sender(deadline_s=100.0)
    session.handle(AllReady(5, b"t"), 0.0)
    drain(session)
    assert hang_ups(session, until=15.0) == [3.75, 7.75, 11.75]
    assert session.handle(PeerLost(), 15.0) == failed("the receiver is gone")


def test_any_answer_ends_the_silence():
    session = make_sender(deadline_s=20.0)
    session.handle(AllReady(5, b"t"), 0.0)
    drain(session)
    while (now := session.wake_at) is not None:
        assert sending.HangUp() not in session.handle(sending.Tick(), now)
        session.handle(Missing(*NAMES, 200, 0, ranges((0, 0, 1))), now)  # late, to an earlier Finish


def test_before_finish_only_the_descriptor_limits_the_time():
    session = make_sender()
    assert session.wake_at == CHANNEL.ttl_s
    session.handle(AllReady(5, b""), 95.0)
    assert session.wake_at == CHANNEL.ttl_s
    assert session.handle(sending.Tick(), 100.0) == failed("the transfer's time is over")


def test_a_connection_may_break_a_few_times():
    session = awaiting()
    for _ in range(sending.MAX_LOSSES):
        assert session.handle(PeerLost(), 0.0) == [finish()]
    assert session.handle(PeerLost(), 0.0) == failed("the receiver is gone")


@pytest.mark.parametrize("prepare", [make_sender, awaiting])
@pytest.mark.parametrize(
    ("event", "message"),
    [
        (sending.Cancel(), "the sender's node cancelled the transfer"),
        (Refused(*NAMES, Refusal.EXPIRED), "the receiver refused the transfer: expired"),
    ],
)
def test_the_end_is_the_end(prepare, event, message):
    session = prepare()
    assert session.handle(event, 0.0) == failed(message)
    everything = [
        *(BlocksReady(5, 2), AllReady(5, b"t"), Turn(), Released(), PeerLost(), sending.Cancel(), sending.Tick()),
        *(Committed(*NAMES), Missing(*NAMES, 0, 0, ranges((0, 0, 1))), Refused(*NAMES, Refusal.EXPIRED)),
    ]
    assert [session.handle(event, 1e9) for event in everything] == [[]] * len(everything)
    assert not session.wants_turn


def test_more_blocks_than_granted_fail_the_transfer():
    assert make_sender().handle(BlocksReady(6, 2), 0.0) == failed("the request has 6 blocks and 5 were granted")
    assert make_sender().handle(AllReady(6, b""), 0.0) == failed("the request has 6 blocks and 5 were granted")


def test_fewer_blocks_than_are_sent_fail_the_transfer():
    session = make_sender()
    session.handle(BlocksReady(3, 2), 0.0)
    expected = failed("the request has 2 blocks, and 3 are sent or cached")
    assert session.handle(AllReady(2, b""), 0.0) == expected


def test_when_every_block_is_cached_only_finish_goes_out():
    session = make_sender(replace(CHANNEL, num_cached_blocks=5))
    session.handle(BlocksReady(5, 1), 0.0)
    session.handle(BlocksReady(5, 2), 0.0)
    assert not session.wants_turn
    assert session.handle(AllReady(5, b"t"), 0.0) == [finish()]
    assert session.handle(Committed(*NAMES), 0.0) == [sending.Conclude(Sent(0))]


def test_fewer_blocks_than_are_cached_fail_the_transfer():
    expected = failed("the request has 2 blocks, and 3 are sent or cached")
    assert make_sender(replace(CHANNEL, num_cached_blocks=3)).handle(AllReady(2, b"t"), 0.0) == expected


def test_answers_to_another_epoch_change_nothing():
    session = awaiting()
    stale = (CHANNEL.transfer_id, CHANNEL.epoch - 1)
    for answer in (Committed(*stale), Missing(*stale, 0, 0, ranges((0, 0, 1))), Refused(*stale, Refusal.WRONG_EPOCH)):
        assert session.handle(answer, 0.0) == []
    assert session.handle(Committed(*NAMES), 0.0) == [sending.Conclude(Sent(5 * LAYOUT.block_bytes))]
