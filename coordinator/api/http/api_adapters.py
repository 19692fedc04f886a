"""APIs that say what /v1/chat/completions does in words of their own. Pure.

A call of such an API is a chat completion between two translations: its body becomes one of a chat completion, and the
events of that one's stream become the API's own objects, those of a stream and those of a whole response alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from coordinator.api.http import sse
from coordinator.api.http.errors import error_object, renamed
from coordinator.api.http.fields import Fields
from coordinator.api.http.requests import Asked, parse_chat
from coordinator.text.answer_format import PLAIN, AnswerFormat
from coordinator.text.calls.reader import Kind
from serving_core.errors import RequestError

Object = dict[str, Any]

# Fields that are those of a chat completion, vLLM's among them.
_SAME: Final = (
    "cache_salt",
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
_TEXTS: Final = {Kind.REASONING: "reasoning_content", Kind.TEXT: "content"}  # in a delta


class ApiAdapter:
    """How the answer of one call is written: here as OpenAI writes completions."""

    failure_is_end = False
    """Whether `failure` is the regular last event of a stream in this API, after which its response ends as a whole."""

    def named(self, error: RequestError) -> RequestError:
        """An error in the words of the API."""
        return error

    def event(self, event: Object) -> bytes:
        """What a stream says in place of one event of a completion."""
        return sse.event(event)

    def end(self) -> bytes:
        """The end of a stream."""
        return sse.DONE

    def failure(self, error: RequestError) -> bytes:
        """The end of a stream that has failed."""
        return sse.event(error_object(error))


class ChatBody:
    """The body of a chat completion in the making. `places` tells where in the API's own body its parts stand."""

    def __init__(self, fields: Fields, places: Mapping[str, str]) -> None:
        self.values: Object = {name: value for name in _SAME if (value := fields.raw(name)) is not None}
        self.messages: list[Object] = []
        self.values["messages"] = self.messages
        self.places = dict(places)

    def take(self, fields: Fields, **names: str) -> None:
        """Takes over fields as they are, by the names that a chat completion has for them."""
        self.values |= {ours: fields.raw(name) for ours, name in names.items() if name in fields}

    def add_message(self, place: str, role: str, **fields: Any) -> Object:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append({"role": role, **fields})
        return self.messages[-1]

    def add_call(self, place: str, call_id: str | None, name: Any, *, arguments: Any, named: str) -> None:
        """A call that the last message made; `named` is the API's word for its arguments."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        path = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"
        self.places |= {path: place, f"{path}.arguments": f"{place}.{named}"}
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_tool(self, tool: Fields, *, parameters: str) -> None:
        """A tool whose fields are those of a function; `parameters` is the API's word for those."""
        tools = self.values.setdefault("tools", [])
        path = f"tools[{len(tools)}].function"
        self.places |= {path: tool.place, f"{path}.parameters": f"{tool.place}.{parameters}"}
        function = {name: tool.raw(name) for name in ("name", "description", "strict")}
        function["parameters"] = tool.raw(parameters)
        told = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": told})

    def force_tool(self, choice: Fields) -> None:
        """One tool has to be called."""
        self.places["tool_choice.function"] = choice.place
        self.values["tool_choice"] = {"type": "function", "function": {"name": choice.raw("name")}}


def content_of(texts: Sequence[str]) -> str | list[Object]:
    """The content of a chat completion's message that has these texts: several are parts."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def num_cached(usage: Object) -> int:
    """Tokens of the prompt, in the usage of a completion."""
    details = usage.get("prompt_tokens_details") or {}
    found: int = details.get("cached_tokens", 0)
    return found


class Translation(ApiAdapter, ABC):
    """Of one call of another API. Its answer comes in parts: thoughts, texts and calls, each of which is opened, told
    of and closed before the next one."""

    def __init__(self) -> None:
        self._places: Mapping[str, str] = {}
        self._completion: Object = {}  # the last event of it
        self._usage: Object | None = None
        self._last: Object | None = None  # the choice that ended the answer
        self._num_parts = 0
        self._kind: Kind | None = None  # of the part that is open
        self._texts: list[str] = []  # of that part
        self._scores: list[Object] = []  # the logprobs of that part

    def parse(self, fields: Fields, request_id: str, answer_format: AnswerFormat = PLAIN) -> Asked:
        """A call of the API. Raises RequestError."""
        body = self._body(fields)
        self._places = body.places
        try:
            asked = parse_chat(Fields(body.values), request_id, answer_format)
        except RequestError as error:
            raise self.named(error) from error
        return replace(asked, include_usage=True, continuous_usage=True, scores_content=True)

    def named(self, error: RequestError) -> RequestError:
        return renamed(error, self._places)

    def read(self, event: Object) -> None:
        """Take one event of a completion for a response that is told as a whole."""
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
                if not self._num_parts:  # clients take the first one for granted
                    yield from self._opened(Kind.TEXT)
                yield from self._closed()

    def _delta(self, delta: Object, scores: list[Object]) -> Iterator[Object]:
        for kind, name in _TEXTS.items():
            if text := delta.get(name):
                if self._kind is not kind:
                    yield from self._opened(kind)
                yield from self._told_of(text, scores)
        for call in delta.get("tool_calls", ()):
            if "id" in call:  # without one, the open one goes on
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
        """Of the call, without what says that it is a chat completion."""
        return str(self._completion["id"]).removeprefix("chatcmpl-")

    @abstractmethod
    def _body(self, fields: Fields) -> ChatBody:
        """The body as that of a chat completion. Raises RequestError."""

    @abstractmethod
    def _begin(self) -> Iterator[Object]:
        """The events before all parts."""

    @abstractmethod
    def _open(self, kind: Kind, call: Object) -> Iterator[Object]:
        """The events that begin a part."""

    @abstractmethod
    def _more(self, kind: Kind, text: str, scores: list[Object]) -> Object:
        """Return the event of a piece of the open part, with the logprobs of its tokens where they are wanted."""

    @abstractmethod
    def _close(self, kind: Kind, text: str, scores: list[Object]) -> Iterator[Object]:
        """Yield the events that end the open part, with all of its text and logprobs."""

    @abstractmethod
    def _ending(self) -> Iterator[Object]:
        """The events behind all parts."""

    @abstractmethod
    def whole(self) -> Object:
        """Return the body of a whole response, after its last event."""
