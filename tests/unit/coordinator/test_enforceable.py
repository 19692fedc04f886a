"""What can be enforced of a schema is what the docs say, and whatever a schema is, it is read or refused."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from coordinator.text.enforceable import Unenforceable, read_schema
from coordinator.text.loosening import freed, loosened
from coordinator.text.structures import Structures
from protos.inference_pb2 import SamplingParams
from serving_core.errors import RequestError
from tests.tiny_models import EOS

DOCS = Path(__file__).parents[3] / "docs" / "asking.md"
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


def drawn(rng, depth):
    """No schema that anyone means well with."""
    kind = rng.random() if depth else 1.0
    if kind < 0.5:
        names = rng.choices([*KEYWORDS, "$defs", "$id", "$anchor", "additionalItems", "default"], k=rng.randrange(5))
        return {name: drawn(rng, depth - 1) for name in names}
    if kind < 0.6:
        return {name: drawn(rng, depth - 1) for name in "ab"}
    if kind < 0.7:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    return rng.choice(ODD)


def test_whatever_a_schema_is_it_is_read_or_refused():
    num_refused = 0
    for seed in range(1500):
        rng = random.Random(seed)
        text = json.dumps({"properties": drawn(rng, 4), rng.choice([*KEYWORDS]): drawn(rng, 3)})
        for given in (text, loosened(text, ("",), lambda schema, rng=rng: len(schema) < rng.randrange(5))):
            try:
                read_schema(given)
            except Unenforceable:
                num_refused += 1
        assert freed(text, ("",))
    assert 100 < num_refused < 2700
