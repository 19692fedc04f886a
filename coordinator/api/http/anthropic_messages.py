"""Translate Anthropic's /v1/messages to and from chat completions. Performs no I/O."""

from collections.abc import Iterator
from typing import Any, Final

from coordinator.api.http import sse
from coordinator.api.http.api_adapters import ChatBody, Object, Translation, content_of, num_cached
from coordinator.api.http.conversations import (
    ASSISTANT,
    messages_in,
    object_of,
    text_of,
    thought_of,
)
from coordinator.api.http.errors import anthropic_error_object
from coordinator.api.http.fields import Fields, shown
from coordinator.api.http.known_fields import MESSAGES, settle
from coordinator.api.http.tools import MAX_TOOLS
from coordinator.api.validation import MAX_PARTS
from coordinator.text.calls.reader import Kind
from serving_core.errors import RequestError

SYSTEM: Final = "system"
ROLES: Final = ("user", ASSISTANT, SYSTEM)
TEXT: Final = "text"

_OF_TOOLS: Final = ("cache_control", "eager_input_streaming", "input_examples")
_PLACES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS: Final = {Kind.TEXT: TEXT, Kind.REASONING: "thinking"}


class MessagesCall(Translation):
    """One call of /v1/messages. The parts of an output are the content blocks of its message."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Object] = []

    # ---- request ----

    def _body(self, fields: Fields) -> ChatBody:
        settle(fields, MESSAGES)
        body = ChatBody(fields, _PLACES)
        if system := _texts(fields, "system"):
            body.add_message("system", SYSTEM, content=content_of(system))
        _read_messages(fields, body)
        body.take(fields, max_tokens="max_tokens", stop="stop_sequences")
        _read_tools(fields, body)
        _read_thinking(fields, body)
        return body

    # ---- response ----

    def _begin(self) -> Iterator[Object]:
        yield {"type": "message_start", "message": self._message()}

    def _open(self, kind: Kind, call: Object) -> Iterator[Object]:
        match kind:
            case Kind.TEXT:
                block: Object = {"type": TEXT, TEXT: "", "citations": None}
            case Kind.REASONING:
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        self._blocks.append(block)
        yield self._of_block("start", content_block=block)

    def _more(self, kind: Kind, text: str, scores: list[Object]) -> Object:
        if (name := _BLOCKS.get(kind)) is None:
            return self._of_block("delta", delta={"type": "input_json_delta", "partial_json": text})
        return self._of_block("delta", delta={"type": f"{name}_delta", name: text})

    def _close(self, kind: Kind, text: str, scores: list[Object]) -> Iterator[Object]:
        name = _BLOCKS.get(kind)
        self._blocks[-1] |= {"input": object_of(text)} if name is None else {name: text}
        yield self._of_block("stop")

    def _ending(self) -> Iterator[Object]:
        message = self.whole()
        told = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": told, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def whole(self) -> Object:
        assert self._last is not None, "the answer has not ended"
        reason, matched = self._last["finish_reason"], self._last["stop_reason"]
        stop_reason = _STOP_REASONS.get(reason, reason)
        if isinstance(matched, str) and reason == "stop":
            return self._message(stop_reason="stop_sequence", stop_sequence=matched)
        return self._message(stop_reason=stop_reason)

    def failure(self, error: RequestError) -> bytes:
        return sse.named_event(anthropic_error_object(error))

    def _message(self, **others: Any) -> Object:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": ASSISTANT,
            "model": self._completion["model"],
            "content": [*self._blocks],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._usage),
            **others,
        }

    def _of_block(self, name: str, **others: Any) -> Object:
        return {"type": f"content_block_{name}", "index": len(self._blocks) - 1, **others}


def _read_messages(fields: Fields, body: ChatBody) -> None:
    for message in messages_in(fields):
        role = message.text("role") or ""
        if role not in ROLES:
            raise message.error("role", f"one of {', '.join(ROLES)}")
        content = message.raw("content")
        if content == [] and role != ASSISTANT:
            raise message.error("content", "a text, or at least one block")
        if not isinstance(content, list):
            body.add_message(message.place, role, content=_required_text(message, "content"))
        elif role == ASSISTANT:
            _add_answer(message, body)
        else:
            _add_question(message, role, body)
    last = body.messages[-1]
    if last["role"] == ASSISTANT and "tool_calls" not in last:  # the client has begun the output
        body.values["continue_final_message"] = True


def _add_answer(message: Fields, body: ChatBody) -> None:
    """Add an assistant turn as one message with thoughts, text and tool calls."""
    said = body.add_message(message.place, ASSISTANT)
    texts: dict[str, list[str]] = {}
    for block in message.objects("content", MAX_PARTS):
        match block.text("type"):
            case "thinking":
                texts.setdefault("reasoning_content", []).append(thought_of(block))
            case "redacted_thinking":
                block.raw("data")  # encrypted for its own server
            case "tool_use":
                for name in ("cache_control", "caller"):
                    block.raw(name)
                if not isinstance(given := block.raw("input"), dict):
                    raise block.error("input", "an object")
                body.add_call(block.place, block.text("id"), block.raw("name"), arguments=given, named="input")
            case _:
                texts.setdefault("content", []).append(text_of(block, (TEXT,)))
    if spoken := texts.pop("content", []):
        said["content"] = content_of(spoken)
    said |= {name: "\n".join(parts) for name, parts in texts.items()}


def _add_question(message: Fields, role: str, body: ChatBody) -> None:
    """Add a user or system turn; each tool result is a message of its own."""
    texts: list[str] = []
    for block in message.objects("content", MAX_PARTS):
        if block.text("type") == "tool_result":
            block.raw("cache_control")
            content = "\n".join(_texts(block, "content"))
            told = f"Error: {content}" if block.boolean("is_error") else content
            body.add_message(block.place, "tool", tool_call_id=block.text("tool_use_id"), content=told)
        else:
            texts.append(_read(block))
    if texts:
        body.add_message(message.place, role, content=content_of(texts))


def _read_tools(fields: Fields, body: ChatBody) -> None:
    for tool in fields.objects("tools", MAX_TOOLS):
        if (kind := tool.text("type")) not in (None, "custom"):
            raise tool.problem("type", f"({shown(kind)}) is not supported: it must be custom")
        for name in _OF_TOOLS:
            tool.raw(name)
        body.add_tool(tool, parameters="input_schema")
    if (choice := fields.nested("tool_choice")) is None:
        return
    if choice.boolean("disable_parallel_tool_use"):
        body.values["parallel_tool_calls"] = False
    kind = choice.text("type") or ""
    if kind == "tool":
        body.force_tool(choice)
    elif kind in _CHOICES:
        body.values["tool_choice"] = _CHOICES[kind]
    else:
        raise choice.error("type", f"tool or one of {', '.join(_CHOICES)}")


def _read_thinking(fields: Fields, body: ChatBody) -> None:
    """Read how much the model may think, and the format of its output."""
    kwargs = fields.raw("chat_template_kwargs")
    if (thinking := fields.nested("thinking")) is not None:
        kind = thinking.text("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise thinking.error("type", "enabled, disabled or adaptive")
        for name in ("budget_tokens", "display"):  # budget_tokens is a target in this API, not a limit
            thinking.raw(name)
        if isinstance(kwargs, dict | None):
            kwargs = {"enable_thinking": kind != "disabled", **(kwargs or {})}
    config = fields.nested("output_config") or Fields({})
    body.values |= {"reasoning_effort": config.text("effort"), "chat_template_kwargs": kwargs}
    if (form := config.nested("format")) is not None:
        if (kind := form.text("type")) != "json_schema":
            raise form.problem("type", f"({shown(kind)}) is not supported: it must be json_schema")
        body.values["response_format"] = {"type": kind, "json_schema": {"schema": form.raw("schema")}}


def _required_text(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if text is None:
        raise fields.error(name, "a string or a list of blocks")
    return text


def _texts(fields: Fields, name: str) -> list[str]:
    """Return a string, or the texts of a list of blocks; an empty list when the field is missing or empty."""
    if isinstance(fields.raw(name), list):
        return [_read(block) for block in fields.objects(name, MAX_PARTS)]
    text = fields.text(name)
    return [text] if text else []


def _read(block: Fields) -> str:
    """Return the text of a block, or of a plain-text document behind its title and context."""
    if block.text("type") != "document":
        return text_of(block, (TEXT,))
    block.raw("cache_control")
    if (block.nested("citations") or Fields({})).boolean("enabled"):
        raise block.problem("citations", "are not supported: the answer is the model's words alone")
    told = [block.text("title"), block.text("context"), _text_of_source(block)]
    return "\n".join(filter(None, told))


def _text_of_source(document: Fields) -> str:
    if (source := document.nested("source")) is None:
        raise document.error("source", "an object")
    match kind := source.text("type"):
        case "text":
            if (media_type := source.text("media_type")) not in (None, "text/plain"):
                raise source.problem("media_type", f"({shown(media_type)}) is not supported: it must be text/plain")
            return _required_text(source, "data")
        case "content":
            return "\n".join(_texts(source, "content"))
    raise source.problem("type", f"({shown(kind)}) is not supported: it must be text or content")


def _usage(usage: Object | None) -> Object:
    """Return the usage, with cached tokens counted apart from other input tokens."""
    assert usage is not None, "every event has its usage"
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached(usage),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached(usage),
        "output_tokens": usage["completion_tokens"],
    }
