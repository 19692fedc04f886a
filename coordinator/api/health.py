"""gRPC's health service, as the coordinator's ports have it."""

from typing import Any, Final

from grpc_health.v1 import health, health_pb2

from protos import inference_pb2

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
OPEN_METHODS: Final = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"}  # that need no key
OVERALL: Final = ""  # the name of the whole server
_Reply: Final = health_pb2.HealthCheckResponse


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """Says whether requests can be answered, as the service Inference; the server as a whole always serves."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses = {OVERALL: _Reply.SERVING}

    async def report(self, *, is_serving: bool) -> None:
        """Take what is so from now on."""
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
