"""Convert the messages of an output to the JSON of OpenAI's endpoints. Performs no I/O.

A response is an envelope with choices, one for each sequence. The envelope is common; the choices depend on the
endpoint's `ChoiceFormatter`, of which each call has its own.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.api.http.logprobs import (
    NOTHING,
    Echo,
    ScoredDeltas,
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    echo_of,
    prompt_logprobs,
)
from coordinator.api.http.messages import CONTENT, Delta, Deltas, Message
from coordinator.api.http.request_models import ASSISTANT
from coordinator.api.http.requests import ParsedRequest
from coordinator.api.validation import skips_special_tokens
from coordinator.control.instructions import FINISH_REASONS, Chunk
from coordinator.text.answer_format import PLAIN, AnswerFormat
from coordinator.text.reasoning import ThoughtCounter, ends_thinking
from coordinator.text.structures import constraint_of, may_begin_blank
from coordinator.text.tokenizer import Tokenizer
from protos.inference_pb2 import (
    FINISH_REASON_STOP,
    Attainment,
    Complete,
    SamplingParams,
    Timeline,
    TokenLogprobs,
)

UNKNOWN: Final = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params"))  # as in vLLM


@dataclass(slots=True)
class Output:
    """Messages of one output that have arrived."""

    prompt: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)  # prompt logprobs
    complete: Complete | None = None
    message: Message | None = None  # set for a chat

    def add(self, chunk: Chunk) -> None:
        if self.message is not None:
            self.message.feed(chunk.text)
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.scores += chunk.prompt_logprobs


class ChoiceFormatter(ABC):
    """Format of the choices of one call."""

    id_prefix: str
    whole_object: str
    event_object: str

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self.parsed = parsed
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer.token_bytes, as_ids=parsed.tokens_as_ids)

    def envelope(self, request_id: str, model: str) -> "Envelope":
        """Return the fields around the choices."""
        return Envelope(self, request_id, model)

    def new_output(self, prompt: list[int]) -> Output:
        """Return an empty Output for one output."""
        return Output(prompt)

    def num_thought_tokens(self, index: int, prompt: list[int], chunk: Chunk) -> int | None:
        """Return the number of thinking tokens of all outputs, this chunk included; None for a model without
        thoughts."""
        return None

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice that begins the events of an output, or None."""

    @abstractmethod
    def pieces(self, index: int, prompt: list[int], chunk: Chunk) -> list[dict[str, Any] | str]:
        """Return the choices for a chunk's events, in the order of the output; a text stands for its `text_choice`."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return the choice of an event that has a text and nothing else."""

    @abstractmethod
    def closing(self, index: int, complete: Complete) -> list[dict[str, Any]]:
        """Return the choices of an output's last events, one an event.

        They hold the text that was held back, if any. The last one also tells how the output ended (`complete`).
        """

    @abstractmethod
    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """Return the choice with a whole output."""

    def end_of(self, complete: Complete) -> dict[str, Any]:
        """Return how an output ended, and its SLO attainment if it had an SLO.

        As in vLLM, stop_reason is the stop string or the token of stop_token_ids, and null at the model's own end
        token.
        """
        matched = complete.WhichOneof("matched_stop")
        stop_reason = getattr(complete, matched) if matched else None
        if matched == "matched_token_id" and stop_reason not in self._params.stop_token_ids:
            stop_reason = None
        end: dict[str, Any] = {"finish_reason": FINISH_REASONS[complete.finish_reason], "stop_reason": stop_reason}
        if complete.error:
            end["error"] = {"message": complete.error}
        if complete.HasField("attainment"):
            end["attainment"] = attainment_object(complete.attainment)
        return {**end, "timeline": timeline_object(complete.timeline)} if self.parsed.include_timeline else end

    def token_ids(self, token_ids: list[int]) -> dict[str, Any]:
        """Return the `token_ids` field, null unless requested."""
        return {"token_ids": token_ids if self.parsed.return_token_ids else None}

    def prompt_token_ids(self, prompt: list[int]) -> dict[str, Any]:
        """Return the `prompt_token_ids` field, null unless requested."""
        return {"prompt_token_ids": prompt if self.parsed.return_token_ids else None}

    def scores(self, scores: list[TokenLogprobs]) -> dict[str, Any]:
        """Return the `prompt_logprobs` field, null unless requested."""
        told = prompt_logprobs(scores, self._tokenizer.token_bytes) if self.parsed.is_scored else None
        return {"prompt_logprobs": told}

    @property
    def _params(self) -> SamplingParams:
        """Sampling parameters, which all requests of a call share."""
        return self.parsed.requests[0].sampling_params

    def envelope_extras(self, prompt: list[int]) -> dict[str, Any]:
        """Return fields besides the choices, for a whole response and the first event."""
        return {}

    def envelope_scores(self, scores: list[TokenLogprobs]) -> dict[str, Any]:
        """Return fields besides the choices, for a whole response."""
        return {}


