"""One lane at its sending end: the session, and the I/O that it asks for."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.ends.alarm import Alarm
from kv_transfer.payload import Buffer, blocks_per_message
from kv_transfer.results import Sent, TransferFailed
from kv_transfer.sessions.sender_session import (
    CANCELLED,
    TIME_IS_OVER,
    AllReady,
    BlocksReady,
    Cancel,
    CaughtUp,
    Conclude,
    Event,
    HangUp,
    Released,
    SendBlocks,
    SenderSession,
    SendMessage,
    Tick,
    Turn,
)
from kv_transfer.store import KVStore
from kv_transfer.ticket import Lane
from kv_transfer.transports.transport import Dialer
from kv_transfer.wire import BlockRange, Data, Segment, encode
from serving_core import reasons
from serving_core.failpoints import reach

logger = logging.getLogger(__name__)


class LaneOwner(Protocol):
    """The transfer that a lane is part of."""

    def lane_sent(self, num_bytes: int) -> None:
        """A message with so many bytes of blocks has left."""

    def lane_caught_up(self) -> None:
        """Called once at most, when everything that was ready has left."""

    def lane_ended(self, result: Sent | TransferFailed) -> None:
        """Called once, at once."""

    def lane_released(self) -> None:
        """The lane `is_over`: it has ended, and the transport has let go of its blocks."""


class SendingLane:
    """Sends the blocks of one store, which holds the lane's heads alone and its layers at least."""

    def __init__(self, lane: Lane, transport: Dialer, store: KVStore, deadline_s: float, owner: LaneOwner) -> None:
        self.address = lane.address
        self._lane = lane
        self._transport = transport
        self._store = store
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._session = SenderSession(lane, blocks_per_message(lane.layout), deadline_s, self._loop.time())
        self._block_ids: Sequence[int] = ()
        self._held: set[asyncio.Future[None]] = set()  # messages whose frames the transport may still read
        self._turn: asyncio.Handle | None = None
        self._alarm = Alarm(lambda: self.handle(Tick()))
        self._has_ended = False
        self._schedule()

    @property
    def is_over(self) -> bool:
        """Whether it has ended and the transport reads none of its blocks any more."""
        return self._has_ended and not self._held

    def blocks_ready(self, block_ids: Sequence[int], layers: range) -> None:
        """As SendingTransfer.blocks_ready: the blocks are final in these layers. The ids stay as they are."""
        self._block_ids = block_ids
        ours = self._lane.layout.layers
        self.handle(BlocksReady(len(block_ids), len(range(ours.start, min(ours.stop, layers.stop)))))

    def finish(self, block_ids: Sequence[int], tail: bytes) -> None:
        """As SendingTransfer.finish. The ids stay as they are."""
        self._block_ids = block_ids
        self.handle(AllReady(len(block_ids), tail))

    def cancel(self) -> None:
        """Ends the lane, unless it has ended."""
        self.handle(Cancel())

    def handle(self, event: Event) -> None:
        """Feeds the session."""
        for action in self._session.handle(event, self._loop.time()):
            match action:
                case SendBlocks(ranges=ranges):
                    if not self._are_sent(ranges):
                        self.cancel()
                        return
                case SendMessage(message=message):
                    self._transport.send(self.address, encode(message))
                case HangUp():
                    self._transport.hang_up(self.address)
                case CaughtUp():
                    self._owner.lane_caught_up()
                case Conclude(result=result):
                    self._has_ended = True
                    self._owner.lane_ended(result)
        self._schedule()

    def _are_sent(self, ranges: tuple[BlockRange, ...]) -> bool:
        try:
            segments, views = self._read(ranges)
            frames = self._transport.payload.gather(views)
        except Exception:  # for want of memory, of the host or the device
            logger.exception("blocks of a transfer could not be read")
            return False
        self._owner.lane_sent(sum(map(len, views)))
        header = encode(Data(self._lane.transfer_id, self._lane.epoch, tuple(segments)))
        held = self._transport.send(self.address, header, frames)
        self._held.add(held)
        held.add_done_callback(self._release)
        reach("sent")
        return True

    def _read(self, ranges: tuple[BlockRange, ...]) -> tuple[list[Segment], list[Buffer]]:
        views: list[Buffer] = []
        for blocks in ranges:
            views += self._store.read(blocks.layer, self._block_ids[blocks.first : blocks.stop])
        checksums = self._transport.payload.checksums(views)
        segments = [
            Segment(blocks.layer, blocks.first, blocks.num_blocks, checksum)
            for blocks, checksum in zip(ranges, checksums, strict=True)
        ]
        return segments, views

    def _release(self, held: asyncio.Future[None]) -> None:
        self._held.discard(held)
        self.handle(Released())
        if self.is_over:
            self._owner.lane_released()

    def _take_turn(self) -> None:
        self._turn = None
        self.handle(Turn())

    def _schedule(self) -> None:
        """Sees to what comes next: a turn, a tick."""
        if self._turn is None and self._session.wants_turn:
            self._turn = self._loop.call_soon(self._take_turn)
        self._alarm.set(self._session.wake_at)


class NoLane:
    """In place of the lanes of a rank that has nothing to send, since others hold the same heads. It ends as they
    would: with success once the request is finished, or when it is cancelled or its time is over."""

    def __init__(self, ttl_s: float, owner: LaneOwner) -> None:
        self.is_over = False
        self._has_begun = False
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._expires_at = self._loop.time() + ttl_s
        self._alarm = Alarm(self._tick)
        self._alarm.set(self._expires_at)

    def blocks_ready(self, block_ids: Sequence[int], layers: range) -> None:
        """Nobody waits for them."""
        if not self._has_begun:
            self._has_begun = True
            self._owner.lane_caught_up()

    def finish(self, block_ids: Sequence[int], tail: bytes) -> None:
        self._end(Sent(0))

    def cancel(self) -> None:
        self._end(TransferFailed(reasons.TRANSFER_FAILED, CANCELLED))

    def _tick(self) -> None:
        if self._loop.time() < self._expires_at:
            self._alarm.set(self._expires_at)  # again, for it rang a little early
        else:
            self._end(TransferFailed(reasons.TRANSFER_FAILED, TIME_IS_OVER))

    def _end(self, result: Sent | TransferFailed) -> None:
        if not self.is_over:
            self.is_over = True
            self._alarm.set(None)
            self._owner.lane_ended(result)
