"""Hold both ends of a connection of the torch.distributed transport: a signaling stream, and on demand a pair.

A link is used once. It ends when it is stopped, or when its stream or its pair breaks or times out.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kv_transfer.results import TransferError
from kv_transfer.transports.dist_stream import (
    DistAddress,
    Kind,
    Stream,
    pack_key,
    pack_sizes,
    unpack_key,
    unpack_message,
)
from kv_transfer.transports.torch_pair import RECEIVER_RANK, SENDER_RANK, Pair
from kv_transfer.transports.transport import OnMessage, OnReply

logger = logging.getLogger(__name__)

SEND_QUEUE_MESSAGES = 4096  # to one receiver; the frames stay in the pool
RECEIVE_QUEUE_MESSAGES = 8  # from one sender; the frames are allocated, at most 128 MiB
ANNOUNCED_MESSAGES = 4  # whose sizes the receiver already knows
CLOSE_TIMEOUT_S = 5.0

BROKEN = (OSError, EOFError, TransferError)  # errors of broken streams and pairs


class _Link(ABC):
    """Implement the part of a link that both ends share."""

    def __init__(self, rank: int, device: torch.device, on_ended: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._rank = rank
        self._device = device
        self._stream: Stream | None = None
        self._pair: Pair | None = None
        self._tasks = asyncio.TaskGroup()
        self._talking = loop.create_task(self._talk())
        self.ended = loop.create_task(self._end(on_ended))  # done when no frame is used any more

    def stop(self) -> None:
        """Begin to end the link; `ended` completes when no frame is used any more."""
        self._talking.cancel()

    @abstractmethod
    async def _open(self) -> Stream:
        """Return the stream."""

    @abstractmethod
    async def _read(self, stream: Stream) -> None:
        """Read until the stream breaks."""

    @abstractmethod
    async def _work(self, stream: Stream) -> None:
        """Handle queued messages until the link breaks."""

    @abstractmethod
    def _drop(self) -> None:
        """Release queued messages."""

    async def _talk(self) -> None:
        self._stream = await self._open()
        async with self._tasks:
            self._tasks.create_task(self._read(self._stream))
            self._tasks.create_task(self._work(self._stream))

    async def _end(self, on_ended: Callable[[], None]) -> None:
        await asyncio.wait([self._talking])
        on_ended()
        self._drop()
        if self._stream is not None:
            self._stream.close()
        if self._pair is not None:
            self._pair.stop()
        try:
            if not self._talking.cancelled():
                self._talking.result()
        except* (EOFError, ConnectionError):
            logger.info("a connection between two ranks ended: the other end closed it")
        except* BROKEN as group:
            logger.warning("a connection between two ranks ended: %s", reason(group))
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        """Return when the pair uses no frame any more."""
        if self._pair is not None:
            await asyncio.wait([self._pair.ended], timeout=CLOSE_TIMEOUT_S)
            if not self._pair.ended.done():
                logger.error("torch.distributed does not let go of a pair of ranks")

    def _join(self, stream: Stream) -> Pair:
        """Return the pair, making it first if needed; the other end makes it too."""
        if self._pair is None:

            def relay(key: str, value: bytes) -> None:
                stream.write(Kind.KEY, pack_key(key, value))

            self._pair = Pair(self._rank, self._device, stream.local_ip, relay)
            self._tasks.create_task(self._watch(self._pair))
        return self._pair

    def _relay(self, stream: Stream, key: str, value: bytes) -> None:
        """Pass a value of the other end's group to the pair."""
        self._join(stream).put(key, value)

    async def _watch(self, pair: Pair) -> None:
        async with asyncio.timeout(pair.make_timeout_s):
            await asyncio.wait([pair.ready, pair.ended], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([pair.ended])
        raise TransferError("the group of the two broke")


@dataclass(slots=True, eq=False)
class Message:
    """A message to be sent, and the future that completes when its frames may be reused."""

    header: bytes
    frames: Sequence[torch.Tensor]
    released: asyncio.Future[None]

    def release(self) -> None:
        self.frames = ()
        if not self.released.done():
            self.released.set_result(None)


class SendingLink(_Link):
    """The Dialer's end of a connection."""

    def __init__(
        self, address: DistAddress, device: torch.device, on_reply: OnReply, on_ended: Callable[[], None]
    ) -> None:
        self._address = address
        self._on_reply = on_reply
        self._queue: deque[Message] = deque()
        self._is_filled = asyncio.Event()
        super().__init__(SENDER_RANK, device, on_ended)

    def send(self, message: Message) -> None:
        """Queue a message; drop it, with a warning and its frames released, if SEND_QUEUE_MESSAGES are queued."""
        if len(self._queue) >= SEND_QUEUE_MESSAGES:
            logger.warning("a message was dropped: %d wait for the receiver already", SEND_QUEUE_MESSAGES)
            message.release()
            return
        self._queue.append(message)
        self._is_filled.set()

    async def _open(self) -> Stream:
        return await Stream.dial(self._address)

    async def _read(self, stream: Stream) -> None:
        while True:
            match await stream.read():
                case Kind.REPLY, header:
                    self._on_reply(memoryview(header))
                case Kind.KEY, body:
                    self._relay(stream, *unpack_key(body))
                case kind, _:
                    raise TransferError(f"a receiver sent something of kind {kind}")

    async def _work(self, stream: Stream) -> None:
        announced: deque[asyncio.Future[list[torch.Tensor] | None]] = deque()
        while True:
            while not self._queue:
                self._is_filled.clear()
                await self._is_filled.wait()
            if self._queue[0].frames:
                await asyncio.wait([self._join(stream).ready])
                if len(announced) >= ANNOUNCED_MESSAGES:
                    await asyncio.wait([announced.popleft()])
            self._write(stream, self._queue.popleft(), announced)
            await stream.drain()

    def _write(
        self, stream: Stream, message: Message, announced: deque[asyncio.Future[list[torch.Tensor] | None]]
    ) -> None:
        stream.write(Kind.MESSAGE, pack_sizes([len(frame) for frame in message.frames]), message.header)
        if message.frames:
            moved = self._join(stream).send(message.frames)
            message.frames = ()
            moved.add_done_callback(lambda _: message.release())
            announced.append(moved)
        else:
            message.release()

    def _drop(self) -> None:
        for message in self._queue:
            message.release()
        self._queue.clear()


class ReceivingLink(_Link):
    """The Listener's end of a connection: the peer of its messages."""

    def __init__(
        self, stream: Stream, device: torch.device, on_message: OnMessage, on_ended: Callable[[], None]
    ) -> None:
        self._opened = stream
        self._on_message = on_message
        self._inbox: asyncio.Queue[tuple[memoryview, asyncio.Future[list[torch.Tensor] | None] | None]]
        self._inbox = asyncio.Queue(RECEIVE_QUEUE_MESSAGES)
        super().__init__(RECEIVER_RANK, device, on_ended)
        self._stream = stream

    def reply(self, header: bytes) -> None:
        """Send a header to the sender; drop it, with a warning, if the sender leaves too many replies unread."""
        if self._opened.is_clogged:
            logger.warning("a reply to a sender was dropped: it reads nothing")
        else:
            self._opened.write(Kind.REPLY, header)

    async def _open(self) -> Stream:
        return self._opened

    async def _read(self, stream: Stream) -> None:
        while True:
            match await stream.read():
                case Kind.MESSAGE, body:
                    await self._inbox.put(self._announce(body))
                case Kind.KEY, body:
                    self._relay(stream, *unpack_key(body))
                case kind, _:
                    raise TransferError(f"a sender sent something of kind {kind}")

    def _announce(self, body: bytes) -> tuple[memoryview, asyncio.Future[list[torch.Tensor] | None] | None]:
        sizes, header = unpack_message(body)
        if not sizes:
            return header, None
        if self._pair is None:
            raise TransferError("frames were announced before there was a group for them")
        return header, self._pair.receive(sizes)

    async def _work(self, stream: Stream) -> None:
        while True:
            header, moved = await self._inbox.get()
            frames = await moved if moved is not None else []
            if frames is not None:
                self._on_message(self, header, frames)
            del header, moved, frames

    def _drop(self) -> None:
        """Do nothing: the pair drops announced frames."""


def reason(error: BaseException) -> str:
    """Return in words why a stream or a pair broke, given the exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case EOFError():
            return "the other end closed it"
        case TimeoutError():
            return "it took too long"
        case _:
            return str(error)
