"""Receive KV blocks on one rank: sessions and their I/O."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from kv_transfer.descriptor import Channel, TransferDescriptor
from kv_transfer.payload import Buffer, KVStore, Payload, blocks_per_message
from kv_transfer.plan import Grid
from kv_transfer.results import Received, TransferError, TransferFailed, combined
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
from kv_transfer.transports.transport import Listener
from kv_transfer.wire import (
    Abort,
    BlockRange,
    Committed,
    Data,
    Finish,
    Missing,
    Refusal,
    Refused,
    Segment,
    decode,
    encode,
)
from serving_core import reasons
from serving_core.figures import Histogram
from serving_core.process.failpoints import reach
from serving_core.sharding import rank_layout


class Alarm:
    """Calls a function at a time of the running loop's clock, perhaps a little early."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Call the function at this time of the loop's clock instead of the time set before; None: not at all."""
        if at == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = None if at is None else self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._at = self._timer = None  # so that an early callback can set the same time again
        self._callback()


logger = logging.getLogger(__name__)

MAX_ENDED = 4096
REMEMBER_S = 300.0


class ChannelOwner(Protocol):
    """Takes the events of the channels of one transfer."""

    def reply(self, peer: Hashable, message: Committed | Missing | Refused) -> None:
        """Send a message to `peer`, the sender of the channel's last message.

        `peer` is None if no message has come; nothing is sent then.
        """

    def channel_wrote(self, num_bytes: int) -> None:
        """Count `num_bytes` bytes of blocks that were verified and written."""

    def channel_found_corrupt(self, num_blocks: int) -> None:
        """Count `num_blocks` blocks that were in segments with a wrong checksum."""

    def channel_ended(self, channel: "ReceivingChannel", result: Received | TransferFailed) -> None:
        """Take the result of a channel; called once, immediately at its end. Nothing is written afterwards."""


class ReceivingChannel:
    """Writes the blocks of one channel into a store until the session ends.

    The store holds exactly the heads and at least the layers of the channel.
    """

    def __init__(
        self, channel: Channel, payload: Payload, store: KVStore, block_ids: Sequence[int], owner: ChannelOwner
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.session = ReceiverSession(channel, self._loop.time())
        self._payload = payload
        self._store = store
        self._block_ids = block_ids
        self._owner = owner
        self._peer: Hashable = None  # sender of the last message
        self._alarm = Alarm(lambda: self._handle(Tick()))
        self._alarm.set(self.session.expires_at)

    def take(self, peer: Hashable, message: Data | Finish | Abort, frames: Sequence[Buffer]) -> None:
        """Handle a message of this channel and its frames, and reply to `peer`."""
        reach("arrived")
        self._peer = peer
        self._handle(message, frames)

    def cancel(self) -> None:
        """End the channel with a failure, unless it has ended."""
        if self.session.is_open:
            self._handle(Cancel())

    def _handle(self, event: Event, buffers: Sequence[Buffer] = ()) -> None:
        """Pass an event to the session and carry out its actions.

        `buffers` are the frames of Data, or keys and values of each segment for Verified.
        """
        self._alarm.set(self.session.expires_at)  # set again: the alarm may have been a little early
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
                    self._owner.channel_ended(self, result)

    def _verify(self, segments: Sequence[Segment], frames: Sequence[Buffer]) -> None:
        layout, payload = self.session.channel.layout, self._payload
        sizes = [segment.num_blocks * size for segment in segments for size in layout.cache_bytes(segment.layer)]
        pieces = payload.cut(frames, sizes)
        if pieces is None:  # truncated or padded: no byte position can be trusted
            intact = [False] * len(segments)
        else:
            found = payload.checksums(pieces)
            intact = [checksum == segment.checksum for segment, checksum in zip(segments, found, strict=True)]
        num_corrupt = sum(
            segment.num_blocks for segment, is_intact in zip(segments, intact, strict=True) if not is_intact
        )
        self._owner.channel_found_corrupt(num_corrupt)
        self._handle(Verified(segments, intact), pieces or ())

    def _is_written(self, blocks: BlockRange, part: range, keys: Buffer, values: Buffer) -> bool:
        key_bytes, value_bytes = self.session.channel.layout.cache_bytes(blocks.layer)
        keys = keys[part.start * key_bytes : part.stop * key_bytes]
        values = values[part.start * value_bytes : part.stop * value_bytes]
        try:
            self._store.write(blocks.layer, self._block_ids[blocks.first : blocks.stop], keys, values)
        except Exception:  # out of host or device memory
            logger.exception("blocks of a transfer could not be written")
            return False
        self._owner.channel_wrote(len(keys) + len(values))
        return True


class EndedChannels:
    """Keeps the sessions of ended channels, which still reply: at most MAX_ENDED, for REMEMBER_S each."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, tuple[float, ReceiverSession]] = OrderedDict()  # oldest first

    def add(self, session: ReceiverSession, now: float) -> None:
        """Keep a session until now + REMEMBER_S, and drop the oldest one above MAX_ENDED."""
        self._sessions[session.channel.transfer_id] = (now + REMEMBER_S, session)
        if len(self._sessions) > MAX_ENDED:
            self._sessions.popitem(last=False)

    def get(self, transfer_id: bytes, now: float) -> ReceiverSession | None:
        """Return the kept session with this transfer_id; None if there is none. Drops expired sessions."""
        while self._sessions and next(iter(self._sessions.values()))[0] <= now:
            self._sessions.popitem(last=False)
        _, session = self._sessions.get(transfer_id, (now, None))
        return session


