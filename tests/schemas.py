"""JSON schemas of unlike kinds, whose answers are short by what they say: text has a greatest length, lists an end. And
whether answers meet them, as jsonschema sees it."""

import json
import random
import re

import jsonschema

WORD = {"type": "string", "minLength": 1, "maxLength": 8}
LINK = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["value"],
}
POINT = {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 2, "maxItems": 2}


def closed(required=None, **properties):
    """An object of these properties and no others; all are required unless it is said which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


LEAVES = (
    {"type": "null"},
    {"type": "boolean"},
    {"const": "fixed"},
    {"const": {"a": [1, None, "x"]}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, None, True, "one"]},
    {"enum": ["日本", "größe", "naïve", "😀", 'a"b\\c']},
    WORD,
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(foo|bar)+$", "maxLength": 9},
    {"type": "string", "pattern": "^[ぁ-ん]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "minimum": -5, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    {"type": "integer", "minimum": -(10**12), "maximum": -(10**9)},
    {"type": "number", "minimum": 0.25, "maximum": 0.75},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 3},
    {"anyOf": [{"type": "boolean"}, {"enum": ["maybe"]}]},
    {"oneOf": [{"const": "a"}, {"type": "null"}]},
    *({"type": "string", "format": each} for each in ("ipv6", "email", "date-time", "time", "hostname")),
    {"type": "string", "pattern": "^[가-힣]+$", "minLength": 1, "maxLength": 2},
    {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 2},
)

SCHEMAS = (
    *LEAVES[2:23:2],
    closed(),
    closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    closed(["b"], a=WORD, b={"type": "boolean"}, c={"type": "null"}),
    closed(**{"": WORD, "with space": {"type": "null"}, 'quote"': {"type": "boolean"}, "größe": {"const": 1}}),
    closed(deep=closed(deeper=closed(deepest=closed(bottom=WORD)))),
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": WORD, "minItems": 3, "maxItems": 3},
    {"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
    {"anyOf": [closed(kind={"const": "circle"}, r={"enum": [1, 2]}), closed(kind={"const": "dot"})]},
    {"oneOf": [closed(t={"const": "x"}, x=WORD), closed(t={"const": "y"}, y=POINT)]},
    {"allOf": [closed(["a"], a=WORD, b=WORD), {"required": ["b"]}]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": closed(left=WORD, right={"$ref": "#/$defs/side"}), "side": POINT}},
    {
        "$ref": "#/$defs/list",
        "$defs": {"list": {"anyOf": [{"type": "null"}, closed(v={"type": "boolean"}, next={"$ref": "#/$defs/list"})]}},
    },
    {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["id"],
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 0},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [WORD], "additionalItems": False},
    {"type": "object", "properties": {"a": LINK, "b": {"type": "null"}}, "required": ["b", "a"], "maxProperties": 2},
    closed(**{f"field_{index}": leaf for index, leaf in enumerate(LEAVES[:12])}),
)


def many_schemas(count, seed=0):
    """So many, made at random, each unlike the others."""
    rng, schemas = random.Random(seed), {}
    while len(schemas) < count:
        schema = _whole_schema(rng)
        schemas[json.dumps(schema)] = schema
    return list(schemas.values())


def _whole_schema(rng):
    definitions = {}
    schema = _schema(rng, rng.randrange(4), definitions)
    return schema | {"$defs": definitions} if definitions else schema


def _schema(rng, depth, definitions):
    if depth == 0:
        return rng.choice(LEAVES)
    inner = [_schema(rng, depth - 1, definitions) for _ in range(rng.randint(1, 3))]
    names = rng.sample(["id", "name", "ünïcode", "a b", "x.y", "n", "_"], len(inner))
    properties = dict(zip(names, inner, strict=True))
    match rng.choice(["object", "object", "optional", "list", "tuple", "choice", "reference", "tree"]):
        case "object":
            return closed(**properties)
        case "optional":
            return closed(names[:1], **properties)
        case "list":
            return {"type": "array", "items": inner[0], "minItems": rng.randrange(2), "maxItems": rng.randint(1, 3)}
        case "tuple":
            return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
        case "choice":
            return {"anyOf": [*inner, {"type": "null"}]}
        case "tree":
            name = f"d{len(definitions)}"
            itself = {"$ref": f"#/$defs/{name}"}
            under = {"type": "array", "items": itself, "maxItems": 1}
            definitions[name] = closed(["value"], value=inner[0], under=under)
            return itself
    name = f"d{len(definitions)}"
    definitions[name] = inner[0]
    return closed(one={"$ref": f"#/$defs/{name}"}, two={"$ref": f"#/$defs/{name}"})


# ---- schemas that nobody means well with ----


def chain(length):
    """Each refers to the next: whoever follows them one within the other needs a deep stack."""
    links = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def product(num_factors, num_choices):
    """Options of which one of each kind holds: all of their combinations are too many."""
    kinds = [
        {"anyOf": [{"type": "object", "properties": {f"p{kind}": {"const": each}}} for each in range(num_choices)]}
        for kind in range(num_factors)
    ]
    return {"allOf": kinds}


# ---- whether answers meet them ----

_FORMATS = {
    "date-time": r"\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    "hostname": r"[A-Za-z\d]([A-Za-z\d-]{0,61}[A-Za-z\d])?(\.[A-Za-z\d]([A-Za-z\d-]{0,61}[A-Za-z\d])?)*",
}
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])


def _has_form(pattern):
    return lambda value: not isinstance(value, str) or re.fullmatch(pattern, value, re.ASCII) is not None


for _name, _pattern in _FORMATS.items():
    FORMATS.checks(_name)(_has_form(_pattern))


def check(schemas, texts):
    """Each text is JSON that meets its schema. None stands for an answer that was cut short, of which there may be few.
    How many say something: neither null nor anything empty."""
    assert texts.count(None) <= 0.02 * len(schemas)
    values = []
    for schema, text in zip(schemas, texts, strict=True):
        if text is not None:
            values.append(json.loads(text))
            validator = jsonschema.validators.validator_for(schema)
            validator(schema, format_checker=FORMATS).validate(values[-1])
    return sum(value not in (None, "", [], {}) for value in values)
