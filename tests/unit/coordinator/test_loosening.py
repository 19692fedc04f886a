"""Arguments of tools that are not strict keep to what can be enforced of their schemas, by the program that does."""

import asyncio
import json

import pytest

from coordinator.text.asked import Leeway
from coordinator.text.structures import Structures
from protos.inference_pb2 import SamplingParams
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.tiny_models import EOS

INTEGER, TEXT, NOT = {"type": "integer"}, {"type": "string"}, {"not": {"type": "null"}}
ITSELF = {"$ref": "#/$defs/a"}


@pytest.fixture(scope="module")
def may_be(tokenizer_folder):
    structures, grammars = Structures(tokenizer_folder, (EOS,)), Grammars(tokenizer_folder, (EOS,))

    def check(schema, text, loose=("",)):
        """Whether this may be a whole answer. Raises RequestError where the schema is refused."""
        params = SamplingParams(json_schema=json.dumps(schema))
        guide = grammars.guide_of(asyncio.run(structures.grammar(params, Leeway(loose=loose))))
        try:
            mask = guide.allowed(list(text.encode()))
        except RequestError:
            return False
        return bool(mask[EOS // 8] >> EOS % 8 & 1)

    return check


def closed(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
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
        ({"type": "object", "unevaluatedProperties": False, "properties": {"a": TEXT}}, ['{"b":1}'], ['{"a":1}']),
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
    ],
)
def test_all_else_is_kept_to(may_be, schema, good, bad):
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
