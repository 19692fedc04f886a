"""Parse the tools that a chat output may call, and build the schema of an output that must call one. Performs no
I/O."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from coordinator.api.http.conversations import function_of, name_of
from coordinator.api.http.fields import Fields, shown
from coordinator.text.answer_format import AnswerFormat
from coordinator.text.calls.json_calls import ListReader, NamedReader
from coordinator.text.calls.reader import MAX_CALLS, CallReader
from coordinator.text.schemas import with_references

MAX_TOOLS: Final = 512
AUTO, NONE, REQUIRED = "auto", "none", "required"  # tool_choice


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools that an output may call.

    With `schema`, the output is JSON of that schema with calls only, which the `forced` reader parses; `loose` names
    the definitions of tools that are not strict, as in Leeway. `held` has every tool with its schema, or an empty
    string for a tool that is not strict, for an output that may have a required format where it calls no tool.
    """

    names: frozenset[str]
    is_parallel: bool = True  # whether several calls are allowed
    forced: type[CallReader] | None = None
    schema: str = ""
    loose: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()

    @property
    def most_calls(self) -> int:
        return MAX_CALLS if self.is_parallel else 1


@dataclass(frozen=True, slots=True)
class Tool:
    """Definition of one tool."""

    parameters: Mapping[str, Any] | None
    is_strict: bool

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the arguments, which are always an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}


def parse_offer(fields: Fields, answer_format: AnswerFormat) -> Offer | None:
    """Return the offer of a request, or None when the output may call no tool. Raises RequestError."""
    tools, choice = parse_tools(fields), fields.raw("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls") is not False
    if choice == REQUIRED or isinstance(choice, dict):
        with _refusing_depth(fields):
            return _forced_offer(fields, tools, is_parallel=is_parallel)
    if choice not in (None, AUTO, NONE):
        problem = f"({shown(choice)}) is not supported: it may be none, auto, required or one of the tools"
        raise fields.problem("tool_choice", problem)
    if choice == NONE or not tools:
        return None
    if not answer_format.has_calls:
        raise fields.problem("tools", "are not supported: how the model calls them is not known (--tool-call-parser)")
    with _refusing_depth(fields):
        held = tuple((name, json.dumps(tool.schema) if tool.is_strict else "") for name, tool in tools.items())
    return Offer(frozenset(tools), is_parallel, held=held)


@contextmanager
def _refusing_depth(fields: Fields) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise fields.problem("tools", "are nested too deeply") from error


def _forced_offer(fields: Fields, tools: Mapping[str, Tool], *, is_parallel: bool) -> Offer:
    """Return the offer of a request that requires a call of any tool or of one tool."""
    if not tools:
        raise fields.problem("tool_choice", "asks for a call, but there are no tools")
    if fields.raw("tool_choice") == REQUIRED:
        schema = calls_schema(tools, is_parallel=is_parallel)
        loose = tuple(str(index) for index, tool in enumerate(tools.values()) if not tool.is_strict)
        return Offer(frozenset(tools), is_parallel, ListReader, json.dumps(schema), loose)
    name = name_of(function_of(fields.nested("tool_choice") or Fields({})))
    if name not in tools:
        raise fields.problem("tool_choice", f"is {shown(name)}, which is none of the tools")
    loose = () if tools[name].is_strict else ("",)
    return Offer(frozenset({name}), False, NamedReader, json.dumps(tools[name].schema), loose)


def parse_tools(fields: Fields) -> dict[str, Tool]:
    """Return the tools by name. Raises RequestError."""
    return dict(map(_tool, fields.objects("tools", MAX_TOOLS)))


def calls_schema(tools: Mapping[str, Tool], *, is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls.

    Every tool's schema becomes a definition, and references within it are changed to that place.
    """
    places = {name: f"#/$defs/{index}" for index, name in enumerate(tools)}  # a name may not be valid in a reference
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
    moved = [_moved(tools[name].schema, place) for name, place in places.items()]
    return {**schema, "$defs": {str(index): each for index, each in enumerate(moved)}}


def _moved(schema: Mapping[str, Any], place: str) -> Any:
    """Return a schema with its references changed for `place`, where its own `$id` no longer applies."""
    own = str(schema.get("$id", "")).removesuffix("#")

    def reference(given: str) -> str:
        within = given.removeprefix(own).removeprefix("#")
        return place + within if within == "" or within.startswith("/") else given

    return with_references({name: value for name, value in schema.items() if name != "$id"}, reference)


def _tool(tool: Fields) -> tuple[str, Tool]:
    function = function_of(tool)
    function.text("description")
    is_strict = function.boolean("strict") or False
    parameters = function.raw("parameters")
    if not isinstance(parameters, dict | None):
        raise function.error("parameters", "a JSON schema: an object")
    if is_strict and parameters is not None and not _allows_objects(parameters):
        raise function.error("parameters", "a JSON schema of objects")
    return name_of(function), Tool(parameters, is_strict)


def _allows_objects(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "object")
    return "object" in (types if isinstance(types, list) else [types])
