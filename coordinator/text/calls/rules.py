"""What models write when they call tools, as rules of Lark: by format, the counterpart of what a reader reads. Pure.

Each format has a rule `calls`, of an answer that is nothing but calls. It may use the grammars `call`, a JSON object of
a name and arguments, and `object`, any JSON object.
"""

import json
import keyword
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from coordinator.text.calls import hermes, llama3, mistral

Tag = Callable[[str], str]
"""How Lark writes what a format is known by: where it is a special token it comes as that alone."""

BLANKS: Final = "blanks: /[ \\t\\r\\n]{1,8}/\n"
_LITERALS: Final = r"""
calls: "[" call ("," blanks? call)* "]"
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


def rules(calls: str, names: Collection[str], tag: Tag) -> str:
    """Those of a format; empty where it can call none of these tools."""
    match calls:
        case "hermes":
            pair = f"{tag(hermes.OPEN)} blanks? @call blanks? {tag(hermes.CLOSE)}"
            return f"calls: ({pair} blanks?)+\n"
        case "llama3":
            return f'calls: {tag(llama3.TAG)}? @call (blanks? ";" blanks? @call)*\n'
        case "mistral":
            return _of_mistral(names, tag)
        case "pythonic":
            return _of_python(names)
    raise AssertionError(f"{calls} is no format of calls")


def call_schema(calls: str, names: Collection[str]) -> Mapping[str, Any]:
    """Of a call that is a JSON object."""
    arguments = "parameters" if calls == "llama3" else "arguments"
    return {
        "type": "object",
        "properties": {"name": {"enum": [*names]}, arguments: {"type": "object"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _of_mistral(names: Collection[str], tag: Tag) -> str:
    """A list behind the tag, or a call for each tag."""
    return (
        f"calls: {tag(mistral.TAG)} blanks? list | ({tag(mistral.TAG)} blanks? named)+\n"
        'list: "[" blanks? @call (blanks? "," blanks? @call)* blanks? "]"\n'
        f"named: name {tag(mistral.ARGUMENTS)}? blanks? @object\n"
        f"{_any_of(names)}"
    )


def _of_python(names: Collection[str]) -> str:
    able = [name for name in names if all(map(_is_key, name.split(".")))]
    keywords = "|".join(filter(str.isidentifier, keyword.kwlist))
    return f"{_any_of(able)}KEY: /{_KEY}/ & ~/{keywords}/{_LITERALS}" if able else ""


def _is_key(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def _any_of(names: Collection[str]) -> str:
    return "name: " + " | ".join(json.dumps(name, ensure_ascii=False) for name in names) + "\n"
