"""One lane at its receiving end: the session, and the I/O that it asks for."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

from kv_transfer.ends.alarm import Alarm
from kv_transfer.payload import Buffer, Payload
from kv_transfer.results import Received, TransferFailed
from kv_transfer.sessions.receiver_session import (
    Cancel,
    Conclude,
    Event,
    ReceiverSession,
    Reply,
    Tick,
    Verified,
    Verify,
    Write,
    WriteFailed,
)
from kv_transfer.store import KVStore
from kv_transfer.ticket import Lane
from kv_transfer.wire import Abort, BlockRange, Committed, Data, Finish, Missing, Refused, Segment
from serving_core.failpoints import reach

logger = logging.getLogger(__name__)

MAX_ENDED = 4096
REMEMBER_S = 300.0


class LaneOwner(Protocol):
    """The transfer that a lane is part of."""

    def reply(self, peer: Hashable, message: Committed | Missing | Refused) -> None:
        """Sends a message to the peer, which is None when nobody has sent anything yet."""

    def lane_wrote(self, num_bytes: int) -> None:
        """So many bytes of blocks are verified and in place."""

    def lane_found_corrupt(self, num_blocks: int) -> None:
        """So many blocks came in segments that failed their checksum."""

    def lane_ended(self, lane: "ReceivingLane", result: Received | TransferFailed) -> None:
        """Called once, at once. Nothing is written any more."""


class ReceivingLane:
    """Blocks of one store, which holds the lane's heads alone and its layers at least, that may be written until the
    session ends."""

    def __init__(
        self, lane: Lane, payload: Payload, store: KVStore, block_ids: Sequence[int], owner: LaneOwner
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.session = ReceiverSession(lane, self._loop.time())
        self._payload = payload
        self._store = store
        self._block_ids = block_ids
        self._owner = owner
        self._peer: Hashable = None  # that sent something last
        self._alarm = Alarm(lambda: self._handle(Tick()))
        self._alarm.set(self.session.expires_at)

    def take(self, peer: Hashable, message: Data | Finish | Abort, frames: Sequence[Buffer]) -> None:
        """A message of this lane's, and the frames behind it."""
        reach("arrived")
        self._peer = peer
        self._handle(message, frames)

    def cancel(self) -> None:
        """Ends the lane, unless it has ended."""
        if self.session.is_open:
            self._handle(Cancel())

    def _handle(self, event: Event, buffers: Sequence[Buffer] = ()) -> None:
        """Feeds the session. The buffers are the frames behind Data, and behind Verified K and V of each segment."""
        self._alarm.set(self.session.expires_at)  # again, for it may have rung a little early
        for action in self.session.handle(event, self._loop.time()):
            match action:
                case Reply(message=Committed() as message):
                    reach("commit")
                    self._owner.reply(self._peer, message)
                case Reply(message=message):
                    self._owner.reply(self._peer, message)
                case Verify(segments=segments):
                    self._verify(segments, buffers)
                case Write(blocks=blocks, segment=segment, part=part):
                    if not self._is_written(blocks, part, *buffers[2 * segment : 2 * segment + 2]):
                        self._handle(WriteFailed())
                        return
                case Conclude(result=result):
                    self._alarm.set(None)
                    self._owner.lane_ended(self, result)

    def _verify(self, segments: Sequence[Segment], frames: Sequence[Buffer]) -> None:
        layout, payload = self.session.lane.layout, self._payload
        sizes = [segment.num_blocks * size for segment in segments for size in layout.plane_bytes(segment.layer)]
        pieces = payload.cut(frames, sizes)
        if pieces is None:  # truncated, or padded: no byte can be trusted to be where it should
            intact = [False] * len(segments)
        else:
            found = payload.checksums(pieces)
            intact = [checksum == segment.checksum for segment, checksum in zip(segments, found, strict=True)]
        num_corrupt = sum(
            segment.num_blocks for segment, is_intact in zip(segments, intact, strict=True) if not is_intact
        )
        self._owner.lane_found_corrupt(num_corrupt)
        self._handle(Verified(segments, intact), pieces or ())

    def _is_written(self, blocks: BlockRange, part: range, keys: Buffer, values: Buffer) -> bool:
        key_bytes, value_bytes = self.session.lane.layout.plane_bytes(blocks.layer)
        keys = keys[part.start * key_bytes : part.stop * key_bytes]
        values = values[part.start * value_bytes : part.stop * value_bytes]
        try:
            self._store.write(blocks.layer, self._block_ids[blocks.first : blocks.stop], keys, values)
        except Exception:  # for want of memory, of the host or the device
            logger.exception("blocks of a transfer could not be written")
            return False
        self._owner.lane_wrote(len(keys) + len(values))
        return True


class EndedLanes:
    """Sessions that have ended, which still answer: the last MAX_ENDED, for REMEMBER_S each."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, tuple[float, ReceiverSession]] = OrderedDict()  # oldest first

    def add(self, session: ReceiverSession, now: float) -> None:
        """Remembers a session until now + REMEMBER_S."""
        self._sessions[session.lane.transfer_id] = (now + REMEMBER_S, session)
        if len(self._sessions) > MAX_ENDED:
            self._sessions.popitem(last=False)

    def get(self, transfer_id: bytes, now: float) -> ReceiverSession | None:
        """None when it is forgotten or never was."""
        while self._sessions and next(iter(self._sessions.values()))[0] <= now:
            self._sessions.popitem(last=False)
        _, session = self._sessions.get(transfer_id, (now, None))
        return session
