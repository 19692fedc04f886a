"""Serve HTTP with uvicorn on the coordinator's event loop, without uvicorn's signal handlers, clock and main loop.

uvicorn has no deadline for the headers of a request or for a client that stops reading, no limit of headers with
httptools, and no limit of connections. A `_Connection` stands between the socket and uvicorn's protocol and has them.
It calls uvicorn's protocol only by the methods of `asyncio.Protocol`, and learns from an ASGI middleware when calls
begin and end.
"""

import asyncio
import logging
import socket
import ssl
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.connections import CROWDED, HTTP, MALFORMED, SLOW, UNREAD, Connections, PortSheds, Sheds, peer_of
from coordinator.api.exchange import WRITE_TIMEOUT_S
from coordinator.api.http.errors import error_response
from coordinator.api.http.sse import CONNECTION, SEND
from serving_core.errors import RequestError
from serving_core.net.ports import listening_sockets
from serving_core.reasons import MALFORMED_REQUEST

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S: Final = 30.0  # from connecting, or the first byte of a later request, to the end of its headers
KEEP_ALIVE_S: Final = 75  # for an idle connection
MAX_BYTES_AHEAD: Final = 2**16  # of pipelined requests, while one is served
ABORT_S: Final = 1.0  # until calls have noticed that their connections are closed
MAX_HEAD_BYTES: Final = 2**16
MAX_CHUNKED_BYTES: Final = 2**23  # of a body of unknown length, with the framing of its chunks
MAX_TRAILERS: Final = 64
PROBE_S: Final = 0.1  # before the first probe of a half-closed connection; each later wait is twice the previous
MAX_BACKLOG: Final = 2048
BACKLOG_SHARE: Final = 4  # one in BACKLOG_SHARE of max_connections may wait to be accepted: each waits for a moment
PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"  # ignored by every client
SHED: Final = "connections are closed at the HTTP port (%s), so that others can come in: see /metrics"


