"""Translate OpenAI's /v1/responses to and from chat completions. Performs no I/O.

The server stores nothing: every call must send the whole conversation.
"""

from collections.abc import Iterator
from typing import Any, Final

from coordinator.api.http import sse
from coordinator.api.http.api_adapters import ChatBody, Object, Translation, content_of, num_cached
from coordinator.api.http.conversations import ASSISTANT, TEXT_PARTS, texts_of_parts
from coordinator.api.http.errors import error_object
from coordinator.api.http.fields import Fields, shown
from coordinator.api.http.known_fields import RESPONSES, settle
from coordinator.api.http.tools import MAX_TOOLS
from coordinator.api.validation import MAX_MESSAGES
from coordinator.text.calls.reader import Kind
from serving_core.errors import RequestError
from serving_core.json_fields import json_line

SYSTEM: Final = "system"
ROLES: Final = {"user": "user", "assistant": ASSISTANT, "system": SYSTEM, "developer": SYSTEM}
MAX_INCLUDED: Final = 32
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Values of `include` in OpenAI's API. Only the first has an effect."""

_OF_ITEMS: Final = ("id", "status", "phase", "summary", "encrypted_content")  # irrelevant to the model
_PLACES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ENDS: Final = {"length": "incomplete", "abort": "cancelled"}  # all other finish reasons are completed
_IDS: Final = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_PARTS: Final = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text"}


class ResponsesCall(Translation):
    """One call of /v1/responses. The parts of an output are the items of its `output`."""

    def __init__(self) -> None:
        super().__init__()
        self._echo: Object = {}  # request fields that a response repeats
        self._output: list[Object] = []
        self._num_events = 0

    # ---- request ----

    def _body(self, fields: Fields) -> ChatBody:
        settle(fields, RESPONSES)
        body = ChatBody(fields, _PLACES)
        _Items(body).read(fields)
        body.take(fields, max_tokens="max_output_tokens", stop="stop")
        _read_logprobs(fields, body)
        _read_text(fields, body)
        _read_tools(fields, body)
        effort = _read_reasoning(fields, body)
        self._echo = _echo(fields, effort)
        return body

    # ---- response ----

    def _begin(self) -> Iterator[Object]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def _open(self, kind: Kind, call: Object) -> Iterator[Object]:
        item: Object = {"id": f"{_IDS[kind]}_{self._id}-{len(self._output)}"}
        match kind:
            case Kind.TEXT:
                item |= {"type": "message", "role": ASSISTANT, "content": []}
            case Kind.REASONING:
                item |= {"type": "reasoning", "summary": [], "content": []}
            case _:
                name = call["function"]["name"]
                item |= {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        self._output.append({**item, "status": "in_progress"})
        yield self._of_output("output_item.added", item=self._output[-1])
        if kind in _PARTS:
            yield self._of_item("content_part.added", content_index=0, part=_part(kind, "", []))

    def _more(self, kind: Kind, text: str, scores: list[Object]) -> Object:
        if kind not in _PARTS:
            return self._of_item("function_call_arguments.delta", delta=text)
        return self._of_item(f"{_PARTS[kind]}.delta", content_index=0, delta=text, **_logprobs(kind, scores))

    def _close(self, kind: Kind, text: str, scores: list[Object]) -> Iterator[Object]:
        item = self._output[-1]
        if kind in _PARTS:
            part = _part(kind, text, scores)
            yield self._of_item(f"{_PARTS[kind]}.done", content_index=0, text=text, **_logprobs(kind, scores))
            yield self._of_item("content_part.done", content_index=0, part=part)
            told: Object = {"content": [part]}
        else:
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=text)
            told = {"arguments": text}
        status = "completed" if self._status in ("in_progress", "completed") else "incomplete"
        self._output[-1] = {**item, **told, "status": status}
        yield self._of_output("output_item.done", item=self._output[-1])

    def _ending(self) -> Iterator[Object]:
        name = "completed" if self._status == "completed" else "incomplete"
        yield self._event(f"response.{name}", response=self.whole())

    def whole(self) -> Object:
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._response(self._status, incomplete_details=details, usage=_usage(self._usage))

    failure_is_end = True

    def failure(self, error: RequestError) -> bytes:
        told = error_object(error)["error"]
        code = told["code"] if told["code"] == "rate_limit_exceeded" else "server_error"
        failed = self._response("failed", error={"code": code, "message": told["message"]})
        return sse.named_event(self._event("response.failed", response=failed))

    @property
    def _status(self) -> str:
        return "in_progress" if self._last is None else _ENDS.get(self._last["finish_reason"], "completed")

    def _response(self, status: str, **others: Any) -> Object:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._completion["created"],
            "model": self._completion["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._echo,
            "output": [*self._output],
            **others,
        }

    def _event(self, name: str, /, **others: Any) -> Object:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **others}

    def _of_output(self, name: str, /, **others: Any) -> Object:
        return self._event(f"response.{name}", output_index=len(self._output) - 1, **others)

    def _of_item(self, name: str, /, **others: Any) -> Object:
        return self._of_output(name, item_id=self._output[-1]["id"], **others)


