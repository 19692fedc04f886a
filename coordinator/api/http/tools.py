"""Offer tools to an output: the readers of its calls, and the schema of an output that must call one. Performs no
I/O."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from coordinator.api.http.field_types import shown
from coordinator.api.http.request_models import ChatFields, Function, NamedTool, Tool
from coordinator.api.validation import bad
from coordinator.text.answer_format import READERS, AnswerFormat
from coordinator.text.calls.json_calls import ListReader, NamedReader
from coordinator.text.calls.reader import MAX_CALLS, CallReader, Tools
from coordinator.text.calls.rules import keeps_schemas
from coordinator.text.schemas import with_references

AUTO, NONE, REQUIRED = "auto", "none", "required"  # tool_choice


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools that an output may call, each with the JSON schema of its arguments.

    With `schema`, the output is calls only, which the `forced` reader parses: JSON of that schema, or calls in the
    model's own format, if there is `held`. `loose` names the definitions of tools that are not strict, as in Leeway.
    `held` has every tool with its schema, or an empty string for a tool that is not strict, for an output that may have
    a required format where it calls no tool.
    """

    tools: Tools
    is_parallel: bool = True  # whether several calls are allowed
    forced: Callable[..., CallReader] | None = None
    schema: str = ""
    loose: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()

    @property
    def must_call(self) -> bool:
        """Return whether the output is calls in the model's own format."""
        return self.schema != "" and self.held != ()

    @property
    def most_calls(self) -> int:
        return MAX_CALLS if self.is_parallel else 1


def offer_of(request: ChatFields, answer_format: AnswerFormat) -> Offer | None:
    """Return the offer of a request, or None when the output may call no tool. Raises RequestError."""
    choice, is_parallel = request.tool_choice, request.parallel_tool_calls is not False
    functions = functions_of(request.tools or ())
    if choice == REQUIRED or isinstance(choice, NamedTool):
        with _refusing_depth():
            return _forced_offer(functions, choice, answer_format.calls, is_parallel=is_parallel)
    if choice == NONE or not functions:
        return None
    if not answer_format.has_calls:
        raise bad("tools", "are not supported: how the model calls them is not known (--tool-call-parser)")
    with _refusing_depth():
        tools = schemas_of(functions)
        held = tuple((name, json.dumps(tools[name]) if each.strict else "") for name, each in functions.items())
    return Offer(tools, is_parallel, held=held)


@contextmanager
def _refusing_depth() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise bad("tools", "are nested too deeply") from error


def _forced_offer(
    functions: Mapping[str, Function], choice: str | NamedTool, calls: str, *, is_parallel: bool
) -> Offer:
    """Return the offer of a request that requires a call of any tool or of one tool.

    The calls are in the model's own format, if that can keep to the schemas of strict tools, or else in JSON.
    """
    if not functions:
        raise bad("tool_choice", "asks for a call, but there are no tools")
    if isinstance(choice, NamedTool):
        if (function := functions.get(choice.function.name)) is None:
            raise bad("tool_choice", f"is {shown(choice.function.name)}, which is none of the tools")
        functions, is_parallel = {function.name: function}, False
    tools = schemas_of(functions)
    loose = tuple(str(index) for index, each in enumerate(functions.values()) if not each.strict)
    schema = json.dumps(calls_schema(tools, is_parallel=is_parallel))
    if keeps_schemas(calls, tools, [json.dumps(tools[name]) for name, each in functions.items() if each.strict]):
        return Offer(tools, is_parallel, READERS[calls], schema, loose, tuple((name, "") for name in tools))
    if isinstance(choice, NamedTool):
        [schema] = map(json.dumps, tools.values())
        return Offer(tools, is_parallel, NamedReader, schema, ("",) if loose else ())
    return Offer(tools, is_parallel, ListReader, schema, loose)


def functions_of(tools: Sequence[Tool]) -> dict[str, Function]:
    """Return the functions by name."""
    return {tool.function.name: tool.function for tool in tools}


def schemas_of(functions: Mapping[str, Function]) -> dict[str, dict[str, Any]]:
    """Return the schemas of the arguments by name."""
    return {name: schema_of(each) for name, each in functions.items()}


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**function.parameters, "type": "object"}


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls, from those of each function's arguments.

    Every function's schema becomes a definition, and references within it are changed to that place.
    """
    places = {name: f"#/$defs/{index}" for index, name in enumerate(schemas)}  # a name may not be valid in a reference
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
    moved = [_moved(schemas[name], place) for name, place in places.items()]
    return {**schema, "$defs": {str(index): each for index, each in enumerate(moved)}}


def _moved(schema: Mapping[str, Any], place: str) -> Any:
    """Return a schema with its references changed for `place`, where its own `$id` no longer applies."""
    own = str(schema.get("$id", "")).removesuffix("#")

    def reference(given: str) -> str:
        within = given.removeprefix(own).removeprefix("#")
        return place + within if within == "" or within.startswith("/") else given

    return with_references({name: value for name, value in schema.items() if name != "$id"}, reference)


# ---- Arguments of a call, as JSON that a model wrote ----

MAX_DEPTH: Final = 256  # levels; the stack suffices to serialize as many again


def object_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Text that is no JSON object (cut short, or with a number that JSON does not have) is returned under the key
    "arguments", so that it is not mistaken for a call without arguments.
    """
    try:
        value = parsed(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def parsed(text: str) -> Any:
    """Parse JSON that can be serialized again unchanged.

    Raises ValueError for anything else: invalid JSON, numbers beyond a float (1e400) or outside JSON (NaN), lone
    surrogates, and more than MAX_DEPTH levels.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not _is_shallow(value):
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is beyond the range of a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inner:
            return True
        level = [each for values in inner for each in values]
    return False
