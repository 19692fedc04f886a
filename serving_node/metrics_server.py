"""Serves a node's figures to Prometheus, in a thread of its own: one call at a time, each of which ends soon.

The figures are taken on the node's event loop, between two of its turns, and are written and sent in the thread.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import HTTPServer
from socketserver import TCPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from serving_core.errors import SettingsError
from serving_core.figures import Figure, families
from serving_core.ports import listened_on

logger = logging.getLogger(__name__)

READ_S: Final = 2.0  # for a client that sends nothing, or takes nothing
CALL_S: Final = 5.0  # for a whole call
FIGURES_S: Final = 2.0  # for the event loop to tell the figures
WAITING_CALLS: Final = 8
SHORTAGE_S: Final = 0.5  # between two tries to accept while the process has no descriptor left
PATH: Final = "/metrics"


class MetricsServer:
    """Listens from the start to `stop`. Made on the event loop where `figures` is to be called."""

    def __init__(self, host: str, port: int, figures: Callable[[], Iterable[Figure]]) -> None:
        """Port 0 takes a free one. Raises SettingsError."""
        registry = CollectorRegistry(support_collectors_without_names=True)
        ProcessCollector(registry=registry)
        registry.register(_OnLoop(asyncio.get_running_loop(), figures))
        handler = type("Handler", (_Handler,), {"registry": registry})
        host = listened_on(host)
        try:
            self._server = (_ServerOfSix if ":" in host else _Server)((host, port), handler)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "no such address"
            raise SettingsError(f"--metrics-port {port} cannot be listened on at {host:.80}: {why}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.1], name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Returns when no call is served any more."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _OnLoop(Collector):
    """Figures that belong to an event loop, for another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, figures: Callable[[], Iterable[Figure]]) -> None:
        self._loop = loop
        self._figures = figures

    def describe(self) -> list[Metric]:
        """None before they are asked for."""
        return []

    def collect(self) -> list[Metric]:
        """Raises TimeoutError when the loop has no turn for it."""
        future = asyncio.run_coroutine_threadsafe(self._taken(), self._loop)
        try:
            return future.result(FIGURES_S)
        finally:
            future.cancel()

    async def _taken(self) -> list[Metric]:
        return list(families(self._figures()))


class _Handler(MetricsHandler):
    """One call."""

    timeout = READ_S
    server_version = "splitserve"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"figures are at {PATH}")
            return
        try:
            super().do_GET()
        except TimeoutError:
            self.close_connection = True
            with contextlib.suppress(OSError):  # it may be the client that has stopped reading
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the node is too busy to tell")


class _Server(HTTPServer):
    request_queue_size = WAITING_CALLS

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without looking up a name for the address
        self.server_name, self.server_port = "", self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(SHORTAGE_S)  # the call that cannot be accepted would be offered again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(CALL_S, _cut, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request(request, client_address)
        finally:
            deadline.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a call for metrics failed: %s", sys.exception())


class _ServerOfSix(_Server):
    address_family = socket.AF_INET6


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was faster
        request.shutdown(socket.SHUT_RDWR)
