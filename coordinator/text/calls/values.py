"""Convert the values of arguments that a model writes as plain text to JSON, by the types that the tool's schema
allows."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from coordinator.text.calls.pythonic import literal
from coordinator.text.calls.reader import BLANKS, MAX_HELD_CHARS

TEXT: Final = frozenset({"string"})
MAX_REFERENCES: Final = 16  # followed from one schema to the next
_NAMES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types_of(root: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that an object's schema `root` allows for the property `key`; empty if it does not say."""
    properties = root.get("properties")
    return types_in(root, properties.get(key) if isinstance(properties, Mapping) else None)


def types_in(root: Mapping[str, Any], schema: Any) -> frozenset[str]:
    """Return the JSON types that `schema`, a part of the schema `root`, allows; empty if it does not say."""
    return frozenset(_types(root, schema, MAX_REFERENCES))


def _types(root: Mapping[str, Any], schema: Any, most: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not most:
        return
    named = schema.get("type")
    yield from (each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
    for value in [schema["const"]] if "const" in schema else listed(schema, "enum"):
        yield _NAMES.get(type(value), "null")
    for name in ("anyOf", "oneOf", "allOf"):
        for each in listed(schema, name):
            yield from _types(root, each, most - 1)
    yield from _types(root, target(root, schema.get("$ref")), most - 1)


def listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list that a schema has under the keyword `name`; empty if it has no list there."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def target(root: Any, reference: Any) -> Any:
    """Return the part of the schema `root` that a reference such as #/$defs/a names; None if it names none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def as_json(text: str, types: frozenset[str]) -> str:
    """Return an argument, written as plain text, as JSON of one of these types; an empty set allows any.

    Text that reads as a value of an allowed type, in JSON or in Python's words, becomes that value. Any other text
    becomes a string if strings are allowed, or if it reads as no value.
    """
    written, kind = _read(text.strip(BLANKS))
    is_allowed = not types or kind in types or (kind == "integer" and "number" in types)
    if kind and is_allowed and not (kind == "string" and types):
        return written
    return quoted(text) if not kind or not types or "string" in types else written


def quoted(text: str) -> str:
    """Return text as a JSON string, with its quotes."""
    return json.dumps(text, ensure_ascii=False)


def _read(text: str) -> tuple[str, str]:
    """Return the JSON and the JSON type of a value; empty if it is neither JSON nor a literal of Python."""
    for written in (text, literal(text)):
        try:
            value = json.loads(written or "", parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        return written or "", _NAMES.get(type(value), "null")
    return "", ""


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


class Value:
    """Write one argument as JSON while its text comes, by calls of `write` with pieces of JSON.

    Strings are written as they come. Other values wait for their end, or for more than MAX_HELD_CHARS, from which on
    they are written as they come.
    """

    def __init__(self, write: Callable[[str], None], types: frozenset[str]) -> None:
        self._write = write
        self._types = types
        self._held = ""
        self._is_text: bool | None = None  # None: not known yet
        if types == TEXT:
            self._begin(is_text=True)

    def add(self, text: str) -> None:
        """Add the next piece of the value's text, and write what is certain."""
        self._held += text
        if len(self._held) > MAX_HELD_CHARS and self._is_text is None:
            self._begin(is_text=not self._types or "string" in self._types)
        if self._is_text is not None:
            self._write(quoted(self._held)[1:-1] if self._is_text else self._held)
            self._held = ""

    def end(self) -> None:
        """Write the rest of the value, whose text has ended."""
        if self._is_text is None:
            self._write(as_json(self._held, self._types))
        elif self._is_text:
            self._write('"')

    def _begin(self, *, is_text: bool) -> None:
        self._is_text = is_text
        if is_text:
            self._write('"')
