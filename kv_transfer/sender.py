"""Send KV blocks from one rank: sessions and their I/O."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kv_transfer.descriptor import Channel, TransferDescriptor
from kv_transfer.payload import Buffer, KVStore, blocks_per_message
from kv_transfer.plan import Grid
from kv_transfer.receiver import Alarm
from kv_transfer.results import Sent, TransferError, TransferFailed, combined
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
    PeerLost,
    Released,
    SendBlocks,
    SenderSession,
    SendMessage,
    Tick,
    Turn,
)
from kv_transfer.transports.transport import Dialer
from kv_transfer.wire import BlockRange, Committed, Data, Missing, Refused, Segment, decode, encode
from serving_core import reasons
from serving_core.figures import Histogram
from serving_core.process.failpoints import reach
from serving_core.sharding import rank_layout

logger = logging.getLogger(__name__)


class ChannelOwner(Protocol):
    """Takes the events of the channels of one transfer."""

    def channel_sent(self, num_bytes: int) -> None:
        """Count one message with `num_bytes` bytes of blocks that was passed to the transport."""

    def channel_caught_up(self) -> None:
        """Note that a channel has sent all ready blocks; called at most once for each channel."""

    def channel_ended(self, result: Sent | TransferFailed) -> None:
        """Take the result of a channel; called once, immediately at its end."""

    def channel_released(self) -> None:
        """Note that a channel `is_over`: it has ended, and the transport has released its blocks."""


class SendingChannel:
    """Sends the blocks of one store over one channel.

    The store holds exactly the heads and at least the layers of the channel.
    """

    def __init__(
        self, channel: Channel, transport: Dialer, store: KVStore, deadline_s: float, owner: ChannelOwner
    ) -> None:
        self.address = channel.address
        self._channel = channel
        self._transport = transport
        self._store = store
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        num_blocks = blocks_per_message(channel.layout, transport.payload)
        self._session = SenderSession(channel, num_blocks, deadline_s, self._loop.time())
        self._block_ids: Sequence[int] = ()
        self._held: set[asyncio.Future[None]] = set()  # messages whose frames the transport may still read
        self._turn: asyncio.Handle | None = None
        self._alarm = Alarm(lambda: self.handle(Tick()))
        self._has_ended = False
        self._schedule()

    @property
    def is_over(self) -> bool:
        """Return whether the channel has ended and the transport reads none of its blocks any more."""
        return self._has_ended and not self._held

    def blocks_ready(self, block_ids: Sequence[int], layers: range) -> None:
        """Send these leading blocks of the request, which are final in these layers of the model.

        The list may grow only once its earlier blocks are final in all layers. The caller must not change it
        afterwards.
        """
        self._block_ids = block_ids
        ours = self._channel.layout.layers
        self.handle(BlocksReady(len(block_ids), len(range(ours.start, min(ours.stop, layers.stop)))))

    def finish(self, block_ids: Sequence[int], tail: bytes) -> None:
        """Send the rest of these blocks, which are all of the request's and all final, then `tail` and the commit.

        The caller must not change `block_ids` afterwards.
        """
        self._block_ids = block_ids
        self.handle(AllReady(len(block_ids), tail))

    def cancel(self) -> None:
        """End the channel with a failure, unless it has ended. Calls the owner's `channel_ended` at once.

        The transport may still read the blocks: do not free them before `is_over`.
        """
        self.handle(Cancel())

    def handle(self, event: Event) -> None:
        """Pass an event to the session, and carry out the actions that it returns."""
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
                    self._owner.channel_caught_up()
                case Conclude(result=result):
                    self._has_ended = True
                    self._owner.channel_ended(result)
        self._schedule()

    def _are_sent(self, ranges: tuple[BlockRange, ...]) -> bool:
        try:
            segments, views = self._read(ranges)
            frames = self._transport.payload.gather(views)
        except Exception:  # out of host or device memory
            logger.exception("blocks of a transfer could not be read")
            return False
        self._owner.channel_sent(sum(map(len, views)))
        header = encode(Data(self._channel.transfer_id, self._channel.epoch, tuple(segments)))
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
            self._owner.channel_released()

    def _take_turn(self) -> None:
        self._turn = None
        self.handle(Turn())

    def _schedule(self) -> None:
        """Schedule the next turn and the next tick."""
        if self._turn is None and self._session.wants_turn:
            self._turn = self._loop.call_soon(self._take_turn)
        self._alarm.set(self._session.wake_at)


class NoChannel:
    """Stands for the channels of a rank that sends nothing because other ranks hold the same heads.

    It ends as channels do: with success once the request is finished, or with a failure by cancel or expiry.
    """

    def __init__(self, ttl_s: float, owner: ChannelOwner) -> None:
        self.is_over = False
        self._has_begun = False
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._expires_at = self._loop.time() + ttl_s
        self._alarm = Alarm(self._tick)
        self._alarm.set(self._expires_at)

    def blocks_ready(self, block_ids: Sequence[int], layers: range) -> None:
        """Tell the owner, at the first call, that all ready blocks are sent; the arguments do not matter."""
        if not self._has_begun:
            self._has_begun = True
            self._owner.channel_caught_up()

    def finish(self, block_ids: Sequence[int], tail: bytes) -> None:
        self._end(Sent(0))

    def cancel(self) -> None:
        self._end(TransferFailed(reasons.TRANSFER_FAILED, CANCELLED))

    def _tick(self) -> None:
        if self._loop.time() < self._expires_at:
            self._alarm.set(self._expires_at)  # set again: the alarm was a little early
        else:
            self._end(TransferFailed(reasons.TRANSFER_FAILED, TIME_IS_OVER))

    def _end(self, result: Sent | TransferFailed) -> None:
        if not self.is_over:
            self.is_over = True
            self._alarm.set(None)
            self._owner.channel_ended(result)


__all__ = ["KVSender", "SendingTransfer", "Sent", "TransferFailed"]


MAX_OPEN = 1024
CLOSE_TIMEOUT_S = 10.0

OnSent = Callable[[Sent | TransferFailed], None]
OnCaughtUp = Callable[[], None]


class KVSender:
    """Sends one rank's blocks to the receivers that descriptors name. Belongs to the event loop that created it."""

    def __init__(
        self,
        transport: Dialer,
        store: KVStore,
        *,
        rank: int = 0,
        tp_size: int = 1,
        pp_size: int = 1,
        deadline_s: float,
    ) -> None:
        """Start the transport, whose replies this sender takes.

        `deadline_s` limits the seconds from a transfer's finish to its commit. Raises TransferError if a block of the
        store is too large to be sent.
        """
        blocks_per_message(store.layout)
        self.num_bytes = 0  # of blocks, including retransmissions
        self.num_messages = 0  # messages with blocks
        self.num_failed = 0  # transfers
        self.seconds = Histogram()  # of successful transfers, from start to commit
        self.num_refused = 0  # replies of kind Refused
        self.num_malformed = 0  # replies that cannot be read
        self.transport = transport
        self.store = store
        self.rank = rank
        self.node = Grid(tp_size, pp_size)
        self.deadline_s = deadline_s
        self._open: dict[int, SendingTransfer] = {}  # by epoch
        self._channels: dict[bytes, SendingChannel] = {}  # of the open transfers, by transfer id
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False
        transport.start(self._take_reply, self._lose)

    @property
    def num_open(self) -> int:
        """Return the number of transfers that have not ended: their on_done has not been called."""
        return len(self._open)

    @property
    def num_channels(self) -> int:
        """Return the number of open channels of all transfers."""
        return len(self._channels)

    def start(self, descriptor: bytes, on_done: OnSent, on_caught_up: OnCaughtUp | None = None) -> "SendingTransfer":
        """Begin this rank's part of the transfer that `descriptor`, encoded, describes; return the transfer.

        Dials the receivers of all channels that begin here. on_done and on_caught_up are called as SendingTransfer
        says. Raises TransferError if the descriptor is invalid, does not fit this rank, or if it or its epoch is in
        use, or MAX_OPEN transfers are open.
        """
        if self._is_closed or len(self._open) >= MAX_OPEN:
            raise TransferError(f"no further transfer can be started: {len(self._open)} of {MAX_OPEN} are open")
        decoded = TransferDescriptor.decode(descriptor)
        self._check(decoded)
        for _, channel in decoded.channels_from(self.rank):
            self.transport.connect(channel.address)
        conclude = partial(self._conclude, decoded.epoch, on_done, self._loop.time())
        transfer = SendingTransfer(self, decoded, conclude, on_caught_up)
        self._open[decoded.epoch] = transfer
        self._channels.update(transfer.channels)
        self._idle.clear()
        return transfer

    async def close(self) -> None:
        """Cancel open transfers and close the transport; return when every on_done was called.

        Raises TimeoutError after CLOSE_TIMEOUT_S seconds.
        """
        self._is_closed = True
        for transfer in list(self._open.values()):
            transfer.cancel()
        await self.transport.close()
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await self._idle.wait()

    def _check(self, descriptor: TransferDescriptor) -> None:
        if descriptor.senders != self.node:
            raise TransferError(f"the descriptor is for a prefill node of {descriptor.senders}, not {self.node}")
        expected = rank_layout(descriptor.layout, self.rank, *self.node)
        if expected != self.store.layout:
            raise TransferError(f"the descriptor asks this rank for blocks of {expected}; it has {self.store.layout}")
        is_known = any(channel.transfer_id in self._channels for _, channel in descriptor.channels_from(self.rank))
        if is_known or descriptor.epoch in self._open:
            raise TransferError("the descriptor is in use already")

    def _conclude(self, epoch: int, on_done: OnSent, started_s: float, result: Sent | TransferFailed) -> None:
        for transfer_id in self._open.pop(epoch).channels:
            del self._channels[transfer_id]
        if not self._open:
            self._idle.set()
        if isinstance(result, TransferFailed):
            self.num_failed += 1
        else:
            self.seconds.observe(self._loop.time() - started_s)
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
        channel = self._channels.get(message.transfer_id)
        if channel is not None and isinstance(message, Committed | Missing | Refused):
            channel.handle(message)

    def _lose(self, address: str) -> None:
        for channel in list(self._channels.values()):
            if channel.address == address:
                channel.handle(PeerLost())


