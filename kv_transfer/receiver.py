"""What a node receives KV blocks with."""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import eq

from kv_transfer.alarm import Alarm
from kv_transfer.errors import TransferError
from kv_transfer.payload import blocks_per_message, checksums, cut, some_blocks
from kv_transfer.receiver_session import (
    Cancel,
    Conclude,
    Event,
    ReceiverSession,
    Reply,
    Tick,
    Verified,
    Verify,
    Write,
)
from kv_transfer.results import Received, TransferFailed
from kv_transfer.store import KVStore
from kv_transfer.ticket import TRANSFER_ID_BYTES, Ticket
from kv_transfer.transports.transport import Listener
from kv_transfer.wire import Abort, Committed, Data, Finish, Missing, Refusal, Refused, Segment, decode, encode

__all__ = ["KVReceiver", "Received", "TransferFailed"]

logger = logging.getLogger(__name__)

MAX_OPEN = 1024
MAX_ENDED = 4096
REMEMBER_S = 300.0

OnReceived = Callable[[Received | TransferFailed], None]


class KVReceiver:
    """Receives blocks into one store, where it has granted them. Belongs to the event loop it was made on."""

    def __init__(self, transport: Listener, store: KVStore) -> None:
        """Raises TransferError when a block of the store is too large to be sent."""
        blocks_per_message(store.layout)
        self.num_bytes = 0  # of blocks, verified and written
        self.num_messages = 0
        self.num_corrupt_blocks = 0
        self.num_failed = 0  # transfers
        self.num_refused = 0  # refusals sent
        self.num_malformed = 0  # messages that cannot be read
        self._transport = transport
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._open: dict[bytes, _Grant] = {}
        self._ended = _Ended()
        self._is_closed = False
        transport.start(self._take)

    @property
    def num_open(self) -> int:
        """Transfers that may still write."""
        return len(self._open)

    def expect(self, block_ids: Sequence[int], epoch: int, ttl_s: float, on_done: OnReceived) -> Ticket:
        """Grants these blocks to one transfer. Nothing is written to them any more once on_done is called, which
        happens once, from the loop. Raises TransferError when no further transfer may be open."""
        if self._is_closed or len(self._open) >= MAX_OPEN:
            raise TransferError(f"no further transfer can be granted: {len(self._open)} of {MAX_OPEN} are open")
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        layout, address = self._store.layout, self._transport.address
        ticket = Ticket(transfer_id, epoch, address, layout, len(block_ids), 0, float(ttl_s))
        session = ReceiverSession(ticket, self._loop.time())
        grant = _Grant(list(block_ids), on_done, session, Alarm(lambda: self._handle(grant, Tick())))
        grant.alarm.set(session.expires_at)
        self._open[transfer_id] = grant
        return ticket

    def cancel(self, transfer_id: bytes) -> None:
        """Ends a transfer, unless it has ended."""
        if grant := self._open.get(transfer_id):
            self._handle(grant, Cancel())

    async def close(self) -> None:
        """Cancels what is open, and returns when every on_done has been called."""
        self._is_closed = True
        for transfer_id in list(self._open):
            self.cancel(transfer_id)
        await asyncio.sleep(0)  # the turn of the loop in which on_done is called
        await self._transport.close()

    def _take(self, peer: Hashable, header: memoryview, frames: list[memoryview]) -> None:
        self.num_messages += 1
        try:
            message = decode(header)
        except TransferError as error:
            self._drop(str(error))
            return
        if not isinstance(message, Data | Finish | Abort):
            self._drop("a message that only receivers send")
        elif grant := self._open.get(message.transfer_id):
            grant.peer = peer
            self._handle(grant, message, frames)
        else:
            self._answer_late(peer, message)

    def _drop(self, why: str) -> None:
        """Without an answer: there is nobody to name in it."""
        self.num_malformed += 1
        logger.warning("a message to the receiver was dropped: %s", why)

    def _handle(self, grant: "_Grant", event: Event, buffers: Sequence[memoryview] = ()) -> None:
        """Feeds the session. The buffers are the frames behind Data, and behind Verified one piece for each segment."""
        grant.alarm.set(grant.session.expires_at)  # again, for it may have rung a little early
        for action in grant.session.handle(event, self._loop.time()):
            match action:
                case Reply(message=message):
                    self._reply(grant.peer, message)
                case Verify(segments=segments):
                    self._verify(grant, segments, buffers)
                case Write(blocks=blocks, segment=segment, part=part):
                    planes = some_blocks(buffers[segment], part, self._store.layout.plane_bytes)
                    self._store.write(blocks.layer, grant.block_ids[blocks.first : blocks.stop], planes)
                    self.num_bytes += len(planes)
                case Conclude(result=result):
                    self._conclude(grant, result)

    def _verify(self, grant: "_Grant", segments: Sequence[Segment], frames: Sequence[memoryview]) -> None:
        plane_bytes = self._store.layout.plane_bytes
        pieces = cut(frames, [2 * plane_bytes * len(segment.checksums) for segment in segments])
        if pieces is None:  # truncated, or padded: no byte can be trusted to be where it should
            intact = [bytes(len(segment.checksums)) for segment in segments]
        else:
            intact = [
                bytes(map(eq, segment.checksums, checksums([piece], plane_bytes)))
                for segment, piece in zip(segments, pieces, strict=True)
            ]
        self.num_corrupt_blocks += sum(blocks.count(0) for blocks in intact)
        self._handle(grant, Verified(segments, intact), pieces or ())

    def _conclude(self, grant: "_Grant", result: Received | TransferFailed) -> None:
        transfer_id = grant.session.ticket.transfer_id
        del self._open[transfer_id]
        self._ended.add(transfer_id, grant.session, self._loop.time())
        grant.alarm.set(None)
        if isinstance(result, TransferFailed):
            self.num_failed += 1
        self._loop.call_soon(grant.on_done, result)

    def _answer_late(self, peer: Hashable, message: Data | Finish | Abort) -> None:
        """To a transfer that has ended, or never was: nothing is written, and everyone is told."""
        session = self._ended.get(message.transfer_id, self._loop.time())
        if session is not None:
            for action in session.handle(message, self._loop.time()):
                assert isinstance(action, Reply), "an ended session wants more than to answer"
                self._reply(peer, action.message)
        elif not isinstance(message, Abort):
            self._reply(peer, Refused(message.transfer_id, message.epoch, Refusal.UNKNOWN_TRANSFER))

    def _reply(self, peer: Hashable | None, message: Committed | Missing | Refused) -> None:
        if isinstance(message, Refused):
            self.num_refused += 1
        if peer is not None:
            self._transport.reply(peer, encode(message))


@dataclass(slots=True, eq=False)
class _Grant:
    """Blocks that one transfer may write until its session ends."""

    block_ids: list[int]
    on_done: OnReceived
    session: ReceiverSession
    alarm: Alarm
    peer: Hashable | None = None  # that sent something last


class _Ended:
    """Sessions that have ended, which still answer: the last MAX_ENDED, for REMEMBER_S each."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, tuple[float, ReceiverSession]] = OrderedDict()  # oldest first

    def add(self, transfer_id: bytes, session: ReceiverSession, now: float) -> None:
        self._sessions[transfer_id] = (now + REMEMBER_S, session)
        if len(self._sessions) > MAX_ENDED:
            self._sessions.popitem(last=False)

    def get(self, transfer_id: bytes, now: float) -> ReceiverSession | None:
        while self._sessions and next(iter(self._sessions.values()))[0] <= now:
            self._sessions.popitem(last=False)
        _, session = self._sessions.get(transfer_id, (now, None))
        return session
