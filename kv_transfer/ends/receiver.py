"""What a rank receives KV blocks with."""

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence

from kv_transfer.ends.receiving import EndedLanes, ReceivingLane
from kv_transfer.errors import TransferError
from kv_transfer.payload import Buffer, blocks_per_message
from kv_transfer.plan import Grid
from kv_transfer.results import Received, TransferFailed, combined
from kv_transfer.sessions.receiver_session import Reply
from kv_transfer.store import KVStore
from kv_transfer.ticket import Ticket
from kv_transfer.transports.transport import Listener
from kv_transfer.wire import Abort, Committed, Data, Finish, Missing, Refusal, Refused, decode, encode
from serving_core import reasons
from serving_core.histograms import Histogram
from serving_core.sharding import rank_layout

__all__ = ["KVReceiver", "Received", "TransferFailed"]

logger = logging.getLogger(__name__)

MAX_OPEN = 1024

OnReceived = Callable[[Received | TransferFailed], None]
OnComing = Callable[[], None]


class KVReceiver:
    """Receives blocks into one rank's store, where it has granted them. Belongs to the event loop it was made on."""

    def __init__(
        self, transport: Listener, store: KVStore, *, rank: int = 0, tp_size: int = 1, pp_size: int = 1
    ) -> None:
        """Raises TransferError when a block of the store is too large to be sent."""
        blocks_per_message(store.layout)
        self.num_bytes = 0  # of blocks, verified and written
        self.num_messages = 0
        self.num_corrupt_blocks = 0  # in segments that failed their checksum
        self.num_failed = 0  # transfers
        self.seconds = Histogram()  # of those that did not fail, each from its first message to its commit
        self.num_refused = 0  # refusals sent
        self.num_malformed = 0  # messages that cannot be read
        self.transport = transport
        self.store = store
        self.rank = rank
        self.node = Grid(tp_size, pp_size)
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Transfer] = {}  # by epoch
        self._lanes: dict[bytes, ReceivingLane] = {}  # of them, by transfer id
        self._ended = EndedLanes()
        self._is_closed = False
        transport.start(self._take)

    @property
    def address(self) -> str:
        """Where this rank's lanes end, for a ticket."""
        return self.transport.address

    @property
    def num_open(self) -> int:
        """Transfers that may still write."""
        return len(self._open)

    @property
    def num_lanes(self) -> int:
        """Return the number of lanes that are open: 0 where no transfer is."""
        return len(self._lanes)

    def expect(
        self, ticket: Ticket, block_ids: Sequence[int], on_done: OnReceived, on_coming: OnComing | None = None
    ) -> None:
        """Grants these blocks, which include the cached ones, to the ticket's lanes that end at this rank. Nothing is
        written to them any more once on_done is called, which happens once, from the loop: with success when every
        lane has committed, else with what failed first. on_coming is called before it, from the loop, when the first
        message has come. Raises TransferError when the ticket does not fit, its epoch is in use or no further transfer
        may be open."""
        if self._is_closed or len(self._open) >= MAX_OPEN:
            raise TransferError(f"no further transfer can be granted: {len(self._open)} of {MAX_OPEN} are open")
        self._check(ticket, len(block_ids))
        transfer = _Transfer(self, ticket, tuple(block_ids), on_done, on_coming)
        self._open[ticket.epoch] = transfer
        self._lanes.update({lane.session.lane.transfer_id: lane for lane in transfer.lanes})

    def cancel(self, epoch: int) -> None:
        """Ends a transfer, unless it has ended."""
        if transfer := self._open.get(epoch):
            transfer.cancel()

    async def close(self) -> None:
        """Cancels what is open, and returns when every on_done has been called."""
        self._is_closed = True
        for epoch in list(self._open):
            self.cancel(epoch)
        await asyncio.sleep(0)  # the turn of the loop in which on_done is called
        await self.transport.close()

    def reply(self, peer: Hashable, message: Committed | Missing | Refused) -> None:
        """For the lanes' use."""
        if isinstance(message, Refused):
            self.num_refused += 1
        if peer is not None:
            self.transport.reply(peer, encode(message))

    def lane_ended(self, lane: ReceivingLane) -> None:
        """For the transfers' use."""
        del self._lanes[lane.session.lane.transfer_id]
        self._ended.add(lane.session, self._loop.time())

    def conclude(self, epoch: int, on_done: OnReceived, result: Received | TransferFailed) -> None:
        """For the transfers' use."""
        transfer = self._open.pop(epoch)
        if isinstance(result, TransferFailed):
            self.num_failed += 1
        elif transfer.began_s is not None:
            self.seconds.observe(self._loop.time() - transfer.began_s)
        self._loop.call_soon(on_done, result)

    def _check(self, ticket: Ticket, num_blocks: int) -> None:
        if ticket.receivers != self.node:
            raise TransferError(f"the ticket is for a decode node of {ticket.receivers}, not {self.node}")
        expected = rank_layout(ticket.layout, self.rank, *self.node)
        if expected != self.store.layout:
            raise TransferError(f"the ticket gives this rank blocks of {expected}; it has {self.store.layout}")
        if ticket.num_blocks != num_blocks:
            raise TransferError(f"the ticket is for {ticket.num_blocks} blocks, not {num_blocks}")
        is_known = any(lane.transfer_id in self._lanes for _, lane in ticket.lanes_to(self.rank))
        if is_known or ticket.epoch in self._open:
            raise TransferError("the ticket is in use already")

    def _take(self, peer: Hashable, header: memoryview, frames: list[Buffer]) -> None:
        self.num_messages += 1
        try:
            message = decode(header)
        except TransferError as error:
            self._drop(str(error))
            return
        if not isinstance(message, Data | Finish | Abort):
            self._drop("a message that only receivers send")
        elif lane := self._lanes.get(message.transfer_id):
            self._open[lane.session.lane.epoch].note_begin(self._loop.time())
            lane.take(peer, message, frames)
        else:
            self._answer_late(peer, message)

    def _drop(self, why: str) -> None:
        """Without an answer: there is nobody to name in it."""
        self.num_malformed += 1
        logger.warning("a message to the receiver was dropped: %s", why)

    def _answer_late(self, peer: Hashable, message: Data | Finish | Abort) -> None:
        """To a lane that has ended, or never was: nothing is written, and everyone is told."""
        session = self._ended.get(message.transfer_id, self._loop.time())
        if session is not None:
            for action in session.handle(message, self._loop.time()):
                assert isinstance(action, Reply), "an ended session wants more than to answer"
                self.reply(peer, action.message)
        elif not isinstance(message, Abort):
            self.reply(peer, Refused(message.transfer_id, message.epoch, Refusal.UNKNOWN_TRANSFER))


