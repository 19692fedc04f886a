"""Which properties an object may have, and that each beginning of an answer leads to an end, as jsonschema sees it."""

import asyncio
import itertools
import json
import random

import jsonschema
import pytest

from coordinator.text.constraints import NO_LEEWAY, Leeway
from coordinator.text.structures import Structures
from protos.inference_pb2 import SamplingParams
from serving_core.grammars import Grammars
from tests.effort import effort
from tests.tiny_models import EOS
from tests.unit.coordinator.grammar_kit import may_be, walk

INTEGER, TEXT, WORD = {"type": "integer"}, {"type": "string"}, {"type": "string", "maxLength": 2}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def guide(tokenizer_folder):
    grammars = Grammars(tokenizer_folder, (EOS,))
    structures = {closes: Structures(tokenizer_folder, (EOS,), closes_objects=closes) for closes in (True, False)}

    def make(schema, *, closes=True, leeway=NO_LEEWAY, **asked):
        params = SamplingParams(json_schema=json.dumps(schema), disable_any_whitespace=True, **asked)
        return grammars.guide_of(asyncio.run(structures[closes].grammar(params, leeway)))

    return make


def may_come(guide, value):
    """Whether this may be a whole answer, with its properties in some order."""
    return any(may_be(guide.another(), text) for text in texts(value))


def texts(value):
    """Yield the value as JSON, with the properties of its objects in each order."""
    if not isinstance(value, dict):
        yield json.dumps(value, separators=(",", ":"))
        return
    for items in itertools.permutations(value.items()):
        for inner in itertools.product(*(list(texts(each)) for _, each in items)):
            told = (f"{json.dumps(name)}:{text}" for (name, _), text in zip(items, inner, strict=True))
            yield "{" + ",".join(told) + "}"


# ---- objects are closed ----