class CompletionFormatter(ChoiceFormatter):
    """Format of /v1/completions."""

    id_prefix = "cmpl-"
    whole_object = event_object = "text_completion"

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        super().__init__(parsed, tokenizer)
        self._offsets: dict[int, TextOffsets] = {}
        self._has_begun: set[int] = set()

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def pieces(self, index: int, prompt: list[int], chunk: Chunk) -> list[dict[str, Any] | str]:
        if index not in self._has_begun:
            self._has_begun.add(index)
            choice = self._first_choice(index, prompt, list(chunk.prompt_logprobs), chunk.text, list(chunk.logprobs))
        elif chunk.logprobs or self.parsed.return_token_ids:
            choice = self._choice(index, prompt, chunk.text, list(chunk.logprobs))
        else:
            return [chunk.text]
        return [self._open(choice, list(chunk.token_ids))]

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._open({"index": index, "text": text, "logprobs": None}, [])

    def _open(self, choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return {**choice, "finish_reason": None, "stop_reason": None, **self.token_ids(token_ids)}

    def closing(self, index: int, complete: Complete) -> list[dict[str, Any]]:
        return [{"index": index, "text": "", "logprobs": None, **self.end_of(complete)}]

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        assert output.complete is not None, "the output has not ended"
        return {
            **self._first_choice(index, output.prompt, output.scores, output.text, output.logprobs),
            **self.end_of(output.complete),
            **self.scores(output.scores),
            **self.token_ids(output.token_ids),
        }

    def _first_choice(
        self, index: int, prompt: list[int], scores: list[TokenLogprobs], text: str, logprobs: list[TokenLogprobs]
    ) -> dict[str, Any]:
        echo = self._echo(index, prompt) if self.parsed.echoes else NOTHING
        choice = self._choice(index, prompt, echo.text + text, logprobs, echo, scores)
        return {**choice, **self.prompt_token_ids(prompt)}

    def _echo(self, index: int, prompt: list[int]) -> Echo:
        """Return the echo of the client's text; of a truncated prompt, the echo of its remaining tokens."""
        request = self.parsed.requests[index // self.parsed.num_sequences]
        is_whole_text = request.HasField("text") and not request.HasField("truncate_prompt_tokens")
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        return echo_of(prompt, detokenizer, request.text if is_whole_text else None)

    def _choice(
        self,
        index: int,
        prompt: list[int],
        text: str,
        logprobs: list[TokenLogprobs],
        echo: Echo = NOTHING,
        scores: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        """Return a choice. `scores` are the logprobs of an echoed prompt's tokens after the first."""
        has_logprobs = self._params.HasField("logprobs") and bool(logprobs or echo.offsets)
        told = self._logprobs(index, prompt, logprobs, echo, scores) if has_logprobs else None
        return {"index": index, "text": text, "logprobs": told}

    def _logprobs(
        self,
        index: int,
        prompt: list[int],
        logprobs: list[TokenLogprobs],
        echo: Echo,
        scores: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        if index not in self._offsets:
            skips = skips_special_tokens(self._params)
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skips, after=prompt)
            self._offsets[index] = TextOffsets(detokenizer, len(echo.text))
        offsets = [*echo.offsets, *self._offsets[index].add(item.token_id for item in logprobs)]
        if not echo.offsets:
            return completion_logprobs(logprobs, offsets, self._names)
        return completion_logprobs([*scores, *logprobs], offsets, self._names, unscored=prompt[:1])


class ChatFormatter(ChoiceFormatter):
    """Format of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer, answer_format: AnswerFormat = PLAIN) -> None:
        super().__init__(parsed, tokenizer)
        self._format = answer_format
        self._deltas: dict[int, Deltas] = {}
        self._scored: dict[int, ScoredDeltas] = {}
        self._thoughts: dict[int, ThoughtCounter] = {}

    def new_output(self, prompt: list[int]) -> Output:
        return Output(prompt, message=Message(self._new_deltas(prompt)))

    def num_thought_tokens(self, index: int, prompt: list[int], chunk: Chunk) -> int | None:
        if not self._format.thinks:
            return None
        if index not in self._thoughts:
            reasoning = self._format.reasoning
            has_begun = ends_thinking(self._tokenizer.end_of(prompt), reasoning)
            self._thoughts[index] = ThoughtCounter(self._tokenizer.token_bytes, reasoning, has_begun=has_begun)
        self._thoughts[index].add(chunk.token_ids)
        return sum(thoughts.num_tokens for thoughts in self._thoughts.values())

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": ASSISTANT, "content": self._echo(index)}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def pieces(self, index: int, prompt: list[int], chunk: Chunk) -> list[dict[str, Any] | str]:
        if index not in self._deltas:
            self._begin(index, prompt)
        if index in self._scored:
            return [self._choice(index, delta, items) for delta, items in self._scored[index].feed(chunk)]
        deltas = self._deltas[index].feed(chunk.text)
        if not (chunk.logprobs or self.parsed.return_token_ids):
            return [each[CONTENT] if CONTENT in each else self._choice(index, each) for each in deltas]
        # The first event has the logprobs and token ids of the whole chunk.
        first = self._choice(index, deltas[0] if deltas else {}, chunk.logprobs, chunk.token_ids)
        return [first, *(self._choice(index, delta) for delta in deltas[1:])]

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, {CONTENT: text})

    def closing(self, index: int, complete: Complete) -> list[dict[str, Any]]:
        deltas = self._deltas.get(index)
        choices: list[dict[str, Any]] = []
        if index in self._scored:
            choices = [self._choice(index, delta, items) for delta, items in self._scored[index].finish()]
        elif deltas is not None:
            choices = [self._choice(index, delta) for delta in deltas.finish()]
        *others, last = choices or [self._choice(index, {})]
        del last["token_ids"]  # the events of tokens have the token ids
        return [*others, {**last, **self._end_of(complete, has_calls=deltas is not None and deltas.has_calls)}]

    def _begin(self, index: int, prompt: list[int]) -> None:
        self._deltas[index] = self._new_deltas(prompt)
        if self.parsed.scores_content and self._params.HasField("logprobs"):
            skips = skips_special_tokens(self._params)
            offsets = TextOffsets(self._tokenizer.detokenizer(skip_special_tokens=skips, after=prompt))
            self._scored[index] = ScoredDeltas(self._deltas[index], offsets)

    def _choice(
        self, index: int, delta: Delta, items: Sequence[TokenLogprobs] = (), token_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(items), "finish_reason": None}
        return {**choice, **self.token_ids(list(token_ids))}

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        assert output.complete is not None, "the output has not ended"
        assert output.message is not None, "it is not of a chat"
        message = output.message.finish()
        if echo := self._echo(index):
            message["content"] = echo + (message["content"] or "")
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            **self._end_of(output.complete, has_calls=output.message.has_calls),
            **self.token_ids(output.token_ids),
        }

    def _echo(self, index: int) -> str:
        """Return the assistant message that the output continues, if it is echoed."""
        if not self.parsed.echoes:
            return ""
        last = self.parsed.requests[index // self.parsed.num_sequences].chat.messages[-1]
        return (last.content or "\n".join(last.content_parts)) if last.role == ASSISTANT else ""

    def _end_of(self, complete: Complete, *, has_calls: bool) -> dict[str, Any]:
        end = self.end_of(complete)
        if has_calls and complete.finish_reason == FINISH_REASON_STOP:
            end["finish_reason"] = "tool_calls"
        return end

    def _new_deltas(self, prompt: list[int]) -> Deltas:
        offer = self.parsed.offer
        forced = offer.forced if offer else None
        tools = offer.tools if offer and (forced or self._format.has_calls) else {}
        is_parallel = offer is None or offer.is_parallel
        reader = self._format.reader(
            self._tokenizer.end_of(prompt),
            tools,
            forced,
            is_held=constraint_of(self._params) is not None,
            keeps_blanks=may_begin_blank(self._params),
        )
        return Deltas(reader, is_parallel=is_parallel, includes_thoughts=self.parsed.includes_thoughts)

    def envelope_extras(self, prompt: list[int]) -> dict[str, Any]:
        return self.prompt_token_ids(prompt) if len(self.parsed.requests) == 1 else {}

    def envelope_scores(self, scores: list[TokenLogprobs]) -> dict[str, Any]:
        return self.scores(scores)

    def _logprobs(self, items: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        tells_sampled = bool(self._params.logprob_token_ids)
        return chat_logprobs(items, self._names, tells_sampled=tells_sampled) if items else None


class Usage:
    """Count the tokens of all outputs of a call; each prompt counts once."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}
        self.num_thought_tokens: int | None = None  # part of the completion tokens; None for a model without thoughts

    def add_tokens(self, num_tokens: int) -> None:
        self._num_completion_tokens += num_tokens

    def set_cached(self, prompt_index: int, num_tokens: int) -> None:
        """Set the number of cached tokens of a prompt; repeated calls replace it."""
        self._num_cached_tokens[prompt_index] = num_tokens

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }
        if self.num_thought_tokens is not None:
            told["completion_tokens_details"] = {"reasoning_tokens": self.num_thought_tokens}
        return told


class Envelope:
    """Common fields around the choices of a call."""

    def __init__(self, formatter: ChoiceFormatter, request_id: str, model: str) -> None:
        self._formatter = formatter
        self._same = {"id": f"{formatter.id_prefix}{request_id}", "created": int(time.time()), "model": model}
        tier = formatter.parsed.service_tier
        self._tier = {"service_tier": tier} if tier else {}

    def event(self, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        return {**self._same, "object": self._formatter.event_object, "choices": choices, **self._tier, **others}

    def whole(self, choices: list[dict[str, Any]], usage: Usage, **others: Any) -> dict[str, Any]:
        response = {**self._same, "object": self._formatter.whole_object, "choices": choices}
        return {**response, **UNKNOWN, **self._tier, "usage": usage.to_json(), **others}


def attainment_object(attainment: Attainment) -> dict[str, Any]:
    """Return every field by its protobuf name; null for an unset field."""
    names = [field.name for field in Attainment.DESCRIPTOR.fields]
    return dict.fromkeys(names) | {field.name: value for field, value in attainment.ListFields()}


def timeline_object(timeline: Timeline) -> dict[str, Any]:
    """Return every field by its protobuf name; times are in seconds."""
    return {field.name: getattr(timeline, field.name) for field in Timeline.DESCRIPTOR.fields}
