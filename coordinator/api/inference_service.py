"""Serve the public gRPC service Inference."""

import asyncio
import secrets
from typing import Any, Protocol

from coordinator.api.exchange import WriteTimer
from coordinator.api.preprocess import Call, Preprocessor
from coordinator.api.unknown_fields import WARNING_HEADER, ClientRequest, unknown_in_message
from coordinator.traces.carrier import CARRIER, carrier_of
from protos import inference_pb2
from protos.convert import MAX_TOKENS_HEADER, MODEL_HEADER
from serving_core.process.telemetry import CURRENT_REQUEST


class Status(Protocol):
    """Methods that control handles. A gRPC stub of Inference fits too."""

    async def Abort(self, request: inference_pb2.AbortRequest, context: Any) -> inference_pb2.AbortResponse: ...
    async def GetServerInfo(self, request: Any, context: Any) -> inference_pb2.GetServerInfoResponse: ...
    async def GetLoads(self, request: Any, context: Any) -> inference_pb2.GetLoadsResponse: ...


class InferenceService:
    """Serve Inference. Methods raise RequestError, which the interceptor turns into a gRPC status."""

    def __init__(self, preprocessor: Preprocessor, status: Status) -> None:
        self._preprocessor = preprocessor
        self.Abort = status.Abort
        self.GetServerInfo = status.GetServerInfo
        self.GetLoads = status.GetLoads

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        self._arrived(request, context)
        # A disconnected client shows as one of several exceptions, cancellation among them.
        async with self._preprocessor.answer(request, context.time_remaining()) as call:
            await context.send_initial_metadata(self._terms(request.model, call))
            loop = asyncio.get_running_loop()
            with WriteTimer() as timer:
                while (message := await call.generation.next()) is not None:
                    response = inference_pb2.GenerateResponse(request_id=request.request_id, **message.fields())
                    timer.since_s = loop.time()
                    await context.write(response)
                    timer.since_s = None

    def _terms(self, model: str, call: Call) -> tuple[tuple[str, str | bytes], ...]:
        """Return the initial metadata that a client needs to resume the outputs at another server."""
        name = model or self._preprocessor.model.name
        return (MODEL_HEADER, name.encode()), (MAX_TOKENS_HEADER, str(call.max_tokens))

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        self._arrived(request, context)
        complete = await self._preprocessor.embed(request, context.time_remaining())
        return inference_pb2.EmbedResponse(
            request_id=request.request_id,
            embedding=complete.embedding,
            prompt_tokens=complete.prompt_tokens,
            cached_tokens=complete.cached_tokens,
            timeline=complete.timeline,
        )

    async def Score(self, request: inference_pb2.ScoreRequest, context: Any) -> inference_pb2.ScoreResponse:
        self._arrived(request, context)
        return await self._preprocessor.score(request, context.time_remaining())

    def _arrived(self, request: ClientRequest, context: Any) -> None:
        """Give the request an id if it has none, and set the warning for its unknown fields."""
        request.request_id = request.request_id or secrets.token_hex(16)
        CURRENT_REQUEST.set(request.request_id)
        CARRIER.set(carrier_of(context.invocation_metadata()))
        if warning := self._preprocessor.unknown_fields.check(unknown_in_message(request)):
            context.set_trailing_metadata(((WARNING_HEADER, warning),))

    async def GetModelInfo(self, _request: Any, _context: Any) -> inference_pb2.GetModelInfoResponse:
        model = self._preprocessor.model
        return inference_pb2.GetModelInfoResponse(
            served_model_name=model.name,
            architecture=model.config.architecture,
            vocab_size=model.config.vocab_size,
            max_model_len=self._preprocessor.limits().max_model_len,
            eos_token_ids=model.config.eos_token_ids,
            has_chat_template=model.tokenizer.has_chat_template,
            default_sampling_params=model.sampling_defaults,
            adapters=self._preprocessor.adapters,
            embedding_size=0 if model.config.embedder is None else model.config.hidden_size,
        )