class HttpServer:
    """HTTP server of one application on one port, over TLS with `tls`. Call `start` at most once; call `stop` in any
    case."""

    def __init__(
        self, app: ASGIApp, sheds: Sheds, *, max_connections: int, max_per_peer: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._connections: Connections[_Connection] = Connections(max_connections, max_per_peer)
        http = uvicorn.Config(app, http="httptools")
        http.load()
        connection: Any = partial(
            _Connection, http.http_protocol_class, self._connections, PortSheds(sheds, HTTP, SHED)
        )
        config = uvicorn.Config(
            _Watched(app),
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn would log a warning for each bad request
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # uvicorn's date needs its main loop, which polls
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=min(MAX_BACKLOG, max(1, max_connections // BACKLOG_SHARE)),
        )
        config.load()
        config.ssl = tls  # older versions of uvicorn take paths only
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self.sockets: list[socket.socket] = []  # set by `listen`

    def listen(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listen and return the port number; 0 chooses a free port.

        With `shares_port`, other processes of this user may listen at the same port. Raises SettingsError.
        """
        self.sockets = listening_sockets(host, port, shares_port=shares_port, backlog=self._server.config.backlog)
        number: int = self.sockets[0].getsockname()[1]
        return number

    async def start(self) -> None:
        """Start to serve, after `listen`."""
        await self._server.startup(sockets=self.sockets)

    async def stop(self, grace_s: float) -> None:
        """Close the port and idle connections, and after `grace_s` all other connections, which ends their calls."""
        if not self._server.started:
            for each in self.sockets:
                each.close()
            return
        tasks = self._server.server_state.tasks
        try:
            async with asyncio.timeout(grace_s):
                await self._server.shutdown(sockets=self.sockets)
        except TimeoutError:
            logger.warning("%d HTTP calls are cut off", len(tasks))
            for connection in list(self._connections):
                connection.abort()
            if tasks:
                await asyncio.wait(set(tasks), timeout=ABORT_S)


class _Watched:
    """ASGI middleware around all others, which tells a connection when its calls begin, have their body, and end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: _Connection = scope["state"][CONNECTION]

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message["more_body"]:
                connection.end_body()
            return message

        async def watched_send(message: Message) -> None:
            connection.has_response = True
            await send(message)

        connection.begin(scope)
        scope["state"][SEND] = send
        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            connection.end()


class _Transport:
    """The transport that uvicorn's protocol gets: its socket's, but for the refusal of a request."""

    def __init__(self, transport: asyncio.Transport, connection: "_Connection") -> None:
        self._transport = transport
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes of a response. While uvicorn parses, it writes only its own refusal, which is replaced."""
        if self._connection.is_parsing:
            self._connection.refuse("the request is no valid HTTP/1.1")
        else:
            self._transport.write(data)


class _Connection(asyncio.Protocol):
    """Connection with limits for slow clients, which hands bytes to uvicorn's protocol.

    It may stay idle while other connections have room, must send headers and read responses in time, and may close its
    sending side after a request and still get the response.
    """

    def __init__(
        self,
        http: Any,
        kept: "Connections[_Connection]",
        sheds: PortSheds,
        *,
        app_state: dict[str, Any],
        **options: Any,
    ) -> None:
        self.is_parsing = False
        self.has_response = False  # of the latest call: its response has begun
        self._http = http(app_state={**app_state, CONNECTION: self}, **options)  # the `state` of every call's scope
        self._kept = kept
        self._sheds = sheds
        self._loop = asyncio.get_running_loop()
        self._num_calls = 0
        self._has_body = False  # of the latest call: its body is read
        self._call_number = 0  # of the latest call
        self._probes = False  # whether the latest call is one of HTTP/1.1 without TLS, so that probes may be sent
        self._headers: list[Any] = []  # of the latest call; uvicorn adds its trailers
        self._most_headers = 0
        self._room = MAX_HEAD_BYTES  # bytes that may still come before the next call begins
        self._next_room = MAX_HEAD_BYTES  # after the latest call
        self._ahead = bytearray()  # received and not parsed yet
        self._is_ended = False  # uvicorn's protocol has been told that the connection is lost
        self.is_unread = False  # the client has not read all that was sent
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    # ---- what the socket says ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._http.connection_made(_Transport(transport, self))
        # With limit 0, any unread byte counts as a pause; over TLS reaching the limit already counts, so the limit is
        # 1.
        transport.set_write_buffer_limits(1 if self._is_tls else 0)
        self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self.shed, SLOW)
        peer = transport.get_extra_info("peername")
        if (closed := self._kept.add(self, peer_of(peer[0] if peer else ""))) is not None:
            closed.shed(CROWDED)

    def data_received(self, data: bytes) -> None:
        if self._ahead or self._reads_ahead:
            self._ahead += data
            if len(self._ahead) > MAX_BYTES_AHEAD:
                self._transport.pause_reading()
        else:
            self._parse(data)

    def eof_received(self) -> bool:
        """Return whether the connection stays open after the client has closed its sending side.

        The client may wait for its response or be gone. Only sending tells: the host of a client that is gone resets
        the connection. TLS has no half-closed connections.
        """
        if not self._is_tls:
            self._loop.call_soon(self._begin_probes)  # after the call whose request has just come
        return not self._is_tls

    def pause_writing(self) -> None:
        self.is_unread = True
        self._http.pause_writing()
        self._tell_whether_idle()
        self._watch_reader()

    def resume_writing(self) -> None:
        self.is_unread = False
        self._http.resume_writing()
        self._tell_whether_idle()
        self._cancel_timers(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._kept.remove(self)
        self.break_off()
        self._cancel_timers(self._head_timer, self._write_timer, self._probe_timer)

    # ---- what calls say ----

    def begin(self, scope: Scope) -> None:
        """Note that the headers of a call have come."""
        headers = dict(scope["headers"])
        length, is_chunked = headers.get(b"content-length", b"0"), b"transfer-encoding" in headers
        self._num_calls += 1
        self._call_number += 1
        self.has_response, self._has_body = False, False
        self._probes = not self._is_tls and scope["http_version"] == "1.1"
        self._headers, self._most_headers = scope["headers"], len(scope["headers"]) + MAX_TRAILERS
        self._next_room = MAX_HEAD_BYTES + (0 if is_chunked else int(length))
        self._room = MAX_HEAD_BYTES + MAX_CHUNKED_BYTES if is_chunked else self._next_room
        self._cancel_timers(self._head_timer)
        self._head_timer = None
        self._tell_whether_idle()
        if length == b"0" and not is_chunked:
            self.end_body()
        elif self._ahead:
            self._loop.call_soon(self._parse_ahead)  # its body

    def end_body(self) -> None:
        """Note that the body of the latest call is read. From now on bytes are kept, so that a disconnect is noticed
        and nothing is parsed ahead of its time."""
        self._has_body = True
        self._transport.resume_reading()  # uvicorn's protocol may have paused it

    def end(self) -> None:
        """Note that a call has ended."""
        self._num_calls -= 1
        self._tell_whether_idle()
        if self._num_calls == 0:
            if self._has_body:
                self._next_room = MAX_HEAD_BYTES
            self._room = min(self._room, self._next_room)
            self._loop.call_soon(self._settle, self._call_number)  # after the next call, if its request has come

    def write_chunk(self, data: bytes) -> None:
        """Send a part of a response in chunks that has begun, as uvicorn's protocol would."""
        if data and not self._is_ended:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def break_off(self) -> None:
        """Close the connection after the sent bytes, without the end of a whole response."""
        if not self._is_ended:
            self._is_ended = True
            self._http.connection_lost(None)  # closes the transport

    # ---- what uvicorn's protocol says ----

    def refuse(self, message: str) -> None:
        """Respond 400, unless a response has begun, and close the connection."""
        self._sheds.count(MALFORMED)
        if not self._num_calls or not self.has_response:
            self._transport.write(_bad_request(message))
        self._loop.call_soon(self.break_off)  # not while uvicorn parses

    # ---- timers and bytes ----

    def shed(self, reason: str) -> None:
        """Close the connection at once and count `reason`."""
        self._sheds.count(reason)
        self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _parse(self, data: bytes) -> None:
        if self._is_ended or self._transport.is_closing():
            return
        if self._num_calls == 0 and self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self.shed, SLOW)
        self._room -= len(data)
        self.is_parsing = True
        try:
            self._http.data_received(data)
        finally:
            self.is_parsing = False
        if self._room < 0 or len(self._headers) > self._most_headers:
            self._loop.call_soon(self._check_room)  # after a call whose headers have just come

    def _check_room(self) -> None:
        if self._room < 0 and not self._is_ended:
            num_bytes = self._next_room - self._room
            self.refuse(f"the headers have {num_bytes} bytes or more, the limit is {MAX_HEAD_BYTES}")
        elif len(self._headers) > self._most_headers > 0:
            self.refuse(f"the body has more than {MAX_TRAILERS} trailers")

    @property
    def _reads_ahead(self) -> bool:
        """Return whether received bytes are of later calls than the latest."""
        return self._num_calls > 0 and self._has_body

    def _parse_ahead(self) -> None:
        """Parse the bytes that have come ahead of their time, if it has come."""
        if self._ahead and not self._reads_ahead:
            self._transport.resume_reading()
            data, self._ahead = bytes(self._ahead), bytearray()
            self._parse(data)

    def _settle(self, latest: int) -> None:
        """Parse what has come ahead, or close a half-closed connection, unless a call has begun after the `latest`."""
        if self._ahead:
            self._parse_ahead()
        elif self._probe_timer is not None and self._num_calls == 0 and self._call_number == latest:
            self._transport.close()

    def _tell_whether_idle(self) -> None:
        """Report the connection as busy while a response is pending or unread, else as idle."""
        if self._num_calls or self.is_unread:
            self._kept.set_busy(self)
        else:
            self._kept.set_idle(self)

    def _begin_probes(self) -> None:
        begun = self._call_number if self.has_response else 0
        self._probe_timer = self._loop.call_later(PROBE_S, self._probe, PROBE_S, begun)
        self._loop.call_soon(self._settle, self._call_number)

    def _probe(self, wait_s: float, begun: int) -> None:
        """Send a probe, unless the response has started, which is a probe itself. Close the connection where no
        probe may be sent, and during the response `begun`, which the client had begun to read: it has left."""
        if not (self._reads_ahead and self._probes) or self._call_number == begun:
            self._transport.close()
            return
        if not self.has_response:
            self._transport.write(PROBE)
        self._probe_timer = self._loop.call_later(wait_s, self._probe, 2 * wait_s, begun)

    def _watch_reader(self) -> None:
        num_unread_bytes = self._transport.get_write_buffer_size()
        self._write_timer = self._loop.call_later(WRITE_TIMEOUT_S, self._check_reader, num_unread_bytes)

    def _check_reader(self, num_unread_bytes: int) -> None:
        if self._transport.get_write_buffer_size() < num_unread_bytes:
            self._watch_reader()
        else:
            self._sheds.count(UNREAD, f"a client has read nothing for {WRITE_TIMEOUT_S:g} s")
            self.abort()

    @staticmethod
    def _cancel_timers(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def _bad_request(message: str) -> bytes:
    response = error_response(RequestError(MALFORMED_REQUEST, message))
    head = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in response.raw_headers)]
    return b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)])