class SendingTransfer:
    """Sends one rank's part of a transfer.

    The caller keeps the blocks unchanged until on_done is called, once, from the loop: with success if every channel is
    committed, else with the first failure.

    After `cancel` the caller may write to the blocks, but not free them. From then on only the transport still reads
    them, for messages whose checksums are already taken. Changed bytes fail the checksum at the receiver and are never
    requested again, since the sessions have ended, and the Abort ends the receiver's part.

    on_caught_up is called at most once, from the loop and before on_done, when all channels have sent every ready
    block.
    """

    def __init__(
        self, sender: KVSender, descriptor: TransferDescriptor, on_done: OnSent, on_caught_up: OnCaughtUp | None
    ) -> None:
        self._sender = sender
        self._layers = sender.store.layout.layers
        self._on_done = on_done
        self._on_caught_up = on_caught_up
        self._results: list[Sent | TransferFailed] = []  # of the channels, in the order in which they ended
        self._has_concluded = False
        self.channels = {  # by transfer id; for KVSender
            channel.transfer_id: SendingChannel(
                channel, sender.transport, sender.store.heads(copy.source_heads), sender.deadline_s, self
            )
            for copy, channel in descriptor.channels_from(sender.rank)
        }
        self._parts: list[SendingChannel | NoChannel] = [*self.channels.values()] or [NoChannel(descriptor.ttl_s, self)]
        self._num_behind = len(self._parts)  # channels that have not caught up

    def blocks_ready(self, block_ids: Sequence[int], num_layers: int | None = None) -> None:
        """Send the leading blocks, which are final in the leading `num_layers` layers of this rank; None: in all.

        The list may grow only once its earlier blocks are final in all layers.
        """
        ids, layers = tuple(block_ids), self._layers[:num_layers]
        for channel in self._parts:
            channel.blocks_ready(ids, layers)

    def finish(self, block_ids: Sequence[int], tail: bytes) -> None:
        """Send the rest of these blocks, which are all of the request's and all final, then commit.

        `tail` is passed to the receivers' callers.
        """
        ids = tuple(block_ids)
        for channel in self._parts:
            channel.finish(ids, tail)

    def cancel(self) -> None:
        """End the transfer with a failure as soon as the transport releases its blocks."""
        for channel in self._parts:
            channel.cancel()

    def channel_sent(self, num_bytes: int) -> None:
        """Count one message with `num_bytes` bytes of blocks."""
        self._sender.num_messages += 1
        self._sender.num_bytes += num_bytes

    def channel_caught_up(self) -> None:
        """Count a channel that has sent every ready block; after the last one, call on_caught_up from the loop."""
        self._num_behind -= 1
        if self._num_behind == 0 and self._on_caught_up is not None:
            asyncio.get_running_loop().call_soon(self._on_caught_up)

    def channel_ended(self, result: Sent | TransferFailed) -> None:
        """Take a channel's result; after a failure cancel the other channels."""
        self._results.append(result)
        if isinstance(result, TransferFailed):
            self.cancel()
        self.channel_released()

    def channel_released(self) -> None:
        """Call on_done with the combined result, from the loop, if all channels are over; once."""
        if not self._has_concluded and all(channel.is_over for channel in self._parts):
            self._has_concluded = True
            asyncio.get_running_loop().call_soon(self._on_done, combined(self._results))
