"""Patterns of names that leave no name: all of theirs are those of `properties`. Pure.

The library lets a comma come before each property that a pattern, or `additionalProperties`, may have, also where every
name is taken: then no token can follow.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coordinator.text.json_grammar import bytes_behind


def replace_spent(parts: Sequence[dict[str, Any]]) -> None:
    """Put properties in place of each pattern that stands for no other names than those that the schema has anywhere:
    where schemas are joined, they may meet. Where patterns and properties leave no name for others, there are none."""
    patterned = [part for part in parts if _mapping(part, "patternProperties")]
    names = sorted({name for part in parts for name in _names(part)}) if patterned else []
    for part in patterned:
        patterns = part["patternProperties"]
        for pattern in [each for each in patterns if _is_spent([each], names)]:
            _put_properties(part, pattern, patterns.pop(pattern), names)
        is_open = patterns and part.get("additionalProperties") is not False
        if is_open and _is_spent(patterns, sorted(_names(part)), others=True):
            part["additionalProperties"] = False


def _put_properties(part: dict[str, Any], pattern: str, schema: Any, names: Sequence[str]) -> None:
    properties = _mapping(part, "properties")
    matching = [name for name in names if _matches(pattern, name)]
    added = {name: {"allOf": [properties[name], schema]} if name in properties else schema for name in matching}
    part["properties"] = {**properties, **added}


def _is_spent(patterns: Collection[str], names: Sequence[str], *, others: bool = False) -> bool:
    """Whether no name is left of those that the patterns stand for; with `others`, of those that they do not."""
    probe = {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": dict.fromkeys(patterns, not others),
        "additionalProperties": others,
    }
    behind = bytes_behind(probe, "{")
    return behind is not None and ord('"') not in behind


def _matches(pattern: str, name: str) -> bool:
    probe = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    return bool(bytes_behind(probe, "{" + json.dumps(name, ensure_ascii=False)))


def _names(part: Mapping[str, Any]) -> set[str]:
    required = part.get("required")
    listed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {*_mapping(part, "properties"), *listed}


def _mapping(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return value if isinstance(value := part.get(name), dict) else {}
