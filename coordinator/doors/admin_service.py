"""The gRPC service for operators, on the public port."""

import asyncio
import logging
import time
from typing import Any, Final

from coordinator.control.overview import Overview
from coordinator.control.roles import CONFIRM_S
from coordinator.dispatcher import Dispatcher
from coordinator.doors.exchange import write
from protos import inference_pb2, inference_pb2_grpc
from protos.convert import shape_from_wire
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, DEADLINE_EXCEEDED

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1  # between two looks at what a node that drains has left


class AdminService(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Serves Admin. Its methods raise RequestError; the interceptor turns it into a status."""

    def __init__(self, dispatcher: Dispatcher, overview: Overview) -> None:
        self._dispatcher = dispatcher
        self._overview = overview
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
            what = f"has not confirmed its new shape within {CONFIRM_S:g} s, has refused it or was lost"
            raise RequestError(DEADLINE_EXCEEDED, f"node {node.name} {what}")
        return inference_pb2.SetRoleResponse(node=node.load)

    async def Drain(self, request: inference_pb2.DrainRequest, context: Any) -> None:
        """Tells what is left, each time that it has changed, until nothing is. The node drains on without a listener:
        every answer has its deadline. A role ends the drain, and so does the loss of the node."""
        node = self._dispatcher.drain_node(request.node)
        told: int | None = None
        while told != 0:
            if (num_left := self._dispatcher.num_left(node)) != told:
                told = num_left
                await write(context, inference_pb2.DrainProgress(num_left=num_left))
            else:
                await asyncio.sleep(LOOK_S)
        logger.info("%s %s is drained", node.kind, node.name)

    async def GetOverview(self, request: inference_pb2.GetOverviewRequest, _: Any) -> inference_pb2.Overview:
        after = request.after if request.HasField("after") else None
        return self._overview.to_wire(time.monotonic(), after=after)
