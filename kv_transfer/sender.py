"""What a node sends KV blocks with."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kv_transfer.alarm import Alarm
from kv_transfer.errors import TransferError
from kv_transfer.payload import blocks_per_message, checksums, gather
from kv_transfer.results import Sent, TransferFailed
from kv_transfer.sender_session import (
    AllReady,
    BlocksReady,
    Cancel,
    Conclude,
    Event,
    PeerLost,
    Released,
    SendBlocks,
    SenderSession,
    SendMessage,
    Tick,
    Turn,
)
from kv_transfer.store import KVStore
from kv_transfer.ticket import Ticket
from kv_transfer.transports.transport import Dialer
from kv_transfer.wire import BlockRange, Committed, Data, Missing, Refused, Segment, decode, encode

__all__ = ["KVSender", "SendingTransfer", "Sent", "TransferFailed"]

logger = logging.getLogger(__name__)

MAX_OPEN = 1024
CLOSE_TIMEOUT_S = 10.0

OnSent = Callable[[Sent | TransferFailed], None]


class KVSender:
    """Sends blocks of one store to the receivers that tickets name. Belongs to the event loop it was made on."""

    def __init__(self, transport: Dialer, store: KVStore, *, deadline_s: float) -> None:
        """`deadline_s` is the time from a transfer's finish to its commit. Raises TransferError when a block of the
        store is too large to be sent."""
        self.num_bytes = 0  # of blocks, repeats included
        self.num_messages = 0  # with blocks in them
        self.num_failed = 0  # transfers
        self.num_refused = 0  # replies that refuse something
        self.num_malformed = 0  # replies that cannot be read
        self.transport = transport
        self.store = store
        self.deadline_s = deadline_s
        self.blocks_per_message = blocks_per_message(store.layout)
        self._open: dict[bytes, SendingTransfer] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False
        transport.start(self._take_reply, self._lose)

    @property
    def num_open(self) -> int:
        """Transfers whose on_done has not been called."""
        return len(self._open)

    def start(self, ticket: bytes, on_done: OnSent) -> "SendingTransfer":
        """Begins a transfer. Raises TransferError when the ticket is odd, fits another layout or is in use."""
        if self._is_closed or len(self._open) >= MAX_OPEN:
            raise TransferError(f"no further transfer can be started: {len(self._open)} of {MAX_OPEN} are open")
        decoded = Ticket.decode(ticket)
        if decoded.layout != self.store.layout:
            raise TransferError(f"the receiver's blocks are {decoded.layout}, the sender's {self.store.layout}")
        if decoded.transfer_id in self._open:
            raise TransferError("the ticket is in use already")
        self.transport.connect(decoded.address)
        transfer = SendingTransfer(self, decoded, lambda result: self._conclude(decoded.transfer_id, on_done, result))
        self._open[decoded.transfer_id] = transfer
        self._idle.clear()
        return transfer

    async def close(self) -> None:
        """Cancels what is open, and returns when every on_done has been called."""
        self._is_closed = True
        for transfer in list(self._open.values()):
            transfer.cancel()
        await self.transport.close()
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await self._idle.wait()

    def _conclude(self, transfer_id: bytes, on_done: OnSent, result: Sent | TransferFailed) -> None:
        del self._open[transfer_id]
        if not self._open:
            self._idle.set()
        if isinstance(result, TransferFailed):
            self.num_failed += 1
        on_done(result)

    def _take_reply(self, header: memoryview) -> None:
        try:
            message = decode(header)
        except TransferError as error:
            self.num_malformed += 1
            logger.warning("a reply was dropped: %s", error)
            return
        if isinstance(message, Refused):
            self.num_refused += 1
        transfer = self._open.get(message.transfer_id)
        if transfer is not None and isinstance(message, Committed | Missing | Refused):
            transfer.handle(message)

    def _lose(self, address: str) -> None:
        for transfer in list(self._open.values()):
            if transfer.ticket.address == address:
                transfer.handle(PeerLost())


class SendingTransfer:
    """One transfer under way. Its caller keeps the blocks as they are until on_done is called, once, from the loop."""

    def __init__(self, sender: KVSender, ticket: Ticket, on_done: OnSent) -> None:
        self.ticket = ticket
        self._sender = sender
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._session = SenderSession(ticket, sender.blocks_per_message, sender.deadline_s, self._loop.time())
        self._block_ids: list[int] = []
        self._held: set[asyncio.Future[None]] = set()  # messages whose frames the transport may still read
        self._turn: asyncio.Handle | None = None
        self._alarm = Alarm(lambda: self.handle(Tick()))
        self._result: Sent | TransferFailed | None = None  # known, and not told yet
        self._schedule()

    def blocks_ready(self, block_ids: Sequence[int], num_layers: int | None = None) -> None:
        """The request's leading blocks that are final in the leading num_layers layers, by default in all of them.
        The list may grow only when what it held is final in all layers."""
        self._block_ids = list(block_ids)
        layers = self.ticket.layout.num_layers if num_layers is None else num_layers
        self.handle(BlocksReady(len(block_ids), layers))

    def finish(self, block_ids: Sequence[int], tail: bytes) -> None:
        """These are all of the request's blocks, and they are final. `tail` goes to the receiver's caller."""
        self._block_ids = list(block_ids)
        self.handle(AllReady(len(block_ids), tail))

    def cancel(self) -> None:
        """Ends the transfer as soon as the transport lets go of its blocks."""
        self.handle(Cancel())

    def handle(self, event: Event) -> None:
        """Feeds the session. For the sender's use."""
        for action in self._session.handle(event, self._loop.time()):
            match action:
                case SendBlocks(ranges=ranges):
                    self._send_blocks(ranges)
                case SendMessage(message=message):
                    self._sender.transport.send(self.ticket.address, encode(message))
                case Conclude(result=result):
                    self._result = result
        self._schedule()

    def _send_blocks(self, ranges: tuple[BlockRange, ...]) -> None:
        store = self._sender.store
        segments: list[Segment] = []
        views: list[memoryview] = []
        for blocks in ranges:
            planes = store.read(blocks.layer, self._block_ids[blocks.first : blocks.stop])
            segments.append(Segment(blocks.layer, blocks.first, checksums(planes, store.layout.plane_bytes)))
            views += planes
        header = encode(Data(self.ticket.transfer_id, self.ticket.epoch, tuple(segments)))
        self._sender.num_messages += 1
        self._sender.num_bytes += sum(map(len, views))
        held = self._sender.transport.send(self.ticket.address, header, gather(views))
        self._held.add(held)
        held.add_done_callback(self._release)

    def _release(self, held: asyncio.Future[None]) -> None:
        self._held.discard(held)
        self.handle(Released())

    def _take_turn(self) -> None:
        self._turn = None
        self.handle(Turn())

    def _schedule(self) -> None:
        """Sees to what comes next: a turn, a tick, the end."""
        if self._turn is None and self._session.wants_turn:
            self._turn = self._loop.call_soon(self._take_turn)
        self._alarm.set(self._session.wake_at)
        if self._result is not None and not self._held:
            self._loop.call_soon(self._on_done, self._result)
            self._result = None
