"""Reduce a JSON schema to what can be enforced. Performs no I/O.

The library refuses by name what it does not enforce. This module refuses what the library would enforce only in part.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeGuard

from coordinator.text.patterns import (
    WIDEST,
    control_in,
    control_of_pattern,
    is_number,
    may_name_controls,
    put_format,
    with_ascii_classes,
    without_control,
)
from coordinator.text.schemas import (
    bytes_behind,
    close_objects,
    endless_reference,
    leads_to_data,
    put_names,
    replace_spent,
    schemas_in,
)

EXACT: Final = 2**53  # integers up to this are exact as a float
INT64: Final = range(-(2**63), 2**63 - 1)  # the library takes a wider bound for the end of this range
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EXCLUSIVE: Final = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
WITHIN: Final = ("properties", "additionalProperties", "items", "prefixItems", "additionalItems")  # have subschemas
IDLE: Final[Mapping[str, Sequence[Any]]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
DRAFT: Final = re.compile(r"https?://json-schema\.org/(draft[-/][\w-]+/)?schema#?")
LAST_DRAFT: Final = "draft/2020-12/"
MOST_REMAINDERS: Final = 2**12  # remainders of a multiple, each of which is a state
MOST_MULTIPLE: Final = 2**32 - 1  # the largest least common multiple that the library supports


class Unenforceable(ValueError):
    """A constraint that cannot be enforced; the message says why in the client's terms."""


def parse_schema(text: str) -> dict[str, Any]:
    """Return a JSON schema as a dict. Raises Unenforceable unless the text is a JSON object."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unenforceable(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise Unenforceable("it is no JSON object")
    return schema


def read_schema(text: str, *, closes_objects: bool = False) -> dict[str, Any]:
    """Parse a JSON schema, and return it in the form that `of_schema` takes, with the same values as far as possible.

    With `closes_objects`, objects that name properties allow no others unless they say so. Raises Unenforceable for
    what the library would not enforce, or only in part.
    """
    schema = parse_schema(text)
    parts = list(schemas_in(schema))
    if closes_objects:
        close_objects(schema, parts)
    for part in parts:
        _mend_draft(part)
        put_format(part)
        _check_texts(part)
        _mend_patterns(part)
        _check_pattern(part)
    for part in parts:
        _mend_minimum(part)
        _check_count(part)
        _check_numbers(part)
        _check_items(part)
        _drop_idle(part)
        put_names(part, schema)
        _check_reference(part, schema)
    _check_multiples(parts)
    _check_open_ends(parts)
    if endless := endless_reference(schema, parts):
        raise Unenforceable(f"$ref {endless!r:.80} leads back to itself, and no value can meet it")
    replace_spent(parts)
    return schema


def _check_reference(part: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    reference = part.get("$ref")
    if isinstance(reference, str) and leads_to_data(reference):
        raise Unenforceable(f"$ref {reference!r:.80} leads to no schema")
    if reference is not None and "$id" in part and part is not schema:  # older drafts resolve it without this $id
        raise Unenforceable("$ref stands beside an $id")


def _check_count(part: Mapping[str, Any]) -> None:
    """Check minProperties: the library would count a repeated property twice unless the schema names it."""
    fewest, required = part.get("minProperties"), part.get("required")
    if not _is_integer(fewest) or fewest <= 1:
        return
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if len(names) < fewest:
        raise Unenforceable(f"minProperties ({fewest}) is more than 1 and than the names in required ({len(names)})")


def _check_numbers(part: Mapping[str, Any]) -> None:
    for name in ("const", "enum"):
        integers = [each for each in _leaves(part.get(name)) if _is_integer(each)]
        if not all(map(_is_exact, integers)):
            raise _inexact(name)
        if INT64[0] in integers:  # the library fails at this value
            raise Unenforceable(f"{name} has the least integer of 64 bits ({INT64[0]})")
    for name, bound in _bounds(part).items():
        if (number := _whole(bound)) is not None:
            _check_bound(name, number)


def _bounds(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of a number. In older drafts a bound is exclusive when its exclusive keyword is true."""
    bounds = {name: part[name] for name in BOUNDS if name in part}
    for exclusive, inclusive in EXCLUSIVE.items():
        if bounds.get(exclusive) is True and inclusive in bounds:
            bounds[exclusive] = bounds.pop(inclusive)
    return bounds


