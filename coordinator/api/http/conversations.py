"""Convert the JSON of a conversation to the input of a chat template. Performs no I/O."""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn

from coordinator.api.http.fields import Fields, check_num_values, shown
from coordinator.api.validation import MAX_MESSAGES, MAX_PARTS, MAX_TEMPLATE_KWARGS_CHARS
from coordinator.text.calls.reader import MAX_CALLS, NAME
from protos.inference_pb2 import ChatInput, ChatMessage

MAX_TEMPLATE_KWARGS: Final = 64
MAX_ARGUMENTS_CHARS: Final = 2**20  # of one tool call
ASSISTANT: Final = "assistant"
TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_TEXTS: Final = ("name", "reasoning_content", "tool_call_id")
_OF_TEXTS: Final = ("annotations", "cache_control", "citations", "logprobs")  # irrelevant to the model


def parse_conversation(fields: Fields, *, has_tools: bool) -> ChatInput:
    """Return the template input for a conversation, with or without tools. Raises RequestError."""
    return _chat_input(fields, parse_messages(fields), has_tools=has_tools)


def parse_conversations(fields: Fields, limit: int) -> list[ChatInput]:
    """Return the template inputs for the list of conversations in `messages`, without tools. Raises RequestError."""
    conversations = fields.lists("messages", limit)
    if not conversations:
        raise fields.problem("messages", "is missing or empty: a batch needs at least one conversation")
    return [_chat_input(fields, parse_messages(each, ""), has_tools=False) for each in conversations]


def _chat_input(fields: Fields, messages: list[ChatMessage], *, has_tools: bool) -> ChatInput:
    return ChatInput(
        messages=messages,
        tools_json=fields.as_json("tools", fields.raw("tools")) if has_tools else "",
        template_kwargs_json=_template_kwargs_json(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt"),
        continue_final_message=fields.boolean("continue_final_message") or False,
    )


def _template_kwargs_json(fields: Fields) -> str:
    text = fields.as_json("chat_template_kwargs", _template_kwargs(fields))
    if len(text) > MAX_TEMPLATE_KWARGS_CHARS:  # before it is copied
        problem = f"has {len(text)} characters, the limit is {MAX_TEMPLATE_KWARGS_CHARS}"
        raise fields.problem("chat_template_kwargs", problem)
    return text


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    """Return the template variables of a request; reasoning_effort sets the variables that templates know."""
    kwargs = fields.mapping("chat_template_kwargs", MAX_TEMPLATE_KWARGS) or {}
    effort = fields.text("reasoning_effort")
    if effort is None:
        return kwargs
    if effort not in REASONING_EFFORTS:
        raise fields.error("reasoning_effort", f"one of {', '.join(REASONING_EFFORTS)}")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}


def parse_messages(fields: Fields, name: str = "messages") -> list[ChatMessage]:
    """Return the conversation in a field. Raises RequestError."""
    return [_message(message) for message in messages_in(fields, name)]


def messages_in(fields: Fields, name: str = "messages") -> list[Fields]:
    """Return the messages of a conversation, at least one. Raises RequestError."""
    messages = fields.objects(name, MAX_MESSAGES)
    if not messages:
        raise fields.problem(name, "is missing or empty: a conversation needs at least one message")
    return messages


def _message(message: Fields) -> ChatMessage:
    role = message.text("role")
    if not role:
        raise message.error("role", "a string such as user")
    if message.raw("function_call"):
        raise message.problem("function_call", "is not supported: send tool_calls")
    message.raw("annotations")  # of a response that is sent back; the template has no use for them
    if role == ASSISTANT:
        texts, thoughts = _said(message)
    elif "content" in message:
        texts, thoughts = _texts(message), ""
    else:
        raise message.error("content", "a string or a list of text parts")
    extra_json = _extra_json(message, thoughts)
    if isinstance(message.raw("content"), list):
        return ChatMessage(role=role, content_parts=texts, extra_json=extra_json)
    return ChatMessage(role=role, content="".join(texts), extra_json=extra_json)


def _texts(message: Fields) -> list[str]:
    """Return the texts of the content; a string counts as one text."""
    if isinstance(message.raw("content"), list):
        return texts_of_parts(message, "content", TEXT_PARTS)
    return [message.text("content") or ""]


