"""What can be enforced and what is refused, by the very program that compiles it."""

import asyncio
import base64
import datetime
import itertools
import json
import operator
import re

import jsonschema
import pytest

from coordinator.text.structures import Structures
from protos.inference_pb2 import Choice, SamplingParams
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.effort import effort, few
from tests.schemas import chain, product
from tests.tiny_models import EOS, SPECIAL_TOKENS
from tests.unit.coordinator.grammar_kit import may_be, tokens_in


@pytest.fixture(scope="module")
def structures(tokenizer_folder):
    return Structures(tokenizer_folder, (EOS,))


def grammar(structures, **params):
    return asyncio.run(structures.grammar(SamplingParams(**params)))


def refusal(structures, **params):
    with pytest.raises(RequestError) as error:
        grammar(structures, **params)
    assert error.value.reason == "BAD_PARAM"
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{error.value.metadata['field']} cannot be enforced: ")
    return error.value.metadata["field"], str(error.value)


def reason_of(structures, **params):
    """Why it is refused; empty if it is not."""
    try:
        grammar(structures, **params)
    except RequestError as error:
        return error.reason
    return ""


KEEPS = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}
CONTROLLED = (
    "^a\x0bb$",
    r"^a\x01b$",
    r"^a\u001Fb$",
    r"^(b|a\u{1}b)$",
    r"^\x{7f}$",
    r"^\U0000000e",
    r"\v",
    r"^[\x01-\x02]$",
    r"^(?:\x0e|[\x{f}-\x{1f}])+$",
    r"[[:cntrl:]&&[^\t\n\r\x08\x0c]]",
    r"[\a]",
    r"[[\x01]]",
)
AHEAD, THE = "^(?!a).*$", "the regular expression"
HALF, POSITIVE = {"type": "number", "maximum": 0.5}, {"type": "number", "exclusiveMinimum": 0}
ITSELF = {"$ref": "#/$defs/a"}
DRAFTS = itertools.product(
    ("http", "https"), ("", "draft-04/", "draft-06/", "draft-07/", "draft/2019-09/", "draft/2020-12/"), ("", "#")
)
FEW = {"type": "object", "minProperties": 2}  # which the library does not enforce


def schema(**fields):
    return {"json_schema": json.dumps(fields)}


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        (schema(type="object", properties={"é": {"type": "null"}}, required=["é"]), '{"é": null}', "{}"),
        ({"json_object": True}, '{"a":[1,{}]}', "[]"),
        (
            schema(type="object", properties={"a": {"type": "null"}}, additionalProperties=True),
            '{"b\\n":"é\\t"}',
            '{"\\u0061":1}',
        ),
        ({"regex": "[a-c]{2}"}, "ab", "abc"),
        ({"choice": Choice(choices=["yes", "no"])}, "no", "maybe"),
        ({"choice": Choice(choices=["a\x7f\x01", "no"])}, "a\x7f\x01", "a"),
        ({"grammar": 'start: "a"+'}, "aaa", "b"),
        ({"grammar": 'root ::= "a"+'}, "aaa", "b"),
        ({"grammar": 'start: "%json"'}, "%json", "b"),
        ({"json_object": True, "disable_any_whitespace": True}, "{}", "{ }"),
        ({"json_object": True, "whitespace_pattern": "_"}, "{_}", "{ }"),
    ],
)
def test_what_comes_out_lets_these_come_and_not_those(structures, tokenizer_folder, params, good, bad):
    made = grammar(structures, **params)
    assert may_be(Grammars(tokenizer_folder, (EOS,)).guide_of(made), good)
    assert not may_be(Grammars(tokenizer_folder, (EOS,)).guide_of(made), bad)


@pytest.mark.parametrize("params", [{}, {"json_object": False}, {"disable_any_whitespace": True}])
def test_what_asks_for_nothing(tokenizer_folder, params):
    assert grammar(Structures(tokenizer_folder, (EOS,)), **params) == ""


