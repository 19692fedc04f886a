"""Run the receiver's side of one channel: events and the time in, actions out. No I/O, no clock.

    RECEIVING ──Finish, blocks lacking──> LACKING ──the last block verified──> COMMITTED
        └──────────────Finish, every block verified──────────────────────────────^
    Abort, Cancel, Tick past the time to live: RECEIVING and LACKING ──> FAILED
    WriteFailed, before the commit of the same actions is sent: any of the three ──> FAILED

A block is written at most once, when the checksum of its segment is correct, and never after the session has ended. An
ended session still replies: Committed to every message after a commit, Refused after a failure.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kv_transfer.descriptor import Channel
from kv_transfer.results import Received, TransferFailed
from kv_transfer.wire import (
    MAX_CORRUPT,
    MAX_RANGES,
    Abort,
    BlockRange,
    Committed,
    Data,
    Finish,
    Message,
    Missing,
    Refusal,
    Refused,
    Segment,
)
from serving_core import reasons


class State(Enum):
    """How far the receiver's side of a channel is."""

    RECEIVING = auto()  # Finish has not arrived
    LACKING = auto()  # Finish has arrived, some blocks have not
    COMMITTED = auto()
    FAILED = auto()


# ---- events: Data, Finish and Abort as received, and ----


@dataclass(frozen=True, slots=True)
class Verified:
    """Event: says of each segment of the last Verify whether its checksum is correct."""

    segments: Sequence[Segment]
    intact: Sequence[bool]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Event: a Write failed; the actions behind it in the same list are not executed."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Event: the caller cancels the transfer."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: the time `expires_at` is reached."""


Event = Data | Finish | Abort | Verified | WriteFailed | Cancel | Tick


# ---- actions ----


@dataclass(frozen=True, slots=True)
class Verify:
    """Action: check the blocks of the current Data message, and pass Verified to `handle` at once."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Action: write these blocks of the current message; `part` counts within segment number `segment`."""

    blocks: BlockRange
    segment: int
    part: range


@dataclass(frozen=True, slots=True)
class Reply:
    """Action: send this message to the sender."""

    message: Committed | Missing | Refused


@dataclass(frozen=True, slots=True)
class Conclude:
    """Action: report this result to the caller; the session has ended."""

    result: Received | TransferFailed


Action = Verify | Write | Reply | Conclude


