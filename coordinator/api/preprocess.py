"""Preprocess a request of any API: validate, render, tokenize, plan and submit."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from coordinator.api.authentication import ASKER
from coordinator.api.control import Control
from coordinator.api.generation import Generation
from coordinator.api.prompts import (
    USUAL,
    WHAT_FITS,
    Terms,
    check_truncation,
    cut,
    question_of,
    tokenize,
    tokenize_cut,
    uncut_limit,
    within,
)
from coordinator.api.scoring import Item, check_items, plan_scores, response_of, tokenize_items
from coordinator.api.unknown_fields import UnknownFields
from coordinator.api.validation import (
    MAX_BAD_WORD_CHARS,
    Limits,
    RequestPlan,
    bad,
    check_count,
    check_input,
    check_num_sequences,
    check_prompt_length,
    check_token_ids,
    plan_request,
    prompt_limit,
)
from coordinator.control.request import NOTHING, SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answer_format import AnswerFormat
from coordinator.text.answers import AnswerText, TextOptions
from coordinator.text.constraints import Leeway
from coordinator.text.structures import Structures, constraint_of
from coordinator.text.tokenizer import Tokenizer, TokenLimit
from protos import inference_pb2
from protos.convert import FINISH_REASONS
from protos.inference_pb2 import EmbedRequest, GenerateRequest
from serving_core.errors import RequestError
from serving_core.model_files.config import Embedder, ModelConfig
from serving_core.reasons import ABORTED, BAD_PARAM
from serving_core.requests import Pooling, Request, SamplingParams, finish_reason


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model as the coordinator serves it. Clients may use any of its names; the first name is the primary one."""

    names: Sequence[str]
    config: ModelConfig
    tokenizer: Tokenizer
    answer_format: AnswerFormat
    structures: Structures
    max_model_len: int  # before the limits of the nodes
    sampling_defaults: inference_pb2.SamplingParams

    @property
    def name(self) -> str:
        return self.names[0]

    def name_in_responses(self, asked: str) -> str:
        """Return the model name for a response: the requested adapter's, else the primary name."""
        return asked if asked and asked not in self.names else self.name


