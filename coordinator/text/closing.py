"""Objects that have the properties that their schema names, and no others. Pure.

By JSON Schema an object may have any further properties where `additionalProperties` is missing. Who writes a schema
for a model expects none, as OpenAI's strict mode, llama.cpp and xgrammar have it, and a model that may invent some
often never comes to an end.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from coordinator.text.recursion import References

NAMED: Final = ("properties", "patternProperties")
OPTIONS: Final = ("allOf", "anyOf", "oneOf")


def close_objects(schema: Mapping[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Close each object schema that names properties and does not say what others there may be. `parts` are the schemas
    in `schema`. Where several of them are about the same object (allOf; a $ref or anyOf beside keywords), all of their
    names may come, and the object stays open if one of them says so. A definition that is joined with others somewhere
    stays as it is where it stands alone: the library takes no keywords beside a reference that leads back."""
    references = References(schema, parts)
    joined = {id(part): _joined(part, references) for part in parts}
    inner = {id(each) for schemas in joined.values() for each in schemas}
    for part in parts:
        group = [part, *joined[id(part)]]
        if id(part) not in inner and any(map(_names, group)) and not any(map(_tells_of_others, group)):
            _close(part, group)


def _close(part: dict[str, Any], group: Sequence[Mapping[str, Any]]) -> None:
    for name in NAMED:
        named: dict[str, Any] = {key: {} for each in group if isinstance(each.get(name), dict) for key in each[name]}
        if name == "properties":
            named |= {key: {} for each in group for key in _listed(each, "required") if isinstance(key, str)}
        if named and isinstance(own := part.get(name, {}), dict):
            part[name] = named | own
    part["additionalProperties"] = False


def _joined(part: Mapping[str, Any], references: References) -> Sequence[Mapping[str, Any]]:
    """The schemas that, beside the keywords of a part, are about the same value; none where they are all there is."""
    num_sources = _names(part) + len(_listed(part, "allOf")) + sum(name in part for name in ("$ref", *OPTIONS[1:]))
    if num_sources < 2:
        return ()
    found: dict[int, Mapping[str, Any]] = {}
    left = list(_beside(part, references))
    while left:
        each = left.pop()
        if id(each) not in found and each is not part:
            found[id(each)] = each
            left += _beside(each, references)
    return list(found.values())


def _beside(part: Mapping[str, Any], references: References) -> Iterator[Mapping[str, Any]]:
    """The schemas that a part itself refers to for its value."""
    for name in OPTIONS:
        yield from (each for each in _listed(part, name) if isinstance(each, dict))
    if isinstance(reference := part.get("$ref"), str) and isinstance(target := references.target(reference), dict):
        yield target


def _tells_of_others(part: Mapping[str, Any]) -> bool:
    return "additionalProperties" in part or part.get("unevaluatedProperties", False) is not False


def _names(part: Mapping[str, Any]) -> bool:
    return any(isinstance(part.get(name), dict) for name in NAMED)


def _listed(part: Mapping[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := part.get(name), list) else []