class _Transfer:
    """One rank's part of a transfer: the lanes that end here, which succeed or fail together."""

    def __init__(
        self,
        receiver: KVReceiver,
        ticket: Ticket,
        block_ids: Sequence[int],
        on_done: OnReceived,
        on_coming: OnComing | None,
    ) -> None:
        self._receiver = receiver
        self.began_s: float | None = None  # with its first message
        self._epoch = ticket.epoch
        self._on_done, self._on_coming = on_done, on_coming
        self._results: dict[ReceivingLane, Received | TransferFailed] = {}  # in the order of the lanes' ends
        payload, store = receiver.transport.payload, receiver.store
        self.lanes = [
            ReceivingLane(lane, payload, store.heads(copy.destination_heads), block_ids, self)
            for copy, lane in ticket.lanes_to(receiver.rank)
        ]

    def note_begin(self, now: float) -> None:
        """A message has come."""
        if self.began_s is None:
            self.began_s = now
            if self._on_coming is not None:
                asyncio.get_running_loop().call_soon(self._on_coming)

    def cancel(self) -> None:
        for lane in self.lanes:
            lane.cancel()

    def reply(self, peer: Hashable, message: Committed | Missing | Refused) -> None:
        self._receiver.reply(peer, message)

    def lane_wrote(self, num_bytes: int) -> None:
        self._receiver.num_bytes += num_bytes

    def lane_found_corrupt(self, num_blocks: int) -> None:
        self._receiver.num_corrupt_blocks += num_blocks

    def lane_ended(self, lane: ReceivingLane, result: Received | TransferFailed) -> None:
        self._receiver.lane_ended(lane)
        self._results[lane] = result
        if len(self._results) == len(self.lanes):
            self._receiver.conclude(self._epoch, self._on_done, self._joined())
        elif isinstance(result, TransferFailed):
            self.cancel()

    def _joined(self) -> Received | TransferFailed:
        blocks = {
            result.num_bytes // lane.session.lane.layout.block_bytes
            for lane, result in self._results.items()
            if isinstance(result, Received)
        }
        result = combined(list(self._results.values()))
        if isinstance(result, Received) and len(blocks) > 1:
            return TransferFailed(reasons.TRANSFER_FAILED, "the prefill ranks sent different numbers of blocks")
        return result