UNENFORCED_SCHEMAS = [
    ({"not": {"type": "null"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"if": {"type": "null"}, "then": {}}, "if"),
    ({"type": "object", "propertyNames": {"maxLength": 2, "pattern": "a"}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"minLength": 1.5}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"pattern": "(?=a)"}}, "look-around"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "patternProperties": {"b": {}}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"enum": ["a", 1]}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"enum": ["a"], "maxLength": 1}}, "propertyNames"),
    (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"format": "uuid"}}},
        "propertyNames",
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}, "not"),
    ({"type": "string", "format": "colour"}, "format"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
    ({"$schema": "https://example.org/schema"}, "https://example.org/schema"),
    ({"type": "object", "minProperties": 2, "required": ["a"]}, "minProperties"),
    ({"items": [{"minProperties": 3, "type": "object"}], "type": "array"}, "minProperties"),
    ({"enum": [1, {"a": [2**53 + 1]}]}, "enum"),
    ({"type": "integer", "maximum": -(2**53) - 1}, "maximum"),
    ({"const": [-(2**63)]}, "const has the least integer of 64 bits"),
    ({"allOf": [{"type": "integer", "multipleOf": True}]}, "multipleOf"),
    ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
    ({"type": "object", "properties": {"default": FEW}}, "minProperties"),  # a name, and no keyword
    ({"type": "object", "properties": {"properties": FEW}}, "minProperties"),
    ({"$defs": {"examples": {"enum": [2**53 + 1]}}, "$ref": "#/$defs/examples"}, "enum"),
    ({"$ref": "#/default", "default": FEW}, "$ref"),
    ({"$ref": "#/properties/a/const", "properties": {"a": {"const": FEW}}}, "$ref"),
    ({"$id": "http://a/b/", "allOf": [{"$id": "http://a/", "$ref": "c"}], "$defs": {"x": {"$id": "c"}}}, "$ref"),
    ({"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False}, "prefixItems"),
    ({"type": "array", "prefixItems": [{"type": "string"}], "items": [{}]}, "prefixItems"),
    ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
    ({"type": "integer", "exclusiveMaximum": 2**54}, "exclusiveMaximum"),
    ({"type": "integer", "exclusiveMaximum": float(2**63)}, "exclusiveMaximum"),
    ({"type": "integer", "minimum": 2**63, "maximum": 2**64}, "minimum"),
    ({"type": "integer", "minimum": -(2**64), "maximum": -(2**63) - 2048}, "maximum"),
    ({"allOf": [{"type": "integer", "multipleOf": 70000}, {"multipleOf": 90000}]}, "multipleOf"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum (0)"),
    ({"type": "number", "exclusiveMinimum": 1.0, "exclusiveMaximum": 1.5}, "exclusiveMinimum (1)"),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "exclusiveMaximum (-1)"),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "exclusiveMinimum (0)"),
    ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "exclusiveMinimum (0)"),
    ({"$ref": "#/$defs/a", "exclusiveMinimum": 0, "$defs": {"a": HALF}}, "exclusiveMinimum (0)"),
    ({"anyOf": [HALF], "exclusiveMinimum": 0}, "exclusiveMinimum (0)"),
    ({"$ref": "#/$defs/a", "properties": {"x": POSITIVE}, "$defs": {"a": {"properties": {"x": HALF}}}}, "(0)"),
    ({"type": "object", "properties": {"x": POSITIVE}, "patternProperties": {"x": HALF}}, "exclusiveMinimum (0)"),
    ({"type": "array", "items": ITSELF, "$defs": {"a": ITSELF}}, "$ref '#/$defs/a' leads back to itself"),
    ({**ITSELF, "$defs": {"a": {"type": "array", "items": ITSELF, "minItems": 1}}}, "leads back to itself"),
    ({"const": "a\x01b"}, "const has the control character U+0001"),
    ({"enum": ["a", {"a": ["\x7f"]}]}, "enum has the control character U+007F"),
    (
        {"type": "object", "patternProperties": {r"^a\x01$": {}}},
        "patternProperties has the control character U+0001",
    ),
    *(({"type": "string", "pattern": pattern}, "control character") for pattern in CONTROLLED),
]


def test_what_is_not_enforced_is_named(structures):
    for fields, named in UNENFORCED_SCHEMAS:
        field, message = refusal(structures, **schema(**fields))
        assert (field, named in message) == ("json_schema", True), (fields, message)


