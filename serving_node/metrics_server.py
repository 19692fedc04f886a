"""Serve a node's metrics to Prometheus in a separate thread, one short call at a time.

The values are read on the node's event loop; formatting and sending happen in the thread.
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
from serving_core.net.ports import listened_on

logger = logging.getLogger(__name__)

READ_S: Final = 2.0  # for a client that sends or reads nothing
CALL_S: Final = 5.0  # for a whole call
FIGURES_S: Final = 2.0  # for the event loop to return the values
WAITING_CALLS: Final = 8
SHORTAGE_S: Final = 0.5  # between two attempts to accept while the process has no file descriptor left
PATH: Final = "/metrics"


class MetricsServer:
    """Serve metrics until `stop`. Create it on the event loop that runs `figures`."""

    def __init__(self, host: str, port: int, figures: Callable[[], Iterable[Figure]]) -> None:
        """Listen. Port 0 takes a free one. Raises SettingsError."""
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
        """Stop the server; return when no call is in progress."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _OnLoop(Collector):
    """Collect values of an event loop from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, figures: Callable[[], Iterable[Figure]]) -> None:
        self._loop = loop
        self._figures = figures

    def describe(self) -> list[Metric]:
        """Return nothing, since the metrics are known only when collected."""
        return []

    def collect(self) -> list[Metric]:
        """Return the metrics. Raises TimeoutError if the event loop does not respond within FIGURES_S."""
        future = asyncio.run_coroutine_threadsafe(self._taken(), self._loop)
        try:
            return future.result(FIGURES_S)
        finally:
            future.cancel()

    async def _taken(self) -> list[Metric]:
        return list(families(self._figures()))


class _Handler(MetricsHandler):
    """Handle one call."""

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
            with contextlib.suppress(OSError):  # the client may have stopped reading
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the node is too busy to tell")


class _Server(HTTPServer):
    request_queue_size = WAITING_CALLS

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without a name lookup of the address
        self.server_name, self.server_port = "", self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(SHORTAGE_S)  # otherwise the loop would retry at once
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
    with contextlib.suppress(OSError):  # the client has closed already
        request.shutdown(socket.SHUT_RDWR)