class ReceiverSession:
    """The receiver's state of one channel of a transfer. `handle` is the only entry point."""

    def __init__(self, channel: Channel, now: float) -> None:
        self.state = State.RECEIVING
        self.expires_at = now + channel.ttl_s
        self.num_corrupt = 0
        self.channel = channel
        self._refusal = Refusal.MALFORMED  # sent in replies once FAILED
        self._finish: Finish | None = None
        self._verified = {layer: bytearray(channel.num_blocks) for layer in channel.layout.layers}

    @property
    def is_open(self) -> bool:
        return self.state in (State.RECEIVING, State.LACKING)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Change the state for an event at time `now`, and return the actions to execute, in order.

        An event without a transition in the current state changes nothing and returns no actions.
        """
        if isinstance(event, Message) and event.epoch != self.channel.epoch:
            refused = Refused(event.transfer_id, event.epoch, Refusal.WRONG_EPOCH)
            return [] if isinstance(event, Abort) else [Reply(refused)]
        transition = _TRANSITIONS.get((self.state, type(event)))
        return [] if transition is None else transition(self, event, now)

    # ---- transitions ----

    def _data(self, event: Data, now: float) -> list[Action]:
        channel = self.channel
        for segment in event.segments:
            is_layer = segment.layer in channel.layout.layers
            if not is_layer or segment.first < channel.num_cached_blocks or segment.stop > channel.num_blocks:
                return [self._refuse(Refusal.MALFORMED)]
        return [Verify(event.segments)]

    def _verified_some(self, event: Verified, now: float) -> list[Action]:
        actions: list[Action] = []
        for number, (segment, is_intact) in enumerate(zip(event.segments, event.intact, strict=True)):
            if not is_intact:
                self.num_corrupt += segment.num_blocks
                continue
            verified = self._verified[segment.layer]
            for blocks in list(_runs(verified, 0, segment.first, segment.stop)):
                verified[blocks.start : blocks.stop] = b"\x01" * len(blocks)
                part = range(blocks.start - segment.first, blocks.stop - segment.first)
                actions.append(Write(BlockRange(segment.layer, blocks.start, len(blocks)), number, part))
        return actions + self._commit_if_complete()

    def _finish_came(self, event: Finish, now: float) -> list[Action]:
        if not self._is_plausible(event):
            return [self._refuse(Refusal.MALFORMED)]
        self._finish = event
        self.state = State.LACKING
        return self._commit_if_complete() or [Reply(self._missing(event))]

    def _write_failed(self, event: WriteFailed, now: float) -> list[Action]:
        return self._fail(Refusal.CANCELLED, "the receiver's node could not write the blocks")

    def _cancel(self, event: Cancel, now: float) -> list[Action]:
        return self._fail(Refusal.CANCELLED, "the receiver's node cancelled the transfer")

    def _abort(self, event: Abort, now: float) -> list[Action]:
        return self._fail(Refusal.ABORTED, "the sender gave the transfer up")

    def _tick(self, event: Tick, now: float) -> list[Action]:
        if now < self.expires_at:
            return []
        return self._fail(Refusal.EXPIRED, f"the blocks did not come within {self.channel.ttl_s:g} s")

    def _committed_again(self, event: Data | Finish, now: float) -> list[Action]:
        if isinstance(event, Finish) and not self._is_plausible(event):
            return [self._refuse(Refusal.MALFORMED)]
        return [Reply(self._committed())]

    def _refused_again(self, event: Data | Finish, now: float) -> list[Action]:
        return [self._refuse(self._refusal)]

    # ---- helpers ----

    def _commit_if_complete(self) -> list[Action]:
        finish = self._finish
        if finish is None or any(self._lacking(finish)):
            return []
        self._end(State.COMMITTED)
        num_received = finish.num_blocks - self.channel.num_cached_blocks
        received = Received(finish.tail, num_received * self.channel.layout.block_bytes)
        return [Reply(self._committed()), Conclude(received)]

    def _fail(self, refusal: Refusal, message: str) -> list[Action]:
        reason = reasons.TRANSFER_ABORTED if refusal is Refusal.ABORTED else reasons.TRANSFER_FAILED
        if self.state is State.LACKING and self.num_corrupt > 0:
            reason = reasons.KV_CHECKSUM_MISMATCH
        self._end(State.FAILED)
        self._refusal = refusal
        return [self._refuse(refusal), Conclude(TransferFailed(reason, message))]

    def _end(self, state: State) -> None:
        self.state = state
        self._verified = {}

    def _is_plausible(self, finish: Finish) -> bool:
        known = self._finish
        if known is not None and (finish.num_blocks, finish.tail) != (known.num_blocks, known.tail):
            return False
        return self.channel.num_cached_blocks <= finish.num_blocks <= self.channel.num_blocks

    def _lacking(self, finish: Finish) -> Iterator[BlockRange]:
        for layer, verified in self._verified.items():
            for blocks in _runs(verified, 0, self.channel.num_cached_blocks, finish.num_blocks):
                yield BlockRange(layer, blocks.start, len(blocks))

    def _missing(self, finish: Finish) -> Missing:
        ranges = tuple(itertools.islice(self._lacking(finish), MAX_RANGES))
        return Missing(finish.transfer_id, finish.epoch, finish.round, min(self.num_corrupt, MAX_CORRUPT), ranges)

    def _committed(self) -> Committed:
        return Committed(self.channel.transfer_id, self.channel.epoch)

    def _refuse(self, refusal: Refusal) -> Reply:
        return Reply(Refused(self.channel.transfer_id, self.channel.epoch, refusal))


def _runs(flags: bytes | bytearray, value: int, start: int, stop: int) -> Iterator[range]:
    """Yield the maximal runs of `value` among flags[start:stop]; each flag is 0 or 1."""
    first = flags.find(value, start, stop)
    while first != -1:
        end = flags.find(1 - value, first, stop)
        end = stop if end == -1 else end
        yield range(first, end)
        first = flags.find(value, end, stop)


Transition = Callable[[ReceiverSession, Any, float], list[Action]]

_TRANSITIONS: dict[tuple[State, type], Transition] = {}
for _state in (State.RECEIVING, State.LACKING):
    _TRANSITIONS[_state, Data] = ReceiverSession._data
    _TRANSITIONS[_state, Verified] = ReceiverSession._verified_some
    _TRANSITIONS[_state, Finish] = ReceiverSession._finish_came
    _TRANSITIONS[_state, Abort] = ReceiverSession._abort
    _TRANSITIONS[_state, Cancel] = ReceiverSession._cancel
    _TRANSITIONS[_state, Tick] = ReceiverSession._tick
for _state in (State.RECEIVING, State.LACKING, State.COMMITTED):
    _TRANSITIONS[_state, WriteFailed] = ReceiverSession._write_failed
for _event in (Data, Finish):
    _TRANSITIONS[State.COMMITTED, _event] = ReceiverSession._committed_again
    _TRANSITIONS[State.FAILED, _event] = ReceiverSession._refused_again