def _check_bound(name: str, number: int) -> None:
    if number in INT64 and not _is_exact(number):
        raise _inexact(name)
    if name.startswith("exclusive") and abs(number) >= EXACT:
        raise Unenforceable(f"{name} ({number}) is not within 2^53, where a float tells it from what is next to it")
    if (name == "minimum" and number > INT64[-1]) or (name == "maximum" and number < INT64[0]):
        raise Unenforceable(f"{name} ({number}) is beyond 64 bits")


def _check_items(part: Mapping[str, Any]) -> None:
    """Refuse keywords of two drafts together, for which the library follows neither draft."""
    if "prefixItems" in part and ("additionalItems" in part or isinstance(part.get("items"), list)):
        raise Unenforceable("prefixItems stand beside additionalItems, or a list of items, of an older draft")


def _check_multiples(parts: Sequence[Mapping[str, Any]]) -> None:
    """Check the multiples. The library replaces several multiples of one number by their least common multiple."""
    given = {each for part in parts if is_number(each := part.get("multipleOf"))}
    decimals = [abs(number) for number in map(Decimal, map(str, given)) if number.is_finite()]
    for number in decimals:
        if (remainders := int("".join(map(str, number.normalize().as_tuple().digits)))) > MOST_REMAINDERS:
            raise Unenforceable(f"multipleOf ({number}) has {remainders} remainders, the limit is {MOST_REMAINDERS}")
    if not any("allOf" in part or "$ref" in part for part in parts):
        return
    places = max((-min(0, int(each.as_tuple().exponent)) for each in decimals), default=0)
    if len(decimals) > 1 and math.prod(int(each.scaleb(places)) for each in decimals) > MOST_MULTIPLE:
        raise Unenforceable("the multiples (multipleOf) of a schema with allOf or $ref are too large together")


