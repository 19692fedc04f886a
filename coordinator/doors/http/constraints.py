"""What an answer is made to be, as OpenAI's response_format and vLLM's structured_outputs ask for it. Pure."""

import json
from typing import Any, Final

from coordinator.doors.http.fields import Fields, shown
from coordinator.doors.validation import MAX_CHOICES
from protos.inference_pb2 import Choice

KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")  # of structured_outputs
WITHOUT_EFFECT: Final = ("name", "description", "strict")  # of a schema, which is enforced in any case


def read_constraint(fields: Fields) -> dict[str, Any]:
    """The fields of SamplingParams that say so. Raises RequestError."""
    form, outputs = fields.nested("response_format"), fields.nested("structured_outputs")
    asked = {} if form is None else _of_form(fields, form)
    if outputs is None:
        return asked
    if asked:
        raise fields.problem("structured_outputs", "cannot be had beside response_format: one of them says what comes")
    return _of_outputs(fields, outputs)


def constraint_names(fields: Fields) -> dict[str, str]:
    """Return where the client has said it, by the fields of SamplingParams."""
    if "structured_outputs" in fields:
        names = (*KINDS, "whitespace_pattern")
        return {"json_schema": "structured_outputs.json", **{name: f"structured_outputs.{name}" for name in names}}
    match fields.raw("response_format"):
        case {"type": "json_schema"}:
            return {"json_schema": "response_format.json_schema.schema"}
        case {"type": "json_object"}:
            return {"json_schema": "response_format.schema", "json_object": "response_format"}
    return {}


def _of_form(fields: Fields, form: Fields) -> dict[str, Any]:
    match kind := form.text("type"):
        case "text":
            return {}
        case "json_object" if "schema" in form:  # as llama.cpp and others have it
            return {"json_schema": _schema(form, "schema")}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            given = form.nested("json_schema")
            if given is None:
                raise form.error("json_schema", "an object with a schema")
            for name in WITHOUT_EFFECT:
                given.raw(name)
            return {"json_schema": _schema(given, "schema")}
    raise fields.problem("response_format", f"of type {shown(kind)} is not supported")


def _of_outputs(fields: Fields, outputs: Fields) -> dict[str, Any]:
    if outputs.raw("structural_tag"):
        raise outputs.problem("structural_tag", "is not supported")
    outputs.boolean("disable_fallback")  # there is none
    kinds = [name for name in KINDS if outputs.raw(name) not in (None, False)]
    if len(kinds) != 1:
        raise fields.problem("structured_outputs", f"must have one of {', '.join(KINDS)}, not {len(kinds)}")
    options = {
        "disable_any_whitespace": outputs.boolean("disable_any_whitespace"),
        "disable_additional_properties": outputs.boolean("disable_additional_properties"),
        "whitespace_pattern": outputs.text("whitespace_pattern"),
    }
    return {**_of_kind(outputs, kinds[0]), **{name: value for name, value in options.items() if value is not None}}


def _of_kind(outputs: Fields, kind: str) -> dict[str, Any]:
    match kind:
        case "json":
            return {"json_schema": _schema(outputs, "json")}
        case "json_object":
            return {"json_object": outputs.boolean("json_object")}
        case "choice":
            return {"choice": Choice(choices=outputs.texts("choice", MAX_CHOICES))}
    return {kind: outputs.text(kind)}


def _schema(fields: Fields, name: str) -> str:
    """A schema as text; whether it is one is checked where it is compiled."""
    schema = fields.raw(name)
    if name == "json" and isinstance(schema, str):
        return fields.text(name) or ""
    if not isinstance(schema, dict):
        raise fields.error(name, "an object")
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise fields.problem(name, "is nested too deeply") from error
