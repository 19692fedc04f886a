"""Protect a gRPC server whose calls take a key from clients without a key.

gRPC reads, counts and keeps whatever a client sends before the key can be checked, and has no limit by address. A guard
accepts the connections instead and passes their bytes to gRPC over a local socket. Until a call of a connection has
brought a key, the guard parses the bytes: a head has a size limit, each frame, head and request must end in time, and
all bytes of one address without a key are held to an allowance. Afterwards the guard passes bytes unread. gRPC itself
refuses calls without a key and answers calls that need none.
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
from coordinator.api.connections import CROWDED, MALFORMED, OVER_ALLOWANCE, SLOW, Connections, PortSheds, Sheds, peer_of
from coordinator.api.http2_heads import EMPTY_SETTINGS, MAX_HEAD_BYTES, BadHead, HeadReader
from serving_core.net.descriptors import NONE_LEFT
from serving_core.net.ports import listening_sockets

# Allowance of each peer without a key: a token bucket. Reads no clock; callers pass the time.

MAX_PEERS: Final = 4096  # remembered; the peers that sent most recently


class Allowances:
    """Limit each peer to `most` at once and `per_s` more each second."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most = most
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}  # amount left and its time, by peer; most recent sender last

    def take(self, peer: str, amount: float, now: float) -> bool:
        """Take `amount` from the peer's allowance and return True, or take nothing and return False if less is left.

        `now` is in seconds of any clock that only goes forward.
        """
        left, then = self._left.pop(peer, (self._most, now))
        left = min(self._most, left + self._per_s * (now - then))
        has_enough = left >= amount
        self._left[peer] = left - amount if has_enough else left, now
        if len(self._left) > MAX_PEERS:
            del self._left[next(iter(self._left))]
        return has_enough


logger = logging.getLogger(__name__)

PREFACE_TIMEOUT_S: Final = 5.0  # for the TLS handshake, and again for the HTTP/2 preface
REQUEST_TIMEOUT_S: Final = 10.0  # for a client without a key to finish a frame, head or request
ALLOWED_BYTES: Final = 2**18  # at once, from clients of one address without a key
ALLOWED_BYTES_PER_S: Final = 2**15
BYTES_PER_HEAD, BYTES_PER_FRAME = 2**12, 2**9  # added for each head and frame: allows 8 calls a second
FREE_BYTES: Final = MAX_HEAD_BYTES + 2**11  # of each connection before its first call, beyond any allowance
PIECE_BYTES: Final = 2**10  # of a client without a key, between two checks of its allowance
IDLE_DIAL_S: Final = 1.0  # before gRPC takes a connection without a call; most connections of a flood end sooner
DIAL_TIMEOUT_S: Final = 5.0
FLUSH_S: Final = 10.0  # for a client to read the last bytes sent to it
BACKLOG: Final = 2048
ACCEPTS_AT_ONCE: Final = 8
ACCEPT_AGAIN_S: Final = 0.5  # when no descriptor is left
SHED: Final = "connections without a key are closed at the {} port (%s), so that others can come in: see /metrics"


