"""What can be enforced of a JSON schema is what the docs say; which schemas no value meets for want of an end; and what
is left of those of tools that are not strict."""

import asyncio
import functools
import json
import random
import re
from pathlib import Path

import pytest

from coordinator.text.constraints import Leeway
from coordinator.text.enforceable import Unenforceable, freed, loosened, read_schema
from coordinator.text.schemas import endless_reference, schemas_in
from coordinator.text.structures import Structures
from protos.inference_pb2 import SamplingParams
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.effort import effort
from tests.tiny_models import EOS
from tests.unit.coordinator.grammar_kit import may_be as is_let

# ---- what can be enforced ----

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "clients.md"
TEXT = {"type": "string"}
KEYWORDS = {  # of the drafts, each as it asks for something by itself
    "type": "null",
    "enum": [1],
    "const": 1,
    "$ref": "#/$defs/t",
    "not": TEXT,
    "if": TEXT,
    "anyOf": [TEXT],
    "allOf": [TEXT],
    "oneOf": [{"type": "number"}, {"type": "integer"}],
    "minimum": 3,
    "maximum": 3,
    "exclusiveMinimum": 3,
    "exclusiveMaximum": 3,
    "multipleOf": 3,
    "minLength": 3,
    "maxLength": 3,
    "pattern": "a",
    "format": "date",
    "items": TEXT,
    "prefixItems": [TEXT],
    "minItems": 3,
    "maxItems": 3,
    "uniqueItems": True,
    "contains": TEXT,
    "unevaluatedItems": False,
    "properties": {"a": TEXT},
    "required": ["a"],
    "additionalProperties": TEXT,
    "patternProperties": {"a": TEXT},
    "minProperties": 1,
    "maxProperties": 3,
    "propertyNames": {"enum": ["a"]},
    "unevaluatedProperties": False,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": TEXT},
}
STRINGS = (  # formats of the drafts, of OpenAPI and of libraries that write schemas
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
    *("uuid", "byte", "base64", "base64url", "char", "commonmark", "html", "emoji", "cuid", "jwt", "e164", "decimal"),
)
NUMBERS = {"int8", "int64", "uint8", "uint64"}


@pytest.fixture(scope="module")
def is_taken(tokenizer_folder):
    structures = Structures(tokenizer_folder, (EOS,))

    def check(**schema):
        try:
            asyncio.run(structures.grammar(SamplingParams(json_schema=json.dumps(schema))))
        except RequestError:
            return False
        return True

    return check


def columns():
    """What is named in the columns of the table: as enforced, and as refused."""
    rows = DOCS.read_text().partition("| of a schema |")[2].partition("\n\n")[0].splitlines()[2:]
    return [set(re.findall("`([^`]+)`", " ".join(row.split("|")[at] for row in rows))) for at in (2, 3)]


def test_each_keyword_is_in_its_column(is_taken):
    enforced, refused = columns()
    for name, value in KEYWORDS.items():
        column = enforced if is_taken(**{name: value, "$defs": {"t": TEXT}}) else refused - enforced
        assert name in column, name
    assert enforced | refused == {*KEYWORDS, *NUMBERS, *(name for name in STRINGS if name in enforced)}


def test_the_formats_of_text_that_are_named_are_enforced_and_no_others(is_taken):
    enforced, _ = columns()
    for name in STRINGS:
        assert is_taken(type="string", format=name) == (name in enforced), name


ODD = (
    *(
        "string",
        "integer",
        "null",
        "#",
        "#/$defs/a",
        "#a",
        "int32",
        "uint64",
        "byte",
        "date",
        "^a",
        "(?=x)",
        "\x01",
        "",
    ),
    *(0, 1, -1, 3, 2**53 + 1, 2**63, -(2**63), 10**400, 0.5, float("nan"), float("inf"), True, False, None),
)


def any_schema(rng, depth):
    """No schema that anyone means well with."""
    kind = rng.random() if depth else 1.0
    if kind < 0.5:
        names = rng.choices([*KEYWORDS, "$defs", "$id", "$anchor", "additionalItems", "default"], k=rng.randrange(5))
        return {name: any_schema(rng, depth - 1) for name in names}
    if kind < 0.6:
        return {name: any_schema(rng, depth - 1) for name in "ab"}
    if kind < 0.7:
        return [any_schema(rng, depth - 1) for _ in range(rng.randrange(4))]
    return rng.choice(ODD)


def test_whatever_a_schema_is_it_is_read_or_refused():
    num_refused = 0
    for seed in range(effort(500, 1500, 1500)):
        rng = random.Random(seed)
        text = json.dumps({"properties": any_schema(rng, 4), rng.choice([*KEYWORDS]): any_schema(rng, 3)})
        for given in (text, loosened(text, ("",), lambda schema, rng=rng: len(schema) < rng.randrange(5))):
            try:
                read_schema(given)
            except Unenforceable:
                num_refused += 1
        assert freed(text, ("",))
    assert effort(30, 100, 100) < num_refused < effort(900, 2700, 2700)


# ---- schemas without end, beside whoever tries to write a value down ----


def endless(schema):
    return endless_reference(schema, list(schemas_in(schema)))


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


A = ref("a")


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
def test_what_leads_back_to_itself_and_nowhere_else(definition):
    for place in (A, {"type": "array", "items": A}, {"properties": {"x": A}}):
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


