"""Both halves of a transfer over a network that does what it likes, without a clock."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.results import Received, Sent
from kv_transfer.sessions import receiver_session as receiving
from kv_transfer.sessions import sender_session as sending
from kv_transfer.sessions.receiver_session import Reply, Verified, Verify, Write
from kv_transfer.sessions.sender_session import (
    AllReady,
    BlocksReady,
    CaughtUp,
    HangUp,
    PeerLost,
    Released,
    SendBlocks,
    SendMessage,
    Turn,
)
from kv_transfer.wire import Data, Segment
from tests.unit.kv_transfer.session_kit import (
    CHANNEL,
    LAYOUT,
    NAMES,
    make_receiver,
    make_sender,
)


class World:
    """Two sessions, the messages between them, and the pool of the receiver as (layer, index) -> what was written."""

    def __init__(self, num_blocks, num_cached, blocks_per_message):
        self.channel = replace(CHANNEL, num_blocks=num_blocks, num_cached_blocks=num_cached)
        self.sender = make_sender(self.channel, blocks_per_message)
        self.receiver = make_receiver(self.channel)
        self.now = 0.0
        self.num_held = 0  # messages that the transport has not let go of
        self.to_receiver = []  # (message, damaged blocks of it)
        self.to_sender = []
        self.pool = {}
        self.sent, self.received = [], []  # results
        self.num_ready = 0  # blocks, in all layers
        self.left = set()  # (layer, index) that the transport was given
        self.num_caught_up = 0
        self.is_finished = False

    def send(self, event):
        if isinstance(event, BlocksReady) and event.num_layers == LAYOUT.num_layers:
            self.num_ready = event.num_blocks
        self.is_finished |= isinstance(event, AllReady)
        is_broken = False
        for action in self.sender.handle(event, self.now):
            match action:
                case SendBlocks(ranges=blocks):
                    assert all(r.first >= self.channel.num_cached_blocks for r in blocks), "a cached block was sent"
                    segments = tuple(Segment(r.layer, r.first, r.num_blocks, 0) for r in blocks)
                    self.to_receiver.append((Data(*NAMES, segments), frozenset()))
                    self.num_held += 1
                    self.left |= {(r.layer, index) for r in blocks for index in range(r.first, r.stop)}
                case CaughtUp():
                    self.num_caught_up += 1
                    assert self.num_caught_up == 1, "it has caught up twice"
                    assert not self.is_finished
                    assert not self.num_held
                    ready = range(self.channel.num_cached_blocks, self.num_ready)
                    assert self.left >= {(layer, index) for layer in (0, 1) for index in ready}
                case SendMessage(message=message):
                    self.to_receiver.append((message, frozenset()))
                case HangUp():
                    self.to_receiver.clear()
                    is_broken = True
                case sending.Conclude(result=result):
                    self.sent.append(result)
        if is_broken:
            self.send(PeerLost())

    def receive(self, event, damaged=frozenset()):
        for action in self.receiver.handle(event, self.now):
            match action:
                case Verify(segments=segments):
                    intact = [
                        damaged.isdisjoint((s.layer, index) for index in range(s.first, s.stop)) for s in segments
                    ]
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
                num_blocks = result.num_bytes // LAYOUT.block_bytes + self.channel.num_cached_blocks
                expected = {(layer, i) for layer in (0, 1) for i in range(self.channel.num_cached_blocks, num_blocks)}
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

    def let_leave(self):
        """The transport takes everything that is ready."""
        while self.sender.wants_turn or self.num_held:
            if self.sender.wants_turn:
                self.turn()
            else:
                self.release()

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


@given(st.data())
def test_whatever_happens_nothing_wrong_is_committed_and_both_sides_end(data):
    num_blocks = data.draw(st.integers(1, 6))
    world = World(num_blocks, data.draw(st.integers(0, num_blocks)), data.draw(st.integers(1, 5)))
    num_needed = data.draw(st.integers(world.channel.num_cached_blocks or 1, num_blocks))
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
        if isinstance(event, BlocksReady) and data.draw(st.booleans()):
            world.let_leave()
            assert world.num_caught_up or world.sent
    for _ in range(1000):
        if world.sent and world.received:
            break
        world.settle()
        world.check()
    assert len(world.sent) == len(world.received) == 1
