"""Serve the gRPC calls that control handles for every API server: Admin, and the status methods of Inference."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from coordinator.api.authentication import check_admin_key
from coordinator.api.exchange import write
from coordinator.api.overview import Overview
from coordinator.api.validation import MAX_ABORTED, check_count
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Registry
from coordinator.control.roles import CONFIRM_S
from coordinator.control.scheduler import Scheduler
from coordinator.dispatcher import Dispatcher
from protos import inference_pb2, inference_pb2_grpc
from protos.convert import PROTOCOL_VERSION, shape_from_wire
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, DEADLINE_EXCEEDED
from serving_core.version import VERSION

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1  # between two checks of a draining node


class AdminService(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Serve the Admin service. Methods raise RequestError, which the interceptor turns into a gRPC status."""

    def __init__(
        self, dispatcher: Dispatcher, overview: Overview, tell: Callable[[], None], *, has_admin_key: bool
    ) -> None:
        """Create the service. `tell` tells API servers of a change of the fleet."""
        self._dispatcher = dispatcher
        self._tell = tell
        self._has_admin_key = has_admin_key
        self._overview = overview
        self._reshaping = asyncio.Lock()

    async def SetRole(self, request: inference_pb2.SetRoleRequest, _: Any) -> inference_pb2.SetRoleResponse:
        """Change the role or the ranks of a node, and return its load once it has confirmed.

        The request sets either `role` or `shape` (tensor and pipeline ranks). Raises RequestError when neither is set,
        when the node is unknown or may not change, and when the node refuses, is lost or does not confirm within
        CONFIRM_S. Calls run one after the other, so that each call sees the previous result.
        """
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
        """Drain a node or the fleet: stream the number of requests left on it, at each change, until none is left.

        Raises RequestError when the node is unknown or may not be drained. The drain goes on when the client
        disconnects: every request has its deadline. A role change or the loss of the node ends its drain.
        """
        if request.all and request.node:
            raise RequestError(BAD_PARAM, "node and all cannot both be set", field="node")
        if request.all:
            logger.info("the fleet is draining: new calls are refused until a restart")
            self._dispatcher.drain()
            await self._count_down(context, lambda: self._dispatcher.num_live)
            return
        node = self._dispatcher.drain_node(request.node)
        await self._count_down(context, lambda: self._dispatcher.num_left(node))
        logger.info("%s %s is drained", node.kind, node.name)

    async def _count_down(self, context: Any, num_left: Callable[[], int]) -> None:
        told: int | None = None
        while told != 0:
            if (left := num_left()) != told:
                told = left
                await write(context, inference_pb2.DrainProgress(num_left=left))
            else:
                await asyncio.sleep(LOOK_S)

    async def LoadAdapter(self, request: inference_pb2.LoadAdapterRequest, _: Any) -> inference_pb2.LoadAdapterResponse:
        check_admin_key(has_admin_key=self._has_admin_key)
        await self._dispatcher.load_adapter(request.name, request.folder)
        self._tell()
        return inference_pb2.LoadAdapterResponse()

    async def UnloadAdapter(
        self, request: inference_pb2.UnloadAdapterRequest, _: Any
    ) -> inference_pb2.UnloadAdapterResponse:
        check_admin_key(has_admin_key=self._has_admin_key)
        num_live = self._dispatcher.unload_adapter(request.name)
        self._tell()
        return inference_pb2.UnloadAdapterResponse(num_live=num_live)

    async def GetOverview(self, request: inference_pb2.GetOverviewRequest, _: Any) -> inference_pb2.Overview:
        after = request.after if request.HasField("after") else None
        return self._overview.to_wire(time.monotonic(), after=after)


class StatusService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """Serve the status methods of Inference.

    Methods raise RequestError, which the interceptor turns into a gRPC status.
    """

    def __init__(
        self, registry: Registry, scheduler: Scheduler, dispatcher: Dispatcher, metrics: Metrics, *, instance_id: str
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
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
            await asyncio.sleep(0)  # lets other calls run between two aborts
        return response

    async def GetServerInfo(self, _request: Any, _context: Any) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse(
            version=VERSION,
            protocol_version=PROTOCOL_VERSION,
            uptime_s=time.monotonic() - self._start_s,
            instance_id=self._instance_id,
            nodes=[node.hello.node for node in self._registry.nodes],
        )

    async def GetLoads(self, _request: Any, _context: Any) -> inference_pb2.GetLoadsResponse:
        # Requests that have ended but that nodes have yet to release count as live: at 0 the fleet holds nothing.
        loads = [self._scheduler.load_of(node) for node in self._registry.nodes]
        return inference_pb2.GetLoadsResponse(
            nodes=loads, num_live_requests=self._scheduler.num_open, slo_classes=self._metrics.attainment.to_wire()
        )
