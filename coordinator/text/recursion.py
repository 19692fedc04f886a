"""Schemas of which every value would have to hold another one of them, and so on without end. Pure.

The library compiles them, and an answer comes to a place from which nothing leads on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote


class References:
    """Finds what a $ref of a schema refers to. `parts` are the schemas in it."""

    def __init__(self, schema: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        self._schema = schema
        self._anchors = {str(part["$anchor"]): part for part in parts if "$anchor" in part}

    def target(self, reference: str) -> Any:
        """Return the schema within the whole one; None where that is nothing."""
        own = str(self._schema.get("$id", "")).removesuffix("#")
        fragment = unquote(reference.removeprefix(own).removeprefix("#"))
        if not fragment.startswith("/"):
            return self._anchors.get(fragment) if fragment else self._schema
        place: Any = self._schema
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list):
                place = place[int(name)] if name.isdecimal() and int(name) < len(place) else None
            else:
                place = place.get(name) if isinstance(place, dict) else None
        return place


def endless_reference(schema: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> str:
    """A $ref that no value can meet; empty if there is none. `parts` are the schemas in it. Where some of them have an
    $id, references within those are not followed, and none is found."""
    if any("$id" in part for part in parts if part is not schema):
        return ""
    references = References(schema, parts)
    endless = {id(part): part for part in parts}  # as far as is known

    def ends(part: Any) -> bool:
        return id(part) not in endless

    num_before = 0
    while len(endless) != num_before:
        num_before = len(endless)
        for part in (*reversed(endless.values()), *endless.values()):  # what is needed may stand on either side
            reference = part.get("$ref")
            target = references.target(reference) if isinstance(reference, str) else True
            if ends(target) and _has_value(part, ends):
                endless.pop(id(part), None)
    return next((str(part["$ref"]) for part in endless.values() if "$ref" in part), "")


def _has_value(part: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    """Whether one may end, its $ref apart."""
    options = [given for name in ("anyOf", "oneOf") if (given := _listed(part, name))]
    return all(any(map(ends, given)) for given in options) and all(map(ends, _held(part)))


def _held(part: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that every value of it has to meet, itself or with something within it."""
    yield from _listed(part, "allOf")
    if part.get("type") in ("object", ["object"]):
        given = part.get("properties")
        properties = given if isinstance(given, dict) else {}
        others = part.get("additionalProperties") if not part.get("patternProperties") else True
        yield from (properties.get(name, others) for name in _listed(part, "required") if isinstance(name, str))
        if not properties and _count(part, "minProperties"):
            yield others
    if part.get("type") in ("array", ["array"]):
        is_old = isinstance(part.get("items"), list)
        first = _listed(part, "items" if is_old else "prefixItems")
        fewest = _count(part, "minItems")
        yield from first[:fewest]
        if fewest > len(first):
            yield part.get("additionalItems" if is_old else "items")


def _listed(part: Mapping[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := part.get(name), list) else []


def _count(part: Mapping[str, Any], name: str) -> int:
    return value if isinstance(value := part.get(name), int) else 0
