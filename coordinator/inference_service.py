"""The public service: validate, tokenize, submit, stream."""

import asyncio
import importlib.metadata
import secrets
import time
from dataclasses import dataclass
from typing import Any, Final

from coordinator.dispatcher import Dispatcher
from coordinator.registry import Registry
from coordinator.tokenizer import Tokenizer
from coordinator.tracker import Tracker
from coordinator.validation import Limits, check_input, plan_answers
from engine.errors import RequestError
from engine.model_config import ModelConfig
from protos import inference_pb2
from protos.convert import PROTOCOL_VERSION
from protos.reasons import SLOW_READER

WRITE_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the coordinator knows of the model."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int  # before the nodes have their say


class InferenceService:
    """Serves Inference. Its methods raise RequestError; the interceptor turns it into a status."""

    def __init__(
        self,
        model: ServedModel,
        registry: Registry,
        tracker: Tracker,
        dispatcher: Dispatcher,
        *,
        max_logprobs: int,
        request_timeout_s: float,
    ) -> None:
        self._model = model
        self._registry = registry
        self._tracker = tracker
        self._dispatcher = dispatcher
        self._max_logprobs = max_logprobs
        self._request_timeout_s = request_timeout_s
        self._start_s = time.monotonic()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        arrived_s = time.monotonic()
        request.request_id = request.request_id or secrets.token_hex(16)
        check_input(request, self._limits())
        prompt = await self._tokenize(request)
        plan = plan_answers(request, prompt, self._limits())
        deadline_s = arrived_s + self._request_timeout_s
        if (remaining_s := context.time_remaining()) is not None:
            deadline_s = min(deadline_s, time.monotonic() + remaining_s)
        generation = self._dispatcher.submit(plan, arrived_s=arrived_s, deadline_s=deadline_s)
        try:
            while (response := await generation.next()) is not None:
                await _write(context, response)
        finally:  # a client that is gone shows as one of several exceptions, cancellation among them
            self._dispatcher.close(generation)

    async def Abort(self, request: inference_pb2.AbortRequest, _: Any) -> inference_pb2.AbortResponse:
        response = inference_pb2.AbortResponse()
        for request_id in request.request_ids:
            known = self._dispatcher.abort(request_id)
            (response.aborted if known else response.unknown).append(request_id)
        return response

    async def GetModelInfo(self, _request: Any, _context: Any) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(
            served_model_name=self._model.name,
            architecture=self._model.config.architecture,
            vocab_size=self._model.config.vocab_size,
            max_model_len=self._limits().max_model_len,
            eos_token_ids=self._model.config.eos_token_ids,
            has_chat_template=self._model.tokenizer.has_chat_template,
        )

    async def GetServerInfo(self, _request: Any, _context: Any) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse(
            version=importlib.metadata.version("splitserve"),
            protocol_version=PROTOCOL_VERSION,
            uptime_s=time.monotonic() - self._start_s,
            nodes=[node.hello.node for node in self._registry.nodes],
        )

    async def GetLoads(self, _request: Any, _context: Any) -> inference_pb2.GetLoadsResponse:
        # Live are also answers that have ended but that nodes have yet to let go of: at 0 the fleet holds nothing.
        loads = [node.load for node in self._registry.nodes]
        return inference_pb2.GetLoadsResponse(nodes=loads, num_live_requests=self._tracker.num_open)

    async def _tokenize(self, request: inference_pb2.GenerateRequest) -> list[int]:
        if request.HasField("text"):
            return await self._model.tokenizer.encode(request.text)
        if request.HasField("chat"):
            messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            return await self._model.tokenizer.encode_chat(messages)
        return list(request.tokenized.input_ids)

    def _limits(self) -> Limits:
        prefill, decode = self._registry.of_role("prefill"), self._registry.of_role("decode")
        lengths = [self._model.max_model_len]
        lengths += [max(node.hello.max_model_len for node in nodes) for nodes in (prefill, decode) if nodes]
        return Limits(
            served_model_name=self._model.name,
            vocab_size=self._model.config.vocab_size,
            max_model_len=min(lengths),
            max_logprobs=self._max_logprobs,
            prefill_pool_tokens=max((node.pool_tokens for node in prefill), default=None),
            decode_pool_tokens=max((node.pool_tokens for node in decode), default=None),
        )


async def _write(context: Any, response: inference_pb2.GenerateResponse) -> None:
    """Hands a message to gRPC, which has room for it unless the client has stopped reading."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(response)
    except TimeoutError as error:
        raise RequestError(SLOW_READER, f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from error