@dataclass(frozen=True, slots=True)
class Call:
    """A request in flight: prompt token ids, the outputs as they come, and the largest length of each output."""

    prompt: list[int]
    generation: Generation
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can begin. Its outputs end at the deadline."""

    request: inference_pb2.GenerateRequest
    plan: RequestPlan
    beginnings: Sequence[tuple[SoFar, AnswerText]]
    deadline_s: float
    record: CallRecord


class Preprocessor:
    """Preprocess the requests of both APIs, gRPC and HTTP: validate, tokenize, plan and submit them to control."""

    def __init__(
        self,
        model: ServedModel,
        control: Control,
        *,
        max_logprobs: int,
        request_timeout_s: float,
        strict_fields: bool,
        max_sequences: int,
        slo_classes: Collection[str] = (),
    ) -> None:
        """Create the preprocessor for a model, whose requests go to `control`.

        Requests may ask for at most `max_logprobs` top logprobs, and last at most `request_timeout_s`. With
        `strict_fields`, a request with unknown fields is refused. `max_sequences` is the largest number of sequences in
        flight, over all clients, and `slo_classes` are the names of the operator's SLO classes.
        """
        self.model = model
        self.max_sequences = max_sequences
        self.slo_classes = slo_classes
        self.unknown_fields = UnknownFields(strict=strict_fields)
        self._control = control
        self._max_logprobs = max_logprobs
        self.request_timeout_s = request_timeout_s

    @asynccontextmanager
    async def answer(
        self, request: inference_pb2.GenerateRequest, remaining_s: float | None = None
    ) -> AsyncIterator[Call]:
        """Begin the outputs of a request that has an id, and yield the call.

        The outputs end within `remaining_s` seconds and in any case when the block is left. Raises RequestError before
        the block when nothing can begin.
        """
        async with self.prepared(request, remaining_s) as prepared, self.begun(prepared) as call:
            yield call

    @asynccontextmanager
    async def prepared(
        self,
        request: inference_pb2.GenerateRequest,
        remaining_s: float | None = None,
        terms: Terms = USUAL,
    ) -> AsyncIterator[Prepared]:
        """Validate, tokenize and plan a request without submitting it; yield what `begun` needs to submit it.

        The first half of `answer`: several requests of one call can so begin together or not at all. `remaining_s` are
        the seconds left for the request (None: request_timeout_s). `terms` are properties of the request that its
        message has no field for. Raises RequestError before the block. When the block is left, the call's trace ends.
        """
        operation = "chat" if request.HasField("chat") else "text_completion"
        with self._recorded(request.request_id, operation, request.model) as record:
            yield await self._prepare(request, remaining_s, terms, record)

    async def planned(self, request: inference_pb2.GenerateRequest, terms: Terms = USUAL) -> RequestPlan:
        """Validate, tokenize and plan a request as `prepared` does, and return the plan; there is no trace.

        Raises RequestError for an invalid request.
        """
        record = CallRecord(request.request_id, ASKER.get(), arrived_s=time.monotonic())
        return (await self._prepare(request, None, terms, record)).plan

    @asynccontextmanager
    async def begun(self, prepared: Prepared) -> AsyncIterator[Call]:
        """Submit a prepared request and yield the call, which is released when the block is left.

        The second half of `answer`; must be used within the block of `prepared`. Raises RequestError before the block.
        """
        plan, record, begun_s = prepared.plan, prepared.record, time.monotonic()
        with self.noting_refusal(record):
            generation = await self._control.begin(
                plan, prepared.beginnings, prepared.request, deadline_s=prepared.deadline_s, record=record
            )
        try:
            record.begun_s, record.num_prompt_tokens = begun_s, len(plan.prompt)
            record.sampling, record.num_sequences = plan.samplings[0], len(plan.samplings)
            yield Call(plan.prompt, generation, plan.samplings[0].max_tokens)
        finally:
            self._control.close(generation)

    async def _prepare(
        self,
        request: inference_pb2.GenerateRequest,
        remaining_s: float | None,
        terms: Terms,
        record: CallRecord,
    ) -> Prepared:
        timeout_s = self._timeout_s(remaining_s)
        with self.noting_refusal(record):
            check_writes(self.model.config)
            limits = self._limits_of(terms)
            check_input(request, limits)
            num_sequences = check_num_sequences(
                request.sampling_params, 1 + terms.num_prompts_behind, self.max_sequences
            )
            check_counts(request, limits)
            check_truncation(request, limits)
            has_grammar = constraint_of(request.sampling_params) is not None
            async with within(timeout_s, "the prompt and the grammar were" if has_grammar else "the prompt was"):
                uncut = await tokenize(self.model.tokenizer, request, uncut_limit(request, limits))
                grammar = await self._grammar(request.sampling_params, terms.leeway, uncut) if has_grammar else ""
                spelled = await spellings(self.model.tokenizer, request.sampling_params.bad_words)
            prompt = cut(uncut, request, limits, keeps_first=terms.keeps_first)
            limits = self._limits_of(terms)
            plan = plan_request(request, prompt, limits, self._defaults(terms.default_max_tokens), grammar, spelled)
            plan = replace(plan, num_behind=num_sequences - len(plan.samplings))
            so_far = read_so_far(request, plan, limits, self.model.config.eos_token_ids)
            after = prompt if grammar or not _begins_a_text(request) else ()  # a grammar counts the first blank
            beginnings = [await self._beginning(plan, each, after) for each in so_far]
        return Prepared(request, plan, beginnings, record.arrived_s + timeout_s, record)

    async def _grammar(self, params: inference_pb2.SamplingParams, leeway: Leeway, prompt: Sequence[int]) -> str:
        prompt_end = self.model.tokenizer.end_of(prompt)
        return await self.model.structures.grammar(params, leeway, prompt_end, ASKER.get())

    def _limits_of(self, terms: Terms) -> Limits:
        limits = self.limits()
        return replace(limits, min_output_tokens=0) if terms.drops_answers else limits

    def _defaults(self, max_tokens: int | None) -> inference_pb2.SamplingParams:
        """Return the model's sampling defaults, with `max_tokens` replaced if given."""
        if max_tokens is None:
            return self.model.sampling_defaults
        defaults = inference_pb2.SamplingParams()
        defaults.CopyFrom(self.model.sampling_defaults)
        defaults.max_tokens = max_tokens
        return defaults

    @contextmanager
    def _recorded(self, request_id: str, operation: str, model: str) -> Iterator[CallRecord]:
        """Yield the record of a call that has arrived; its trace ends when the block is left."""
        arrived_s = time.monotonic()
        record = CallRecord(
            request_id, ASKER.get(), operation=operation, model=model or self.model.name, arrived_s=arrived_s
        )
        with self._control.recorded(record):
            try:
                yield record
            except Exception as error:
                record.failure = error.reason if isinstance(error, RequestError) else type(error).__name__
                raise

    async def embed(
        self, request: inference_pb2.EmbedRequest, remaining_s: float | None = None
    ) -> inference_pb2.Complete:
        """Submit a request that has an id, wait for its end, and return its Complete message, with the embedding.

        `remaining_s` are the seconds left for the request (None: request_timeout_s). Raises RequestError when the
        request is refused, fails, is aborted or is late.
        """
        with self._recorded(request.request_id, "embeddings", request.model) as record:
            [complete] = await self._completes(await self._begin_embedding(request, remaining_s, record), 1)
            return complete

    async def score(
        self, request: inference_pb2.ScoreRequest, remaining_s: float | None = None
    ) -> inference_pb2.ScoreResponse:
        """Submit the prompts of a request that has an id, wait for their ends, and return the logprobs of its labels.

        `remaining_s` are the seconds left for the request (None: request_timeout_s). Raises RequestError when the
        request is refused, fails or is late.
        """
        with self._recorded(request.request_id, "score", request.model) as record:
            timeout_s = self._timeout_s(remaining_s)
            with self.noting_refusal(record):
                question = question_of(request)
                plan, items = await self._plan_scores(request, question, timeout_s)
                generation = await self._begin_prefills(plan, question, timeout_s, record)
            completes = await self._completes(generation, len(plan.samplings))
            return response_of(request.request_id, plan, items, completes)

    async def _plan_scores(
        self, request: inference_pb2.ScoreRequest, question: GenerateRequest, timeout_s: float
    ) -> tuple[RequestPlan, Sequence[Item]]:
        """Return the plan of a Score request, and its items as tokens; `question` has its other fields."""
        check_writes(self.model.config)
        # Nothing is decoded: neither an output token nor a decode node's pool bounds a prompt.
        limits = replace(self.limits(), min_output_tokens=0, decode_pool_tokens=None)
        check_input(question, limits)
        check_items(request)
        async with within(timeout_s, "the tokens were"):
            prompt, items = await tokenize_items(
                self.model.tokenizer, request, limits, self.model.answer_format.reasoning
            )
        return plan_scores(request, prompt, items, limits, self.max_sequences), items

    async def _begin_prefills(
        self, plan: RequestPlan, asked: GenerateRequest, timeout_s: float, record: CallRecord
    ) -> Generation:
        """Begin the sequences of a call that only prefills; `_completes` must follow."""
        beginnings = [await self._beginning(plan, NOTHING, ())] * len(plan.samplings)
        record.begun_s, record.num_prompt_tokens = time.monotonic(), plan.num_prompt_tokens
        deadline_s = record.arrived_s + timeout_s
        return await self._control.begin(plan, beginnings, asked, deadline_s=deadline_s, record=record)

    async def _completes(self, generation: Generation, num: int) -> list[inference_pb2.Complete]:
        """Return the ends of all `num` sequences of a call that only prefills, in order. Raises RequestError."""
        completes: dict[int, inference_pb2.Complete] = {}
        try:
            while (message := await generation.next()) is not None:
                if message.complete is None or not message.complete.embedding:
                    raise RequestError(ABORTED, f"request {generation.request_id} was aborted")
                completes[message.index] = message.complete
            return [completes[index] for index in range(num)]
        finally:
            self._control.close(generation)

    def _timeout_s(self, remaining_s: float | None) -> float:
        return self.request_timeout_s if remaining_s is None else min(self.request_timeout_s, remaining_s)

    async def _begin_embedding(
        self, request: inference_pb2.EmbedRequest, remaining_s: float | None, record: CallRecord
    ) -> Generation:
        timeout_s = self._timeout_s(remaining_s)
        with self.noting_refusal(record):
            embedder_of(self.model.config)
            question = question_of(request)
            limits = self.limits()
            check_input(question, limits)
            check_truncation(question, limits)
            async with within(timeout_s, "the tokens were"):
                prompt = await tokenize_cut(self.model.tokenizer, question, most_kept(request, limits), limits)
            plan = plan_embedding(request, prompt, limits, self.model.config)
            return await self._begin_prefills(plan, question, timeout_s, record)

    @property
    def adapters(self) -> Sequence[str]:
        """Return the names of the LoRA adapters that requests may give as their model."""
        return self._control.capacity().adapters or ()

    @property
    def num_live(self) -> int:
        """Return the number of sequences in flight or queued, over all API servers."""
        return self._control.num_live

    @contextmanager
    def noting_refusal(self, record: CallRecord) -> Iterator[None]:
        """Return a context manager that reports a RequestError raised inside as a refused call, and re-raises it."""
        try:
            yield
        except RequestError as error:
            self._control.refused(record, error)
            raise

    def why_not_ready(self) -> str:
        """Return why no request can be served at this moment; empty when requests can be served."""
        return self._control.why_not_ready()

    def is_ready(self, node_name: str) -> bool:
        """Return whether a node of this name is attached and ready."""
        return self._control.is_ready(node_name)

    async def _beginning(self, plan: RequestPlan, so_far: SoFar, after: Sequence[int]) -> tuple[SoFar, AnswerText]:
        """Return the resumed state of an output and its text, which follows the text of the tokens `after`.

        A stop string in the resumed text ends the output.
        """
        skips = plan.text.skip_special_tokens
        detokenizer = self.model.tokenizer.detokenizer(skip_special_tokens=skips, after=after)
        text = AnswerText(detokenizer, plan.text)
        if so_far.token_ids and not so_far.has_ended:
            await asyncio.to_thread(text.resume, so_far)
            if text.matched_stop is not None:
                so_far = replace(so_far, finish_reason=inference_pb2.FINISH_REASON_STOP)
        return so_far, text

    def limits(self) -> Limits:
        """Return the current limits for requests: those of the fleet and of the model."""
        there, own = self._control.capacity(), self.model.max_model_len
        return Limits(
            served_model_names=self.model.names,
            vocab_size=self.model.config.vocab_size,
            max_model_len=own if there.max_model_len is None else min(own, there.max_model_len),
            max_logprobs=self._max_logprobs,
            prefill_pool_tokens=there.prefill_pool_tokens,
            decode_pool_tokens=there.decode_pool_tokens,
            own_pool_tokens=there.own_pool_tokens,
            adapters=there.adapters,
            eos_token_ids=self.model.config.eos_token_ids,
            min_output_tokens=1 if self.model.config.embedder is None else 0,
        )


