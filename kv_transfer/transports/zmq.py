"""ZeroMQ over tcp and ipc: a ROUTER bound by the Listener, one DEALER for each receiver in the Dialer.

Payload frames leave without a copy, and are read in the buffers that ZeroMQ received them in. ZeroMQ accepts and
drops at will; the sessions above ask again for what did not come. It accepts whoever connects, too, and then gives
them SHAKE_MS to show the key of a ticket (ticket_key), or where it is encrypted one of their own (curve): until then
each of them has a descriptor of the process, and nothing else.
"""

import asyncio
import itertools
import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq

from kv_transfer.ends.alarm import Alarm
from kv_transfer.ends.host_memory import keep_freed_memory
from kv_transfer.errors import TransferError
from kv_transfer.payload import HOST, Payload
from kv_transfer.transports.curve import Keyring
from kv_transfer.transports.ticket_key import TicketKey
from kv_transfer.transports.transport import MAX_FRAMES, OnLost, OnMessage, OnReply
from kv_transfer.transports.zmq_inbox import Inbox
from kv_transfer.wire import MAX_PAYLOAD_BYTES
from serving_core.descriptors import NONE_LEFT, Spares, connections_within
from serving_core.errors import SettingsError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # of one Dialer; beyond them, the one used least recently makes room
CONNECTION_DESCRIPTORS = 4  # of one Dialer: the connection, its DEALER, and both ends of that one's monitor
SEND_QUEUE_MESSAGES = 4096  # to one receiver; their frames still lie in the pool
RECEIVE_QUEUE_MESSAGES = 8  # from one sender; ZeroMQ allocates their frames
TIMEOUT_MS = 3000
SHAKE_MS = 2000  # from being accepted to having shown the key
CLOSE_TIMEOUT_S = 5.0

IPC = "ipc://"
WILDCARDS = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")
# Could not be made; was lost; was not let in.
BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
READY = zmq.EVENT_HANDSHAKE_SUCCEEDED


