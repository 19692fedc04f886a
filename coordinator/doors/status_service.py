"""The part of the public gRPC service that control answers, whatever door is asked."""

import asyncio
import importlib.metadata
import secrets
import time
from typing import Any

from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Registry
from coordinator.control.tracker import Tracker
from coordinator.dispatcher import Dispatcher
from coordinator.doors.validation import MAX_ABORTED, check_count
from protos import inference_pb2, inference_pb2_grpc
from protos.convert import PROTOCOL_VERSION


class StatusService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """Its methods raise RequestError; the interceptor turns it into a status."""

    def __init__(
        self, registry: Registry, tracker: Tracker, dispatcher: Dispatcher, metrics: Metrics, *, instance_id: str
    ) -> None:
        self._registry = registry
        self._tracker = tracker
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._instance_id = instance_id or secrets.token_hex(16)
        self._start_s = time.monotonic()

    async def Abort(self, request: inference_pb2.AbortRequest, _: Any) -> inference_pb2.AbortResponse:
        check_count("request_ids", len(request.request_ids), MAX_ABORTED)
        response = inference_pb2.AbortResponse()
        for request_id in request.request_ids:
            known = self._dispatcher.abort(request_id)
            (response.aborted if known else response.unknown).append(request_id)
            await asyncio.sleep(0)  # others go on meanwhile
        return response

    async def GetServerInfo(self, _request: Any, _context: Any) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse(
            version=importlib.metadata.version("splitserve"),
            protocol_version=PROTOCOL_VERSION,
            uptime_s=time.monotonic() - self._start_s,
            instance_id=self._instance_id,
            nodes=[node.hello.node for node in self._registry.nodes],
        )

    async def GetLoads(self, _request: Any, _context: Any) -> inference_pb2.GetLoadsResponse:
        # Live are also answers that have ended but that nodes have yet to let go of: at 0 the fleet holds nothing.
        loads = [self._tracker.load_of(node) for node in self._registry.nodes]
        return inference_pb2.GetLoadsResponse(
            nodes=loads, num_live_requests=self._tracker.num_open, slo_classes=self._metrics.attainment.to_wire()
        )
