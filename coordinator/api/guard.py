"""Stands before a gRPC server whose calls take a key, and keeps strangers from what those with a key need.

gRPC reads whatever a client sends, counts and keeps it, before anybody can ask for the key, and knows no limit by
address. So connections come in here, and what they send goes on to gRPC over a socket of this machine. Until a call
of a connection has brought a key, what it sends is read along: a head has a limit, what has begun must end soon, and
all that comes of one address without a key is held to an allowance. Afterwards nothing is looked at any more. gRPC
itself refuses calls without a key, and answers those that need none.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from coordinator.api.authentication import BearerSecrets
from coordinator.api.connections import Connections, peer_of
from coordinator.api.http2_heads import EMPTY_SETTINGS, MAX_HEAD_BYTES, BadHead, HeadReader
from coordinator.api.sheds import CROWDED, MALFORMED, OVER_ALLOWANCE, SLOW, PortSheds, Sheds
from serving_core.descriptors import NONE_LEFT
from serving_core.ports import listening_sockets

# How much strangers may send: by peer, what it has left of an allowance that fills again. Pure: times come in.

MAX_PEERS: Final = 4096  # remembered, those that have sent something last


class Allowances:
    """Of each peer, as much as may come at once, and as much more each second."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most = most
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}  # what a peer had at which time; who sent last is last

    def take(self, peer: str, amount: float, now: float) -> bool:
        """Return whether the peer has this much, which is taken then, and else nothing."""
        left, then = self._left.pop(peer, (self._most, now))
        left = min(self._most, left + self._per_s * (now - then))
        has_enough = left >= amount
        self._left[peer] = left - amount if has_enough else left, now
        if len(self._left) > MAX_PEERS:
            del self._left[next(iter(self._left))]
        return has_enough


logger = logging.getLogger(__name__)

PREFACE_TIMEOUT_S: Final = 5.0  # from connecting to the end of the TLS handshake, and as long to speak HTTP/2
REQUEST_TIMEOUT_S: Final = 10.0  # for what a stranger has begun to send
ALLOWED_BYTES: Final = 2**18  # of strangers of one address at once
ALLOWED_BYTES_PER_S: Final = 2**15
BYTES_PER_HEAD, BYTES_PER_FRAME = 2**12, 2**9  # which each counts beside its own: so 8 calls a second
FREE_BYTES: Final = MAX_HEAD_BYTES + 2**11  # of each connection before its first call, whatever its address has left
PIECE_BYTES: Final = 2**10  # of what a stranger sends, that are read before the next look at its allowance
IDLE_DIAL_S: Final = 1.0  # until gRPC takes a connection without a call, which most of a flood do not live for
DIAL_TIMEOUT_S: Final = 5.0
FLUSH_S: Final = 10.0  # for a client to read what was sent to it last
BACKLOG: Final = 2048
ACCEPTS_AT_ONCE: Final = 8
ACCEPT_AGAIN_S: Final = 0.5  # where no descriptors were left
SHED: Final = "connections without a key are closed at the {} port (%s), so that others can come in: see /metrics"