def _said(message: Fields) -> tuple[list[str], str]:
    """Return the texts and the thoughts of an assistant message. A refusal counts as text."""
    refusal = message.text("refusal") or ""
    if not isinstance(message.raw("content"), list):
        return [message.text("content") or refusal], ""
    texts, thoughts = list[str](), list[str]()
    for part in message.objects("content", MAX_PARTS):
        match part.text("type"):
            case "thinking":
                thoughts.append(thought_of(part))
            case "redacted_thinking":
                part.raw("data")  # encrypted for its own server
            case _:
                texts.append(text_of(part, TEXT_PARTS))
    return texts or [refusal], "\n".join(thoughts)


def thought_of(part: Fields) -> str:
    """Return the text of a part of type thinking, and ignore its signature. Raises RequestError."""
    part.raw("signature")
    if (thought := part.text("thinking")) is None:
        raise part.error("thinking", "a string")
    return thought


def texts_of_parts(message: Fields, name: str, kinds: Collection[str]) -> list[str]:
    """Return the text of each part in a list, all of which must be of these kinds. Raises RequestError."""
    return [text_of(part, kinds) for part in message.objects(name, MAX_PARTS)]


def text_of(part: Fields, kinds: Collection[str]) -> str:
    """Return the text of one part of these kinds. Raises RequestError."""
    for name in _OF_TEXTS:
        part.raw(name)
    kind = part.text("type")
    if kind not in kinds:
        raise part.problem("type", f"{shown(kind)} is not supported: this model reads text alone")
    name = "refusal" if kind == "refusal" else "text"
    text = part.text(name)
    if text is None:
        raise part.error(name, "a string")
    return text


def _extra_json(message: Fields, thoughts: str) -> str:
    """Return the fields of a message besides role and content, as JSON."""
    extra: dict[str, Any] = {name: message.text(name) for name in _TEXTS if name in message}
    if "reasoning" in message:  # vLLM's newer name of reasoning_content
        extra.setdefault("reasoning_content", message.text("reasoning"))
    if thoughts:
        extra.setdefault("reasoning_content", thoughts)
    if calls := message.objects("tool_calls", MAX_CALLS):
        extra["tool_calls"] = [_call(call) for call in calls]
    return message.as_json("tool_calls", extra)


def _call(call: Fields) -> Mapping[str, Any]:
    """Return an earlier tool call, with its arguments as an object, as templates expect."""
    function = function_of(call)
    call.raw("index")  # set in stream events
    known = {"id": call.text("id")} if "id" in call else {}
    return {**known, "type": "function", "function": {"name": name_of(function), "arguments": _arguments(function)}}


def _arguments(function: Fields) -> Mapping[str, Any]:
    if isinstance(given := function.raw("arguments"), dict):
        return given
    text = function.text("arguments") or ""
    if len(text) > MAX_ARGUMENTS_CHARS:
        raise function.problem("arguments", f"has {len(text)} characters, the limit is {MAX_ARGUMENTS_CHARS}")
    check_num_values(text.encode())
    return object_of(text)


def object_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Text that is no JSON object (cut short, or with a number that JSON does not have) is returned under the key
    "arguments", so that it is not mistaken for a call without arguments.
    """
    try:
        value = parsed(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def function_of(parent: Fields) -> Fields:
    """Return the function of a tool or a call. Raises RequestError for another type."""
    kind = parent.text("type")
    if kind not in (None, "function"):
        raise parent.problem("type", f"{shown(kind)} is not supported: it must be function")
    function = parent.nested("function")
    if function is None:
        raise parent.error("function", "an object")
    return function


def name_of(function: Fields) -> str:
    """Return the name of a function. Raises RequestError when it is missing or invalid."""
    name = function.text("name")
    if name is None or not NAME.fullmatch(name):
        raise function.error("name", f"a name that matches {NAME.pattern}")
    return name


# ---- JSON written by a model ----

MAX_DEPTH: Final = 256  # levels; the stack suffices to serialize as many again


def parsed(text: str) -> Any:
    """Parse JSON that can be serialized again unchanged.

    Raises ValueError for anything else: invalid JSON, numbers beyond a float (1e400) or outside JSON (NaN), lone
    surrogates, and more than MAX_DEPTH levels.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not _is_shallow(value):
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is beyond the range of a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inner:
            return True
        level = [each for values in inner for each in values]
    return False