ENFORCED_SCHEMAS = [
    {"type": "object", "minProperties": 2, "required": ["a", "b"], "properties": {"a": {}, "b": {}}},
    {"type": "object", "properties": {"minProperties": {"type": "integer"}}},
    {"const": {"minProperties": 5}},
    {"enum": [2**53, -(2**60)]},
    {"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**53)},
    {"type": ["integer", "null"], "maximum": 2**63 - 1, "minimum": -(2**63)},
    {"type": "string", "title": "t", "description": "d", "default": 2**53 + 1, "x-anything": {"not": 1}},
    {"type": "object", "default": FEW, "examples": [FEW]},
    {"$ref": "#/properties/default", "properties": {"default": {"type": "integer"}}},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
    {"type": "integer", "exclusiveMaximum": 2**53 - 1, "exclusiveMinimum": -5.0},
    {"allOf": [{"type": "integer", "multipleOf": 6}, {"multipleOf": 4}]},
    {"properties": {"a": {"type": "integer", "multipleOf": 70000}, "b": {"type": "integer", "multipleOf": 90000}}},
    {"type": "object", "properties": {"a": POSITIVE, "b": HALF}},
    {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": POSITIVE, "b": HALF}},
    {"type": "array", "items": ITSELF, "$defs": {"a": {"anyOf": [ITSELF, {"type": "null"}]}}},
    {"type": "array", "uniqueItems": False, "unevaluatedItems": True},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"propertyNames": True}},
    {"type": "object", "unevaluatedProperties": {}, "dependentRequired": {}, "dependentSchemas": {}},
    {"type": "object", "properties": {"a\x01b": {"const": "\n\r\t\b\f\x80"}}},
    *({"type": "string", "format": each} for each in ("binary", "password", "path", "double", "int64")),
    *({"$schema": f"{scheme}://json-schema.org/{draft}schema{end}"} for scheme, draft, end in DRAFTS),
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (r"^[^\x00-\x1F\x7f]+$", r"^[\x00-\x7F]*$", r"^[\x01-\x08\x0b\x0c!]b$", r"^\\x01\n$")
    ),
]


def test_what_only_looks_like_it_is_taken(structures):
    for fields in ENFORCED_SCHEMAS:
        assert grammar(structures, **schema(**fields)), fields


def in_any_order(value):
    return map(dict, itertools.permutations(value.items())) if isinstance(value, dict) else [value]


NAMES = {"enum": ["b", "a", ""], "type": "string"}
LENGTHS = ({"minLength": 1}, {"maxLength": 1}, {"minLength": 1, "maxLength": 1})


@pytest.mark.parametrize(
    "names", [NAMES, {"$ref": "#/$defs/n"}, {"pattern": "^[ab]?$"}, {"pattern": "a", "type": "string"}, *LENGTHS]
)
def test_names_of_properties_are_what_is_asked_of_them(structures, tokenizer_folder, names):
    """As pydantic and zod write a record with such keys. Which objects meet the schema, jsonschema says."""
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}, "required": ["a"]}
    whole = {"type": "object", "properties": {"r": record}, "$defs": {"n": NAMES}}
    made, grammars = grammar(structures, **schema(**whole)), Grammars(tokenizer_folder, (EOS,))
    others = {}, [], {"ca": 2, "a": 1}, {"a": 1, "é": 1}, {"a": 1, "\t": 1}, {"a": 1, "éé": 1}
    for value in {"b": 1, "a": 2}, {"a": 1, "": 3}, {"a": 2}, {"b": 1}, {"a": "x"}, {"a": 1, "c": 2}, *others:
        is_right = jsonschema.Draft202012Validator(whole).is_valid({"r": value})
        texts = [json.dumps({"r": each}, ensure_ascii=False) for each in in_any_order(value)]
        assert any(may_be(grammars.guide_of(made), text) for text in texts) == is_right, value


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("int8", -128, 127),
        ("uint8", 0, 255),
        ("int16", -32768, 32767),
        ("uint16", 0, 65535),
        ("int32", -2147483648, 2147483647),
        ("uint32", 0, 4294967295),
        ("int64", -9223372036854774784, 9223372036854774784),  # which floats say: up to 1023 short of the ends
        ("uint64", 0, 9223372036854774784),
    ],
)
def test_formats_of_whole_numbers_are_their_bounds(structures, tokenizer_folder, name, least, most):
    grammars = Grammars(tokenizer_folder, (EOS,))
    plain, narrow, any_value = (
        grammar(structures, **schema(**fields, format=name))
        for fields in ({"type": "integer"}, {"type": "integer", "minimum": 7, "maximum": 10**30}, {})
    )
    for number in (least - 1, least, -1, 0, 6, 7, most, most + 1):
        is_within = least <= number <= most
        assert may_be(grammars.guide_of(plain), str(number)) == is_within
        if abs(number) < 2**53:  # of numbers that need not be whole, floats tell these from the next
            assert may_be(grammars.guide_of(any_value), str(number)) == is_within
        assert may_be(grammars.guide_of(narrow), str(number)) == (7 <= number <= most)
    assert may_be(grammars.guide_of(any_value), '"text"')


