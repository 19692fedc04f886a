"""The public gRPC service."""

import asyncio
import importlib.metadata
import logging
import secrets
import time
from typing import Any

from coordinator.control.metrics import Metrics
from coordinator.control.registry import Registry
from coordinator.control.tracker import Tracker
from coordinator.dispatcher import Dispatcher
from coordinator.doors.front import WRITE_TIMEOUT_S, Call, Front
from coordinator.doors.unknown_fields import WARNING_HEADER, unknown_in_message
from coordinator.doors.validation import MAX_ABORTED, check_count
from coordinator.traces.carrier import CARRIER, carrier_of
from protos import inference_pb2
from protos.convert import MAX_TOKENS_HEADER, MODEL_HEADER, PROTOCOL_VERSION
from serving_core.telemetry import CURRENT_REQUEST

logger = logging.getLogger(__name__)


class InferenceService:
    """Serves Inference. Its methods raise RequestError; the interceptor turns it into a status."""

    def __init__(
        self,
        front: Front,
        registry: Registry,
        tracker: Tracker,
        dispatcher: Dispatcher,
        metrics: Metrics,
        *,
        instance_id: str,
    ) -> None:
        self._front = front
        self._registry = registry
        self._tracker = tracker
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._instance_id = instance_id or secrets.token_hex(16)
        self._start_s = time.monotonic()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        request.request_id = request.request_id or secrets.token_hex(16)
        CURRENT_REQUEST.set(request.request_id)
        CARRIER.set(carrier_of(context.invocation_metadata()))
        if warning := self._front.unknown_fields.check(unknown_in_message(request)):
            context.set_trailing_metadata(((WARNING_HEADER, warning),))
        # A client that is gone shows as one of several exceptions, cancellation among them.
        async with self._front.answer(request, context.time_remaining()) as call:
            await context.send_initial_metadata(self._terms(request.model, call))
            while (response := await call.generation.next()) is not None:
                await write(context, response)

    def _terms(self, model: str, call: Call) -> tuple[tuple[str, str | bytes], ...]:
        """What a client that goes on with the answers at another server has to know of this call."""
        name = model or self._front.model.name
        return (MODEL_HEADER, name.encode()), (MAX_TOKENS_HEADER, str(call.max_tokens))

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        request.request_id = request.request_id or secrets.token_hex(16)
        if warning := self._front.unknown_fields.check(unknown_in_message(request)):
            context.set_trailing_metadata(((WARNING_HEADER, warning),))
        embedding = await self._front.embed(request, context.time_remaining())
        complete = embedding.complete
        return inference_pb2.EmbedResponse(
            request_id=request.request_id,
            embedding=embedding.vector,
            prompt_tokens=complete.prompt_tokens,
            cached_tokens=complete.cached_tokens,
            timeline=complete.timeline,
        )

    async def Abort(self, request: inference_pb2.AbortRequest, _: Any) -> inference_pb2.AbortResponse:
        check_count("request_ids", len(request.request_ids), MAX_ABORTED)
        response = inference_pb2.AbortResponse()
        for request_id in request.request_ids:
            known = self._dispatcher.abort(request_id)
            (response.aborted if known else response.unknown).append(request_id)
            await asyncio.sleep(0)  # others go on meanwhile
        return response

    async def GetModelInfo(self, _request: Any, _context: Any) -> inference_pb2.GetModelInfoResponse:
        model = self._front.model
        return inference_pb2.GetModelInfoResponse(
            served_model_name=model.name,
            architecture=model.config.architecture,
            vocab_size=model.config.vocab_size,
            max_model_len=self._front.limits().max_model_len,
            eos_token_ids=model.config.eos_token_ids,
            has_chat_template=model.tokenizer.has_chat_template,
            default_sampling_params=model.sampling_defaults,
            adapters=self._front.adapters,
            embedding_size=0 if model.config.embedder is None else model.config.hidden_size,
        )

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
        loads = [node.load for node in self._registry.nodes]
        return inference_pb2.GetLoadsResponse(
            nodes=loads, num_live_requests=self._tracker.num_open, slo_classes=self._metrics.attainment.to_wire()
        )


async def write(context: Any, response: Any) -> None:
    """Hands a message to gRPC, which has room for it unless the client has stopped reading. Raises CancelledError when
    it has for too long: gRPC still holds the message, and no status can follow it but the end of the connection."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(response)
    except TimeoutError:
        logger.warning("a client has read nothing for %g s", WRITE_TIMEOUT_S)
        raise asyncio.CancelledError from None