def _begins_a_text(request: inference_pb2.GenerateRequest) -> bool:
    """Return whether the output is a text of its own instead of a continuation of the prompt's text."""
    return request.HasField("chat") and not request.chat.continue_final_message


# ---- Bad words, as the token sequences that spell them ----

_LIMIT = TokenLimit(MAX_BAD_WORD_CHARS, lambda fewest: bad("bad_words", f"has one of at least {fewest} tokens"))


async def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> Collection[tuple[int, ...]]:
    """Return the token sequences that spell each word, at the start of a text and behind a space; each once.

    Raises RequestError for a word with more than MAX_BAD_WORD_CHARS tokens.
    """
    texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}"))
    runs = [await tokenizer.encode(text, _LIMIT, add_special_tokens=False) for text in texts]
    return dict.fromkeys(tuple(run) for run in runs if run)


# ---- Requests for embeddings: checked before any node gets them ----

NO_ANSWERS: Final = "the model makes embeddings, and generates no text"
NO_EMBEDDINGS: Final = "the model generates text, and makes no embeddings unless it is served with --runner pooling"


def check_writes(config: ModelConfig) -> None:
    """Raise RequestError if the model only makes embeddings, so that it cannot generate tokens."""
    if config.embedder is not None:
        raise RequestError(BAD_PARAM, NO_ANSWERS, field="model")