def schema_of_definitions(rng, depth):
    """A schema that may refer to the definitions 0 to 4."""
    kind = rng.choice(
        ["end", "end", "reference", "any", "all", "object", "map", "list"] if depth else ["end", "reference"]
    )
    inner = [schema_of_definitions(rng, depth - 1) for _ in range(2)] if depth else []
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
    for seed in range(effort(100, 300, 300)):
        rng = random.Random(seed)
        definitions = {str(index): schema_of_definitions(rng, 2) for index in range(5)}
        parts = [part for definition in definitions.values() for part in schemas_in(definition)]
        has_none = not all(may_be_written(part, definitions, 60) for part in parts)
        assert bool(endless({"$defs": definitions})) == has_none, definitions
        found[has_none] += 1
    assert min(found.values()) > effort(15, 50, 50)


# ---- tools that are not strict, by the program that loosens them ----

INTEGER, NOT = {"type": "integer"}, {"not": {"type": "null"}}
ITSELF = {"$ref": "#/$defs/a"}


@pytest.fixture(scope="module")
def may_be(tokenizer_folder):
    structures, grammars = Structures(tokenizer_folder, (EOS,)), Grammars(tokenizer_folder, (EOS,))

    def check(schema, text, loose=("",)):
        """Whether this may be a whole answer. Raises RequestError where the schema is refused."""
        params = SamplingParams(json_schema=json.dumps(schema))
        return is_let(grammars.guide_of(asyncio.run(structures.grammar(params, Leeway(loose=loose)))), text)

    return check


def closed(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


LOOSE_SCHEMAS = [
    ({"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 2}, ["[1,1]"], ['["a"]', "[1,1,1]"]),
    ({"type": "array", "contains": INTEGER, "minContains": 2, "items": TEXT}, ["[]", '["a"]'], ["[1]"]),
    ({"type": "integer", **NOT}, ["1"], ['"a"']),
    ({"type": "object", "if": NOT, "then": NOT, "else": {}, "properties": {"a": TEXT}}, ["{}"], ['{"a":1}']),
    (
        {"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": TEXT},
        ['{"aa":""}'],
        ['{"a":1}'],
    ),
    ({"type": "object", "minProperties": 2, "maxProperties": 3, "properties": {"a": TEXT}}, ["{}"], ['{"a":1}']),
    ({"type": "object", "dependentRequired": {"a": ["b"]}, "required": ["c"]}, ['{"c":1}'], ["{}"]),
    ({"type": "object", "unevaluatedProperties": False, "properties": {"a": TEXT}}, ['{"a":""}'], ['{"b":1}']),
    ({**TEXT, "format": "colour", "maxLength": 2}, ['"ab"'], ['"abc"', "1"]),
    ({**TEXT, "pattern": "^(?!a)", "format": "ipv4"}, ['"1.2.3.4"'], ['"a"', "1"]),
    ({**TEXT, "pattern": r"^(a)\1$", "minLength": 2}, ['"bc"'], ['"b"']),
    ({"oneOf": [INTEGER, {"type": "number"}]}, ["1", "1.5"], ['"a"']),
    ({"enum": [2**53 + 1], "type": "integer"}, ["5"], ['"a"']),
    ({"type": "integer", "minimum": 2**63, "maximum": 2**64, "multipleOf": 3}, ["12"], ["13"]),
    (
        {"type": "object", "additionalProperties": False, "patternProperties": {"(?=a)": TEXT}, **closed(b=TEXT)},
        ['{"b":""}', '{"b":"","a":1}'],
        ["{}", '{"b":1}'],
    ),
    ({"type": "array", "prefixItems": [TEXT], "items": False, "additionalItems": False}, ['["a"]'], ["[1]"]),
    (
        closed(deep=closed(deeper={"type": "array", "items": {**INTEGER, **NOT}})),
        ['{"deep":{"deeper":[1]}}'],
        ["{}"],
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": closed(a={**TEXT, **NOT})}}, ['{"a":""}'], ['{"a":1}']),
    ({"anyOf": [{**TEXT, **NOT}, {"type": "null", **NOT}]}, ['""', "null"], ["1"]),
]


def test_all_else_is_kept_to(may_be):
    for schema, good, bad in LOOSE_SCHEMAS:
        with pytest.raises(RequestError, match="cannot be enforced"):
            may_be(schema, good[0], loose=())
        assert [text for text in good if not may_be(schema, text)] == []
        assert [text for text in bad if may_be(schema, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {**ITSELF, "$defs": {"a": {"type": "array", "items": ITSELF, "minItems": 1}}},
        {"$ref": "https://example.org/schema"},
        {"type": "object", "allOf": [{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"a": INTEGER}}]},
        {"type": "nothing"},
        {"required": 3, "properties": 4},
    ],
)
def test_any_object_where_that_is_not_enough(may_be, schema):
    assert may_be(schema, '{"b":[1]}')
    if "type" not in schema:
        assert not may_be(schema, "[")


def test_what_can_be_enforced_in_whole_is(may_be):
    schema = closed(a={"oneOf": [INTEGER, {"type": "null"}]}, b={"type": "object", "minProperties": 1})
    assert may_be(schema, '{"a":1,"b":{"c":1}}')
    assert not may_be(schema, '{"a":1,"b":{}}')


def test_definitions_are_loose_each_by_itself(may_be):
    schema = {
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}],
        "minItems": 2,
        "$defs": {"0": {**TEXT, **NOT}, "1": {"type": "object", "minProperties": 1, "additionalProperties": INTEGER}},
    }
    assert may_be(schema, '["",{"a":1}]', loose=("0",))
    assert not may_be(schema, '["",{}]', loose=("0",))
    assert not may_be(schema, '[1,{"a":1}]', loose=("0",))
    with pytest.raises(RequestError, match="not"):
        may_be(schema, "", loose=("1",))
