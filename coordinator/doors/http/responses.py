"""From the messages of an answer to the JSON of OpenAI's endpoints. Pure.

A response is an envelope with choices, one for each answer of each prompt. The envelope is the same everywhere; how a
choice looks is the endpoint's `Form`, of which there is one for each call.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from coordinator.control.outcomes import FINISH_REASONS
from coordinator.doors.http.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from coordinator.doors.http.requests import Asked
from coordinator.text.tokenizer import Tokenizer
from protos.inference_pb2 import Attainment, Chunk, Complete, Timeline, TokenLogprobs


@dataclass(slots=True)
class Answered:
    """What has come of one answer so far."""

    prompt: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    complete: Complete | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs


class Form(ABC):
    """How the choices of one call look."""

    id_prefix: str
    whole_object: str
    event_object: str

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self._tokenizer = tokenizer

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that begins an answer's events; None where there is none."""

    @abstractmethod
    def event(self, index: int, prompt: list[int], chunk: Chunk) -> dict[str, Any]:
        """The choice of one event."""

    @abstractmethod
    def closing(self, index: int, complete: Complete) -> dict[str, Any]:
        """The choice that ends an answer's events."""

    @abstractmethod
    def whole(self, index: int, answered: Answered) -> dict[str, Any]:
        """The choice that is a whole answer."""

    def end_of(self, complete: Complete) -> dict[str, Any]:
        """How an answer ended, and which limits it kept if there were any; stop_reason is the stop string or the token
        id, as vLLM has it."""
        matched = complete.WhichOneof("matched_stop")
        end: dict[str, Any] = {
            "finish_reason": FINISH_REASONS[complete.finish_reason],
            "stop_reason": getattr(complete, matched) if matched else None,
        }
        if complete.HasField("attainment"):
            end["attainment"] = attainment_object(complete.attainment)
        return {**end, "timeline": timeline_object(complete.timeline)} if self.asked.include_timeline else end

    def token_ids(self, token_ids: list[int]) -> dict[str, Any]:
        """The field for them where it was asked for."""
        return {"token_ids": token_ids} if self.asked.return_token_ids else {}

    def envelope_extras(self, prompt: list[int]) -> dict[str, Any]:
        """Fields beside the choices: of a whole response and of the first event."""
        return {}


class CompletionForm(Form):
    """Of /v1/completions."""

    id_prefix = "cmpl-"
    whole_object = event_object = "text_completion"

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self._offsets: dict[int, TextOffsets] = {}
        self._has_begun: set[int] = set()

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def event(self, index: int, prompt: list[int], chunk: Chunk) -> dict[str, Any]:
        choice = self._choice(index, chunk.text, list(chunk.logprobs))
        if index not in self._has_begun:
            self._has_begun.add(index)
            choice |= self._prompt_token_ids(prompt)
        return {**choice, "finish_reason": None, **self.token_ids(list(chunk.token_ids))}

    def closing(self, index: int, complete: Complete) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, **self.end_of(complete)}

    def whole(self, index: int, answered: Answered) -> dict[str, Any]:
        assert answered.complete is not None, "the answer has not ended"
        return {
            **self._choice(index, answered.text, answered.logprobs),
            **self.end_of(answered.complete),
            **self._prompt_token_ids(answered.prompt),
            **self.token_ids(answered.token_ids),
        }

    def _choice(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, logprobs) if logprobs else None}

    def _logprobs(self, index: int, items: list[TokenLogprobs]) -> dict[str, Any]:
        if index not in self._offsets:
            params = self.asked.requests[0].sampling_params
            skip = params.skip_special_tokens if params.HasField("skip_special_tokens") else True
            self._offsets[index] = TextOffsets(self._tokenizer.detokenizer(skip_special_tokens=skip))
        offsets = self._offsets[index].add(item.token_id for item in items)
        return completion_logprobs(items, offsets, self._tokenizer.token_bytes)

    def _prompt_token_ids(self, prompt: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": prompt} if self.asked.return_token_ids else {}


class ChatForm(Form):
    """Of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def event(self, index: int, prompt: list[int], chunk: Chunk) -> dict[str, Any]:
        choice = {"index": index, "delta": {"content": chunk.text}, "logprobs": self._logprobs(list(chunk.logprobs))}
        return {**choice, "finish_reason": None, **self.token_ids(list(chunk.token_ids))}

    def closing(self, index: int, complete: Complete) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, **self.end_of(complete)}

    def whole(self, index: int, answered: Answered) -> dict[str, Any]:
        assert answered.complete is not None, "the answer has not ended"
        return {
            "index": index,
            "message": {"role": "assistant", "content": answered.text, "refusal": None},
            "logprobs": self._logprobs(answered.logprobs),
            **self.end_of(answered.complete),
            **self.token_ids(answered.token_ids),
        }

    def envelope_extras(self, prompt: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": prompt} if self.asked.return_token_ids else {}

    def _logprobs(self, items: list[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(items, self._tokenizer.token_bytes) if items else None


class Usage:
    """Counts the tokens of all answers of a call; each prompt counts once."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0

    def add_tokens(self, num_tokens: int) -> None:
        self._num_completion_tokens += num_tokens

    def add_cached(self, num_tokens: int) -> None:
        """Once for each prompt."""
        self._num_cached_tokens += num_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


class Envelope:
    """What is the same around all choices of a call."""

    def __init__(self, form: Form, request_id: str, model: str) -> None:
        self._form = form
        self._same = {"id": f"{form.id_prefix}{request_id}", "created": int(time.time()), "model": model}

    def event(self, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        return {**self._same, "object": self._form.event_object, "choices": choices, **others}

    def whole(self, choices: list[dict[str, Any]], usage: Usage, **others: Any) -> dict[str, Any]:
        response = {**self._same, "object": self._form.whole_object, "choices": choices}
        return {**response, "usage": usage.to_json(), **others}


def attainment_object(attainment: Attainment) -> dict[str, Any]:
    """Every field by its name on the wire; null for what is not set."""
    names = [field.name for field in Attainment.DESCRIPTOR.fields]
    return dict.fromkeys(names) | {field.name: value for field, value in attainment.ListFields()}


def timeline_object(timeline: Timeline) -> dict[str, Any]:
    """Every field by its name on the wire; times are in seconds."""
    return {field.name: getattr(timeline, field.name) for field in Timeline.DESCRIPTOR.fields}
