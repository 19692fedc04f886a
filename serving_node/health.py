"""Serve gRPC's health service on its own port, for probes without secret or certificate.

    live     no step is stuck, and the process responds; otherwise a restart may help
    ready    the node is attached to the coordinator and is not stopping; the empty name reports the same

The port opens when the model is loaded. Checks run on the node's event loop, so a node that hangs
does not respond. The port exposes only these two states; the network must restrict access to it.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving_core.net.channels import SERVER_OPTIONS, listen
from serving_node.ranks.processes import is_first_here

logger = logging.getLogger(__name__)

LIVE: Final = "live"
READY: Final = "ready"
OVERALL: Final = ""
MAX_CALLS: Final = 64  # at a time; the same limit for connections
MAX_REQUEST_BYTES: Final = 4096
_OPTIONS: Final = (
    *SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CALLS),
)

States = Mapping[str, Callable[[], bool]]
"""The current state, by the name of a service."""


class _Settings(Protocol):
    @property
    def health_host(self) -> str: ...
    @property
    def health_port(self) -> int: ...


class _Node(Protocol):
    @property
    def is_stuck(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...


class _Link(Protocol):
    @property
    def is_attached(self) -> bool: ...


def node_states(node: _Node, link: _Link) -> States:
    """Return, for each service of gRPC's health check by name, a function that tells whether it is serving now.

    Of rank 0: LIVE is serving while no step is stuck; READY and OVERALL while the node is attached and not draining.
    """

    def is_ready() -> bool:
        return link.is_attached and not node.is_draining

    return {LIVE: lambda: not node.is_stuck, READY: is_ready, OVERALL: is_ready}


FOLLOWER_STATES: Final[States] = dict.fromkeys((LIVE, READY, OVERALL), lambda: True)
"""States of a follower, which ends with rank 0 and has no state of its own."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Replies to health checks with the current state. Watch is not supported, so that no call stays open."""

    def __init__(self, states: States) -> None:
        self._states = states

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"services are {LIVE} and {READY}")
        return self._reply(request.service)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses={name: self._reply(name) for name in self._states})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check")

    def _reply(self, name: str) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._states[name]() else status.NOT_SERVING)


@contextlib.asynccontextmanager
async def health_port(settings: _Settings, states: States) -> AsyncIterator[int]:
    """Serve gRPC health checks of these states while the context is open; its value is the port.

    The value is -1, and nothing is served, if the setting `health_port` is negative, or if this is not the machine's
    first rank. Raises SettingsError if it cannot listen on the port.
    """
    if settings.health_port < 0 or not is_first_here():
        yield -1
        return
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(states), server)
    port = listen(server, settings.health_host, settings.health_port)
    await server.start()
    logger.info("probes may dial port %d", port)
    try:
        yield port
    finally:
        await server.stop(None)
