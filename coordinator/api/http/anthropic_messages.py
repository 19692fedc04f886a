"""Translate Anthropic's /v1/messages to and from chat completions. Performs no I/O."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from coordinator.api.http import sse
from coordinator.api.http.anthropic_messages_models import (
    AnthropicText,
    AssistantBlock,
    AssistantTurn,
    Block,
    MessagesRequest,
    TextSource,
    ToolResult,
    ToolUse,
    UserBlock,
)
from coordinator.api.http.api_adapters import ChatBody, Object, Translation, content_of, num_cached
from coordinator.api.http.errors import anthropic_error_object
from coordinator.api.http.request_models import ASSISTANT, ThinkingPart
from coordinator.api.http.tools import object_of
from coordinator.text.calls.reader import Kind
from serving_core.errors import RequestError

TEXT: Final = "text"

_PLACES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS: Final = {Kind.TEXT: TEXT, Kind.REASONING: "thinking"}


class MessagesCall(Translation[MessagesRequest]):
    """One call of /v1/messages. The parts of an output are the content blocks of its message."""

    places = _PLACES

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Object] = []

    # ---- request ----

    def _body(self, request: MessagesRequest) -> ChatBody:
        body = ChatBody(request)
        if system := _texts(request.system):
            body.add_message("system", content=content_of(system))
        _add_messages(request, body)
        body.values |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
        _set_tools(request, body)
        _set_thinking(request, body)
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
        assert self._last is not None, "the output has not ended"
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


def _add_messages(request: MessagesRequest, body: ChatBody) -> None:
    for turn in request.messages:
        if isinstance(turn.content, str):
            body.add_message(turn.role, content=turn.content)
        elif isinstance(turn, AssistantTurn):
            _add_output(turn.content, body)
        else:
            _add_input(turn.role, turn.content, body)
    last = body.messages[-1]
    if last["role"] == ASSISTANT and "tool_calls" not in last:  # the client has begun the output
        body.values["continue_final_message"] = True


def _add_output(blocks: Sequence[AssistantBlock], body: ChatBody) -> None:
    """Add an assistant turn as one message with thoughts, text and tool calls."""
    message = body.add_message(ASSISTANT)
    texts = [block.text for block in blocks if isinstance(block, AnthropicText)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingPart)]
    if texts:
        message["content"] = content_of(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    for block in blocks:
        if isinstance(block, ToolUse):
            body.add_call(block.id, block.name, block.input)


def _add_input(role: str, blocks: Sequence[UserBlock], body: ChatBody) -> None:
    """Add a user or system turn; each tool result is a message of its own."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, ToolResult):
            content = "\n".join(_texts(block.content))
            body.add_message(
                "tool", tool_call_id=block.tool_use_id, content=f"Error: {content}" if block.is_error else content
            )
        else:
            texts.append(_text(block))
    if texts:
        body.add_message(role, content=content_of(texts))


def _set_tools(request: MessagesRequest, body: ChatBody) -> None:
    for tool in request.given("tools") or ():
        body.add_tool(tool, parameters="input_schema")
    if (choice := request.tool_choice) is None:
        return
    if choice.disable_parallel_tool_use:
        body.values["parallel_tool_calls"] = False
    if choice.type == "tool":
        body.force_tool(choice.name)
    else:
        body.values["tool_choice"] = _CHOICES[choice.type]


def _set_thinking(request: MessagesRequest, body: ChatBody) -> None:
    """Set how much the model may think, and the format of its output."""
    if request.thinking is not None:
        thinks = {"enable_thinking": request.thinking.type != "disabled"}
        body.values["chat_template_kwargs"] = {**thinks, **(request.chat_template_kwargs or {})}
    if (config := request.output_config) is not None:
        body.values["reasoning_effort"] = config.effort
        if config.format is not None:
            body.values["response_format"] = {
                "type": "json_schema",
                "json_schema": {"schema": config.format.json_schema},
            }


def _texts(content: str | Sequence[Block] | None) -> list[str]:
    """Return a string, or the texts of a list of blocks; an empty list without any."""
    if isinstance(content, str):
        return [content] if content else []
    return [_text(block) for block in content or ()]


def _text(block: Block) -> str:
    """Return the text of a block, or of a document behind its title and context."""
    if isinstance(block, AnthropicText):
        return block.text
    source = block.source
    text = source.data if isinstance(source, TextSource) else "\n".join(_texts(source.content))
    return "\n".join(filter(None, [block.title, block.context, text]))


def _usage(usage: Object | None) -> Object:
    """Return the usage, with cached tokens counted apart from other input tokens."""
    assert usage is not None, "every event has its usage"
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached(usage),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached(usage),
        "output_tokens": usage["completion_tokens"],
    }
