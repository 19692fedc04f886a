"""Translate OpenAI's /v1/responses to and from chat completions. Performs no I/O.

The server stores nothing: every call must send the whole conversation.
"""

from collections.abc import Iterator
from typing import Any, Final

from coordinator.api.http import sse
from coordinator.api.http.api_adapters import ChatBody, Object, Translation, content_of, num_cached
from coordinator.api.http.errors import error_object
from coordinator.api.http.openai_responses_models import (
    LOGPROBS,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesNamedTool,
    ResponsesRequest,
)
from coordinator.api.http.request_models import ASSISTANT, Part
from coordinator.api.http.requests import text_of
from coordinator.api.validation import bad
from coordinator.text.calls.reader import Kind
from serving_core.errors import RequestError
from serving_core.json_fields import json_line

SYSTEM: Final = "system"
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


class ResponsesCall(Translation[ResponsesRequest]):
    """One call of /v1/responses. The parts of an output are the items of its `output`."""

    places = _PLACES

    def __init__(self) -> None:
        super().__init__()
        self._echo: Object = {}  # request fields that a response repeats
        self._output: list[Object] = []
        self._num_events = 0

    # ---- request ----

    def _body(self, request: ResponsesRequest) -> ChatBody:
        body = ChatBody(request)
        _add_items(request, body)
        body.values |= {"max_tokens": request.max_output_tokens, "stop": request.stop}
        _set_logprobs(request, body)
        _set_format(request, body)
        _set_tools(request, body)
        effort = request.reasoning.effort if request.reasoning is not None else None
        body.values["reasoning_effort"] = effort
        self._echo = _echo(request, effort)
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
            "service_tier": self._completion.get("service_tier"),
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


def _add_items(request: ResponsesRequest, body: ChatBody) -> None:
    """Add the input as messages. Consecutive assistant items are one message: thoughts, text, tool calls."""
    if request.instructions:
        body.add_message(SYSTEM, content=request.instructions)
    if isinstance(request.input, str):
        if request.input:
            body.add_message("user", content=request.input)
        return
    for item in request.input:
        add_item(item, body)


def add_item(item: Item, body: ChatBody) -> None:
    match item:
        case MessageItem():
            _add_message(item, body)
        case FunctionCallItem():
            if not _goes_on(body):
                body.add_message(ASSISTANT)
            body.add_call(item.call_id, item.name, item.arguments)
        case FunctionOutputItem():
            body.add_message("tool", tool_call_id=item.call_id, content=_text(item.output))
        case ReasoningItem():
            if thoughts := "\n".join(part.text for part in item.content or ()):
                body.add_message(ASSISTANT, reasoning_content=thoughts)


def _add_message(item: MessageItem, body: ChatBody) -> None:
    role = SYSTEM if item.role == "developer" else item.role
    if role == SYSTEM:
        content: Any = _text(item.content)
    elif isinstance(item.content, str):
        content = item.content
    else:
        content = content_of([text_of(part) for part in item.content])
    if role == ASSISTANT and _goes_on(body, "content", "tool_calls"):
        body.messages[-1]["content"] = content
    elif role == SYSTEM and body.messages and body.messages[-1]["role"] == SYSTEM:
        body.messages[-1]["content"] += f"\n\n{content}"  # templates accept one system message
    else:
        body.add_message(role, content=content)


def _goes_on(body: ChatBody, *without: str) -> bool:
    """Return whether the last message is the assistant's and has none of these fields."""
    last = body.messages[-1] if body.messages else {}
    return last.get("role") == ASSISTANT and not any(name in last for name in without)


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(map(text_of, content))


def _set_logprobs(request: ResponsesRequest, body: ChatBody) -> None:
    if LOGPROBS in (request.include or ()):
        body.values |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    elif request.top_logprobs:
        raise bad("top_logprobs", f"needs {LOGPROBS} in include")


def _set_format(request: ResponsesRequest, body: ChatBody) -> None:
    """Set the format of the output text."""
    if request.text is None or (formatter := request.text.format) is None:
        return
    schema = {"json_schema": {"schema": formatter.json_schema}} if formatter.type == "json_schema" else {}
    body.values["response_format"] = {"type": formatter.type, **schema}


def _set_tools(request: ResponsesRequest, body: ChatBody) -> None:
    for tool in request.given("tools") or ():
        body.add_tool(tool, parameters="parameters")
    body.values["parallel_tool_calls"] = request.parallel_tool_calls
    if isinstance(request.tool_choice, ResponsesNamedTool):
        body.force_tool(request.tool_choice.name)
    else:
        body.values["tool_choice"] = request.tool_choice


def _echo(request: ResponsesRequest, effort: str | None) -> Object:
    for name in ("metadata", "text", "tool_choice", "tools"):
        _check_can_be_told(name, request.given(name))
    names = ("instructions", "max_output_tokens", "temperature", "top_logprobs", "top_p")
    return {
        **{name: request.given(name) for name in names},
        "background": False,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "text": request.given("text") or {"format": {"type": "text"}},
        "tool_choice": request.given("tool_choice") or "auto",
        "tools": request.given("tools") or [],
        "truncation": "disabled",
    }


def _check_can_be_told(name: str, value: Any) -> None:
    try:
        json_line(value)
    except (ValueError, RecursionError) as error:
        raise bad(name, "cannot be repeated: it is nested too deeply, or no valid JSON") from error


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