def embedder_of(config: ModelConfig) -> Embedder:
    """Return the model's embedder settings. Raises RequestError if the model generates text."""
    if config.embedder is None:
        raise RequestError(BAD_PARAM, NO_EMBEDDINGS, field="model")
    return config.embedder


def most_kept(request: EmbedRequest, limits: Limits) -> int | None:
    """Return the number of tokens to which a longer input is truncated, or None without truncation.

    -1 in the request means the longest prompt that `limits` allow. The value must have passed `check_truncation`.
    """
    if not request.HasField("truncate_prompt_tokens"):
        return None
    most, room = request.truncate_prompt_tokens, prompt_limit(limits).most
    return room if most == WHAT_FITS else most


def plan_embedding(request: EmbedRequest, prompt: list[int], limits: Limits, config: ModelConfig) -> RequestPlan:
    """Check a tokenized embedding request against the limits, and return its plan with the defaults filled in.

    `prompt` are its token ids. Raises RequestError for an empty or too long prompt, an unknown token id, and dimensions
    that the model does not support.
    """
    if not prompt:
        raise bad("input", "is empty: an embedding needs at least one token")
    check_prompt_length(len(prompt), limits)
    check_token_ids("input", prompt, limits)
    return RequestPlan(
        request_id=request.request_id,
        prompt=prompt,
        cache_salt=request.cache_salt,
        samplings=(SamplingParams(max_tokens=0),),
        text=TextOptions(),
        adapter="" if request.model in limits.served_model_names else request.model,
        pooling=pooling_of(request, config),
    )


