"""The tools that the answer of a chat may call, and the schema of an answer that has to call some. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from coordinator.doors.http.conversations import function_of, name_of
from coordinator.doors.http.fields import Fields, shown
from coordinator.text.answer_format import AnswerFormat
from coordinator.text.calls.forced import ListReader, NamedReader
from coordinator.text.calls.reader import CallReader
from coordinator.text.schemas import with_references

MAX_TOOLS: Final = 512
AUTO, NONE, REQUIRED = "auto", "none", "required"  # tool_choice


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that an answer may call. With `schema` it is JSON of that schema, and nothing but calls, which the
    `forced` reader reads."""

    names: frozenset[str]
    is_parallel: bool = True  # whether it may call several
    forced: type[CallReader] | None = None
    schema: str = ""


def parse_offer(fields: Fields, answer_format: AnswerFormat) -> Offer | None:
    """None where the answer may call nothing. Raises RequestError."""
    tools, choice = parse_tools(fields), fields.raw("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls") is not False
    if choice == REQUIRED or isinstance(choice, dict):
        try:
            return _forced_offer(fields, tools, is_parallel=is_parallel)
        except RecursionError as error:
            raise fields.problem("tools", "are nested too deeply") from error
    if choice not in (None, AUTO, NONE):
        problem = f"({shown(choice)}) is not supported: it may be none, auto, required or one of the tools"
        raise fields.problem("tool_choice", problem)
    if choice == NONE or not tools:
        return None
    if not answer_format.has_calls:
        raise fields.problem("tools", "are not supported: how the model calls them is not known (--tool-call-parser)")
    return Offer(frozenset(tools), is_parallel)


def _forced_offer(fields: Fields, tools: Mapping[str, Mapping[str, Any] | None], *, is_parallel: bool) -> Offer:
    """Of tools of which one has to be called: any, or a certain one."""
    if not tools:
        raise fields.problem("tool_choice", "asks for a call, but there are no tools")
    if fields.raw("tool_choice") == REQUIRED:
        schema = calls_schema(tools, is_parallel=is_parallel)
        return Offer(frozenset(tools), is_parallel, ListReader, json.dumps(schema))
    name = name_of(function_of(fields.nested("tool_choice") or Fields({})))
    if name not in tools:
        raise fields.problem("tool_choice", f"is {shown(name)}, which is none of the tools")
    return Offer(frozenset({name}), False, NamedReader, json.dumps(_parameters(tools[name])))


def parse_tools(fields: Fields) -> dict[str, Mapping[str, Any] | None]:
    """The parameters of the tools by their names. Raises RequestError."""
    return dict(map(_tool, fields.objects("tools", MAX_TOOLS)))


def calls_schema(tools: Mapping[str, Mapping[str, Any] | None], *, is_parallel: bool) -> dict[str, Any]:
    """Of a list of calls. Every tool's own schema is a definition in it, and what refers to a place in that one goes
    there."""
    places = {name: f"#/$defs/{index}" for index, name in enumerate(tools)}  # names may be no part of a reference
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1
    moved = [_moved(_parameters(tools[name]), place) for name, place in places.items()]
    return {**schema, "$defs": {str(index): each for index, each in enumerate(moved)}}


def _parameters(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}


def _moved(schema: Mapping[str, Any], place: str) -> Any:
    """A schema that has gone to this place, where it has no name of its own: references begin at the whole."""
    own = str(schema.get("$id", "")).removesuffix("#")

    def reference(given: str) -> str:
        within = given.removeprefix(own).removeprefix("#")
        return place + within if within == "" or within.startswith("/") else given

    return with_references({name: value for name, value in schema.items() if name != "$id"}, reference)


def _tool(tool: Fields) -> tuple[str, Mapping[str, Any] | None]:
    function = function_of(tool)
    function.text("description")
    function.boolean("strict")
    parameters = function.raw("parameters")
    if not isinstance(parameters, dict | None):
        raise function.error("parameters", "a JSON schema: an object")
    return name_of(function), parameters
