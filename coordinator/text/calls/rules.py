"""What models write when they call tools, as rules of Lark: by format, the counterpart of what a reader reads. Pure.

Each format has a rule `calls`, of an answer that is nothing but calls. `tools` are those that may be called by their
names, each with the grammar of its arguments, as in @object.
"""

import json
import keyword
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from coordinator.text.calls.json_calls import HERMES_CLOSE, HERMES_OPEN, MISTRAL_ARGUMENTS, MISTRAL_TAG, PYTHON_TAG

Tag = Callable[[str], str]
"""How Lark writes what a format is known by: where it is a special token it comes as that alone."""

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
    """Those of a format, of at most so many calls; empty where it can call none of the tools."""
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
    """Each call is a JSON object."""
    between = f'blanks? "," blanks? {_quoted(arguments)} blanks? ":" blanks?'
    named = _any_of(f"{_quoted(name)} {between} {grammar}" for name, grammar in tools.items())
    return f'call: "{{" blanks? {_quoted("name")} blanks? ":" blanks? ({named}) blanks? "}}"\n'


def _of_mistral(tools: Mapping[str, str], tag: Tag, most: int) -> str:
    """A list behind the tag, or a call for each tag."""
    named = _any_of(f"{_text(name)} {tag(MISTRAL_ARGUMENTS)}? blanks? {grammar}" for name, grammar in tools.items())
    return (
        f"calls: {tag(MISTRAL_TAG)} blanks? list | ({tag(MISTRAL_TAG)} blanks? ({named}) blanks?){{1,{most}}}\n"
        f'list: "[" blanks? {_listed("call", ",", most)} blanks? "]"\n' + _objects(tools, "arguments")
    )


def _of_python(names: Collection[str], most: int) -> str:
    """Arguments are literals with any keywords."""
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
    """A string of JSON."""
    return _text(_text(text))
