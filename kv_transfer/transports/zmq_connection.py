"""Connect ZeroMQ sockets to the event loop, and hold one connection to one receiver."""

import asyncio
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import zmq

from kv_transfer.receiver import Alarm
from kv_transfer.results import TransferError
from kv_transfer.shared_memory import notes
from kv_transfer.shared_memory.lending import Lender, Loan
from kv_transfer.transports.curve import Keyring
from kv_transfer.transports.transport import OnReply
from kv_transfer.wire import MAX_PAYLOAD_BYTES


class Inbox:
    """Own a socket, and receive its messages, one in each turn of the loop."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._take_one)
        self.nudge()

    def nudge(self) -> None:
        """Check for messages in the next turn.

        Call after every other use of the socket: its descriptor signals a change only once, to the first reader.
        """
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_one)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _take_one(self) -> None:
        if self._turn is not None:
            self._turn.cancel()  # a later turn, if the descriptor came first; else this one
            self._turn = None
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self.nudge()
            self._on_message(parts)


logger = logging.getLogger(__name__)

SEND_QUEUE_MESSAGES = 4096  # to one receiver; the frames stay in the pool
RECEIVE_QUEUE_MESSAGES = 8  # from one sender; ZeroMQ allocates the frames
TIMEOUT_MS = 3000

# The connection failed, was lost, or was refused.
BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
READY = zmq.EVENT_HANDSHAKE_SUCCEEDED
NO_HEADER = b""  # marks a note of shared memory in the next frame, which a header may follow


class Connection:
    """Hold one DEALER, and detect a broken connection.

    ZeroMQ's monitor reports most breaks. An alarm detects a receiver that takes nothing any more; heartbeats of ZeroMQ
    would not, since pings queue behind the frames. Another alarm detects a connection that is not made in time, which
    ZeroMQ does not report if it lacks a file descriptor.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keyring: Keyring,
        lender: Lender | None,
        on_reply: OnReply,
        on_broken: Callable[[], None],
    ) -> None:
        with ExitStack() as on_error:
            self._dealer = on_error.enter_context(open_socket(context, zmq.DEALER))
            monitor = on_error.enter_context(self._dealer.get_monitor_socket(BROKEN | READY))
            endpoint = keyring.prepare(self._dealer, address)
            choose_family(self._dealer, endpoint)
            self._dealer.connect(endpoint)
            on_error.pop_all()
        self._inbox = Inbox(self._dealer, self._take)
        self._events = Inbox(monitor, self._take_event)
        self._on_reply = on_reply
        self._on_broken = on_broken
        self._late = Alarm(on_broken)
        self._late.set(asyncio.get_running_loop().time() + TIMEOUT_MS / 1000)
        self._stalled = Alarm(on_broken)
        self._num_held = 0  # messages whose frames ZeroMQ holds
        self._is_closed = False
        self._loan = None if lender is None else Loan(lender, self._tell, on_broken)

    @property
    def shares_memory(self) -> bool:
        """Return whether blocks go through shared memory now."""
        return self._loan is not None and self._loan.is_taken

    def send(self, header: bytes, frames: Sequence[memoryview]) -> asyncio.Future[None]:
        """Send a message, as Dialer.send."""
        if self._loan is not None and (lent := self._loan.lend(frames)) is not None:
            note, released = lent
            self._queue([NO_HEADER, notes.encode(note), header])
        else:
            views = [memoryview(frame) for frame in frames]
            released = when_dropped(views)
            self._queue([header, *views])
        if not released.done():  # without frames, the send says nothing about earlier frames
            self._num_held += 1
            if self._num_held == 1:
                self._restart_alarm()
            released.add_done_callback(self._release)
        return released

    def close(self) -> None:
        """Drop queued messages and close the sockets."""
        self._is_closed = True
        if self._loan is not None:
            self._loan.close()
        self._late.set(None)
        self._stalled.set(None)
        self._dealer.disable_monitor()
        self._events.close()
        self._inbox.close()

    def _queue(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            logger.warning("a message was dropped: %d wait for the receiver already", SEND_QUEUE_MESSAGES)
        self._inbox.nudge()

    def _tell(self, note: notes.Note) -> None:
        self._queue([NO_HEADER, notes.encode(note)])

    def _take(self, parts: list[zmq.Frame]) -> None:
        header, *rest = parts
        if len(header) or not rest or self._loan is None:
            self._on_reply(header.buffer)
            return
        try:
            self._loan.take(notes.decode(rest[0].buffer))
        except TransferError as error:
            logger.warning("a note of shared memory was dropped: %s", error)

    def _take_event(self, parts: list[zmq.Frame]) -> None:
        if int.from_bytes(parts[0].bytes[:2], sys.byteorder) == READY:
            self._late.set(None)
        else:
            self._on_broken()

    def _release(self, _: asyncio.Future[None]) -> None:
        self._num_held -= 1
        self._restart_alarm()

    def _restart_alarm(self) -> None:
        if not self._is_closed:
            loop = asyncio.get_running_loop()
            self._stalled.set(loop.time() + TIMEOUT_MS / 1000 if self._num_held else None)


def choose_family(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Select IPv4 or IPv6 before a socket binds or connects.

    IPv6 is enabled only for IPv6 addresses; otherwise libzmq would pick an interface's IPv6 address by its name.
    """
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: the Dialer makes a new socket with an empty queue
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # detects a silently cut link within half a minute
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    # No ZMTP heartbeats, on either side: libzmq aborts the process when a ping or a pong is due on a connection that
    # broke while its receive queue was full (libzmq issues 4364 and 4767).
    return socket


def when_dropped(views: Sequence[memoryview]) -> asyncio.Future[None]:
    """Return a future that completes when no object holds any of these views; pyzmq holds those that ZeroMQ reads."""
    loop = asyncio.get_running_loop()
    dropped: asyncio.Future[None] = loop.create_future()
    num_views, numbers = len(views), itertools.count(1)

    def drop_one() -> None:  # must not hold the views itself
        if next(numbers) == num_views:
            loop.call_soon_threadsafe(dropped.set_result, None)

    for view in views:  # the last reference is dropped in a thread of pyzmq
        weakref.finalize(view, drop_one).atexit = False
    if not views:
        dropped.set_result(None)
    return dropped
