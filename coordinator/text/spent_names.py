"""Patterns of names that leave no name: all of theirs are those of `properties`. Pure.

The library lets a comma come before each property that a pattern, or `additionalProperties`, may have, also where every
name is taken: then no token can follow.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from coordinator.text.json_grammar import bytes_behind

SAMPLES: Final = ("", "q", "z9 \u00e9")  # names that hardly any schema has
_UNLIKE: Final = re.compile(r"\[\^|\[[^\]]*\[|&&|--|~~|\\[a-zA-Z0]|[\x00-\x1f]|\(\?")
"""In a pattern that Python may read otherwise, or whose names answers cannot spell."""


def replace_spent(parts: Sequence[dict[str, Any]]) -> None:
    """Put properties in place of each pattern that stands for no other names than those that the schema has anywhere:
    where schemas are joined, they may meet. Where patterns and properties leave no name for others, there are none."""
    patterned = [part for part in parts if _mapping(part, "patternProperties")]
    names = sorted({name for part in parts for name in _names(part)}) if patterned else []
    for part in patterned:
        patterns = part["patternProperties"]
        for pattern in [each for each in patterns if _finds(each, names) is not False]:
            if _is_spent(pattern, names):
                _put_properties(part, pattern, patterns.pop(pattern), names)
        own = sorted(_names(part))
        if patterns and part.get("additionalProperties") is not False and not _leaves_others(patterns, own):
            part["additionalProperties"] = False


def _put_properties(part: dict[str, Any], pattern: str, schema: Any, names: Sequence[str]) -> None:
    properties = _mapping(part, "properties")
    matching = [name for name in names if _matches(pattern, name)]
    added = {name: {"allOf": [properties[name], schema]} if name in properties else schema for name in matching}
    part["properties"] = {**properties, **added}


def _leaves_others(patterns: Collection[str], names: Sequence[str]) -> bool:
    """Whether there are names that none of the patterns stands for."""
    samples = [sample for sample in SAMPLES if sample not in names]
    if any(all(_finds(pattern, [sample]) is False for pattern in patterns) for sample in samples):
        return True
    return not _is_spent("|".join(f"(?:{pattern})" for pattern in patterns), names, others=True)


def _finds(pattern: str, names: Iterable[str]) -> bool | None:
    """Whether a pattern stands for one of these names; None where the library alone can say."""
    if _UNLIKE.search(pattern):
        return None
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
    return any(map(expression.search, names))


def _is_spent(pattern: str, names: Sequence[str], *, others: bool = False) -> bool:
    """Whether no name is left of those that a pattern stands for; with `others`, of those that it does not."""
    probe = {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": {pattern: not others},
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
