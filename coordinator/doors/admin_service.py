"""The gRPC service for operators, on the public port."""

import asyncio
from typing import Any

from coordinator.control.roles import CONFIRM_S
from coordinator.dispatcher import Dispatcher
from protos import inference_pb2, inference_pb2_grpc
from protos.convert import shape_from_wire
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, DEADLINE_EXCEEDED


class AdminService(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Serves Admin. Its methods raise RequestError; the interceptor turns it into a status."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._reshaping = asyncio.Lock()

    async def SetRole(self, request: inference_pb2.SetRoleRequest, _: Any) -> inference_pb2.SetRoleResponse:
        """One after the other, so that each finds what the one before has made of the fleet."""
        match request.WhichOneof("to"):
            case "role":
                to: Any = request.role
            case "shape":
                to = shape_from_wire(request.shape)
            case _:
                raise RequestError(BAD_PARAM, "role or shape must be set", field="to")
        async with self._reshaping:
            node, shape = self._dispatcher.set_shape(request.node, to)
            await self._dispatcher.settled(node)
        if node.shape != shape:
            message = f"node {node.name} has not confirmed its new shape within {CONFIRM_S:g} s, or was lost"
            raise RequestError(DEADLINE_EXCEEDED, message)
        return inference_pb2.SetRoleResponse(node=node.load)