class ZmqListener:
    """A Listener on an endpoint such as tcp://192.0.2.1:5600, tcp://eth0:* (any free port) or ipc:///run/node.sock.
    With a keyring its tcp connections are encrypted, and only those come in whose keys are on it."""

    payload: Payload = HOST

    def __init__(self, bind: str, keyring: Keyring | None = None) -> None:
        """Raises SettingsError when the endpoint cannot be used. Sets how this process keeps freed memory."""
        if bind.startswith(WILDCARDS):
            raise SettingsError(f"{bind} names no host that senders could dial: give an address or an interface")
        if bind.startswith(IPC) and len(bind) - len(IPC) > zmq.IPC_PATH_MAX_LEN:
            raise SettingsError(f"the path of {bind} is longer than {zmq.IPC_PATH_MAX_LEN} characters")
        keep_freed_memory()
        self._context = zmq.Context()
        self._router = _open_socket(self._context, zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a peer that is gone raises
        self._router.setsockopt(zmq.HANDSHAKE_IVL, SHAKE_MS)
        self._guard = keyring or TicketKey()
        self._questions = self._guard.guard(self._router, self._context)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(f"cannot listen for KV blocks on {bind}: {error.strerror}") from error

    @property
    def address(self) -> str:
        return self._guard.address_of(self._endpoint)

    @property
    def _endpoint(self) -> str:
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def allow(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._guard.allow(keys)

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._gate = Inbox(self._questions, partial(self._guard.answer, self._questions))
        self._inbox = Inbox(self._router, self._take)

    def reply(self, peer: Hashable, header: bytes) -> None:
        assert isinstance(peer, bytes)
        try:
            self._router.send_multipart([peer, header], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # unreachable, or its queue is full; it asks again if it still wants to know
            logger.warning("a reply to a sender was dropped: %s", error.strerror)
        self._inbox.nudge()

    async def close(self) -> None:
        endpoint = self._endpoint
        self._inbox.close()
        self._gate.close()
        self._context.destroy(linger=0)
        _remove_socket(endpoint)

    def _take(self, parts: list[zmq.Frame]) -> None:
        if not 2 <= len(parts) <= 2 + MAX_FRAMES:
            logger.warning("a message of %d frames was dropped", len(parts))
            return
        peer, header, *frames = parts
        self._on_message(peer.bytes, header.buffer, [frame.buffer for frame in frames])


class ZmqDialer:
    """A Dialer of the addresses of ZmqListeners, of encrypted ones with the keyring's key. It needs descriptors when it
    dials, even where others have taken all that are left: the spares are for that."""

    payload: Payload = HOST

    def __init__(self, keyring: Keyring | None = None, spares: Spares | None = None) -> None:
        self._keyring = keyring or Keyring()
        self._spares = spares
        self._max_connections = connections_within(MAX_CONNECTIONS, descriptors_each=CONNECTION_DESCRIPTORS)
        self._context = zmq.Context()
        # Its threads start with its first socket, and libzmq aborts the process where they find no descriptors then.
        self._context.socket(zmq.DEALER).close()
        self._connections: OrderedDict[str, _Connection] = OrderedDict()  # the one used last is last
        self._held: set[asyncio.Future[None]] = set()  # of messages whose frames ZeroMQ holds

    @property
    def key(self) -> bytes:
        return self._keyring.public

    def start(self, on_reply: OnReply, on_lost: OnLost) -> None:
        self._on_reply = on_reply
        self._on_lost = on_lost

    def connect(self, address: str) -> None:
        self._connection(address)

    def send(self, address: str, header: bytes, frames: Sequence[memoryview] = ()) -> asyncio.Future[None]:
        views = [memoryview(frame) for frame in frames]
        released = _when_dropped(views)
        self._held.add(released)
        released.add_done_callback(self._held.discard)
        try:
            self._connection(address).send([header, *views], released)
        except TransferError as error:
            logger.warning("a receiver cannot be dialled any more: %s", error)
            asyncio.get_running_loop().call_soon(self._on_lost, address)
        return released

    def hang_up(self, address: str) -> None:
        if address in self._connections:
            logger.warning("a receiver is silent: it is dialled again")
            self._lose(address)

    async def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._held:
            _, still_held = await asyncio.wait(self._held, timeout=CLOSE_TIMEOUT_S)
            if still_held:
                logger.error("ZeroMQ still holds the frames of %d messages", len(still_held))
        self._context.destroy(linger=0)

    def _connection(self, address: str) -> "_Connection":
        connection = self._connections.get(address)
        if connection is None:
            if len(self._connections) >= self._max_connections:
                self._lose(next(iter(self._connections)))
            if self._spares is not None:
                self._spares.release()
            try:
                connection = _Connection(
                    self._context, address, self._keyring, self._on_reply, lambda: self._lose(address)
                )
            except zmq.ZMQError as error:
                if error.errno in NONE_LEFT:
                    raise TransferError("no descriptor is left to dial the receiver with") from error
                raise TransferError("the ticket's address cannot be dialled") from error
            self._connections[address] = connection
        self._connections.move_to_end(address)
        return connection

    def _lose(self, address: str) -> None:
        self._connections.pop(address).close()
        asyncio.get_running_loop().call_soon(self._on_lost, address)


class _Connection:
    """One DEALER, and what tells when it breaks: ZeroMQ's own monitor; an alarm for a receiver that takes nothing any
    more, which no heartbeat of ZeroMQ's would notice, since its pings queue up behind the frames; and one for a
    connection that is not made in time, of which ZeroMQ says nothing where it has no descriptor for it."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keyring: Keyring,
        on_reply: OnReply,
        on_broken: Callable[[], None],
    ) -> None:
        with ExitStack() as on_error:
            self._dealer = on_error.enter_context(_open_socket(context, zmq.DEALER))
            monitor = on_error.enter_context(self._dealer.get_monitor_socket(BROKEN | READY))
            self._dealer.connect(keyring.prepare(self._dealer, address))
            on_error.pop_all()
        self._inbox = Inbox(self._dealer, lambda parts: on_reply(parts[0].buffer))
        self._events = Inbox(monitor, self._take_event)
        self._on_broken = on_broken
        self._late = Alarm(on_broken)
        self._late.set(asyncio.get_running_loop().time() + TIMEOUT_MS / 1000)
        self._stalled = Alarm(on_broken)
        self._num_held = 0  # messages with frames that ZeroMQ holds
        self._is_closed = False

    def send(self, parts: Sequence[bytes | memoryview], released: asyncio.Future[None]) -> None:
        try:
            self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            logger.warning("a message was dropped: %d wait for the receiver already", SEND_QUEUE_MESSAGES)
        self._inbox.nudge()
        if released.done():  # no frames: whether it has left says nothing of those that have not
            return
        self._num_held += 1
        if self._num_held == 1:
            self._restart_alarm()
        released.add_done_callback(self._release)

    def close(self) -> None:
        """Drops what is queued."""
        self._is_closed = True
        self._late.set(None)
        self._stalled.set(None)
        self._dealer.disable_monitor()
        self._events.close()
        self._inbox.close()

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


def _open_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
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


def _when_dropped(views: Sequence[memoryview]) -> asyncio.Future[None]:
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


def _remove_socket(address: str) -> None:
    """Removes the file of an ipc endpoint, which libzmq leaves."""
    if address.startswith(IPC):
        Path(address.removeprefix(IPC)).unlink(missing_ok=True)
