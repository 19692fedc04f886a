"""Traverse JSON schemas, resolve their references and property names, and build their grammar. Performs no I/O."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

from serving_core.grammars import LIMITS

DATA: Final = ("const", "enum", "default", "examples")  # keywords whose values are data, not schemas
NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # a schema for each name


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and every object in it that may be a schema; values under keywords of DATA are left out."""
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
    """Return a copy of the schema in which each $ref is replaced by `moved` of it, except in data (see DATA)."""
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
    """Return whether a reference within a schema leads into the value of a keyword of DATA, which is no schema."""
    has_names = False
    for step in reference.removeprefix("#").split("/")[1:]:
        if not has_names and step in DATA:
            return True
        has_names = not has_names and step in NAMED
    return False


# Schemas whose values would have to contain each other without end. The library compiles these schemas, and an output
# reaches a state from which no token leads on.


class References:
    """Resolve the $ref references of a schema. `parts` are the schemas in it."""

    def __init__(self, schema: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        self._schema = schema
        self._anchors = {str(part["$anchor"]): part for part in parts if "$anchor" in part}

    def target(self, reference: str) -> Any:
        """Return the schema that a reference leads to, or None without one."""
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
    """Return a $ref of the schema that no finite value can satisfy; empty if there is none.

    `parts` are the schemas in `schema`. Also empty if one of them has an $id, since references within it are not
    followed.
    """
    if any("$id" in part for part in parts if part is not schema):
        return ""
    references = References(schema, parts)
    endless = {id(part): part for part in parts}  # as far as is known

    def ends(part: Any) -> bool:
        return id(part) not in endless

    num_before = 0
    while len(endless) != num_before:
        num_before = len(endless)
        for part in (*reversed(endless.values()), *endless.values()):  # dependencies may lie on either side
            reference = part.get("$ref")
            target = references.target(reference) if isinstance(reference, str) else True
            if ends(target) and _has_value(part, ends):
                endless.pop(id(part), None)
    return next((str(part["$ref"]) for part in endless.values() if "$ref" in part), "")


def _has_value(part: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    """Return whether a part, apart from its $ref, has a finite value."""
    options = [given for name in ("anyOf", "oneOf") if (given := _listed(part, name))]
    return all(any(map(ends, given)) for given in options) and all(map(ends, _held(part)))


def _held(part: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that every value of this part must satisfy, itself or by a value within it."""
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


# Closed objects: objects that have the properties named by their schema, and no others. By JSON Schema, an object
# without `additionalProperties` may have any others. Schemas written for models expect none, as OpenAI's strict mode,
# llama.cpp and xgrammar do, and a model that may invent properties often never ends its output.

OF_OBJECTS: Final = ("properties", "patternProperties")
OPTIONS: Final = ("allOf", "anyOf", "oneOf")


def close_objects(schema: Mapping[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Let object schemas that name properties, and do not say which others are allowed, allow no others. In place.

    `parts` are the schemas in `schema`. Where several schemas describe one object (allOf; a $ref or anyOf besides other
    keywords), all of their properties are allowed, and the object stays open if one of the schemas says so. A
    definition that is joined with others anywhere is not closed where it stands alone: the library supports no keywords
    beside a recursive reference.
    """
    references = References(schema, parts)
    joined = {id(part): _joined(part, references) for part in parts}
    inner = {id(each) for schemas in joined.values() for each in schemas}
    for part in parts:
        group = [part, *joined[id(part)]]
        if id(part) not in inner and any(map(_has_names, group)) and not any(map(_tells_of_others, group)):
            _close(part, group)


def _close(part: dict[str, Any], group: Sequence[Mapping[str, Any]]) -> None:
    for name in OF_OBJECTS:
        named: dict[str, Any] = {key: {} for each in group if isinstance(each.get(name), dict) for key in each[name]}
        if name == "properties":
            named |= {key: {} for each in group for key in _listed(each, "required") if isinstance(key, str)}
        if named and isinstance(own := part.get(name, {}), dict):
            part[name] = named | own
    part["additionalProperties"] = False


def _joined(part: Mapping[str, Any], references: References) -> Sequence[Mapping[str, Any]]:
    """Return the schemas that describe the same value as a part; empty when the part is the only one."""
    num_sources = _has_names(part) + len(_listed(part, "allOf")) + sum(name in part for name in ("$ref", *OPTIONS[1:]))
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
    """Yield the schemas that a part refers to for its own value."""
    for name in OPTIONS:
        yield from (each for each in _listed(part, name) if isinstance(each, dict))
    if isinstance(reference := part.get("$ref"), str) and isinstance(target := references.target(reference), dict):
        yield target


def _tells_of_others(part: Mapping[str, Any]) -> bool:
    return "additionalProperties" in part or part.get("unevaluatedProperties", False) is not False


def _has_names(part: Mapping[str, Any]) -> bool:
    return any(isinstance(part.get(name), dict) for name in OF_OBJECTS)


# ---- Requirements for property names, as properties or patterns, which the library supports ----

BESIDE: Final = {"type", "title", "description"}  # keywords without effect on a text
MOST_COPIED_CHARS: Final = 2**17


def put_names(part: dict[str, Any], schema: Mapping[str, Any]) -> None:
    """Replace `propertyNames`, in place, in a part of a schema that names no properties.

    Names from a list become properties, and names that match a pattern become a pattern property; no others are
    allowed. Other requirements are left unchanged. `schema` is the whole one, in which references are resolved.
    """
    asked = _asked(part.get("propertyNames"), schema)
    if not asked or "properties" in part or "patternProperties" in part:
        return
    value = part.get("additionalProperties", True)
    listed, pattern = asked.get("enum"), _pattern(asked)
    if asked.keys() == {"enum"} and isinstance(listed, list) and all(isinstance(each, str) for each in listed):
        if len(listed) * len(json.dumps(value)) > MOST_COPIED_CHARS:
            return
        part["properties"] = dict.fromkeys(listed, value)
    elif pattern:
        part["patternProperties"] = {pattern: value}
    else:
        return
    del part["propertyNames"]
    part["additionalProperties"] = False


def _asked(names: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that apply to a string; empty when names have other requirements."""
    if isinstance(names, dict) and names.keys() == {"$ref"} and isinstance(schema.get("$defs"), dict):
        names = schema["$defs"].get(str(names["$ref"]).removeprefix("#/$defs/"))
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return {}
    return {keyword: value for keyword, value in names.items() if keyword not in BESIDE}


def _pattern(asked: Mapping[str, Any]) -> str:
    """Return the equivalent pattern; empty without one."""
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        return str(asked["pattern"])
    least, most = asked.get("minLength", 0), asked.get("maxLength", "")
    is_length = asked.keys() <= {"minLength", "maxLength"} and str(least).isdecimal() and str(most or 0).isdecimal()
    return rf"^(?s:.{{{least},{most}}})$" if is_length else ""


# ---- Grammar of a JSON schema for llguidance, and the bytes that it allows ----

ESCAPES: Final = 'nrbtf"\\'  # without \uXXXX, which could spell a property's name so that its schema would not apply


def of_schema(schema: Mapping[str, Any], whitespace: str | None) -> dict[str, Any]:
    """Return the part of an llguidance grammar for JSON of this schema.

    Options in the schema are replaced, since they could make the library lenient. `whitespace` is a regular expression
    for the text between JSON tokens, or None for no such text.
    """
    options = {
        "whitespace_flexible": whitespace is not None,
        "whitespace_pattern": whitespace,
        "json_allowed_escapes": ESCAPES,
    }
    return {"json_schema": {**schema, "x-guidance": options}}


def bytes_behind(schema: Mapping[str, Any], begun: str) -> frozenset[int] | None:
    """Return the bytes that may follow `begun`, the beginning of a JSON text of this schema.

    Empty when the beginning is not allowed, or nothing may follow. None when the library does not support the schema.
    """
    matcher = LLMatcher(_bytes(), json.dumps({"grammars": [of_schema(schema, None)]}), log_level=0, limits=LIMITS)
    if matcher.is_error():
        return None
    if not matcher.consume_tokens([*begun.encode()]):
        return frozenset()
    mask = matcher.compute_bitmask()
    return frozenset(byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1) if mask else frozenset()


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


# Name patterns that match no name besides those in `properties`. The library allows a comma before each property that a
# pattern or `additionalProperties` may match, even if every name is taken: then no token can follow.

SAMPLES: Final = ("", "q", "z9 \u00e9")  # names that hardly any schema has
_UNLIKE: Final = re.compile(r"\[\^|\[[^\]]*\[|&&|--|~~|\\[a-zA-Z0]|[\x00-\x1f]|\(\?")
"""Matches patterns that Python may read differently, or whose names outputs cannot spell."""


def replace_spent(parts: Sequence[dict[str, Any]]) -> None:
    """Replace pattern properties by properties, in place, where no name but those in the schema matches the pattern.

    `parts` are the schemas of one document. Names of all of them count, since joined schemas may meet. Where patterns
    and properties leave no other name, additional properties are disallowed.
    """
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
    """Return whether there are names that none of the patterns matches."""
    samples = [sample for sample in SAMPLES if sample not in names]
    if any(all(_finds(pattern, [sample]) is False for pattern in patterns) for sample in samples):
        return True
    return not _is_spent("|".join(f"(?:{pattern})" for pattern in patterns), names, others=True)


def _finds(pattern: str, names: Iterable[str]) -> bool | None:
    """Return whether a pattern matches one of these names; None when only the library can decide."""
    if _UNLIKE.search(pattern):
        return None
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
    return any(map(expression.search, names))


def _is_spent(pattern: str, names: Sequence[str], *, others: bool = False) -> bool:
    """Return whether a pattern matches no name besides `names`; with `others`, whether it matches all names besides
    these."""
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