@pytest.mark.parametrize("name", few(["byte", "base64"]))
def test_bytes_are_base64_that_pythons_reads_and_writes(structures, tokenizer_folder, name):
    grammars = Grammars(tokenizer_folder, (EOS,))
    made, begun = (
        grammar(structures, **schema(type="string", format=name, **others)) for others in ({}, {"pattern": "^Q"})
    )
    chars = effort("Qw=", "Qw/=", "Qw/=")
    texts = ["".join(each) for length in range(5) for each in itertools.product(chars, repeat=length)]
    for text in (*texts, "QUJDRA==", "QUJD\n", "QUI=QUI=", "QU-_"):
        try:
            is_right = base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
        except ValueError:
            is_right = False
        assert may_be(grammars.guide_of(made), json.dumps(text)) == is_right, text
        assert may_be(grammars.guide_of(begun), json.dumps(text)) == (is_right and text.startswith("Q")), text


def is_read(form, text):
    """By Python, and has a zone where it has a time."""
    try:
        if form == "date":
            return datetime.date.fromisoformat(text) is not None
        day = "2024-02-29T" if form == "time" else ""
        return datetime.datetime.fromisoformat(day + text).tzinfo is not None
    except ValueError:
        return False


@pytest.mark.parametrize("form", few(["date", "date-time"]))
def test_days_are_those_of_the_calendar(structures, tokenizer_folder, form):
    made, grammars = grammar(structures, **schema(type="string", format=form)), Grammars(tokenizer_folder, (EOS,))
    years = ["0000", "0004", "0100", "1900", "2000", "2023", "2024", "9999"]
    years = effort(["0004", "1900", "2000", "2023"], years, years)
    for year, month, day in itertools.product(years, range(14), (0, 28, 29, 30, 31, 32)):
        text = f"{year}-{month:02}-{day:02}" + ("T00:00:00Z" if form == "date-time" else "")
        assert may_be(grammars.guide_of(made), json.dumps(text)) == is_read(form, text), text


@pytest.mark.parametrize("form", ["time", "date-time"])
def test_times_are_those_of_a_day_and_have_a_zone(structures, tokenizer_folder, form):
    made, grammars = grammar(structures, **schema(type="string", format=form)), Grammars(tokenizer_folder, (EOS,))
    before = "2024-02-29T" if form == "date-time" else ""
    clocks = ["00:00:00", "23:59:59", "24:00:00", "12:60:00", "23:59:60", "12:00", "00:00:00.5", "1:00:00"]
    for clock, zone in itertools.product(clocks, ["Z", "", "+00:00", "-23:59", "+24:00", "+01:6", "+1:00"]):
        text = before + clock + zone
        is_right = clock != "12:00" and is_read(form, text)  # a time has seconds
        assert may_be(grammars.guide_of(made), json.dumps(text)) == is_right, text


@pytest.mark.parametrize("form", ["nanoid", "e164", "starts_with", "datetime"])
def test_a_format_of_no_draft_is_what_the_pattern_beside_it_asks(structures, tokenizer_folder, form):
    """As zod writes them."""
    made, grammars = (
        grammar(structures, **schema(type="string", format=form, pattern="^a+$")),
        Grammars(tokenizer_folder, (EOS,)),
    )
    assert may_be(grammars.guide_of(made), '"aa"')
    assert not may_be(grammars.guide_of(made), '"b"')
    assert "format" in refusal(structures, **schema(type="string", format=form))[1]
    for known in ("idn-email", "regex", "iri"):
        assert "format" in refusal(structures, **schema(type="string", format=known, pattern="^a+$"))[1]


