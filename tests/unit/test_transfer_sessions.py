"""The two halves of a transfer, without a network and without a clock."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import KVLayout
from kv_transfer import receiver_session as receiving
from kv_transfer import sender_session as sending
from kv_transfer.receiver_session import Reply, Verified, Verify, Write
from kv_transfer.results import Received, Sent, TransferFailed
from kv_transfer.sender_session import AllReady, BlocksReady, PeerLost, Released, SendBlocks, SendMessage, Turn
from kv_transfer.ticket import Ticket
from kv_transfer.wire import Abort, BlockRange, Committed, Data, Finish, Missing, Refusal, Refused, Segment
from protos import reasons

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
TICKET = Ticket(bytes(range(16)), 7, "nowhere", LAYOUT, num_blocks=5, num_cached_blocks=0, ttl_s=100.0)
NAMES = (TICKET.transfer_id, TICKET.epoch)


# ---- the sender ----


def make_sender(ticket=TICKET, blocks_per_message=100, deadline_s=10.0):
    return sending.SenderSession(ticket, blocks_per_message, deadline_s, now=0.0)


def drain(session, now=0.0):
    """Everything the session sends while the transport lets go of each message at once."""
    actions = []
    while session.wants_turn:
        actions += session.handle(Turn(), now)
        session.handle(Released(), now)
    return actions


def ranges(*triples):
    return tuple(BlockRange(*triple) for triple in triples)


def finish(round_=0, num_blocks=5, tail=b"t"):
    return SendMessage(Finish(*NAMES, round_, num_blocks, tail))


def failed(message, reason=reasons.TRANSFER_FAILED):
    return [SendMessage(Abort(*NAMES)), sending.Conclude(TransferFailed(reason, message))]


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


def test_finish_with_nothing_left_to_send_goes_out_at_once():
    session = make_sender()
    session.handle(BlocksReady(5, 2), 0.0)
    drain(session)
    assert session.handle(AllReady(5, b"t"), 0.0) == [finish()]


def test_cached_blocks_stay_at_home():
    session = make_sender(replace(TICKET, num_cached_blocks=3))
    session.handle(BlocksReady(2, 2), 0.0)
    assert not session.wants_turn
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [SendBlocks(ranges((0, 3, 2), (1, 3, 2))), finish()]
    assert session.handle(Committed(*NAMES), 0.0) == [sending.Conclude(Sent(2 * LAYOUT.block_bytes))]


def test_messages_hold_whole_ranges_and_only_long_ones_are_cut():
    session = make_sender(blocks_per_message=3)
    session.handle(BlocksReady(1, 2), 0.0)
    session.handle(AllReady(5, b"t"), 0.0)
    assert drain(session) == [
        SendBlocks(ranges((0, 0, 1), (1, 0, 1))),
        SendBlocks(ranges((0, 1, 3))),
        SendBlocks(ranges((0, 4, 1))),
        SendBlocks(ranges((1, 1, 3))),
        SendBlocks(ranges((1, 4, 1))),
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


def test_before_finish_only_the_ticket_limits_the_time():
    session = make_sender()
    assert session.wake_at == TICKET.ttl_s
    session.handle(AllReady(5, b""), 95.0)
    assert session.wake_at == TICKET.ttl_s
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


# ---- the receiver ----


def make_receiver(ticket=TICKET):
    return receiving.ReceiverSession(ticket, now=0.0)


def data(*segments):
    """Data of (layer, first, number of blocks)."""
    return Data(*NAMES, tuple(Segment(layer, first, (0,) * count) for layer, first, count in segments))


def deliver(session, *segments, corrupt=()):
    """Feeds Data whose blocks are intact but for `corrupt`, given as (layer, index)."""
    (verify,) = session.handle(data(*segments), 0.0)
    assert isinstance(verify, Verify)
    intact = [
        bytes((segment.layer, index) not in corrupt for index in range(segment.first, segment.stop))
        for segment in verify.segments
    ]
    return session.handle(Verified(verify.segments, intact), 0.0)


COMMIT = [
    Reply(Committed(*NAMES)),
    receiving.Conclude(Received(b"t", 5 * LAYOUT.block_bytes)),
]


def missing(round_, num_corrupt, *triples):
    return [Reply(Missing(*NAMES, round_, num_corrupt, ranges(*triples)))]


def refused(refusal, epoch=TICKET.epoch):
    return [Reply(Refused(TICKET.transfer_id, epoch, refusal))]


def test_everything_and_then_finish_commits():
    session = make_receiver()
    assert deliver(session, (0, 0, 5)) == [Write(BlockRange(0, 0, 5), 0, range(5))]
    assert deliver(session, (1, 0, 5)) == [Write(BlockRange(1, 0, 5), 0, range(5))]
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == COMMIT


def test_finish_and_then_the_rest_commits():
    session = make_receiver()
    deliver(session, (0, 0, 5))
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == missing(0, 0, (1, 0, 5))
    assert deliver(session, (1, 0, 5)) == [Write(BlockRange(1, 0, 5), 0, range(5)), *COMMIT]


def test_a_corrupt_block_counts_as_not_arrived():
    session = make_receiver()
    writes = deliver(session, (0, 0, 5), (1, 0, 5), corrupt={(0, 2), (1, 0)})
    assert writes == [
        Write(BlockRange(0, 0, 2), 0, range(2)),
        Write(BlockRange(0, 3, 2), 0, range(3, 5)),
        Write(BlockRange(1, 1, 4), 1, range(1, 5)),
    ]
    assert session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0) == missing(0, 2, (0, 2, 1), (1, 0, 1))
    assert deliver(session, (0, 2, 1), corrupt={(0, 2)}) == []
    assert session.handle(Finish(*NAMES, 1, 5, b"t"), 0.0) == missing(1, 3, (0, 2, 1), (1, 0, 1))
    assert deliver(session, (1, 0, 1), (0, 2, 1))[-2:] == COMMIT


def test_a_block_is_written_once():
    session = make_receiver()
    deliver(session, (0, 1, 2))
    assert deliver(session, (0, 0, 5)) == [
        Write(BlockRange(0, 0, 1), 0, range(1)),
        Write(BlockRange(0, 3, 2), 0, range(3, 5)),
    ]
    assert deliver(session, (0, 0, 5)) == []


def test_cached_blocks_are_neither_awaited_nor_taken():
    session = make_receiver(replace(TICKET, num_cached_blocks=4))
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
    for message in (replace(data((0, 0, 5)), epoch=6), Finish(TICKET.transfer_id, 8, 0, 5, b"t")):
        assert session.handle(message, 0.0) == refused(Refusal.WRONG_EPOCH, message.epoch)
    assert session.handle(Abort(TICKET.transfer_id, 6), 0.0) == []
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
    deliver(session, (0, 0, 5), corrupt={(0, 0)})
    session.handle(Finish(*NAMES, 0, 5, b"t"), 0.0)
    *_, conclude = session.handle(Abort(*NAMES), 0.0)
    assert conclude.result.reason == reasons.KV_CHECKSUM_MISMATCH


def test_a_clock_that_rings_early_changes_nothing():
    session = make_receiver()
    assert session.handle(receiving.Tick(), 99.9) == []
    assert session.is_open


# ---- both, over a network that does what it likes ----


class World:
    """Two sessions, the messages between them, and the pool of the receiver as (layer, index) -> what was written."""

    def __init__(self, num_blocks, num_cached, blocks_per_message):
        self.ticket = replace(TICKET, num_blocks=num_blocks, num_cached_blocks=num_cached)
        self.sender = make_sender(self.ticket, blocks_per_message)
        self.receiver = make_receiver(self.ticket)
        self.now = 0.0
        self.num_held = 0  # messages that the transport has not let go of
        self.to_receiver = []  # (message, damaged blocks of it)
        self.to_sender = []
        self.pool = {}
        self.sent, self.received = [], []  # results

    def send(self, event):
        for action in self.sender.handle(event, self.now):
            match action:
                case SendBlocks(ranges=blocks):
                    segments = tuple(Segment(r.layer, r.first, (0,) * r.num_blocks) for r in blocks)
                    self.to_receiver.append((Data(*NAMES, segments), frozenset()))
                    self.num_held += 1
                case SendMessage(message=message):
                    self.to_receiver.append((message, frozenset()))
                case sending.Conclude(result=result):
                    self.sent.append(result)

    def receive(self, event, damaged=frozenset()):
        for action in self.receiver.handle(event, self.now):
            match action:
                case Verify(segments=segments):
                    intact = [[(s.layer, index) not in damaged for index in range(s.first, s.stop)] for s in segments]
                    self.receive(Verified(segments, intact), damaged)
                case Write(blocks=blocks):
                    assert self.receiver.is_open or self.received == []
                    for index in range(blocks.first, blocks.stop):
                        assert (blocks.layer, index) not in self.pool, "a block was written twice"
                        assert (blocks.layer, index) not in damaged, "a damaged block was written"
                        self.pool[blocks.layer, index] = True
                case Reply(message=message):
                    self.to_sender.append(message)
                case receiving.Conclude(result=result):
                    self.received.append(result)

    def check(self):
        assert len(self.sent) <= 1
        assert len(self.received) <= 1
        for result in self.received:
            if isinstance(result, Received):
                num_blocks = result.num_bytes // LAYOUT.block_bytes + self.ticket.num_cached_blocks
                expected = {(layer, i) for layer in (0, 1) for i in range(self.ticket.num_cached_blocks, num_blocks)}
                assert set(self.pool) == expected
                assert result.tail == b"t"
        for result in self.sent:
            if isinstance(result, Sent):
                assert [type(result) for result in self.received] == [Received]
                assert self.received[0].num_bytes == result.num_bytes

    def step(self, data):
        """One thing happens, whatever hypothesis likes."""
        choices = [self.tick, self.tick_early]
        choices += [self.turn] * self.sender.wants_turn + [self.release] * bool(self.num_held)
        if self.to_receiver:
            choices += [self.receive_one, self.receive_one, self.receive_twice]
            choices += [self.drop, self.damage, self.break_connection]
        if self.to_sender:
            choices += [self.reply, self.drop_reply]
        data.draw(st.sampled_from(choices))(data)

    def settle(self):
        """One useful thing happens, on a network that has become honest."""
        if self.to_receiver:
            self.receive(*self.to_receiver.pop(0))
        elif self.to_sender:
            self.send(self.to_sender.pop(0))
        elif self.sender.wants_turn:
            self.turn()
        elif self.num_held:
            self.release()
        else:
            self.tick()

    def receive_one(self, data):
        self.receive(*self.to_receiver.pop(self.any_of(self.to_receiver, data)))

    def receive_twice(self, data):
        self.receive(*self.to_receiver[self.any_of(self.to_receiver, data)])

    def drop(self, data):
        self.to_receiver.pop(self.any_of(self.to_receiver, data))

    def damage(self, data):
        number = self.any_of(self.to_receiver, data)
        message, _ = self.to_receiver[number]
        if isinstance(message, Data):
            blocks = [(s.layer, i) for s in message.segments for i in range(s.first, s.stop)]
            self.to_receiver[number] = (message, frozenset(data.draw(st.sets(st.sampled_from(blocks)))))

    def break_connection(self, data):
        self.to_receiver.clear()
        self.send(PeerLost())

    def reply(self, data):
        self.send(self.to_sender.pop(self.any_of(self.to_sender, data)))

    def drop_reply(self, data):
        self.to_sender.pop(self.any_of(self.to_sender, data))

    def turn(self, data=None):
        self.send(Turn())

    def release(self, data=None):
        self.num_held -= 1
        self.send(Released())

    def tick(self, data=None, early_s=0.0):
        wake_at = self.sender.wake_at or self.receiver.expires_at
        self.now = max(self.now, wake_at - early_s)
        self.send(sending.Tick())
        self.receive(receiving.Tick())

    def tick_early(self, data):
        self.tick(early_s=0.001)

    @staticmethod
    def any_of(items, data):
        return data.draw(st.integers(0, len(items) - 1))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_nothing_wrong_is_committed_and_both_sides_end(data):
    num_blocks = data.draw(st.integers(1, 6))
    world = World(num_blocks, data.draw(st.integers(0, num_blocks)), data.draw(st.integers(1, 5)))
    num_needed = data.draw(st.integers(world.ticket.num_cached_blocks or 1, num_blocks))
    growth = sorted(data.draw(st.lists(st.integers(0, num_needed), max_size=3)))
    plan = [BlocksReady(n, num_layers) for n in growth for num_layers in range(1, LAYOUT.num_layers + 1)]
    if data.draw(st.booleans()):
        plan.append(BlocksReady(num_needed, 1))
    plan.append(AllReady(num_needed, b"t"))
    if data.draw(st.integers(0, 9)) == 0:
        plan.insert(data.draw(st.integers(0, len(plan))), sending.Cancel())
    for event in plan:
        world.send(event)
        for _ in range(data.draw(st.integers(0, 8))):
            world.step(data)
            world.check()
    for _ in range(1000):
        if world.sent and world.received:
            break
        world.settle()
        world.check()
    assert len(world.sent) == len(world.received) == 1
