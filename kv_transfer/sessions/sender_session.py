"""Run the sender's side of one channel: events and the time in, actions out. No I/O, no clock.

    FILLING ──AllReady──> FLUSHING ──queue empty, Finish sent──> AWAITING ──Committed──> ENDED
                              ^                                     │
                              └──────────────Missing────────────────┘
    Cancel, Refused, Tick past the deadline, too many losses or rounds: any of the three ──> ENDED

Blocks are sent in messages, at most WINDOW of which the transport holds at a time. `Finish` asks for a reply and is
repeated at growing intervals until a reply comes. If none comes although every message has left, the connection may
be cut silently, and is made anew. The receiver reports lost or corrupted blocks as Missing.

While FILLING, the caller is told once that every ready block has left: CaughtUp. A migrating sequence decodes until
then, so that the rest for which it freezes is short.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kv_transfer.descriptor import Channel
from kv_transfer.results import Sent, TransferFailed
from kv_transfer.wire import MAX_SEGMENTS, Abort, BlockRange, Committed, Finish, Missing, Refusal, Refused
from serving_core import reasons


class Backlog:
    """The block ranges that are still to be sent, in the order in which they became ready."""

    def __init__(self, channel: Channel, blocks_per_message: int) -> None:
        self.num_ready = channel.num_cached_blocks  # leading blocks that are ready in all layers
        self._channel = channel
        self._blocks_per_message = blocks_per_message
        self._num_growing = 0  # blocks that are ready in some layers only; 0 if there are none
        self._num_layers = 0  # in which those blocks are ready
        self._queue: deque[BlockRange] = deque()

    def __bool__(self) -> bool:
        """Return whether any range is left."""
        return bool(self._queue)

    def grow(self, num_blocks: int, num_layers: int) -> None:
        """Add the leading num_blocks blocks, as ready in the leading num_layers layers, as far as they are new.

        New blocks become ready in all layers before any further block does.
        """
        channel = self._channel
        num_new = num_blocks - self.num_ready
        if num_new > 0:
            assert self._num_growing in (0, num_blocks), "blocks became ready before earlier ones in all layers"
            layers = channel.layout.layers[self._num_layers : num_layers]
            self._queue.extend(BlockRange(layer, self.num_ready, num_new) for layer in layers)
            self._num_growing, self._num_layers = num_blocks, max(self._num_layers, num_layers)
        if self._num_layers == channel.layout.num_layers:
            self.num_ready, self._num_growing, self._num_layers = num_blocks, 0, 0

    def has_had(self, blocks: BlockRange) -> bool:
        """Return whether these blocks were ever in the backlog: they are blocks of the transfer that became ready."""
        is_layer = blocks.layer in self._channel.layout.layers
        return is_layer and self._channel.num_cached_blocks <= blocks.first and blocks.stop <= self.num_ready

    def add_again(self, ranges: Iterable[BlockRange]) -> None:
        """Add ranges of blocks that were sent and did not arrive."""
        self._queue.extend(ranges)

    def take_message(self) -> tuple[BlockRange, ...]:
        """Remove and return the block ranges of the next message; the backlog must not be empty.

        Only a range that is too long for a message is cut, into parts of about equal length.
        """
        room = self._blocks_per_message
        first = self._queue[0]
        if first.num_blocks > room:
            num_parts = -(-first.num_blocks // room)
            part = -(-first.num_blocks // num_parts)
            self._queue[0] = BlockRange(first.layer, first.first + part, first.num_blocks - part)
            return (BlockRange(first.layer, first.first, part),)
        ranges: list[BlockRange] = []
        while self._queue and self._queue[0].num_blocks <= room and len(ranges) < MAX_SEGMENTS:
            ranges.append(self._queue.popleft())
            room -= ranges[-1].num_blocks
        return tuple(ranges)

    def clear(self) -> None:
        """Remove all ranges."""
        self._queue.clear()


WINDOW = 2  # messages that the transport holds: one in flight, one queued
MAX_ROUNDS = 4  # of retransmission
MAX_LOSSES = 3  # of the connection before the peer counts as gone
FIRST_REPEAT_S = 0.25
LAST_REPEAT_S = 2.0
SILENCE_S = 3.0  # without a reply while the transport holds nothing; then the connection counts as cut

CANCELLED = "the sender's node cancelled the transfer"
TIME_IS_OVER = "the transfer's time is over"


class State(Enum):
    """How far the sender's side of a channel is."""

    FILLING = auto()  # the prompt is still being computed
    FLUSHING = auto()  # every block is ready, some are not sent
    AWAITING = auto()  # every block and Finish are sent
    ENDED = auto()


