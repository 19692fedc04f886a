"""Tools in conversations whose chat template knows of none: a message lists them and says how they are called; calls
and their results become text. What other messages say stays a text, or a list of the texts of its parts. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]

SYSTEM, USER, TOOL = "system", "user", "tool"
FORMS: Final = {  # of a call, by the formats of answer_format
    "hermes": '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>',
    "llama3": '{{"name": {name}, "parameters": {arguments}}}',
    "mistral": '[TOOL_CALLS] [{{"name": {name}, "arguments": {arguments}}}]',
    "pythonic": "[{name}({arguments})]",
}


def description(tools: Sequence[Any], form: str) -> str:
    """What a model is told of its tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = _call(form, "function-name", '{"argument-name": "value"}', 'argument_name="value"')
    return (
        "You may call functions to assist with the user query. These are their signatures, each in a line of JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call one, write its name and its arguments in this form:\n{example}"
    )


def with_description(messages: Sequence[Message], text: str, role: str) -> list[Message]:
    """The conversation with a text in its system message, or before what its first message of another role says."""
    at = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages]
    content = messages[at]["content"]
    *before, last = first, *behind = [content] if isinstance(content, str) else content
    told = [*before, _paragraphs(last, text)] if role == SYSTEM else [_paragraphs(text, first), *behind]
    said = {**messages[at], "content": told[0] if isinstance(content, str) else told}
    return [*messages[:at], said, *messages[at + 1 :]]


def with_calls_as_text(messages: Sequence[Message], form: str) -> list[Message]:
    """The conversation with calls as its model writes them, and their results as messages of the user. Raises KeyError,
    TypeError or AttributeError for calls that are none of functions."""
    told: list[Message] = []
    follows_results = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == TOOL:
            content, role = f"<tool_response>\n{_text(content)}\n</tool_response>", USER
        if follows_results and role == USER:  # templates want user and assistant by turns
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{_text(content)}"}
        elif calls := message.get("tool_calls"):
            texts = [_text(content), *(_call_of(call, form) for call in calls)]
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            told.append({**others, "content": "\n".join(filter(None, texts))})
        else:
            told.append({**message, "role": role, "content": content})
        follows_results = message["role"] == TOOL or (follows_results and role == USER)
    return told


def _text(content: str | Sequence[str]) -> str:
    return content if isinstance(content, str) else "\n".join(content)


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _call_of(call: Mapping[str, Any], form: str) -> str:
    function = call["function"]
    name, arguments = str(function["name"]), function["arguments"]
    if isinstance(arguments, str):
        return _call(form, name, arguments, arguments)
    keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return _call(form, name, json.dumps(arguments, ensure_ascii=False), keywords)


def _call(form: str, name: str, arguments: str, keywords: str) -> str:
    if form == "pythonic":
        return FORMS[form].format(name=name, arguments=keywords)
    return FORMS[form].format(name=json.dumps(name, ensure_ascii=False), arguments=arguments)