@pytest.mark.parametrize(
    "members",
    [
        *(r'^"', r"^\\", r'^"\\', r'^\n"', r'^\\/:*?"<>|', r'^-"', r'^]"', r"^\\-", r'^\x01"', r"^\s\\", r"^\w"),
        *(r"\x00-\x1f", r"\x01-\x20", r"\x00-\x20-", r"\x00-\x1f\x01a", "\x00-\x21", r"\x00-\x7f", r"\x00-!#-\[\]-~"),
    ],
)
def test_a_class_of_characters_has_those_that_pythons_has(structures, tokenizer_folder, members):
    made, grammars = (
        grammar(structures, **schema(type="string", pattern=f"^[{members}]$")),
        Grammars(tokenizer_folder, (EOS,)),
    )
    for char in '\\"\n\t\b\f\ra/ -]!é':
        is_member = re.fullmatch(f"[{members}]", char, re.ASCII) is not None
        assert may_be(grammars.guide_of(made), json.dumps(char, ensure_ascii=False)) == is_member, char


@pytest.mark.parametrize(
    ("pattern", "chars"), [(r"\P{P}", "\na "), (r"[\PPa]", "\na "), ("[[:cntrl:]]", "\n"), (r"[!\p{Cc}]", "!\n")]
)
def test_a_class_that_is_named_has_no_quotes_for_control_characters(structures, tokenizer_folder, pattern, chars):
    made, grammars = (
        grammar(structures, **schema(type="string", pattern=f"^{pattern}$")),
        Grammars(tokenizer_folder, (EOS,)),
    )
    told = [char for char in '\\"\na !' if may_be(grammars.guide_of(made), json.dumps(char))]
    assert sorted(told) == sorted(chars)


def test_a_number_keeps_its_bounds_or_they_are_refused(structures, tokenizer_folder):
    """What may come, arithmetic says; of bounds that are refused nothing is asked."""
    most = effort(2, 3, 3)
    numbers = [half / 2 for half in range(-most, most + 1)]
    lower = [{}, *({name: number} for name in ("minimum", "exclusiveMinimum") for number in numbers)]
    upper = [{}, *({name: number} for name in ("maximum", "exclusiveMaximum") for number in numbers)]
    grammars, num_taken = Grammars(tokenizer_folder, (EOS,)), 0
    for bounds in (low | high for low, high in itertools.product(lower, upper)):
        fields = schema(type="number", **bounds)
        if not reason_of(structures, **fields):
            made, num_taken = grammar(structures, **fields), num_taken + 1
            for number in numbers:
                for text in (f"{number:g}", f"{number:.2f}"):
                    is_within = all(KEEPS[name](number, bound) for name, bound in bounds.items())
                    assert is_within or not may_be(grammars.guide_of(made), text), (bounds, text)
    assert num_taken > effort(50, 100, 100)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": '{"type": "object", "required": 3}'}, "json_schema"),
        ({"json_schema": '{"enum": []}'}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "a(?=b)"}, "regex"),
        ({"grammar": "start: nowhere"}, "grammar"),
        ({"grammar": "no grammar at all"}, "grammar"),
        ({"grammar": '{"grammars": []}'}, "grammar"),
        ({"grammar": 'start: %json {"type": "object", "minProperties": 2}'}, "grammar"),
        ({"grammar": r'start: /"/ %json {"type": "object", "minProperties": 2}'}, "grammar"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object"),
    ],
)
def test_what_is_wrong_is_refused(structures, params, field):
    assert refusal(structures, **params)[0] == field


@pytest.mark.parametrize("named", ["<[257]>", "<|eos|>", "<[3,250-259]>", "<[^3]>", "<[*]>", '"<|eos|>"'])
def test_a_grammar_does_not_name_an_end_token(structures, named):
    _, message = refusal(structures, grammar=f'start: /a*/ {named} "b"')
    assert "it names an end token" in message