def _check_open_ends(parts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an exclusive integer bound less than 1 from the other bound, where the library would allow the bound
    itself.

    Where schemas are joined, any two bounds may meet.
    """
    bounds = [_bounds(part) for part in parts]
    for group in [bounds] if any(map(_joins, parts)) else [[each] for each in bounds]:
        _check_open_end(group, "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1)
        _check_open_end(group, "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1)


def _check_open_end(bounds: Sequence[Mapping[str, Any]], name: str, others: Sequence[str], sign: int) -> None:
    fractions = [each[other] for each in bounds for other in others if _is_fraction(each.get(other))]
    units = {math.floor(sign * number): number for number in fractions}
    for number in (_whole(each.get(name)) for each in bounds):
        if number is not None and sign * number >= 0 and sign * number in units:
            raise Unenforceable(f"{name} ({number}) is less than 1 from the other bound ({units[sign * number]})")


def _joins(part: Mapping[str, Any]) -> bool:
    """Return whether several schemas restrict one value, or values at the same place within it."""
    lists = (part.get("allOf"), part.get("patternProperties"))
    num_schemas = sum(len(each) for each in lists if isinstance(each, list | dict))
    num_schemas += sum(name in part for name in ("$ref", "anyOf", "oneOf"))
    return num_schemas + any(name in part for name in (*BOUNDS, *WITHIN)) > 1


def _check_texts(part: Mapping[str, Any]) -> None:
    named, patterns = part.get("patternProperties"), {"pattern": [str(part.get("pattern", ""))]}
    if isinstance(named, dict):
        patterns["patternProperties"] = list(named)
    for name in ("const", "enum"):
        _refuse_control(name, (control_in(each) for each in _leaves(part.get(name)) if isinstance(each, str)))
    for name, given in patterns.items():
        _refuse_control(name, map(control_of_pattern, given))


def _mend_draft(part: dict[str, Any]) -> None:
    """Replace the URI of a draft by the only spelling that the library knows."""
    if found := DRAFT.fullmatch(str(part.get("$schema"))):
        is_old = (found[1] or "").startswith("draft-")
        part["$schema"] = f"http{'' if is_old else 's'}://json-schema.org/{found[1] or LAST_DRAFT}schema"


def _mend_minimum(part: dict[str, Any]) -> None:
    """Raise the minimum of an integer to the smallest that the library supports; some programs write the 64-bit
    minimum."""
    is_integer = part.get("type") == "integer" or "integer" in _listed(part.get("type"))
    if is_integer and (number := _whole(part.get("minimum"))) is not None:
        part["minimum"] = max(number, -WIDEST)


def _mend_patterns(part: dict[str, Any]) -> None:
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = _mended(pattern)
    if isinstance(named := part.get("patternProperties"), dict):
        part["patternProperties"] = {_mended(pattern): schema for pattern, schema in named.items()}


def _check_pattern(part: Mapping[str, Any]) -> None:
    """Raise Unenforceable for a pattern that requires control characters without naming them.

    The library accepts such a pattern, but no token can match it.
    """
    pattern = part.get("pattern")
    if not isinstance(pattern, str) or not may_name_controls(pattern):
        return
    if bytes_behind({"type": "string", "pattern": pattern}, "") == frozenset():
        asked = f"pattern ({pattern!r:.80}) asks for a control character"
        raise Unenforceable(f"{asked}, which no string of an output can have")


def _mended(pattern: str) -> str:
    return without_control(with_ascii_classes(pattern))


def _drop_idle(part: dict[str, Any]) -> None:
    """Remove keywords that the library refuses although their value has no effect."""
    for name, values in IDLE.items():
        if name in part and any(part[name] == each and type(part[name]) is type(each) for each in values):
            del part[name]


def _refuse_control(name: str, found: Iterable[str]) -> None:
    if control := next(filter(None, found), None):
        raise Unenforceable(f"{name} has the control character {control}, which no string of an output can have")


def _leaves(data: Any) -> Iterator[Any]:
    """Yield all values that hold no other values."""
    left = [data]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        else:
            yield value


def _is_exact(number: int) -> bool:
    return abs(number) <= EXACT or (abs(number) < 2**1023 and int(float(number)) == number)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    """Return the value as an int if it is an integer, possibly as a float; else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if _is_integer(value) else None


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and not value.is_integer()


def _inexact(name: str) -> Unenforceable:
    return Unenforceable(f"{name} has an integer beyond 2^53 that no float is equal to")


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- JSON schemas with fewer requirements, for calls of tools that are not strict ----

ANY: Final[Mapping[str, Any]] = {"type": "object"}
FIRST: Final = ("type", "properties", "required")  # kept first, since others depend on them
NAMED: Final = ("properties", "patternProperties")  # a schema for each name
HOLDERS: Final = (*NAMED, "additionalProperties", "prefixItems", "items", "additionalItems")  # keywords with subschemas
ASIDE: Final = ("$ref", "allOf", "anyOf", "$defs", "definitions", "$id", "title", "description", "default", "examples")
OF_THE_REST: Final = {"additionalProperties": "patternProperties", "items": "prefixItems", "additionalItems": "items"}


def loosened(
    text: str,
    places: Collection[str],
    is_enforced: Callable[[Mapping[str, Any]], bool],
    *,
    closes_objects: bool = False,
) -> str:
    """Return a JSON schema, as text, whose definitions in `places` are reduced to what can be enforced.

    An empty name in `places` stands for the whole schema. `is_enforced` decides for each part by itself. With
    `closes_objects`, objects are closed first, by the property names of the whole schema. Raises Unenforceable if
    `text` is no JSON object.
    """
    schema = parse_schema(text)
    if closes_objects:
        close_objects(schema, list(schemas_in(schema)))
    for place in places:
        for part in schemas_in(schema["$defs"][place] if place else schema):
            _loosen(part, is_enforced)
    return json.dumps(schema)


def freed(text: str, places: Collection[str]) -> str:
    """Return a JSON schema, as text, whose definitions in `places` (names in its $defs) allow any object.

    An empty name in `places` stands for the whole schema; `text` is then not read. Raises Unenforceable if `text` is no
    JSON object, and KeyError if it has no $defs.
    """
    if "" in places:
        return json.dumps(ANY)
    schema = parse_schema(text)
    return json.dumps({**schema, "$defs": {**schema["$defs"], **dict.fromkeys(places, ANY)}})


def _loosen(part: dict[str, Any], is_enforced: Callable[[Mapping[str, Any]], bool]) -> None:
    if options := part.pop("oneOf", None):  # several of which may hold
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
    """Return a keyword's value with subschemas reduced to whether they allow any value."""
    if name not in HOLDERS:
        return value
    if isinstance(value, list):
        return [each is not False for each in value]
    if isinstance(value, dict) and name in NAMED:
        return {each: schema is not False for each, schema in value.items()}
    return value is not False