A, B = {"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}, "required": ["b"]}
NODE = {"type": "object", "properties": {"a": INTEGER, "next": {"$ref": "#/$defs/node"}}}
CLOSED = [  # beside where jsonschema is to see no others
    ({"type": "object", **A}, ()),
    ({"type": "object", "properties": {}}, ()),
    ({"type": "object", "required": ["b"], **A}, ("properties", "b", True)),
    ({"type": "object", "properties": {"a": {"type": "object", **B}}}, ()),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, ()),
    ({"type": "object", "patternProperties": {"^x": INTEGER}, **A}, ()),
    ({"type": "object", "allOf": [A, B]}, ()),
    ({"allOf": [{"$ref": "#/$defs/base"}, {"type": "object", **B}], "$defs": {"base": {"type": "object", **A}}}, ()),
    ({"type": "object", "$ref": "#/$defs/base", **B, "$defs": {"base": {"type": "object", **A}}}, ()),
    ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["a"]}, B]}, ()),
    ({"anyOf": [{"type": "object", **A}, {"type": "object", **B}]}, ()),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, ()),
    ({"type": "array", "items": {"type": "object", **A}}, ()),
]
VALUES = [
    *({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"c": 1}, {"a": 1, "c": "x"}, {"a": 1, "b": 2, "c": None}),
    *({"x": 1}, {"x1": 1, "a": 2}, {"x": "a"}, {"a": "x"}, {"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, {"a": {}}),
    *({"a": 1, "next": {"a": 2, "next": {}}}, {"next": {"c": 1}}, [{"a": 1}], [{"a": 1, "c": 2}], []),
]


def without_others(schema):
    """Return the schema as jsonschema is to see it: each object has no properties but those that it names, except for a
    base, of which the object that refers to it says so."""
    if isinstance(schema, list):
        return [without_others(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs"):
            told[name] = {each: part if each == "base" else without_others(part) for each, part in value.items()}
        elif name in ("items", "anyOf"):
            told[name] = value if name == "anyOf" and "properties" in schema else without_others(value)
        else:
            told[name] = value
    joined = {"properties", "patternProperties", "allOf", "$ref"} & schema.keys()
    return {**told, "unevaluatedProperties": False} if joined else told


@pytest.mark.parametrize(("schema", "declared"), CLOSED)
def test_objects_have_the_properties_that_they_name(guide, schema, declared):
    expected = without_others(schema)
    if schema.get("anyOf") and "properties" not in schema:
        expected = {"anyOf": [{**each, "unevaluatedProperties": False} for each in schema["anyOf"]]}
    if declared:
        expected["properties"] = {**schema["properties"], declared[1]: declared[2]}
    validator, made = jsonschema.Draft202012Validator(expected), guide(schema)
    for value in VALUES:
        assert may_come(made, value) == validator.is_valid(value), value


@pytest.mark.parametrize(
    ("closes", "asked", "is_open"), [(False, True, False), (False, False, True), (True, False, False)]
)
def test_a_request_may_ask_for_closed_objects_where_the_server_leaves_them_open(guide, closes, asked, is_open):
    made = guide({"type": "object", **A}, closes=closes, disable_additional_properties=asked)
    assert may_come(made, {"a": 1})
    assert may_come(made, {"a": 1, "c": 2}) == is_open


OPEN = [
    {"type": "object"},
    {"type": "object", "additionalProperties": True, **A},
    {"type": "object", "additionalProperties": INTEGER, **A},
    {"type": "object", "unevaluatedProperties": True, **A},
    {"allOf": [{"type": "object", **A}, {"type": "object", "additionalProperties": True, **B}]},
    {"type": "object", "properties": {"a": {"type": "object"}}, "additionalProperties": True},
    {},
]


@pytest.mark.parametrize("schema", OPEN)
def test_what_says_that_others_may_come_or_names_none_is_as_json_schema_has_it(guide, schema):
    validator, made = jsonschema.Draft202012Validator(schema), guide(schema)
    for value in VALUES:
        assert may_come(made, value) == validator.is_valid(value), value


JOINED_NODE = {"allOf": [{"$ref": "#/$defs/node"}, {"type": "object", **B}], "$defs": {"node": NODE}}


def test_a_definition_that_refers_to_itself_may_be_joined_with_others(guide):
    """There its object is closed; by itself it is as JSON Schema has it."""
    made = guide(JOINED_NODE)
    for value in {"b": 1}, {"a": 1, "b": 2}, {"b": 1, "next": {"a": 1, "next": {}}}, {"b": 1, "next": {"c": 1}}:
        assert may_come(made, value), value
    for value in {"a": 1}, {"b": 1, "c": 2}, {"b": 1, "next": {"a": "x"}}:
        assert not may_come(made, value), value


def test_a_server_may_leave_them_open(guide):
    for schema, _ in CLOSED:
        validator, made = jsonschema.Draft202012Validator(schema), guide(schema, closes=False)
        for value in VALUES:
            assert may_come(made, value) == validator.is_valid(value), (schema, value)


def test_arguments_of_tools_are_closed_too(guide):
    tool = json.dumps({"type": "object", **A})
    made = guide(TEXT, leeway=Leeway(calls="llama3", tools=(("f", tool),)))
    assert may_come(made, {"name": "f", "parameters": {"a": 1}})
    assert not may_come(made, {"name": "f", "parameters": {"a": 1, "c": 2}})


# ---- each beginning leads to an end ----

OK = {"type": "boolean"}
SPENT = [
    {
        "properties": {"score": INTEGER, "ok": OK},
        "required": ["score", "ok"],
        "additionalProperties": False,
        "patternProperties": {"^score$": INTEGER},
    },
    {"properties": {"a": OK, "b": DIGIT}, "patternProperties": {"^(a|b)$": {}}, "additionalProperties": False},
    {"properties": {"a": OK}, "patternProperties": {"^[ab]$": {"enum": [True, 1]}}, "additionalProperties": False},
    {"properties": {"a": OK}, "patternProperties": {"^a$": {}, "^b?$": OK}, "additionalProperties": False},
    {"properties": {"a": OK}, "patternProperties": {"": False, "^a$": OK}},
    {"properties": {"a": OK}, "patternProperties": {"(?s:.*)": OK}, "additionalProperties": DIGIT},
    {"properties": {"a": OK}, "patternProperties": {"^[^a]|^$|^a.": False}, "additionalProperties": DIGIT},
    {"required": ["a"], "patternProperties": {"^a$": OK}, "additionalProperties": False},
    {
        "allOf": [{"properties": {"a": OK}}, {"patternProperties": {"^a$": {}}, "additionalProperties": False}],
        "type": "object",
    },
    {"properties": {"a": OK}, "required": ["a"], "patternProperties": {"^[^\\s\\S]$": OK}},
    {"properties": {"a": OK}, "patternProperties": {"^[\\x01-\\x02]$": OK}},
    {"properties": {"a": OK}, "patternProperties": {"^\\w?$": False}, "additionalProperties": {"enum": [1]}},
]


@pytest.mark.parametrize("schema", SPENT)
@pytest.mark.parametrize("closes", [True, False])
def test_no_choice_of_tokens_is_a_dead_end(guide, schema, closes):
    """Whatever comes, the grammar goes on until a value of the schema is whole."""
    made = guide({"type": "object", **schema}, closes=closes)
    validator, whole = jsonschema.Draft202012Validator(schema), 0
    for seed in range(effort(20, 40, 200)):
        drawn = walk(made.another(), random.Random(seed), closing='"}', share=0.4, most_tokens=200)
        text = None if drawn is None else drawn.decode()
        if text is not None:
            whole += 1
            validator.validate(json.loads(text))
    assert whole


def test_all_that_meets_the_schema_may_come_still(guide):
    values = [{}, {"a": True}, {"a": 1}, {"b": 1}, {"b": True}, {"a": True, "b": 1}, {"ab": 1}, {"": True}, {"c": 1}]
    for schema in SPENT[1:8]:
        made, validator = guide({"type": "object", **schema}, closes=False), jsonschema.Draft202012Validator(schema)
        for value in values:
            assert may_come(made, value) == validator.is_valid(value), (schema, value)