class _Items:
    """Convert input items to messages. Consecutive assistant items are one message: thoughts, text, tool calls."""

    def __init__(self, body: ChatBody) -> None:
        self._body = body

    def read(self, fields: Fields) -> None:
        if instructions := fields.text("instructions"):
            self._body.add_message("instructions", SYSTEM, content=instructions)
        if isinstance(fields.raw("input"), list):
            for item in fields.objects("input", MAX_MESSAGES):
                self._add(item)
        elif text := fields.text("input"):
            self._body.add_message("input", "user", content=text)
        if "input" not in fields:
            raise fields.problem("input", "is missing: send a string, or a list of items")

    def _add(self, item: Fields) -> None:
        for name in _OF_ITEMS:
            item.raw(name)
        match kind := item.text("type"):
            case None | "message":
                self._add_message(item)
            case "function_call":
                if not self._goes_on():
                    self._body.add_message(item.place, ASSISTANT)
                name, arguments = item.raw("name"), item.raw("arguments")
                self._body.add_call(item.place, item.text("call_id"), name, arguments=arguments, named="arguments")
            case "function_call_output":
                self._body.add_message(
                    item.place, "tool", tool_call_id=item.text("call_id"), content=_text(item, "output")
                )
            case "reasoning":
                if thoughts := "\n".join(texts_of_parts(item, "content", ("reasoning_text",))):
                    self._body.add_message(item.place, ASSISTANT, reasoning_content=thoughts)
            case _:
                raise item.problem("type", f"({shown(kind)}) is not supported")

    def _add_message(self, item: Fields) -> None:
        role = ROLES.get(item.text("role") or "")
        if role is None:
            raise item.error("role", f"one of {', '.join(ROLES)}")
        content = _text(item, "content") if role == SYSTEM else _content(item, "content")
        if role == ASSISTANT and self._goes_on("content", "tool_calls"):
            self._body.messages[-1]["content"] = content
        elif role == SYSTEM and self._body.messages and self._body.messages[-1]["role"] == SYSTEM:
            self._body.messages[-1]["content"] += f"\n\n{content}"  # templates accept one system message
        else:
            self._body.add_message(item.place, role, content=content)

    def _goes_on(self, *without: str) -> bool:
        """Return whether the last message is the assistant's and has none of these fields."""
        last = self._body.messages[-1] if self._body.messages else {}
        return last.get("role") == ASSISTANT and not any(name in last for name in without)


def _text(item: Fields, name: str) -> str:
    content = _content(item, name)
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _content(item: Fields, name: str) -> str | list[Object]:
    if isinstance(item.raw(name), list):
        return content_of(texts_of_parts(item, name, TEXT_PARTS))
    text = item.text(name)
    if text is None:
        raise item.error(name, "a string or a list of text parts")
    return text


