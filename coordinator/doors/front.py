"""What every public door does with a request: check, tokenize, plan, submit. The doors differ in how they stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from coordinator.control.journal import Journal
from coordinator.control.registry import Registry
from coordinator.control.router import does
from coordinator.control.slo import SloClasses
from coordinator.dispatcher import Dispatcher
from coordinator.doors.generation import Generation
from coordinator.doors.unknown_fields import UnknownFields
from coordinator.doors.validation import Limits, check_input, plan_answers, prompt_limit
from coordinator.text.tokenizer import Tokenizer, TokenLimit
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.model_config import ModelConfig
from serving_core.reasons import DEADLINE_EXCEEDED
from serving_core.shapes import DECODE, PREFILL

WRITE_TIMEOUT_S: Final = 30.0  # for a client that has stopped reading, at every door


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the coordinator knows of the model."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int  # before the nodes have their say
    sampling_defaults: inference_pb2.SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is being answered: its prompt as token ids, and the answers as they come."""

    prompt: list[int]
    generation: Generation


class Front:
    """Takes the requests of all public doors."""

    def __init__(
        self,
        model: ServedModel,
        registry: Registry,
        dispatcher: Dispatcher,
        journal: Journal,
        *,
        max_logprobs: int,
        request_timeout_s: float,
        strict_fields: bool,
        slo_classes: SloClasses,
    ) -> None:
        self.model = model
        self.unknown_fields = UnknownFields(strict=strict_fields)
        self._registry = registry
        self._dispatcher = dispatcher
        self._journal = journal
        self._max_logprobs = max_logprobs
        self.request_timeout_s = request_timeout_s
        self._slo_classes = slo_classes

    @asynccontextmanager
    async def answer(
        self, request: inference_pb2.GenerateRequest, remaining_s: float | None = None
    ) -> AsyncIterator[Call]:
        """Begins the answers of a request that has an id. They end within remaining_s, and when the block is left,
        however it is left. Raises RequestError before the block when nothing can begin."""
        arrived_s = time.monotonic()
        timeout_s = self.request_timeout_s if remaining_s is None else min(self.request_timeout_s, remaining_s)
        with self.noting_refusal(request.request_id):
            limits = self.limits()
            check_input(request, limits)
            async with within(timeout_s):
                prompt = await self.tokenize(request, prompt_limit(limits))
            plan = plan_answers(request, prompt, self.limits(), self.model.sampling_defaults)
            slo = self._slo_classes.slo_of(request, len(prompt), self._registry.nodes)
            generation = self._dispatcher.submit(plan, slo, arrived_s=arrived_s, deadline_s=arrived_s + timeout_s)
        try:
            yield Call(prompt, generation)
        finally:
            self._dispatcher.close(generation)

    @contextmanager
    def noting_refusal(self, request_id: str) -> Iterator[None]:
        """Around what must succeed before a request can begin."""
        try:
            yield
        except RequestError as error:
            self._journal.refused(request_id, error)
            raise

    def is_ready(self, node_name: str) -> bool:
        """Whether a node of this name is attached and ready."""
        node = self._registry.find(node_name)
        return node is not None and node.is_ready

    async def tokenize(self, request: inference_pb2.GenerateRequest, limit: TokenLimit) -> list[int]:
        """The token ids of a request's input. Raises RequestError when there is no way to them, or are too many."""
        tokenizer = self.model.tokenizer
        if request.HasField("text"):
            return await tokenizer.encode(request.text, limit)
        if request.HasField("chat"):
            messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            return await tokenizer.encode_chat(messages, limit)
        return list(request.tokenized.input_ids)

    def limits(self) -> Limits:
        """What can be served at this moment."""
        prefill, decode = ([node for node in self._registry.nodes if does(node, role)] for role in (PREFILL, DECODE))
        lengths = [self.model.max_model_len]
        lengths += [max(node.hello.max_model_len for node in nodes) for nodes in (prefill, decode) if nodes]
        return Limits(
            served_model_name=self.model.name,
            vocab_size=self.model.config.vocab_size,
            max_model_len=min(lengths),
            max_logprobs=self._max_logprobs,
            prefill_pool_tokens=max((node.pool_tokens for node in prefill), default=None),
            decode_pool_tokens=max((node.pool_tokens for node in decode), default=None),
        )


@asynccontextmanager
async def within(timeout_s: float) -> AsyncIterator[None]:
    """Around what is done to a text: raises RequestError when it is not done in time."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"the tokenizer was not done within {timeout_s:g} s") from error