class Guard:
    """Guard the port of one gRPC server. Must be created on a running event loop.

    Call `listen`, `start`, then `close` and `wait_closed` in any case.
    """

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
        """Create the guard of a port for the gRPC server that listens at the unix socket `server_path`.

        `port` is the port's name in metrics and logs. Closed connections are counted in `sheds`. With `tls`, clients
        must speak TLS, which ends here: the gRPC server gets plain bytes.
        """
        self.secrets = secrets
        self.allowances = Allowances(ALLOWED_BYTES, ALLOWED_BYTES_PER_S)
        self.connections: Connections[_Client] = Connections(max_connections, max_per_peer)
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._server_path = server_path
        self._sheds = PortSheds(sheds, port, SHED.format(port))
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()  # connections that are being made
        self._open: set[_Client] = set()
        self._is_empty = asyncio.Event()

    def listen(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Bind the address, listen, and return the port number; port 0 chooses a free one.

        `shares_port` lets several processes listen at the same port. Raises SettingsError when the address cannot be
        used.
        """
        self._sockets = listening_sockets(host, port, shares_port=shares_port, backlog=BACKLOG)
        number: int = self._sockets[0].getsockname()[1]
        return number

    def start(self) -> None:
        """Start to accept connections at the sockets that `listen` has opened."""
        for each in self._sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Stop accepting connections; those that are open continue until `wait_closed`."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()

    async def wait_closed(self, grace_s: float) -> None:
        """Wait up to `grace_s` until clients have read gRPC's last bytes, then close all connections."""
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
        """Accept up to ACCEPTS_AT_ONCE waiting connections, so that other callbacks run in between."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NONE_LEFT:  # kept_spares logs this
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
        """Complete the TLS handshake, if there is one, before any byte is read."""
        timeout_s = PREFACE_TIMEOUT_S if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: client, accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, TimeoutError) as error:  # includes ssl.SSLError
            logger.debug("a connection could not be made: %s", error)
        finally:
            if client.transport is None:
                accepted.close()
                self.closed(client)

    def closed(self, client: "_Client") -> None:
        """Forget a client whose connection has ended."""
        self._open.discard(client)
        self.connections.remove(client)
        if not self._open:
            self._is_empty.set()

    def count(self, reason: str) -> None:
        """Count, and now and then log, a connection that is closed for `reason`, one of connections.REASONS."""
        self._sheds.count(reason)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` as a background task, which `wait_closed` cancels, and return the task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def dial(self, client: "_Client") -> "_Server":
        """Connect to the gRPC server for the client, and return this connection.

        Raises OSError, or TimeoutError after DIAL_TIMEOUT_S.
        """
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.setblocking(False)
            ours.connect(self._server_path)  # never blocks; uvloop does not support abstract sockets
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, server = await self._loop.create_unix_connection(lambda: _Server(client), sock=ours)
        except BaseException:
            ours.close()
            raise
        return server


class _End(asyncio.Protocol):
    """One end of a connection, which reads no faster than the other end can send."""

    transport: asyncio.Transport | None = None
    other: "_End | None" = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.send(data)

    def send(self, data: bytes) -> None:
        """Send bytes to this end, unless its connection is closing."""
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
        """Close after the buffered bytes are sent, which may take FLUSH_S."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self.transport.abort)

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()


class _Server(_End):
    """The end of the connection at the gRPC server."""

    def __init__(self, client: "_Client") -> None:
        self.other = client


class _Client(_End):
    """The end of the connection at the client, which is untrusted until it has brought a key."""

    def __init__(self, guard: Guard, peer: str) -> None:
        self.peer = peer
        self.making: asyncio.Task[None] | None = None  # until there is a transport
        self._guard = guard
        self._reader: HeadReader | None = HeadReader()  # until a key and the SETTINGS acknowledgement
        self._is_known = False
        self._num_bytes = 0  # sent without a key, including the cost of frames
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
        """Send bytes to gRPC, or buffer them until gRPC has taken the connection."""
        if self.other is not None:
            self.other.send(data)
        else:
            self._unsent.append(data)

    def _dial_once(self) -> None:
        """Start to connect to gRPC, unless that has begun."""
        if not self._is_dialing and self.transport is not None and not self.transport.is_closing():
            self._is_dialing = True
            self.transport.pause_reading()
            self._guard.begin(self._dial())

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.closed(self)
        self._set_timer(None)
        super().connection_lost(exc)

    def shed(self, reason: str) -> None:
        """Close the connection at once and count `reason`."""
        self._guard.count(reason)
        if self.transport is None and self.making is not None:
            self.making.cancel()
        self.abort()

    def _read(self, data: bytes, reader: HeadReader) -> bool:
        """Pass on the bytes that the client may send. Returns False when the connection is closed and must not be read
        further."""
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
        """Send an empty SETTINGS frame and close, so that a client of another protocol, TLS included, fails at once."""
        self._guard.count(MALFORMED)
        self.send(EMPTY_SETTINGS)
        self.finish()

    def _admits(self, num_bytes: int, reader: HeadReader, before: int) -> bool:
        """Return whether the allowance covers these bytes; close the connection otherwise."""
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
    """Return the bytes that the heads and frames read count beside their length."""
    return BYTES_PER_HEAD * reader.num_heads + BYTES_PER_FRAME * reader.num_frames
