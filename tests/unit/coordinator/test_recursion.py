"""Which schemas no value meets for want of an end, beside whoever tries to write one down."""

import functools
import random

import pytest

from coordinator.text.recursion import endless_reference
from coordinator.text.schemas import schemas_in


def endless(schema):
    return endless_reference(schema, list(schemas_in(schema)))


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


A, TEXT = ref("a"), {"type": "string"}


@pytest.mark.parametrize(
    "definition",
    [
        A,
        {"anyOf": [A, A]},
        {"oneOf": [A]},
        {"allOf": [TEXT, A]},
        {**A, "type": "object"},
        {"type": "object", "properties": {"n": A}, "required": ["n"]},
        {"type": ["object"], "properties": {"m": TEXT, "n": A}, "required": ["m", "n"]},
        {"type": "object", "additionalProperties": A, "required": ["n"]},
        {"type": "object", "additionalProperties": A, "minProperties": 1},
        {"type": "array", "items": A, "minItems": 1},
        {"type": "array", "prefixItems": [TEXT, A], "minItems": 2},
        {"type": "array", "items": [TEXT], "additionalItems": A, "minItems": 2},
        {"type": "array", "items": {"anyOf": [{"type": "array", "items": A, "minItems": 3}, A]}, "minItems": 1},
    ],
)
@pytest.mark.parametrize(
    "place", [A, {"type": "array", "items": A}, {"properties": {"x": A}}], ids=["", "list", "object"]
)
def test_what_leads_back_to_itself_and_nowhere_else(definition, place):
    assert endless({**place, "$defs": {"a": definition}}) == "#/$defs/a"


@pytest.mark.parametrize(
    "definition",
    [
        {"anyOf": [A, {"type": "null"}]},
        {"type": "array", "items": A},
        {"type": "array", "prefixItems": [TEXT, A], "minItems": 1},
        {"type": "array", "items": [TEXT], "additionalItems": A, "minItems": 1},
        {"type": "object", "properties": {"n": A}},
        {"type": "object", "properties": {"n": {"type": "array", "items": A}}, "required": ["n"]},
        {"type": "object", "properties": {"n": TEXT}, "additionalProperties": A, "minProperties": 1},
        {"type": "object", "patternProperties": {"^n$": TEXT}, "additionalProperties": A, "required": ["n"]},
        {"type": ["object", "null"], "properties": {"n": A}, "required": ["n"]},
        {"properties": {"n": A}, "required": ["n"]},
        {"const": A},
        {"type": "object", "properties": {"n": False}, "required": ["n"]},  # which the library refuses
        {"type": "object", "properties": [A], "required": 3, "minProperties": "1", "anyOf": {}},  # likewise
    ],
)
def test_what_may_end(definition):
    assert not endless({"type": "array", "items": A, "$defs": {"a": definition}})


@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("#", {}),
        ("#/anyOf/0", {"anyOf": [{"$ref": "#/anyOf/0"}]}),
        ("#/$defs/a~1b%20~0c", {"$defs": {"a/b ~c": {"$ref": "#/$defs/a~1b%20~0c"}}}),
        ("#here", {"$defs": {"a": {"$anchor": "here", "$ref": "#here"}}}),
        ("http://a/b#/$defs/a", {"$id": "http://a/b", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        ("http://a/b", {"$id": "http://a/b#"}),
    ],
)
def test_references_of_all_kinds_are_followed(reference, others):
    assert endless({"$ref": reference, **others})


@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("#/$defs/none", {"$defs": {}}),
        ("#/anyOf/1", {"anyOf": [{"type": "null"}]}),
        ("http://elsewhere/", {}),
        (3, {}),
        ("#/$defs/a", {"$defs": {"a": {"$id": "c", "$ref": "#/$defs/a", "$defs": {"a": TEXT}}}}),  # its own one
    ],
)
def test_those_that_lead_elsewhere_are_for_the_library_to_judge(reference, others):
    assert not endless({"$ref": reference, **others})


ENDS = ["null", "null", "reference"]


def drawn(rng, depth):
    """A schema that may refer to the definitions 0 to 4."""
    kind = rng.choice(
        ["end", "end", "reference", "any", "all", "object", "map", "list"] if depth else ["end", "reference"]
    )
    inner = [drawn(rng, depth - 1) for _ in range(2)] if depth else []
    match kind:
        case "reference":
            return ref(rng.randrange(5))
        case "any" | "all":
            return {f"{kind}Of": inner}
        case "object":
            properties = dict(zip("ab", inner, strict=True))
            return {"type": "object", "properties": properties, "required": rng.sample("ab", rng.randrange(3))}
        case "map":
            return {"type": "object", "additionalProperties": inner[0], "minProperties": rng.randrange(2)}
        case "list":
            return {"type": "array", "items": inner[0], "minItems": rng.randrange(2)}
    return {"type": "null"}


def may_be_written(schema, definitions, most):
    """Whether a value of it needs no more than so many steps from one schema into the next."""

    @functools.cache
    def tried(place, most):
        part = places[place]
        inner = [functools.partial(tried, id(each), most - 1) for each in needed(part)]
        if "anyOf" in part:
            return most > 0 and any(each() for each in inner)
        return most > 0 and all(each() for each in inner)

    def needed(part):
        if "$ref" in part:
            return [definitions[part["$ref"].rpartition("/")[2]]]
        if part.get("type") == "object" and "properties" in part:
            return [part["properties"][name] for name in part["required"]]
        held = [part[name] for name, fewest in HOLDING.items() if part.get(fewest)]
        return [*part.get("anyOf", []), *part.get("allOf", []), *held]

    places = {id(part): part for part in schemas_in([schema, definitions])}
    return tried(id(schema), most)


HOLDING = {"additionalProperties": "minProperties", "items": "minItems"}


def test_schemas_at_random():
    found = {True: 0, False: 0}
    for seed in range(300):
        rng = random.Random(seed)
        definitions = {str(index): drawn(rng, 2) for index in range(5)}
        parts = [part for definition in definitions.values() for part in schemas_in(definition)]
        has_none = not all(may_be_written(part, definitions, 60) for part in parts)
        assert bool(endless({"$defs": definitions})) == has_none, definitions
        found[has_none] += 1
    assert min(found.values()) > 50
