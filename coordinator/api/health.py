"""Serve gRPC's health protocol at the coordinator's ports."""

from typing import Any, Final

from grpc_health.v1 import health, health_pb2

from protos import inference_pb2

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
OPEN_METHODS: Final = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"}  # need no key
OVERALL: Final = ""  # the name of the server as a whole
_Reply: Final = health_pb2.HealthCheckResponse


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """Report whether requests can be served, as the status of Inference. The server as a whole is always SERVING."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses = {OVERALL: _Reply.SERVING}

    async def report(self, *, is_serving: bool) -> None:
        """Set the status of the service Inference, and send the status to clients that watch it."""
        status = _Reply.SERVING if is_serving else _Reply.NOT_SERVING
        self._statuses[INFERENCE] = status
        await self.set(INFERENCE, status)

    @property
    def is_serving(self) -> bool:
        return bool(self._statuses.get(INFERENCE) == _Reply.SERVING)

    async def List(self, _request: Any, _context: Any) -> health_pb2.HealthListResponse:
        """Return the status of every service that Check knows. The library's servicer for asyncio has no List."""
        return health_pb2.HealthListResponse(
            statuses={service: _Reply(status=status) for service, status in self._statuses.items()}
        )