def pooling_of(request: EmbedRequest, config: ModelConfig) -> Pooling:
    """Return the kind of pooling, normalization and dimensions that the request asks for, with the model's defaults.

    Raises RequestError if the model makes no embeddings, or not with these dimensions.
    """
    embedder = embedder_of(config)
    normalizes = request.normalize if request.HasField("normalize") else embedder.normalizes
    if not request.HasField("dimensions") or request.dimensions == config.hidden_size:
        return Pooling(embedder.kind, normalizes)
    asked = request.dimensions
    if not embedder.may_be_cut:
        why = "its config.json names neither is_matryoshka nor matryoshka_dimensions"
        raise bad("dimensions", f"({asked}) is not supported by the model, which has {config.hidden_size}: {why}")
    if not 1 <= asked <= config.hidden_size:
        raise bad("dimensions", f"must be within [1, {config.hidden_size}], not {asked}")
    if embedder.lengths and asked not in embedder.lengths:
        raise bad("dimensions", f"must be one of {', '.join(map(str, embedder.lengths))}, not {asked}")
    return Pooling(embedder.kind, normalizes, asked)


# Resumed outputs: a client continues outputs of an earlier, broken call. The server keeps nothing of that call, which
# may have run in another process; the client sends the tokens that it has.

MAX_SINCE_FIRST_S: Final = 86_400.0


def check_counts(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    """Raise RequestError if an entry of `so_far` has more tokens than `limits.max_model_len`.

    Call it before the prompt is tokenized; `read_so_far` checks the rest, such as the number of entries.
    """
    for each in request.so_far:
        check_count("so_far.token_ids", len(each.token_ids), limits.max_model_len)


def read_so_far(
    request: inference_pb2.GenerateRequest, plan: RequestPlan, limits: Limits, eos_token_ids: Sequence[int]
) -> tuple[SoFar, ...]:
    """Return, for each output of the plan, the part that the client already has from an earlier call.

    NOTHING for each output if the request has no `so_far`. Raises RequestError when the entries are not one for each
    output, an entry does not fit the plan, or a sampled request (temperature above 0) has no seed.
    """
    if not request.so_far:
        return (NOTHING,) * len(plan.samplings)
    if len(request.so_far) != len(plan.samplings):
        raise bad("so_far", f"must have one entry for each of n ({len(plan.samplings)}), not {len(request.so_far)}")
    if plan.samplings[0].temperature and not request.sampling_params.HasField("seed"):
        raise bad("seed", "is missing: a request resumes with the seed that it began with")
    found = []
    for each, sampling in zip(request.so_far, plan.samplings, strict=True):
        _check(each, sampling, limits)
        ending = _finish_reason(plan.prompt, each.token_ids, sampling, eos_token_ids)
        if not each.has_ended and not ending:
            check_prompt_length(len(plan.prompt) + len(each.token_ids), limits)
        found.append(SoFar(tuple(each.token_ids), each.num_chars, ending, each.since_first_s, each.has_ended))
    return tuple(found)


def _check(each: inference_pb2.OutputSoFar, sampling: SamplingParams, limits: Limits) -> None:
    if len(each.token_ids) > sampling.max_tokens:
        problem = f"has {len(each.token_ids)} output tokens, over max_tokens ({sampling.max_tokens})"
        raise bad("so_far", problem)
    check_token_ids("so_far", each.token_ids, limits)
    if not 0 <= each.since_first_s <= MAX_SINCE_FIRST_S:  # refuses NaN too
        problem = f"has since_first_s of {each.since_first_s:g}, which must be within [0, {MAX_SINCE_FIRST_S:g}]"
        raise bad("so_far", problem)


def _finish_reason(
    prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> inference_pb2.FinishReason:
    """Return how the last token ends the output, by the same rule as a node."""
    if not token_ids:
        return inference_pb2.FINISH_REASON_UNSPECIFIED
    so_far = Request("", 0, [*prompt, *token_ids], len(prompt), sampling)
    reason = finish_reason(so_far, eos_token_ids)
    return FINISH_REASONS[reason] if reason is not None else inference_pb2.FINISH_REASON_UNSPECIFIED
