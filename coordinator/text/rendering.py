"""The program that renders chat templates: `python -m coordinator.text.rendering`.

A process of its own (coordinator/text/program.py), since a template may run for ever. It is given the template, then
one conversation after the other, each answered by its text, by the refusal of the template, by what is wrong with one
of its fields, or by what has failed.
"""

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.text.answering import answer_lines, line

MAX_CPU_S: Final = 2.0  # for one conversation, and not of the clock: a busy machine changes nothing
MAX_BYTES: Final = 2**30
MAX_TEXT_CHARS: Final = 2**23  # twice what a request may bring
MAX_ERROR_CHARS: Final = 200
RESERVED: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # fields of requests
DEVELOPER: Final = "developer"
MARK: Final = secrets.token_hex(16)  # where a message goes on; no text has it


class Refusal(jinja2.TemplateError):
    """The template does not take these messages."""


class BadField(Exception):
    """A field that no template could take."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


def make_environment() -> ImmutableSandboxedEnvironment:
    """What templates find, as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class Renderer:
    """Renders one template; it is compiled when it is needed, which may take long too."""

    def __init__(self, source: str, tool_source: str, variables: Mapping[str, str], kwargs_json: str) -> None:
        self._source = source
        self._tool_source = tool_source or source
        self._variables = variables
        self._kwargs = read_kwargs(kwargs_json)
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, given: Mapping[str, Any]) -> bytes:
        """The line that answers a conversation."""
        try:
            text = self._render(given)
            if len(text) > MAX_TEXT_CHARS:
                return line({"failed": f"its text has {len(text)} characters, the limit is {MAX_TEXT_CHARS}"})
            return line({"text": text})
        except BadField as bad:
            return line({"field": bad.field, "problem": bad.problem})
        except Refusal as refusal:
            return line({"refused": _shown(refusal)})
        except jinja2.TemplateError as error:
            return line({"failed": _shown(error)})
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            return line({"failed": type(error).__name__})

    def _render(self, given: Mapping[str, Any]) -> str:
        tools = _read("tools_json", given["tools_json"], list)
        source = self._tool_source if tools else self._source
        messages = [_message(message, source) for message in given["messages"]]
        kwargs = read_kwargs(given["template_kwargs_json"])
        goes_on = given["continue_final_message"]
        if goes_on:
            messages[-1]["content"] += MARK + " "
        text = self._template(source).render(
            {
                **self._variables,
                "documents": None,  # templates ask whether it is none, as with tools; undefined would not be
                **self._kwargs,
                **kwargs,
                "messages": messages,
                "tools": tools or None,
                "add_generation_prompt": given["add_generation_prompt"],
            }
        )
        return _up_to_mark(text) if goes_on else text

    def _template(self, source: str) -> jinja2.Template:
        if source not in self._templates:
            self._templates[source] = make_environment().from_string(source)
        return self._templates[source]


def read_kwargs(text: str) -> dict[str, Any]:
    """The variables in a JSON object. Raises BadField."""
    kwargs: dict[str, Any] = _read("template_kwargs_json", text, dict)
    for name in RESERVED:
        if name in kwargs:
            raise BadField("template_kwargs_json", f"has {name}, which is a field of its own")
    return kwargs


def _message(message: Mapping[str, str], source: str) -> dict[str, Any]:
    """As this template is given it: one that does not know developers would leave out what they say."""
    is_system = message["role"] == DEVELOPER and DEVELOPER not in source
    known = {"role": "system" if is_system else message["role"], "content": message["content"]}
    extra: dict[str, Any] = _read("messages", message.get("extra_json", ""), dict)
    return known | extra | known


def _read(field: str, text: str, kind: type[Any]) -> Any:
    """What a JSON text holds, of this kind; an empty one of it for an empty text."""
    try:
        value = json.loads(text) if text else kind()
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate is no text
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise BadField(field, f"must be JSON: {'an object' if kind is dict else 'a list'}")
    return value


def _up_to_mark(text: str) -> str:
    """A text that ends where the last message does, whose blanks a template may cut off there."""
    at = text.rfind(MARK)
    if at < 0:
        raise BadField("continue_final_message", "is not possible: the chat template leaves the last message out")
    return text[:at] if text.startswith(" ", at + len(MARK)) else text[:at].rstrip()


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here its content simply stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _strftime_now(template: str) -> str:
    return datetime.now().astimezone().strftime(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes what is special in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _shown(error: jinja2.TemplateError) -> str:
    return str(error)[:MAX_ERROR_CHARS].encode(errors="replace").decode()


def main() -> None:
    answer_lines(lambda given: Renderer(**given).answer)


if __name__ == "__main__":
    main()