__all__ = ["KVReceiver", "Received", "TransferFailed"]


MAX_OPEN = 1024

OnReceived = Callable[[Received | TransferFailed], None]
OnReceiving = Callable[[], None]


class KVReceiver:
    """Receives blocks into one rank's store, where they are reserved. Belongs to the event loop that created it."""

    def __init__(
        self, transport: Listener, store: KVStore, *, rank: int = 0, tp_size: int = 1, pp_size: int = 1
    ) -> None:
        """Start the transport, whose messages this receiver takes.

        Raises TransferError if a block of the store is too large to be sent.
        """
        blocks_per_message(store.layout)
        self.num_bytes = 0  # of blocks that are verified and written
        self.num_messages = 0
        self.num_corrupt_blocks = 0  # in segments that failed their checksum
        self.num_failed = 0  # transfers
        self.seconds = Histogram()  # of successful transfers, from the first message to commit
        self.num_refused = 0  # refusals sent
        self.num_malformed = 0  # messages that cannot be read
        self.transport = transport
        self.store = store
        self.rank = rank
        self.node = Grid(tp_size, pp_size)
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Transfer] = {}  # by epoch
        self._channels: dict[bytes, ReceivingChannel] = {}  # of the open transfers, by transfer id
        self._ended = EndedChannels()
        self._is_closed = False
        transport.start(self._take)

    @property
    def address(self) -> str:
        """Return the address at which senders reach this rank, for a descriptor."""
        return self.transport.address

    @property
    def num_open(self) -> int:
        """Return the number of transfers that may still write to the store."""
        return len(self._open)

    @property
    def num_channels(self) -> int:
        """Return the number of open channels of all transfers."""
        return len(self._channels)

    def expect(
        self,
        descriptor: TransferDescriptor,
        block_ids: Sequence[int],
        on_done: OnReceived,
        on_receiving: OnReceiving | None = None,
    ) -> None:
        """Accept a transfer: open these blocks, cached ones included, to the descriptor's channels that end here.

        on_done is called once, from the loop: with success if every channel has committed, else with the first failure.
        Nothing is written to the blocks afterwards. on_receiving is called before it, from the loop, at the first
        message. Raises TransferError if the descriptor does not fit, its epoch is in use, or MAX_OPEN transfers are
        open.
        """
        if self._is_closed or len(self._open) >= MAX_OPEN:
            raise TransferError(f"no further transfer can be granted: {len(self._open)} of {MAX_OPEN} are open")
        self._check(descriptor, len(block_ids))
        transfer = _Transfer(self, descriptor, tuple(block_ids), on_done, on_receiving)
        self._open[descriptor.epoch] = transfer
        self._channels.update({channel.session.channel.transfer_id: channel for channel in transfer.channels})

    def cancel(self, epoch: int) -> None:
        """End the transfer with this epoch, unless it has ended; its on_done gets a failure."""
        if transfer := self._open.get(epoch):
            transfer.cancel()

    async def close(self) -> None:
        """Cancel open transfers, and return when every on_done has been called."""
        self._is_closed = True
        for epoch in list(self._open):
            self.cancel(epoch)
        await asyncio.sleep(0)  # on_done is called in this turn of the loop
        await self.transport.close()

    def reply(self, peer: Hashable, message: Committed | Missing | Refused) -> None:
        """Send a channel's message to `peer`, and count refusals; without a peer nothing is sent."""
        if isinstance(message, Refused):
            self.num_refused += 1
        if peer is not None:
            self.transport.reply(peer, encode(message))

    def channel_ended(self, channel: ReceivingChannel) -> None:
        """Move an ended channel's session to those that only reply."""
        del self._channels[channel.session.channel.transfer_id]
        self._ended.add(channel.session, self._loop.time())

    def conclude(self, epoch: int, on_done: OnReceived, result: Received | TransferFailed) -> None:
        """Forget an ended transfer, count its failure or its seconds, and call `on_done` from the loop."""
        transfer = self._open.pop(epoch)
        if isinstance(result, TransferFailed):
            self.num_failed += 1
        elif transfer.began_s is not None:
            self.seconds.observe(self._loop.time() - transfer.began_s)
        self._loop.call_soon(on_done, result)

    def _check(self, descriptor: TransferDescriptor, num_blocks: int) -> None:
        if descriptor.receivers != self.node:
            raise TransferError(f"the descriptor is for a decode node of {descriptor.receivers}, not {self.node}")
        expected = rank_layout(descriptor.layout, self.rank, *self.node)
        if expected != self.store.layout:
            raise TransferError(f"the descriptor gives this rank blocks of {expected}; it has {self.store.layout}")
        if descriptor.num_blocks != num_blocks:
            raise TransferError(f"the descriptor is for {descriptor.num_blocks} blocks, not {num_blocks}")
        is_known = any(channel.transfer_id in self._channels for _, channel in descriptor.channels_to(self.rank))
        if is_known or descriptor.epoch in self._open:
            raise TransferError("the descriptor is in use already")

    def _take(self, peer: Hashable, header: memoryview, frames: list[Buffer]) -> None:
        self.num_messages += 1
        try:
            message = decode(header)
        except TransferError as error:
            self._drop(str(error))
            return
        if not isinstance(message, Data | Finish | Abort):
            self._drop("a message that only receivers send")
        elif channel := self._channels.get(message.transfer_id):
            self._open[channel.session.channel.epoch].note_begin(self._loop.time())
            channel.take(peer, message, frames)
        else:
            self._answer_late(peer, message)

    def _drop(self, why: str) -> None:
        """Drop a message without a reply, since its sender cannot be named."""
        self.num_malformed += 1
        logger.warning("a message to the receiver was dropped: %s", why)

    def _answer_late(self, peer: Hashable, message: Data | Finish | Abort) -> None:
        """Reply to a message for an ended or unknown channel; nothing is written."""
        session = self._ended.get(message.transfer_id, self._loop.time())
        if session is not None:
            for action in session.handle(message, self._loop.time()):
                assert isinstance(action, Reply), "an ended session only replies"
                self.reply(peer, action.message)
        elif not isinstance(message, Abort):
            self.reply(peer, Refused(message.transfer_id, message.epoch, Refusal.UNKNOWN_TRANSFER))


