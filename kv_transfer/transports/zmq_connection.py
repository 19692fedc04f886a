"""Connections of the ZeroMQ transport: keys, sockets on the event loop, and one connection to one receiver."""

import asyncio
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import zmq

from kv_transfer.ends.receiver import Alarm
from kv_transfer.results import TransferError
from kv_transfer.shared_memory import notes
from kv_transfer.shared_memory.lending import Lender, Loan
from kv_transfer.transports.curve import Keyring
from kv_transfer.transports.transport import OnReply
from kv_transfer.wire import MAX_PAYLOAD_BYTES


class Inbox:
    """Takes whole messages from one socket, one for each turn of the loop, and owns the socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._take_one)
        self.nudge()

    def nudge(self) -> None:
        """To be called after every other use of the socket: its descriptor announces a change only once, and to
        whoever looks first."""
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_one)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _take_one(self) -> None:
        if self._turn is not None:
            self._turn.cancel()  # of another turn, where the descriptor was faster; else this is it
            self._turn = None
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self.nudge()
            self._on_message(parts)


logger = logging.getLogger(__name__)

SEND_QUEUE_MESSAGES = 4096  # to one receiver; their frames still lie in the pool
RECEIVE_QUEUE_MESSAGES = 8  # from one sender; ZeroMQ allocates their frames
TIMEOUT_MS = 3000

# Could not be made; was lost; was not let in.
BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
READY = zmq.EVENT_HANDSHAKE_SUCCEEDED
NO_HEADER = b""  # in its place: the frame behind it is a note of shared memory, which may have a header behind it


class Connection:
    """One DEALER, and what tells when it breaks: ZeroMQ's own monitor; an alarm for a receiver that takes nothing any
    more, which no heartbeat of ZeroMQ's would notice, since its pings queue up behind the frames; and one for a
    connection that is not made in time, of which ZeroMQ says nothing where it has no descriptor for it."""

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
        self._num_held = 0  # messages with frames that ZeroMQ holds
        self._is_closed = False
        self._loan = None if lender is None else Loan(lender, self._tell, on_broken)

    @property
    def shares_memory(self) -> bool:
        """Whether blocks go through shared memory now."""
        return self._loan is not None and self._loan.is_taken

    def send(self, header: bytes, frames: Sequence[memoryview]) -> asyncio.Future[None]:
        """As Dialer.send."""
        if self._loan is not None and (lent := self._loan.lend(frames)) is not None:
            note, released = lent
            self._queue([NO_HEADER, notes.encode(note), header])
        else:
            views = [memoryview(frame) for frame in frames]
            released = when_dropped(views)
            self._queue([header, *views])
        if not released.done():  # else no frames: whether it has left says nothing of those that have not
            self._num_held += 1
            if self._num_held == 1:
                self._restart_alarm()
            released.add_done_callback(self._release)
        return released

    def close(self) -> None:
        """Drops what is queued."""
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
    """Before it binds or connects: IPv6 for its addresses alone, else libzmq would take an interface's IPv6 address
    where its name is given."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: the Dialer makes a new socket, with nothing queued in it
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a link that was cut in silence is noticed within half a minute
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    # No ZMTP heartbeats, on either side: libzmq aborts the process when a ping or a pong is due on a connection that
    # broke while its receive queue was full (libzmq issues 4364 and 4767).
    return socket


def when_dropped(views: Sequence[memoryview]) -> asyncio.Future[None]:
    """Done when nobody holds any of these view objects; pyzmq holds those that ZeroMQ still reads from."""
    loop = asyncio.get_running_loop()
    dropped: asyncio.Future[None] = loop.create_future()
    num_views, numbers = len(views), itertools.count(1)

    def drop_one() -> None:  # which may not hold the views itself
        if next(numbers) == num_views:
            loop.call_soon_threadsafe(dropped.set_result, None)

    for view in views:  # the last reference goes in a thread of pyzmq's
        weakref.finalize(view, drop_one).atexit = False
    if not views:
        dropped.set_result(None)
    return dropped
