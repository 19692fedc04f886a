"""Run uvicorn on the coordinator's event loop, without its signal handlers, clock and main loop."""

import asyncio
import logging
import socket
import ssl
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.api.connections import Connections, peer_of
from coordinator.api.exchange import WRITE_TIMEOUT_S
from coordinator.api.http.errors import error_response
from coordinator.api.http.sse import BREAK_OFF
from coordinator.api.sheds import CROWDED, HTTP, MALFORMED, SLOW, UNREAD, PortSheds, Sheds
from serving_core.errors import RequestError
from serving_core.net.ports import listening_sockets
from serving_core.reasons import MALFORMED_REQUEST

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S: Final = 30.0  # from connecting, or the first byte of a later request, to the end of its headers
KEEP_ALIVE_S: Final = 75  # for an idle connection
MAX_BYTES_AHEAD: Final = 2**16  # of pipelined requests, while one is served
ABORT_S: Final = 1.0  # until calls have noticed that their connections are closed
MAX_HEAD_BYTES: Final = 2**16
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
        config = uvicorn.Config(
            app,
            http=_connection_class(Connections(max_connections, max_per_peer), sheds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn would log a warning for each bad request
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # uvicorn's date needs its main loop, which polls
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
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
        state = self._server.server_state
        try:
            async with asyncio.timeout(grace_s):
                await self._server.shutdown(sockets=self.sockets)
        except TimeoutError:
            logger.warning("%d HTTP calls are cut off", len(state.tasks))
            for connection in list(state.connections):
                connection.transport.abort()
            if state.tasks:
                await asyncio.wait(set(state.tasks), timeout=ABORT_S)


class _Connection(H11Protocol):
    """Connection with limits for slow clients.

    It may stay idle while other connections have room, must send headers and read responses in time, and may close its
    sending side after a request and still get the response.
    """

    kept: "Connections[_Connection]"
    sheds: PortSheds
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, BREAK_OFF: self._break_off}  # the `state` of every call's scope

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With limit 0, any unread byte counts as a pause; over TLS reaching the limit already counts, so the limit is
        # 1.
        transport.set_write_buffer_limits(1 if self.scheme == "https" else 0)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.shed, SLOW)
        if (closed := self.kept.add(self, peer_of(self.client[0] if self.client else ""))) is not None:
            closed.shed(CROWDED)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timers(self._head_timer)
            self._head_timer = None
            self._listen_on()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.shed, SLOW)
        self._tell_whether_idle()

    def _tell_whether_idle(self) -> None:
        """Report the connection as busy while a response is pending or unread, else as idle."""
        if (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused:
            self.kept.set_idle(self)
        else:
            self.kept.set_busy(self)

    def _listen_on(self) -> None:
        """Resume reading, so that a disconnect is noticed; pipelined requests are kept for later, up to
        MAX_BYTES_AHEAD."""
        if not self.cycle.more_body and len(self.conn.trailing_data[0]) <= MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open after the client has closed its sending side.

        The client may wait for its response or be gone. Only sending tells: the host of a client that is gone resets
        the connection.
        """
        if self._probe_timer is None and self._is_owed_an_answer():
            self._probe(PROBE_S)
        return self._probe_timer is not None

    def _is_owed_an_answer(self) -> bool:
        """Return whether a response is pending that has not begun, so that probes may be sent.

        TLS has no half-closed connections.
        """
        if self.scheme == "https" or self.cycle is None or self.cycle.more_body or self.cycle.response_started:
            return False
        return bool(self.scope["http_version"] == "1.1")

    def _probe(self, wait_s: float) -> None:
        if not self.cycle.response_started:  # once it has started, the response itself is the probe
            self.transport.write(PROBE)
        self._probe_timer = self.loop.call_later(wait_s, self._probe, 2 * wait_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell_whether_idle()
        if self._probe_timer is not None and self.cycle.response_complete:  # not if another call was pipelined
            self.transport.close()

    def _break_off(self) -> None:
        """Close the connection after the sent bytes, without the end of a whole response."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Respond 400 to malformed HTTP, unless a response has begun, and close the connection."""
        self.sheds.count(MALFORMED)
        if (num_bytes := len(self.conn.trailing_data[0])) > MAX_HEAD_BYTES:
            msg = f"the headers have {num_bytes} bytes or more, the limit is {MAX_HEAD_BYTES}"
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_bad_request(msg))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._tell_whether_idle()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._tell_whether_idle()
        self._cancel_timers(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.kept.remove(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel_timers(self._head_timer, self._write_timer, self._probe_timer)

    def _watch_reader(self) -> None:
        num_unread_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self._check_reader, num_unread_bytes)

    def _check_reader(self, num_unread_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_unread_bytes:
            self._watch_reader()
        else:
            self.sheds.count(UNREAD, f"a client has read nothing for {WRITE_TIMEOUT_S:g} s")
            self.transport.abort()

    def shed(self, reason: str) -> None:
        """Close the connection at once and count `reason`."""
        self.sheds.count(reason)
        self.transport.abort()

    @staticmethod
    def _cancel_timers(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def _bad_request(message: str) -> bytes:
    response = error_response(RequestError(MALFORMED_REQUEST, message))
    head = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in response.raw_headers)]
    return b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)])


def _connection_class(kept: "Connections[_Connection]", sheds: Sheds) -> type[Any]:
    return type("Connection", (_Connection,), {"kept": kept, "sheds": PortSheds(sheds, HTTP, SHED)})
