"""The gRPC service for operators, on the public port."""

import asyncio
from typing import Any, Final

from coordinator.control.tracker import Tracker
from coordinator.dispatcher import Dispatcher
from coordinator.doors.inference_service import write
from protos import inference_pb2, inference_pb2_grpc

LOOK_S: Final = 0.1  # between two looks at what is left


class AdminService(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Serves Admin. Its methods raise RequestError; the interceptor turns it into a status."""

    def __init__(self, dispatcher: Dispatcher, tracker: Tracker) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker

    async def Drain(self, request: inference_pb2.DrainRequest, context: Any) -> None:
        """Tells what is left, each time that it has changed, until nothing is. The node drains on without a listener:
        every answer has its deadline."""
        node = self._dispatcher.drain_node(request.node)
        told: int | None = None
        while told != 0:
            if (num_left := self._tracker.num_left(node)) != told:
                told = num_left
                await write(context, inference_pb2.DrainProgress(num_left=num_left))
            else:
                await asyncio.sleep(LOOK_S)