class Guard:
    """Of one port. Must be made on a running event loop. `listen`, `start`, then `close` and `wait_closed` in any
    case."""

    def __init__(
        self,
        port: str,
        server_path: str,
        secrets: BearerSecrets,
        sheds: Sheds,
        *,
        max_connections: int,
        max_per_peer: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`port` is its name in figures; the gRPC server listens at the path of a unix socket."""
        self.secrets = secrets
        self.allowances = Allowances(ALLOWED_BYTES, ALLOWED_BYTES_PER_S)
        self.connections: Connections[_Client] = Connections(max_connections, max_per_peer)
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._server_path = server_path
        self._sheds = PortSheds(sheds, port, SHED.format(port))
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()  # connections in the making
        self._open: set[_Client] = set()
        self._is_empty = asyncio.Event()

    def listen(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """The port listened on; 0 takes a free one. Raises SettingsError."""
        self._sockets = listening_sockets(host, port, shares_port=shares_port, backlog=BACKLOG)
        number: int = self._sockets[0].getsockname()[1]
        return number

    def start(self) -> None:
        """Take connections from now on, after `listen`."""
        for each in self._sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Take no more connections."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()

    async def wait_closed(self, grace_s: float) -> None:
        """Let clients read what gRPC has sent them last, and then close the connections."""
        if self._open:
            self._is_empty.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), grace_s)
        for client in list(self._open):
            client.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        """Take some of those that have come: others have their turn before the next."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NONE_LEFT:  # kept_spares says so in the log
                    self._loop.remove_reader(listener)
                    self._loop.call_later(ACCEPT_AGAIN_S, self._go_on, listener)
                return
            accepted.setblocking(False)
            client = _Client(self, peer_of(address[0]))
            self._open.add(client)
            client.making = self.begin(self._make(client, accepted))
            if (closed := self.connections.add(client, client.peer)) is not None:
                closed.shed(CROWDED)

    def _go_on(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    async def _make(self, client: "_Client", accepted: socket.socket) -> None:
        """Shake hands, where that is to be done, before anything is read."""
        timeout_s = PREFACE_TIMEOUT_S if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: client, accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError too
            logger.debug("a connection could not be made: %s", error)
        finally:
            if client.transport is None:
                accepted.close()
                self.closed(client)

    def closed(self, client: "_Client") -> None:
        """Its connection has ended."""
        self._open.discard(client)
        self.connections.remove(client)
        if not self._open:
            self._is_empty.set()

    def count(self, reason: str) -> None:
        """A connection is closed for this reason."""
        self._sheds.count(reason)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this beside everything else."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def dial(self, client: "_Client") -> "_Server":
        """A connection to the gRPC server for the client. Raises OSError or TimeoutError."""
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.setblocking(False)
            ours.connect(self._server_path)  # at once, or not at all: uvloop itself knows no abstract sockets
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, server = await self._loop.create_unix_connection(lambda: _Server(client), sock=ours)
        except BaseException:
            ours.close()
            raise
        return server


class _End(asyncio.Protocol):
    """One end of a connection. Reads no faster than the other end can send on."""

    transport: asyncio.Transport | None = None
    other: "_End | None" = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.send(data)

    def send(self, data: bytes) -> None:
        """Send this to the other side, unless the connection is at its end."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.finish()

    def finish(self) -> None:
        """Close after what is still to be sent, which may take FLUSH_S."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self.transport.abort)

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()


class _Server(_End):
    """The end at the gRPC server."""

    def __init__(self, client: "_Client") -> None:
        self.other = client


class _Client(_End):
    """The end at the client, who is a stranger until it has brought a key."""

    def __init__(self, guard: Guard, peer: str) -> None:
        self.peer = peer
        self.making: asyncio.Task[None] | None = None  # until there is a transport
        self._guard = guard
        self._reader: HeadReader | None = HeadReader()  # of a stranger, and as long as there is something to leave out
        self._is_known = False
        self._num_bytes = 0  # that a stranger has sent, with what its frames count
        self._unsent: list[bytes] = []  # until gRPC has taken the connection
        self._is_dialing = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(PREFACE_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self._pass_on(data)
            return
        for start in range(0, len(data), PIECE_BYTES):
            if not self._read(data[start : start + PIECE_BYTES], self._reader):
                return
        if self._is_known and self._reader.has_acknowledged:
            self._pass_on(self._reader.rest())
            self._reader = None

    def _pass_on(self, data: bytes) -> None:
        """Send this to gRPC, or keep it for later where gRPC has yet to take the connection."""
        if self.other is not None:
            self.other.send(data)
        else:
            self._unsent.append(data)

    def _dial_once(self) -> None:
        """Have gRPC take the connection."""
        if not self._is_dialing and self.transport is not None and not self.transport.is_closing():
            self._is_dialing = True
            self.transport.pause_reading()
            self._guard.begin(self._dial())

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.closed(self)
        self._set_timer(None)
        super().connection_lost(exc)

    def shed(self, reason: str) -> None:
        """Close the connection for the sake of others."""
        self._guard.count(reason)
        if self.transport is None and self.making is not None:
            self.making.cancel()
        self.abort()

    def _read(self, data: bytes, reader: HeadReader) -> bool:
        """Pass on what the client may send; whether that is all. A connection that is closed is read no further."""
        if self.transport is None or self.transport.is_closing():
            return False
        had_preface, before = reader.has_preface, _cost(reader)
        try:
            passed, values = reader.feed(data)
        except BadHead:
            if reader.has_preface:
                self.shed(MALFORMED)
            else:
                self._turn_away()
            return False
        if values and not self._is_known and self._guard.secrets.holder(values) is not None:
            self._is_known = True
            reader.trust()
            self._guard.connections.set_busy(self)
            self._set_timer(None)
        if not self._is_known and not self._admits(len(data), reader, before):
            return False
        self._pass_on(passed)
        if reader.has_preface and not had_preface:
            self.send(EMPTY_SETTINGS)
            asyncio.get_running_loop().call_later(IDLE_DIAL_S, self._dial_once)
        if reader.num_heads:
            self._dial_once()
        return True

    def _turn_away(self) -> None:
        """Tell a client that speaks something else what is spoken here: one that wants TLS hears that there is none."""
        self._guard.count(MALFORMED)
        self.send(EMPTY_SETTINGS)
        self.finish()

    def _admits(self, num_bytes: int, reader: HeadReader, before: int) -> bool:
        """Whether a stranger may have sent this."""
        amount = num_bytes + _cost(reader) - before
        self._num_bytes += amount
        has_enough = self._guard.allowances.take(self.peer, amount, time.monotonic())
        if not has_enough and (reader.num_heads or self._num_bytes > FREE_BYTES):
            self.shed(OVER_ALLOWANCE)
            return False
        if reader.is_between_calls:
            self._set_timer(None)
        elif self._timer is None:
            self._set_timer(REQUEST_TIMEOUT_S)
        return True

    def _set_timer(self, wait_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if wait_s is None else loop.call_later(wait_s, self.shed, SLOW)

    async def _dial(self) -> None:
        try:
            server = await self._guard.dial(self)
        except (OSError, TimeoutError) as error:
            logger.error("the gRPC server behind its port cannot be reached: %s", error)
            self.abort()
            return
        if self.transport is None or self.transport.is_closing():
            server.abort()
            return
        self.other = server
        for data in self._unsent:
            server.send(data)
        self._unsent.clear()
        self.transport.resume_reading()


def _cost(reader: HeadReader) -> int:
    """What has been read counts so many bytes beside its own."""
    return BYTES_PER_HEAD * reader.num_heads + BYTES_PER_FRAME * reader.num_frames
