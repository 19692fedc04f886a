"""How a JSON schema is made: where in it further schemas are. Pure."""

from collections.abc import Callable, Iterator
from typing import Any, Final

DATA: Final = ("const", "enum", "default", "examples")  # keywords that hold data, whatever it looks like
NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # a schema for each name


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """It and every object in it that may be a schema."""
    left = [(schema, False)]
    while left:
        part, has_names = left.pop()
        if isinstance(part, list):
            left += [(each, False) for each in part]
        elif isinstance(part, dict) and has_names:
            left += [(each, False) for each in part.values()]
        elif isinstance(part, dict):
            yield part
            left += [(value, name in NAMED) for name, value in part.items() if name not in DATA]


def with_references(schema: Any, moved: Callable[[str], str]) -> Any:
    """The same with other references, each $ref of a schema in it; data is as it was."""
    if isinstance(schema, list):
        return [with_references(each, moved) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _with_references(name, value, moved) for name, value in schema.items()}


def _with_references(name: str, value: Any, moved: Callable[[str], str]) -> Any:
    if name in DATA:
        return value
    if name in NAMED and isinstance(value, dict):
        return {each: with_references(part, moved) for each, part in value.items()}
    if name == "$ref" and isinstance(value, str):
        return moved(value)
    return with_references(value, moved)


def leads_to_data(reference: str) -> bool:
    """Whether a reference within a schema leads into what is no schema."""
    has_names = False
    for step in reference.removeprefix("#").split("/")[1:]:
        if not has_names and step in DATA:
            return True
        has_names = not has_names and step in NAMED
    return False