@pytest.mark.parametrize("named", ["<[256]>", "<|user|>", "<[3,258-259]>", "<[^257]>", "<[^250-258]>", '"<|eos>"'])
def test_a_grammar_may_name_other_tokens(structures, named):
    assert grammar(structures, grammar=f'start: /a*/ {named} "b"')


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (schema(const="a<|eos|>b"), '"a<|eos|>b"'),
        (schema(type="string", pattern=r"^<\|eos\|>b$"), '"<|eos|>b"'),
        (schema(type="object", properties={"<|user|>": {"const": 1}}, required=["<|user|>"]), '{"<|user|>":1}'),
        ({"choice": Choice(choices=["<|eos|>b", "c"])}, "<|eos|>b"),
        ({"regex": r"<\|eos\|>b"}, "<|eos|>b"),
        ({"grammar": 'root ::= "<|user|>" "b"'}, "<|user|>b"),
    ],
)
def test_text_that_looks_like_a_special_token_comes_as_text(structures, tokenizer_folder, params, text):
    answer = Grammars(tokenizer_folder, (EOS,)).guide_of(grammar(structures, **params, disable_any_whitespace=True))
    token_ids = [*text.encode(), EOS]
    for count, token_id in enumerate(token_ids):
        mask = answer.allowed(token_ids[:count])
        may_come = set(tokens_in(mask))
        assert token_id in may_come
        assert may_come.isdisjoint(SPECIAL_TOKENS.values()) == (token_id != EOS)


@pytest.mark.parametrize("params", [{"regex": AHEAD}, schema(type="string", pattern=AHEAD)])
def test_what_is_wrong_with_a_regular_expression_is_said(structures, params):
    _, message = refusal(structures, **params)
    assert message.endswith(f": look-around, including look-ahead and look-behind, is not supported in {THE} {AHEAD}")


@pytest.mark.parametrize(
    "params",
    [
        schema(**chain(3000)),
        schema(**product(30, 20)),
        {"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        {"regex": "(((a{1,1000}){1,1000}){1,1000}b?){1,1000}"},
        {"regex": "(a|b)*a(a|b){60}c|" * 200},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    ],
    ids=["chain", "product", "nested", "repeats", "states", "lark", "gbnf"],
)
def test_what_would_take_for_ever_or_too_much_room_ends(structures, params):
    assert reason_of(structures, **params) in ("", "BAD_PARAM")
    assert grammar(structures, regex="a"), "the next one is not served"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"regex": "(" * 48 + "a7" + "){2}" * 48}, "a7" * 60),
        (schema(type="string", pattern="^" + "(" * 48 + "a7" + "){2}" * 48 + "$"), '"' + "a7" * 60),
        ({"grammar": "start: /" + "(" * 60 + "a7" + "){2}" * 60 + "/"}, "a7" * 60),
        (schema(const="lorem " * 15_000), '"' + "lorem " * 20),
        ({"choice": Choice(choices=["lorem " * 20_000, "b"])}, "lorem " * 20),
        ({"choice": Choice(choices=[f"{each}" for each in range(1024)])}, "102"),
        (schema(type="array", items={"const": "a"}, minItems=20_000), '["a","a"'),
    ],
    ids=["regex", "pattern", "lark", "const", "long choice", "choices", "items"],
)
def test_what_is_far_ahead_costs_nothing_now(structures, tokenizer_folder, params, text):
    """However much has to come: the automaton grows with the answer alone."""
    answer = Grammars(tokenizer_folder, (EOS,)).guide_of(grammar(structures, **params, disable_any_whitespace=True))
    token_ids = [*text.encode()]
    for count, token_id in enumerate(token_ids):
        assert answer.allowed(token_ids[:count])[token_id // 8] >> token_id % 8 & 1
    assert any(answer.allowed(token_ids))


@pytest.mark.parametrize(("multiple", "remainders"), [(65521, 65521), (0.65521, 65521), (-4099, 4099)])
def test_multiples_with_more_remainders_than_there_may_be_states(structures, multiple, remainders):
    _, message = refusal(structures, **schema(type="number", multipleOf=multiple))
    assert message.endswith(f"multipleOf ({abs(multiple)}) has {remainders} remainders, the limit is 4096")
    assert grammar(structures, **schema(type="number", multipleOf=4_000_000))


def test_the_worst_are_refused_in_a_sentence(structures):
    assert refusal(structures, **schema(**product(30, 20)))
    assert refusal(structures, json_schema='{"items":' * 10_000 + "{}" + "}" * 10_000)


def test_a_model_of_which_no_answer_can_be_kept_to_a_grammar(tmp_path):
    field, message = refusal(Structures(tmp_path, (EOS,)), regex="a")
    assert field == "regex"
    assert "does not read its tokenizer" in message
    assert str(tmp_path) not in message
