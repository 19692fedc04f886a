"""What a door does not answer itself: passed on to control as it came, and its answer passed back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from coordinator.doors.exchange import write
from protos import inference_pb2_grpc
from serving_core.errors import RequestError
from serving_core.reasons import DEADLINE_EXCEEDED, DRAINING

DEADLINE_S: Final = 30.0


class ForwardedStatus:
    """What `StatusService` of doors/admin_service.py answers at control."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub) -> None:
        self._stub = stub

    async def Abort(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.Abort, request, context)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetServerInfo, request, context)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetLoads, request, context)


class ForwardedAdmin(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """What doors/admin_service.py answers at control."""

    def __init__(self, stub: inference_pb2_grpc.AdminStub) -> None:
        self._stub = stub

    async def SetRole(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.SetRole, request, context)

    async def GetOverview(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetOverview, request, context)

    async def Drain(self, request: Any, context: Any) -> None:
        async with _passing_back(context):
            async for progress in self._stub.Drain(request):
                await write(context, progress)


async def asked(method: Any, request: Any) -> Any:
    """What control says to a single question. Its deadline is not gRPC's, which goes by the wall clock. Raises
    RequestError or AioRpcError."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await method(request)
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"control has not answered within {DEADLINE_S:g} s") from error


async def _ask(method: Any, request: Any, context: Any) -> Any:
    async with _passing_back(context):
        return await asked(method, request)


@asynccontextmanager
async def _passing_back(context: Any) -> AsyncIterator[None]:
    """Control's status becomes that of the call, with its details."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
            raise RequestError(DRAINING, "control cannot be reached") from error
        await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
