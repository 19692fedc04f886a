"""Conversations as OpenAI writes them, as the messages of the wire."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from protos import inference_pb2
from splitserve.client.errors import bad_argument
from splitserve.client.wire_fields import filled, refused

Message = Mapping[str, Any]
"""One turn of a conversation: `role` (system, user or assistant) and `content`, a text or a list of text parts. What
else there is of it, such as tool_calls, is for the chat template."""

ASSISTANT: Final = "assistant"
OWN_FIELDS: Final = ("role", "content", "extra_json")


def chat_input(messages: Sequence[Message]) -> inference_pb2.ChatInput:
    """Raises Refused, which names the message."""
    return inference_pb2.ChatInput(messages=[_message(f"prompt[{i}]", each) for i, each in enumerate(messages)])


def _message(name: str, message: Message) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise refused(name, "must be a message", message)
    extra = {key: value for key, value in message.items() if key not in OWN_FIELDS and value is not None}
    if extra and message.get("extra_json"):
        raise bad_argument(f"{name} has extra_json, and fields that belong into it: {', '.join(extra)}", field=name)
    if calls := extra.get("tool_calls"):
        extra["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    content = message.get("content")
    if content is None and message.get("role") != ASSISTANT:
        raise bad_argument(f"{name} has no content", field=name)
    fields = {
        "role": message.get("role"),
        **_content(f"{name}.content", content),
        "extra_json": as_json(name, extra) if extra else message.get("extra_json"),
    }
    return filled(inference_pb2.ChatMessage(), fields, {field: f"{name}.{field}" for field in fields})


def _content(name: str, content: Any) -> dict[str, Any]:
    """The field for the texts of a list of parts, or for anything else as it is. Raises Refused."""
    if not isinstance(content, list):
        return {"content": content}
    for index, part in enumerate(content):
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise refused(f"{name}[{index}]", "must be a text part: models read text alone", part)
    return {"content_parts": [part["text"] for part in content]}


def _call(call: Any) -> Any:
    """OpenAI writes a call's arguments as JSON text, templates take them as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        read = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call


def as_json(name: str, value: Any) -> str:
    """Raises Refused for what is no JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_argument(f"{name} cannot be written as JSON: {error}", field=name) from error
