"""A JSON schema with less to keep to, for calls of tools that are not strict. Pure."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from coordinator.text.closing import close_objects
from coordinator.text.enforceable import parse_schema
from coordinator.text.schemas import schemas_in

ANY: Final[Mapping[str, Any]] = {"type": "object"}
FIRST: Final = ("type", "properties", "required")  # what others go by
NAMED: Final = ("properties", "patternProperties")  # a schema for each name
WITHIN: Final = (*NAMED, "additionalProperties", "prefixItems", "items", "additionalItems")  # schemas
ASIDE: Final = ("$ref", "allOf", "anyOf", "$defs", "definitions", "$id", "title", "description", "default", "examples")
OF_THE_REST: Final = {"additionalProperties": "patternProperties", "items": "prefixItems", "additionalItems": "items"}


def loosened(
    text: str,
    places: Collection[str],
    is_enforced: Callable[[Mapping[str, Any]], bool],
    *,
    closes_objects: bool = False,
) -> str:
    """Of the definitions of these names in a schema, and of itself where a name is empty, what can be enforced as
    `is_enforced` sees it: each part of them by itself. With `closes_objects` its objects are closed before, by what the
    whole schema names. Raises Unenforceable."""
    schema = parse_schema(text)
    if closes_objects:
        close_objects(schema, list(schemas_in(schema)))
    for place in places:
        for part in schemas_in(schema["$defs"][place] if place else schema):
            _loosen(part, is_enforced)
    return json.dumps(schema)


def freed(text: str, places: Collection[str]) -> str:
    """With any object at these places. Raises Unenforceable."""
    if "" in places:
        return json.dumps(ANY)
    schema = parse_schema(text)
    return json.dumps({**schema, "$defs": {**schema["$defs"], **dict.fromkeys(places, ANY)}})


def _loosen(part: dict[str, Any], is_enforced: Callable[[Mapping[str, Any]], bool]) -> None:
    if options := part.pop("oneOf", None):  # of which several may hold
        part.setdefault("anyOf", options)
    own = {name: _hollow(name, value) for name, value in part.items() if name not in ASIDE}
    if is_enforced(own):
        return
    kept: dict[str, Any] = {}
    for name in dict.fromkeys((*FIRST, *own)):
        if name in own and is_enforced({**kept, name: own[name]}):
            kept[name] = own[name]
    for name in own:
        if name not in kept or OF_THE_REST.get(name) in own.keys() - kept.keys():
            del part[name]


def _hollow(name: str, value: Any) -> Any:
    """The same without what schemas in it ask for, but that there may be no value."""
    if name not in WITHIN:
        return value
    if isinstance(value, list):
        return [each is not False for each in value]
    if isinstance(value, dict) and name in NAMED:
        return {each: schema is not False for each, schema in value.items()}
    return value is not False