class _Transfer:
    """Receive one rank's part of a transfer: the channels that end here succeed or fail together."""

    def __init__(
        self,
        receiver: KVReceiver,
        descriptor: TransferDescriptor,
        block_ids: Sequence[int],
        on_done: OnReceived,
        on_receiving: OnReceiving | None,
    ) -> None:
        self._receiver = receiver
        self.began_s: float | None = None  # time of the first message
        self._epoch = descriptor.epoch
        self._on_done, self._on_receiving = on_done, on_receiving
        self._results: dict[ReceivingChannel, Received | TransferFailed] = {}  # in the order of their ends
        payload, store = receiver.transport.payload, receiver.store
        self.channels = [
            ReceivingChannel(channel, payload, store.heads(copy.destination_heads), block_ids, self)
            for copy, channel in descriptor.channels_to(receiver.rank)
        ]

    def note_begin(self, now: float) -> None:
        """Note the first message."""
        if self.began_s is None:
            self.began_s = now
            if self._on_receiving is not None:
                asyncio.get_running_loop().call_soon(self._on_receiving)

    def cancel(self) -> None:
        for channel in self.channels:
            channel.cancel()

    def reply(self, peer: Hashable, message: Committed | Missing | Refused) -> None:
        self._receiver.reply(peer, message)

    def channel_wrote(self, num_bytes: int) -> None:
        self._receiver.num_bytes += num_bytes

    def channel_found_corrupt(self, num_blocks: int) -> None:
        self._receiver.num_corrupt_blocks += num_blocks

    def channel_ended(self, channel: ReceivingChannel, result: Received | TransferFailed) -> None:
        self._receiver.channel_ended(channel)
        self._results[channel] = result
        if len(self._results) == len(self.channels):
            self._receiver.conclude(self._epoch, self._on_done, self._joined())
        elif isinstance(result, TransferFailed):
            self.cancel()

    def _joined(self) -> Received | TransferFailed:
        blocks = {
            result.num_bytes // channel.session.channel.layout.block_bytes
            for channel, result in self._results.items()
            if isinstance(result, Received)
        }
        result = combined(list(self._results.values()))
        if isinstance(result, Received) and len(blocks) > 1:
            return TransferFailed(reasons.TRANSFER_FAILED, "the prefill ranks sent different numbers of blocks")
        return result
