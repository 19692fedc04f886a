"""Define Lark rules for tool calls by format, the counterparts of the readers. Performs no I/O.

Each format has a rule `calls` for an output that consists of calls only. Arguments in JSON have grammars of their own,
which rules name with an @.
"""

import json
import keyword
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from coordinator.text.calls import literals, parameters
from coordinator.text.calls.harmony import HARMONY
from coordinator.text.calls.json_calls import HERMES_CLOSE, HERMES_OPEN, MISTRAL_ARGUMENTS, MISTRAL_TAG, PYTHON_TAG
from coordinator.text.calls.literals import Language, Literals
from coordinator.text.calls.markup import MARKUPS, QUOTE, Arguments, Markup
from coordinator.text.calls.parameters import Parameters, Tag, any_of, spelled, text_until

BLANKS: Final = "blanks: /[ \\t\\r\\n]{1,8}/\n"
IN_JSON: Final = ("hermes", "llama3", "mistral", HARMONY)  # formats with JSON arguments, beside those of the table
PYTHONIC: Final = "pythonic"
ANY: Final = '{"type": "object"}'
_NUMBERS: Final = r"""
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
"""
_KEY: Final = "[A-Za-z_][A-Za-z0-9_]{0,127}"
_OF_PYTHON: Final = rf"""
arguments: argument ("," blanks? argument)*
argument: KEY "=" value
value: text | NUMBER | "True" | "False" | "None" | "[" (value ("," blanks? value)*)? "]" | "{{" pairs? "}}"
pairs: pair ("," blanks? pair)*
pair: text ":" blanks? value
text: /"([^"\\\x00-\x1f]|\\[\\"nrt])*"|'([^'\\\x00-\x1f]|\\[\\'nrt])*'/
KEY: /{_KEY}/ & ~/{"|".join(filter(str.isidentifier, keyword.kwlist))}/
{_NUMBERS}"""
_OF_GEMMA: Final = rf"""
arguments: pairs
pairs: pair ("," pair)*
pair: KEY ":" value
value: text | NUMBER | "true" | "false" | "null" | "[" (value ("," value)*)? "]" | "{{" pairs? "}}"
KEY: /[A-Za-z_][A-Za-z0-9_ .-]{{0,126}}/
{_NUMBERS}"""
_GEMMAS_KEY: Final = re.compile(r"[^:{}\[\],<\"\n]{1,128}")


class Tool(NamedTuple):
    """A tool that may be called, with the JSON schema of its arguments, or empty for any object."""

    name: str
    schema: str
    is_strict: bool = True  # the arguments keep to the schema in whole


class Rules(NamedTuple):
    """Rules, and the JSON schemas of the grammars that they name."""

    lark: str
    schemas: Mapping[str, str]


NO_RULES: Final = Rules("", {})


def rules(calls: str, tools: Iterable[Tool], tag: Tag, most: int, *, closes_objects: bool) -> Rules:
    """Return the Lark rules for 1 to `most` calls of `tools` in the format `calls`; empty if it can call none of them.

    `tag` gives the Lark form of a tag. With `closes_objects`, parameters between tags have only names in their schema
    unless it says otherwise. Raises Unenforceable for a schema that cannot be kept to.
    """
    tools = list(tools)
    if calls in MARKUPS and MARKUPS[calls].arguments is Arguments.PARAMETERS:
        return _of_parameters(MARKUPS[calls], tools, tag, most, closes_objects=closes_objects)
    if calls == PYTHONIC:
        return Rules(_of_python(tools, most), {})
    places = [f"arguments{index}" if tool.schema else "object" for index, tool in enumerate(tools)]
    schemas = {place: tool.schema or ANY for place, tool in zip(places, tools, strict=True)}
    named = {tool.name: f"@{place}" for place, tool in zip(places, tools, strict=True)}
    match calls:
        case "hermes":
            pair = f"{tag(HERMES_OPEN)} blanks? call blanks? {tag(HERMES_CLOSE)}"
            return Rules(f"calls: ({pair} blanks?){{1,{most}}}\n" + _objects(named, "arguments"), schemas)
        case "llama3":
            listed = _listed("call", ";", most)
            return Rules(f"calls: {tag(PYTHON_TAG)}? {listed}\n" + _objects(named, "parameters"), schemas)
        case "mistral":
            return Rules(_of_mistral(named, tag, most), schemas)
    if calls == HARMONY:
        return Rules(_of_harmony(named, tag), schemas)
    markup = MARKUPS[calls]
    if markup.arguments is Arguments.GEMMA:
        written = Literals(_gemma(tag))
        bodies = {tool.name: f'"{{" {written.of(tool.schema)} "}}"' for tool in tools}
        return Rules(_of_markup(markup, bodies, tag, most) + "".join(written.lines), {})
    bodies = {name: f"{grammar} {spelled(markup.arguments_end, tag)}" for name, grammar in named.items()}
    return Rules(_of_markup(markup, bodies, tag, most), schemas)


def keeps_schemas(calls: str, names: Iterable[str], schemas: Iterable[str]) -> bool:
    """Return whether calls in the format `calls` can name all these tools and be kept to these schemas of arguments."""
    if calls in IN_JSON:
        return True
    if calls == PYTHONIC:
        return all(map(_is_path, names)) and not any(literals.unwritable(_python(), each) for each in schemas)
    if calls not in MARKUPS:
        return False
    match MARKUPS[calls].arguments:
        case Arguments.PARAMETERS:
            return not any(map(parameters.unwritable, schemas))
        case Arguments.GEMMA:
            return not any(literals.unwritable(_gemma(json.dumps), each) for each in schemas)
    return True


