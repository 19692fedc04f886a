"""From what a client wants an answer to be to a grammar in llguidance's own form, or a sentence on why not. Pure.

What the library does not enforce it refuses by name; what it would enforce in part is refused here.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeGuard

from llguidance import LLMatcher, grammar_from

EXACT: Final = 2**53  # integers up to here are what a float says
INT64: Final = range(-(2**63), 2**63 - 1)  # beyond it the library enforces the end of the range
DATA: Final = ("const", "enum")
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NOT_SCHEMAS: Final = (*DATA, "default", "examples")


class Unenforceable(ValueError):
    """A constraint that no answer could be held to; says why in the words of its client."""


def to_grammar(kind: str, value: Any, whitespace: str | None) -> str:
    """`kind` is a field of the oneof `constraint` of protos/inference.proto, `value` what it holds; `whitespace` is a
    regex for what may stand between the tokens of JSON, None for nothing. Raises Unenforceable; whether the grammar
    compiles is not checked."""
    match kind:
        case "json_schema":
            return _of_schema(_read_schema(value), whitespace)
        case "json_object":
            return _of_schema({"type": "object"}, whitespace)
        case "regex":
            return str(LLMatcher.grammar_from_regex(value))
        case "choice":
            return _of_lark("start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value))
        case "grammar":
            return _of_lark(_read_grammar(value))
    raise AssertionError(f"{kind} is no constraint")


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _of_schema(schema: Mapping[str, Any], whitespace: str | None) -> str:
    """With our options whatever the schema says: its own could make the library lenient."""
    options = {"whitespace_flexible": whitespace is not None, "whitespace_pattern": whitespace}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


def _read_grammar(text: str) -> str:
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise Unenforceable(f"it is neither Lark nor GBNF: {error}") from error


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unenforceable(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise Unenforceable("it is no JSON object")
    for part in _objects(schema):
        _check_count(part)
        _check_numbers(part)
    return schema


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it that may be a schema."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            left += [value for name, value in part.items() if name not in NOT_SCHEMAS]


def _check_count(part: Mapping[str, Any]) -> None:
    """A property that no name of the schema stands for may come twice, and is one all the same."""
    fewest, required = part.get("minProperties"), part.get("required")
    if not _is_integer(fewest) or fewest <= 1:
        return
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if len(names) < fewest:
        raise Unenforceable(f"minProperties ({fewest}) is more than 1 and than the names in required ({len(names)})")


def _check_numbers(part: Mapping[str, Any]) -> None:
    for name in DATA:
        if not all(map(_is_exact, _numbers(part.get(name)))):
            raise _inexact(name)
    for name in BOUNDS:
        number = part.get(name)
        if _is_integer(number) and number in INT64 and not _is_exact(number):
            raise _inexact(name)


def _numbers(data: Any) -> Iterator[int]:
    """All integers in it."""
    left = [data]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif _is_integer(value):
            yield value


def _is_exact(number: int) -> bool:
    return abs(number) <= EXACT or (abs(number) < 2**1023 and int(float(number)) == number)


def _inexact(name: str) -> Unenforceable:
    return Unenforceable(f"{name} has an integer beyond 2^53 that no float is equal to")


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
