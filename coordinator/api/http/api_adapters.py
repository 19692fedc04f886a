"""Adapt other APIs to /v1/chat/completions. Performs no I/O.

A call of another API is translated twice: its body becomes the body of a chat completion, and the events of the
completion's stream become the objects of the API, for a stream and for a whole response alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from coordinator.api.http import sse
from coordinator.api.http.errors import error_object, renamed
from coordinator.api.http.field_types import RequestModel
from coordinator.api.http.request_models import ChatRequest, Generating
from coordinator.api.http.requests import ParsedRequest, parse_chat
from coordinator.text.answer_format import PLAIN, AnswerFormat
from coordinator.text.calls.reader import Kind
from serving_core.errors import RequestError

Object = dict[str, Any]
Q = TypeVar("Q", bound=Generating)

# Fields that a chat completion has under the same name, vLLM's extensions included.
_SAME: Final = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "model",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop_token_ids",
    "stream",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
)
_TEXTS: Final = {Kind.REASONING: "reasoning_content", Kind.TEXT: "content"}  # field names in a delta


class ApiAdapter:
    """Serialize the output of one call. This class writes OpenAI's completions."""

    failure_is_end = False
    """Whether `failure` is a regular last event of a stream in this API, so that the response ends as a whole one."""

    def named(self, error: RequestError) -> RequestError:
        """Return the error with the field names of the API."""
        return error

    def event(self, event: Object) -> bytes:
        """Return the bytes that a stream sends for one completion event."""
        return sse.event(event)

    def end(self) -> bytes:
        """Return the bytes that end a stream."""
        return sse.DONE

    def failure(self, error: RequestError) -> bytes:
        """Return the bytes that end a failed stream."""
        return sse.event(error_object(error))


class ChatBody:
    """Build the body of a chat completion from a request of another API."""

    def __init__(self, request: RequestModel) -> None:
        self.messages: list[Object] = []
        self.values: Object = {name: value for name in _SAME if (value := request.given(name)) is not None}
        self.values["messages"] = self.messages

    def add_message(self, role: str, **fields: Any) -> Object:
        self.messages.append({"role": role, **fields})
        return self.messages[-1]

    def add_call(self, call_id: str | None, name: str, arguments: Any) -> None:
        """Append a tool call to the last message."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_tool(self, tool: Object, *, parameters: str) -> None:
        """Append a function tool; `parameters` is the API's name of the parameters field."""
        names = {"name": "name", "description": "description", "strict": "strict", parameters: "parameters"}
        function = {ours: tool[name] for name, ours in names.items() if tool.get(name) is not None}
        self.values.setdefault("tools", []).append({"type": "function", "function": function})

    def force_tool(self, name: str | None) -> None:
        """Require a call of one named tool."""
        self.values["tool_choice"] = {"type": "function", "function": {"name": name}}


def content_of(texts: Sequence[str]) -> str | list[Object]:
    """Return the content of a message with these texts: a string, or a list of text parts."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def num_cached(usage: Object) -> int:
    """Return the number of cached prompt tokens in the usage of a completion."""
    details = usage.get("prompt_tokens_details") or {}
    found: int = details.get("cached_tokens", 0)
    return found


class Translation(ApiAdapter, ABC, Generic[Q]):
    """Translate one call of another API, whose requests are Q.

    The output comes in parts (thoughts, texts, tool calls). Each part is opened, extended and closed before the next
    part.
    """

    places: Mapping[str, str] = {}
    """Field paths of the API by those of a chat completion, for error messages."""

    def __init__(self) -> None:
        self._completion: Object = {}  # its last event
        self._usage: Object | None = None
        self._last: Object | None = None  # the choice with the finish reason
        self._num_parts = 0
        self._kind: Kind | None = None  # of the open part
        self._texts: list[str] = []  # of the open part
        self._scores: list[Object] = []  # logprobs of the open part

    def parse(self, request: Q, request_id: str, answer_format: AnswerFormat = PLAIN) -> ParsedRequest:
        """Convert a call of the API. Raises RequestError."""
        try:
            chat = ChatRequest.read(self._body(request).values)
            parsed = parse_chat(chat, request_id, answer_format)
        except RequestError as error:
            raise self.named(error) from error
        return replace(parsed, include_usage=True, continuous_usage=True, scores_content=True)

    def named(self, error: RequestError) -> RequestError:
        return renamed(error, self.places)

    def read(self, event: Object) -> None:
        """Take one completion event for a whole response."""
        for _ in self._told(event):
            pass

    def event(self, event: Object) -> bytes:
        return b"".join(map(sse.named_event, self._told(event)))

    def end(self) -> bytes:
        return b"".join(map(sse.named_event, self._ending()))

    def _told(self, event: Object) -> Iterator[Object]:
        is_first = not self._completion
        self._completion, self._usage = event, event.get("usage") or self._usage
        if is_first:
            yield from self._begin()
        for choice in event["choices"]:
            yield from self._delta(choice["delta"], (choice["logprobs"] or {}).get("content", []))
            if choice["finish_reason"] is not None:
                self._last = choice
                if not self._num_parts:  # clients expect at least one part
                    yield from self._opened(Kind.TEXT)
                yield from self._closed()

    def _delta(self, delta: Object, scores: list[Object]) -> Iterator[Object]:
        for kind, name in _TEXTS.items():
            if text := delta.get(name):
                if self._kind is not kind:
                    yield from self._opened(kind)
                yield from self._told_of(text, scores)
        for call in delta.get("tool_calls", ()):
            if "id" in call:  # a call without id continues the open part
                yield from self._opened(Kind.CALL, call)
            if arguments := call["function"]["arguments"]:
                yield from self._told_of(arguments, [])

    def _opened(self, kind: Kind, call: Object | None = None) -> Iterator[Object]:
        yield from self._closed()
        self._kind = kind
        self._num_parts += 1
        yield from self._open(kind, call or {})

    def _told_of(self, text: str, scores: list[Object]) -> Iterator[Object]:
        self._texts.append(text)
        self._scores += scores
        assert self._kind is not None, "no part is open"
        yield self._more(self._kind, text, scores)

    def _closed(self) -> Iterator[Object]:
        if self._kind is not None:
            yield from self._close(self._kind, "".join(self._texts), self._scores)
        self._kind = None
        self._texts, self._scores = [], []

    @property
    def _id(self) -> str:
        """Id of the call without the prefix of chat completions."""
        return str(self._completion["id"]).removeprefix("chatcmpl-")

    @abstractmethod
    def _body(self, request: Q) -> ChatBody:
        """Return the body of the equivalent chat completion. Raises RequestError."""

    @abstractmethod
    def _begin(self) -> Iterator[Object]:
        """Yield the events before all parts."""

    @abstractmethod
    def _open(self, kind: Kind, call: Object) -> Iterator[Object]:
        """Yield the events that begin a part."""

    @abstractmethod
    def _more(self, kind: Kind, text: str, scores: list[Object]) -> Object:
        """Return the event for a piece of the open part, with the logprobs of its tokens if requested."""

    @abstractmethod
    def _close(self, kind: Kind, text: str, scores: list[Object]) -> Iterator[Object]:
        """Yield the events that end the open part, given its whole text and logprobs."""

    @abstractmethod
    def _ending(self) -> Iterator[Object]:
        """Yield the events after all parts."""

    @abstractmethod
    def whole(self) -> Object:
        """Return the body of a whole response, after its last event."""