def _of_parameters(markup: Markup, tools: Collection[Tool], tag: Tag, most: int, *, closes_objects: bool) -> Rules:
    written = Parameters(markup, tag, closes_objects=closes_objects)
    bodies = {
        tool.name: written.of(f"arguments{index}", tool.schema, is_strict=tool.is_strict)
        for index, tool in enumerate(tools)
    }
    return Rules(_of_markup(markup, bodies, tag, most) + "".join(written.lines), written.schemas)


def _of_markup(markup: Markup, bodies: Mapping[str, str], tag: Tag, most: int) -> str:
    """Return the rules for calls between a family's tags, from the rule bodies of each tool's arguments."""
    named = any_of(f"{_header(markup, name, tag)} {body}" for name, body in bodies.items())
    between = spelled(markup.between, tag)
    opening = spelled(markup.section + markup.between if markup.section else "", tag)
    closing = spelled(markup.section_end, tag)
    call = f"call: {spelled(markup.call, tag)} ({named}) {spelled(markup.call_end, tag)}\n"
    if markup.wraps_each:
        return f"calls: ({opening} call {between} {closing} blanks?){{1,{most}}}\n{call}"
    before = " ".join(f"({spelled(each, tag)})?" for each in markup.dropped[:2])
    behind = " ".join(f"({spelled(each, tag)})?" for each in markup.dropped[2:])
    return f"calls: {before} {opening} (call blanks?){{1,{most}}} {closing} {behind}\n{call}"


def _header(markup: Markup, name: str, tag: Tag) -> str:
    """Return what is written between the tag of a call and its arguments, with any number of the call."""
    before, _, behind = (markup.header.replace("{name}", name) + markup.between).partition("{number}")
    return " ".join(filter(None, (spelled(before, tag), "/[0-9]{1,3}/" if behind else "", spelled(behind, tag))))


def _of_harmony(tools: Mapping[str, str], tag: Tag) -> str:
    """Return the rules for one call, whose end is an end of the output."""
    header, json_type = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
    named = any_of(f"{_text(name)} {spelled(json_type, tag)} {grammar}" for name, grammar in tools.items())
    return f"calls: {spelled(header, tag)} ({named})\n"


def _listed(call: str, separator: str, most: int) -> str:
    return f'{call} (blanks? "{separator}" blanks? {call}){{0,{most - 1}}}' if most > 1 else call


def _objects(tools: Mapping[str, str], arguments: str) -> str:
    """Return the rule of a call that is a JSON object."""
    between = f'blanks? "," blanks? {_quoted(arguments)} blanks? ":" blanks?'
    named = any_of(f"{_quoted(name)} {between} {grammar}" for name, grammar in tools.items())
    return f'call: "{{" blanks? {_quoted("name")} blanks? ":" blanks? ({named}) blanks? "}}"\n'


def _of_mistral(tools: Mapping[str, str], tag: Tag, most: int) -> str:
    """Return the rules for a list after the tag, or a tag before each call."""
    named = any_of(f"{_text(name)} {tag(MISTRAL_ARGUMENTS)}? blanks? {grammar}" for name, grammar in tools.items())
    return (
        f"calls: {tag(MISTRAL_TAG)} blanks? list | ({tag(MISTRAL_TAG)} blanks? ({named}) blanks?){{1,{most}}}\n"
        f'list: "[" blanks? {_listed("call", ",", most)} blanks? "]"\n' + _objects(tools, "arguments")
    )


def _of_python(tools: Collection[Tool], most: int) -> str:
    """Return the rules for calls with literal keyword arguments."""
    written, able = Literals(_python()), [tool for tool in tools if _is_path(tool.name)]
    bodies = [f'{_text(tool.name)} "(" {written.of(tool.schema)} ")"' for tool in able]
    calls = f'calls: "[" {_listed("call", ",", most)} "]"\ncall: {any_of(bodies)}\n'
    return calls + "".join(written.lines) if able else ""


def _python() -> Language:
    """Return how Python writes values."""
    return Language(
        {True: "True", False: "False", None: "None"},
        text=_in_quotes,
        key=lambda name: f'{_in_quotes(name)} ":" blanks?',
        argument=lambda name: _text(f"{name}=") if _is_key(name) else "",
        rules=_OF_PYTHON,
    )


def _in_quotes(text: str) -> str:
    """Return a text as Python writes it, in either kind of quotes."""
    double = _text(text)
    single = "'" + double[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    return f"({_text(double)} | {_text(single)})"


def _gemma(tag: Tag) -> Language:
    """Return how Gemma writes values."""
    quote = spelled(QUOTE, tag)

    def key(name: str) -> str:
        return _text(f"{name}:") if _GEMMAS_KEY.fullmatch(name) else ""

    return Language(
        {True: "true", False: "false", None: "null"},
        text=lambda text: f"{quote} {_text(text)} {quote}",
        key=key,
        argument=key,
        rules=f"text: {quote} words\n{text_until('words', QUOTE, tag)}{_OF_GEMMA}",
    )


def _is_path(name: str) -> bool:
    return all(map(_is_key, name.split(".")))


def _is_key(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a JSON string as a Lark string."""
    return _text(_text(text))
