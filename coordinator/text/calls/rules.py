"""Define Lark rules for tool calls by format, the counterparts of the readers. Performs no I/O.

Each format has a rule `calls` for an output that consists of calls only. `tools` maps the names that may be called to
the grammars of their arguments, such as @object.
"""

import json
import keyword
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from coordinator.text.calls.json_calls import HERMES_CLOSE, HERMES_OPEN, MISTRAL_ARGUMENTS, MISTRAL_TAG, PYTHON_TAG

Tag = Callable[[str], str]
"""Return the Lark form of a tag: a string, or the special token."""

BLANKS: Final = "blanks: /[ \\t\\r\\n]{1,8}/\n"
_OF_PYTHON: Final = r"""
call: name "(" (argument ("," blanks? argument)*)? ")"
argument: KEY "=" value
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value ("," blanks? value)*)? "]"
dict: "{" (pair ("," blanks? pair)*)? "}"
pair: STRING ":" blanks? value
STRING: /"([^"\\\x00-\x1f]|\\[\\"nrt])*"|'([^'\\\x00-\x1f]|\\[\\'nrt])*'/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?/
"""
_KEY: Final = "[A-Za-z_][A-Za-z0-9_]{0,127}"


def rules(calls: str, tools: Mapping[str, str], tag: Tag, most: int) -> str:
    """Return the rules of a format for at most `most` calls; empty if the format can call none of the tools."""
    match calls:
        case "hermes":
            pair = f"{tag(HERMES_OPEN)} blanks? call blanks? {tag(HERMES_CLOSE)}"
            return f"calls: ({pair} blanks?){{1,{most}}}\n" + _objects(tools, "arguments")
        case "llama3":
            return f"calls: {tag(PYTHON_TAG)}? {_listed('call', ';', most)}\n" + _objects(tools, "parameters")
        case "mistral":
            return _of_mistral(tools, tag, most)
        case "pythonic":
            return _of_python(tools, most)
    raise AssertionError(f"{calls} is no format of calls")


def _listed(call: str, separator: str, most: int) -> str:
    return f'{call} (blanks? "{separator}" blanks? {call}){{0,{most - 1}}}' if most > 1 else call


def _objects(tools: Mapping[str, str], arguments: str) -> str:
    """Return the rule of a call that is a JSON object."""
    between = f'blanks? "," blanks? {_quoted(arguments)} blanks? ":" blanks?'
    named = _any_of(f"{_quoted(name)} {between} {grammar}" for name, grammar in tools.items())
    return f'call: "{{" blanks? {_quoted("name")} blanks? ":" blanks? ({named}) blanks? "}}"\n'


def _of_mistral(tools: Mapping[str, str], tag: Tag, most: int) -> str:
    """Return the rules for a list after the tag, or a tag before each call."""
    named = _any_of(f"{_text(name)} {tag(MISTRAL_ARGUMENTS)}? blanks? {grammar}" for name, grammar in tools.items())
    return (
        f"calls: {tag(MISTRAL_TAG)} blanks? list | ({tag(MISTRAL_TAG)} blanks? ({named}) blanks?){{1,{most}}}\n"
        f'list: "[" blanks? {_listed("call", ",", most)} blanks? "]"\n' + _objects(tools, "arguments")
    )


def _of_python(names: Collection[str], most: int) -> str:
    """Return the rules for calls with literal keyword arguments."""
    able = [name for name in names if all(map(_is_key, name.split(".")))]
    keywords = "|".join(filter(str.isidentifier, keyword.kwlist))
    calls = f'calls: "[" {_listed("call", ",", most)} "]"\nname: {_any_of(map(_text, able))}\n'
    return f"{calls}KEY: /{_KEY}/ & ~/{keywords}/{_OF_PYTHON}" if able else ""


def _is_key(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def _any_of(rules: Iterable[str]) -> str:
    return " | ".join(rules)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a JSON string as a Lark string."""
    return _text(_text(text))
