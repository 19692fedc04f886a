"""Transport messages by ZeroMQ over tcp and ipc.

The Listener binds one ROUTER; the Dialer has one DEALER for each receiver.

Payload frames are sent without a copy and read in ZeroMQ's receive buffers. Between processes of one machine they go
through shared memory if both ends allow it (kv_transfer/shared_memory). ZeroMQ may drop messages; the sessions request
missing blocks again. ZeroMQ accepts every connection and gives it SHAKE_MS to show the key of a descriptor
(zmq_keys), or its own key if encrypted. Until then a connection holds one file descriptor and the memory
of one frame.
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

from kv_transfer.payload import HOST, Payload
from kv_transfer.receiver import Alarm
from kv_transfer.results import TransferError
from kv_transfer.shared_memory import notes
from kv_transfer.shared_memory.sharing import MemoryReader, MemoryServer, MemoryWriter
from kv_transfer.transports.transport import MAX_FRAMES, OnLost, OnMessage, OnReply
from kv_transfer.transports.zmq_keys import ConnectionKey, Keyring
from kv_transfer.wire import MAX_PAYLOAD_BYTES
from serving_core.errors import SettingsError
from serving_core.net.descriptors import NONE_LEFT, Spares, connections_within
from serving_core.process.heap import keep_freed_memory


class Inbox:
    """Owns a ZeroMQ socket, and passes on its messages, one in each turn of the loop."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._take_one)
        self.nudge()

    def nudge(self) -> None:
        """Check for messages in the loop's next turn.

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
    """The Dialer's connection to one receiver: a DEALER socket, and alarms that detect a broken connection.

    ZeroMQ's monitor reports most breaks. An alarm detects a receiver that takes nothing any more; heartbeats of ZeroMQ
    would not, since pings queue behind the frames. Another alarm detects a connection that is not made in time, which
    ZeroMQ does not report if it lacks a file descriptor.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keyring: Keyring,
        memory_server: MemoryServer | None,
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
        self._memory_writer = None if memory_server is None else MemoryWriter(memory_server, self._send_note, on_broken)

    @property
    def shares_memory(self) -> bool:
        """Return whether blocks go through shared memory now."""
        return self._memory_writer is not None and self._memory_writer.is_accepted

    def send(self, header: bytes, frames: Sequence[memoryview]) -> asyncio.Future[None]:
        """Send a message, through shared memory if possible; return a future of when its frames may be reused.

        It is dropped, with a warning, if SEND_QUEUE_MESSAGES are queued.
        """
        if self._memory_writer is not None and (filled := self._memory_writer.write(frames)) is not None:
            note, released = filled
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
        if self._memory_writer is not None:
            self._memory_writer.close()
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

    def _send_note(self, note: notes.Note) -> None:
        self._queue([NO_HEADER, notes.encode(note)])

    def _take(self, parts: list[zmq.Frame]) -> None:
        header, *rest = parts
        if len(header) or not rest or self._memory_writer is None:
            self._on_reply(header.buffer)
            return
        try:
            self._memory_writer.handle(notes.decode(rest[0].buffer))
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
    """Select IPv4 or IPv6 for a socket, before it binds to or connects to this endpoint.

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


MAX_CONNECTIONS = 256  # of one Dialer; above, the least recently used one is closed
# The connection, its DEALER, both ends of the monitor; shared memory and its reader.
CONNECTION_DESCRIPTORS = 6
SHAKE_MS = 2000  # from accept to the key
CLOSE_TIMEOUT_S = 5.0

IPC = "ipc://"
WILDCARDS = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")


class ZmqListener:
    """The ZeroMQ Listener, on an endpoint tcp://HOST:PORT or ipc://PATH.

    HOST is an address or an interface; PORT may be * for any free one. With a keyring, tcp connections are encrypted,
    and only its keys can connect.
    """

    payload: Payload = HOST

    def __init__(self, bind: str, keyring: Keyring | None = None, *, shares_memory: bool = False) -> None:
        """Bind to the endpoint. Raises SettingsError if it cannot be used.

        Also sets how this process keeps freed memory.
        """
        if bind.startswith(WILDCARDS):
            raise SettingsError(f"{bind} names no host that senders could dial: give an address or an interface")
        if bind.startswith(IPC) and len(bind) - len(IPC) > zmq.IPC_PATH_MAX_LEN:
            raise SettingsError(f"the path of {bind} is longer than {zmq.IPC_PATH_MAX_LEN} characters")
        keep_freed_memory()
        self._shares_memory = shares_memory
        # Nothing here may refer to the Listener before it starts: a context that is deleted in a cycle waits for its
        # sockets without end.
        self._context = zmq.Context()
        self._router = open_socket(self._context, zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a disconnected peer raises
        self._router.setsockopt(zmq.HANDSHAKE_IVL, SHAKE_MS)
        self._guard = keyring or ConnectionKey()
        self._auth_socket = self._guard.guard(self._router, self._context)
        try:
            choose_family(self._router, bind)
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(f"cannot listen for KV blocks on {bind}: {error.strerror}") from error
        self._file = _file_of(self._endpoint)

    @property
    def num_shared_bytes(self) -> int:
        return self._memory_reader.num_bytes

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
        self._memory_reader = MemoryReader(self._send_note, is_willing=self._shares_memory)
        self._auth_inbox = Inbox(self._auth_socket, partial(self._guard.authenticate, self._auth_socket))
        self._inbox = Inbox(self._router, self._take)

    def reply(self, peer: Hashable, header: bytes) -> None:
        assert isinstance(peer, bytes)
        self._send([peer, header])

    async def close(self) -> None:
        endpoint = self._endpoint
        self._memory_reader.close()
        self._inbox.close()
        self._auth_inbox.close()
        self._context.destroy(linger=0)
        _remove_socket(endpoint, self._file)

    def _send_note(self, peer: bytes, note: notes.Note) -> None:
        self._send([peer, NO_HEADER, notes.encode(note)])

    def _send(self, parts: Sequence[bytes]) -> None:
        try:
            self._router.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # unreachable, or its queue is full; the sender repeats its Finish
            logger.warning("a reply to a sender was dropped: %s", error.strerror)
        self._inbox.nudge()

    def _take(self, parts: list[zmq.Frame]) -> None:
        if not 2 <= len(parts) <= 2 + MAX_FRAMES:
            logger.warning("a message of %d frames was dropped", len(parts))
            return
        peer, header, *frames = parts
        if len(header) or not self._take_note(peer.bytes, *frames):
            self._on_message(peer.bytes, header.buffer, [frame.buffer for frame in frames])

    def _take_note(self, peer: bytes, packed: zmq.Frame | None = None, *headers: zmq.Frame) -> bool:
        """Handle a note of shared memory. Return False if the frames are no note."""
        try:
            note = notes.decode(packed.buffer) if packed is not None else None
        except TransferError:
            return False
        match note, headers:
            case notes.Offer(), ():
                self._memory_reader.handle_offer(peer, note)
            case notes.SlotFilled(), (header,):
                if (copy := self._memory_reader.copy_slot(peer, note)) is not None:
                    self._on_message(peer, header.buffer, [copy])
            case _:
                return False
        return True


class ZmqDialer:
    """The ZeroMQ Dialer: sends to ZmqListeners, to encrypted ones with the keyring's key.

    `spares` are file descriptors reserved for dialing when the process has none left.
    """

    payload: Payload = HOST

    def __init__(
        self, keyring: Keyring | None = None, spares: Spares | None = None, *, shares_memory: bool = False
    ) -> None:
        self._keyring = keyring or Keyring()
        self._spares = spares
        self._max_connections = connections_within(MAX_CONNECTIONS, descriptors_each=CONNECTION_DESCRIPTORS)
        self._context = zmq.Context()
        # Start the threads now: libzmq aborts the process if they find no file descriptor.
        self._context.socket(zmq.DEALER).close()
        self._shares_memory = shares_memory
        self._memory_server: MemoryServer | None = None
        self._connections: OrderedDict[str, Connection] = OrderedDict()  # least recently used first
        self._held: set[asyncio.Future[None]] = set()  # messages whose frames ZeroMQ holds

    @property
    def key(self) -> bytes:
        return self._keyring.public

    @property
    def num_shared_bytes(self) -> int:
        return self._memory_server.num_bytes if self._memory_server is not None else 0

    def start(self, on_reply: OnReply, on_lost: OnLost) -> None:
        self._on_reply = on_reply
        self._on_lost = on_lost
        if self._shares_memory:
            try:
                self._memory_server = MemoryServer()
            except OSError as error:
                logger.warning("no memory is shared with receivers on this machine: %s", error.strerror)

    def connect(self, address: str) -> None:
        self._connection(address)

    def send(self, address: str, header: bytes, frames: Sequence[memoryview] = ()) -> asyncio.Future[None]:
        try:
            released = self._connection(address).send(header, frames)
        except TransferError as error:
            logger.warning("a receiver cannot be dialled any more: %s", error)
            asyncio.get_running_loop().call_soon(self._on_lost, address)
            return when_dropped([])
        self._held.add(released)
        released.add_done_callback(self._held.discard)
        return released

    def shares_with(self, address: str) -> bool:
        """Return whether blocks for the receiver at this address go through shared memory now."""
        return address in self._connections and self._connections[address].shares_memory

    def hang_up(self, address: str) -> None:
        if address in self._connections:
            logger.warning("a receiver is silent: it is dialled again")
            self._lose(address)

    async def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._memory_server is not None:
            self._memory_server.close()
        if self._held:
            _, still_held = await asyncio.wait(self._held, timeout=CLOSE_TIMEOUT_S)
            if still_held:
                logger.error("ZeroMQ still holds the frames of %d messages", len(still_held))
        self._context.destroy(linger=0)

    def _connection(self, address: str) -> Connection:
        connection = self._connections.get(address)
        if connection is None:
            if len(self._connections) >= self._max_connections:
                self._lose(next(iter(self._connections)))
            if self._spares is not None:
                self._spares.release()
            try:
                connection = Connection(
                    self._context,
                    address,
                    self._keyring,
                    self._memory_server,
                    self._on_reply,
                    lambda: self._lose(address),
                )
            except zmq.ZMQError as error:
                if error.errno in NONE_LEFT:
                    raise TransferError("no descriptor is left to dial the receiver with") from error
                raise TransferError("the descriptor's address cannot be dialled") from error
            self._connections[address] = connection
        self._connections.move_to_end(address)
        return connection

    def _lose(self, address: str) -> None:
        self._connections.pop(address).close()
        asyncio.get_running_loop().call_soon(self._on_lost, address)


def _file_of(address: str) -> tuple[int, int] | None:
    """Return the identity of an ipc endpoint's file, or None without a file."""
    if not address.startswith(IPC):
        return None
    try:
        found = Path(address.removeprefix(IPC)).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _remove_socket(address: str, file: tuple[int, int] | None) -> None:
    """Remove the file of an ipc endpoint, which libzmq leaves, unless another process listens there now."""
    if file is not None and _file_of(address) == file:
        Path(address.removeprefix(IPC)).unlink(missing_ok=True)