# ---- events ----


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """Event: the leading `num_blocks` blocks are final in the leading `num_layers` layers of the channel.

    New blocks become ready in all layers before any further block does.
    """

    num_blocks: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class AllReady:
    """Event: the transfer has `num_blocks` blocks, and all of them are final."""

    num_blocks: int
    tail: bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """Event: the session may send one more message."""


@dataclass(frozen=True, slots=True)
class Released:
    """Event: the transport has released one Data message."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Event: the connection broke, and messages in flight may be lost."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Event: the caller cancels the transfer."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: the time `wake_at` is reached."""


Event = BlocksReady | AllReady | Turn | Released | PeerLost | Cancel | Tick | Committed | Missing | Refused


# ---- actions ----


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Action: send these blocks in one Data message, and pass Released to `handle` when the transport releases it."""

    ranges: tuple[BlockRange, ...]


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Action: send this message, which carries no blocks, to the receiver."""

    message: Finish | Abort


@dataclass(frozen=True, slots=True)
class HangUp:
    """Action: break the connection, and pass PeerLost to every session that uses it. The next message dials again."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Action: tell the caller, once, that every ready block has left the transport, or that there was none."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """Action: report this result to the caller; the session has ended."""

    result: Sent | TransferFailed


Action = SendBlocks | SendMessage | HangUp | CaughtUp | Conclude


class SenderSession:
    """The sender's state of one channel of a transfer. `handle` is the only entry point."""

    def __init__(self, channel: Channel, blocks_per_message: int, deadline_s: float, now: float) -> None:
        """Open a session at time `now`; `deadline_s` seconds run from AllReady.

        The descriptor's time to live limits the whole session.
        """
        self.state = State.FILLING
        self._channel = channel
        self._backlog = Backlog(channel, blocks_per_message)
        self._deadline_s = deadline_s
        self._give_up_at = now + channel.ttl_s
        self._repeat_at: float | None = None
        self._repeat_s = FIRST_REPEAT_S
        self._silent_since = now  # time of the last reply or sent message
        self._tail = b""
        self._num_held = 0  # messages that the transport holds
        self._has_caught_up = False
        self._round = 0
        self._num_losses = 0

    @property
    def wants_turn(self) -> bool:
        """Return whether a Turn would send a message: blocks are left, and the transport holds less than WINDOW."""
        return self.state is not State.ENDED and bool(self._backlog) and self._num_held < WINDOW

    @property
    def wake_at(self) -> float | None:
        """Return the time at which the next Tick is due; None if the session has ended."""
        if self.state is State.ENDED:
            return None
        return self._give_up_at if self._repeat_at is None else min(self._give_up_at, self._repeat_at)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Change the state for an event at time `now`, and return the actions to execute, in order.

        An event without a transition in the current state, or a reply to another epoch, changes nothing.
        """
        if isinstance(event, Committed | Missing | Refused) and event.epoch != self._channel.epoch:
            return []
        transition = _TRANSITIONS.get((self.state, type(event)))
        return [] if transition is None else transition(self, event, now)

    # ---- transitions ----

    def _blocks_ready(self, event: BlocksReady, now: float) -> list[Action]:
        return self._grow(event.num_blocks, event.num_layers) + self._caught_up()

    def _all_ready(self, event: AllReady, now: float) -> list[Action]:
        num_ready = self._backlog.num_ready
        if event.num_blocks < num_ready:
            return self._fail(f"the request has {event.num_blocks} blocks, and {num_ready} are sent or cached")
        actions = self._grow(event.num_blocks, self._channel.layout.num_layers)
        if self.state is State.ENDED:
            return actions
        self._tail = event.tail
        self._give_up_at = min(self._give_up_at, now + self._deadline_s)
        self.state = State.FLUSHING
        return self._finish_when_sent(now)

    def _turn(self, event: Turn, now: float) -> list[Action]:
        if not self.wants_turn:
            return []
        self._num_held += 1
        return [SendBlocks(self._backlog.take_message()), *self._finish_when_sent(now)]

    def _released(self, event: Released, now: float) -> list[Action]:
        self._num_held -= 1
        self._silent_since = now
        return self._caught_up()

    def _committed(self, event: Committed, now: float) -> list[Action]:
        self.state = State.ENDED
        num_sent = self._backlog.num_ready - self._channel.num_cached_blocks
        return [Conclude(Sent(num_sent * self._channel.layout.block_bytes))]

    def _missing(self, event: Missing, now: float) -> list[Action]:
        self._silent_since = now
        if event.round != self._round:
            return []  # replies to an earlier Finish; its ranges have been sent again since
        if self._round == MAX_ROUNDS:
            reason = reasons.KV_CHECKSUM_MISMATCH if event.num_corrupt else reasons.TRANSFER_FAILED
            return self._fail(f"blocks are still missing after {MAX_ROUNDS} repeats", reason)
        if not all(self._backlog.has_had(blocks) for blocks in event.ranges):
            return self._fail("the receiver misses blocks that are not part of the transfer")
        self._round += 1
        self._repeat_at = None
        self._backlog.add_again(event.ranges)
        self.state = State.FLUSHING
        return []

    def _refused(self, event: Refused, now: float) -> list[Action]:
        reason = reasons.TRANSFER_REVOKED if event.refusal is Refusal.CANCELLED else reasons.TRANSFER_FAILED
        return self._fail(f"the receiver refused the transfer: {event.refusal}", reason)

    def _peer_lost(self, event: PeerLost, now: float) -> list[Action]:
        self._num_losses += 1
        self._silent_since = now
        if self._num_losses > MAX_LOSSES:
            return self._fail("the receiver is gone")
        return self._send_finish(now) if self.state is State.AWAITING else []

    def _cancel(self, event: Cancel, now: float) -> list[Action]:
        return self._fail(CANCELLED)

    def _tick(self, event: Tick, now: float) -> list[Action]:
        if now >= self._give_up_at:
            return self._fail(TIME_IS_OVER)
        if self._repeat_at is not None and now >= self._repeat_at:
            self._repeat_s = min(2 * self._repeat_s, LAST_REPEAT_S)
            return [*self._hang_up_if_silent(now), *self._send_finish(now)]
        return []

    # ---- helpers ----

    def _grow(self, num_blocks: int, num_layers: int) -> list[Action]:
        if num_blocks > self._channel.num_blocks:
            return self._fail(f"the request has {num_blocks} blocks and {self._channel.num_blocks} were granted")
        self._backlog.grow(num_blocks, num_layers)
        return []

    def _caught_up(self) -> list[Action]:
        if self._has_caught_up or self.state is not State.FILLING or self._backlog or self._num_held:
            return []
        self._has_caught_up = True
        return [CaughtUp()]

    def _finish_when_sent(self, now: float) -> list[Action]:
        if self.state is not State.FLUSHING or self._backlog:
            return []
        self.state = State.AWAITING
        self._silent_since = now
        self._repeat_s = FIRST_REPEAT_S
        return self._send_finish(now)

    def _send_finish(self, now: float) -> list[Action]:
        self._repeat_at = now + self._repeat_s
        channel = self._channel
        return [
            SendMessage(Finish(channel.transfer_id, channel.epoch, self._round, self._backlog.num_ready, self._tail))
        ]

    def _hang_up_if_silent(self, now: float) -> list[Action]:
        if self._num_held or now - self._silent_since < SILENCE_S:
            return []
        self._silent_since = now
        return [HangUp()]

    def _fail(self, message: str, reason: str = reasons.TRANSFER_FAILED) -> list[Action]:
        self.state = State.ENDED
        self._backlog.clear()
        abort = Abort(self._channel.transfer_id, self._channel.epoch)
        return [SendMessage(abort), Conclude(TransferFailed(reason, message))]


Transition = Callable[[SenderSession, Any, float], list[Action]]

_TRANSITIONS: dict[tuple[State, type], Transition] = {
    (State.FILLING, BlocksReady): SenderSession._blocks_ready,
    (State.FILLING, AllReady): SenderSession._all_ready,
    (State.FILLING, Turn): SenderSession._turn,
    (State.FLUSHING, Turn): SenderSession._turn,
    (State.FLUSHING, Committed): SenderSession._committed,
    (State.AWAITING, Committed): SenderSession._committed,
    (State.AWAITING, Missing): SenderSession._missing,
}
for _state in (State.FILLING, State.FLUSHING, State.AWAITING):
    _TRANSITIONS[_state, Released] = SenderSession._released
    _TRANSITIONS[_state, Refused] = SenderSession._refused
    _TRANSITIONS[_state, PeerLost] = SenderSession._peer_lost
    _TRANSITIONS[_state, Cancel] = SenderSession._cancel
    _TRANSITIONS[_state, Tick] = SenderSession._tick