def _read_logprobs(fields: Fields, body: ChatBody) -> None:
    included = fields.texts("include", MAX_INCLUDED)
    for unknown in set(included).difference(INCLUDABLE):
        raise fields.problem("include", f"({shown(unknown)}) is not supported: it may name {', '.join(INCLUDABLE)}")
    if LOGPROBS in included:
        body.values["logprobs"] = True
        body.take(fields, top_logprobs="top_logprobs")
    elif fields.integer("top_logprobs"):
        raise fields.problem("top_logprobs", f"needs {LOGPROBS} in include")


def _read_text(fields: Fields, body: ChatBody) -> None:
    """Read the format of the output text."""
    text = fields.nested("text")
    if text is None:
        return
    if (verbosity := text.raw("verbosity")) not in (None, "medium"):
        raise text.problem("verbosity", f"({shown(verbosity)}) is not supported: say it in a message")
    if (form := text.nested("format")) is None:
        return
    kind = form.text("type")
    if kind == "json_schema":
        names = ("name", "description", "strict", "schema")
        body.values["response_format"] = {"type": kind, kind: {name: form.raw(name) for name in names}}
    elif kind in ("text", "json_object"):
        body.values["response_format"] = {"type": kind}
    else:
        raise form.problem("type", f"({shown(kind)}) is not supported")


def _read_tools(fields: Fields, body: ChatBody) -> None:
    for tool in fields.objects("tools", MAX_TOOLS):
        if (kind := tool.text("type")) != "function":
            raise tool.problem("type", f"({shown(kind)}) is not supported: it must be function")
        body.add_tool(tool, parameters="parameters")
    body.take(fields, parallel_tool_calls="parallel_tool_calls", tool_choice="tool_choice")
    if isinstance(fields.raw("tool_choice"), dict):
        choice = fields.nested("tool_choice") or Fields({})
        if (kind := choice.text("type")) != "function":
            raise choice.problem("type", f"({shown(kind)}) is not supported: it must be function")
        body.force_tool(choice)


def _read_reasoning(fields: Fields, body: ChatBody) -> str | None:
    """Return the effort. Thoughts are returned unchanged, whatever summary is requested."""
    reasoning = fields.nested("reasoning") or Fields({})
    for name in ("summary", "generate_summary"):
        reasoning.text(name)
    effort = reasoning.text("effort")
    body.values |= {"reasoning_effort": effort, "chat_template_kwargs": fields.raw("chat_template_kwargs")}
    return effort


def _echo(fields: Fields, effort: str | None) -> Object:
    metadata = fields.raw("metadata")
    if not isinstance(metadata, dict | None):
        raise fields.error("metadata", "an object")
    for name in ("metadata", "text", "tool_choice", "tools"):
        _check_can_be_told(fields, name)
    names = ("instructions", "max_output_tokens", "temperature", "top_logprobs", "top_p")
    return {
        **{name: fields.raw(name) for name in names},
        "background": False,
        "metadata": metadata or {},
        "parallel_tool_calls": fields.raw("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "text": fields.raw("text") or {"format": {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "truncation": "disabled",
    }


def _check_can_be_told(fields: Fields, name: str) -> None:
    try:
        json_line(fields.raw(name))
    except (ValueError, RecursionError) as error:
        raise fields.problem(name, "cannot be repeated: it is nested too deeply, or no valid JSON") from error


def _part(kind: Kind, text: str, scores: list[Object]) -> Object:
    part = {"type": _PARTS[kind], "text": text}
    return {**part, "annotations": [], **_logprobs(kind, scores)} if kind is Kind.TEXT else part


def _logprobs(kind: Kind, scores: list[Object]) -> Object:
    """Return the logprobs field, which texts have and thoughts do not."""
    return {"logprobs": scores} if kind is Kind.TEXT else {}


def _usage(usage: Object | None) -> Object:
    assert usage is not None, "every answer ends with its usage"
    details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": num_cached(usage), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
