"""The program that renders chat templates: `python -m coordinator.text.rendering`.

It is a process of its own, since a template may run for ever, and only a process can be stopped whatever it does.
Lines of JSON come and go: first the template, then one conversation after the other, each answered by its text, by the
template's refusal, or by what has failed. It ends with its input. The system ends it when one conversation takes too
long.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S: Final = 2.0  # for one conversation, and not of the clock: a busy machine changes nothing
MAX_MEMORY_BYTES: Final = 2**30
MAX_TEXT_CHARS: Final = 2**23  # twice what a request may bring
MAX_ERROR_CHARS: Final = 200


class Refusal(jinja2.TemplateError):
    """The template does not take these messages."""


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

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = variables
        self._template: jinja2.Template | None = None

    def answer(self, messages: Sequence[Mapping[str, str]]) -> bytes:
        """The line that answers a conversation."""
        try:
            text = self._render(messages)
            if len(text) > MAX_TEXT_CHARS:
                return _line("failed", f"its text has {len(text)} characters, the limit is {MAX_TEXT_CHARS}")
            return _line("text", text)
        except Refusal as refusal:
            return _line("refused", _shown(refusal))
        except jinja2.TemplateError as error:
            return _line("failed", _shown(error))
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            return _line("failed", type(error).__name__)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None:
            self._template = make_environment().from_string(self._source)
        # Templates ask whether tools and documents are none; undefined would not be.
        return self._template.render(
            **self._variables, messages=messages, tools=None, documents=None, add_generation_prompt=True
        )


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


def _line(kind: str, text: str) -> bytes:
    return json.dumps({kind: text}, ensure_ascii=False).encode() + b"\n"


def _shown(error: jinja2.TemplateError) -> str:
    return str(error)[:MAX_ERROR_CHARS].encode(errors="replace").decode()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all; the coordinator drains first
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    renderer: Renderer | None = None
    for line in sys.stdin.buffer:
        given = json.loads(line)
        if renderer is None:
            renderer = Renderer(**given)
            continue
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF, which nobody handles, ends the process
        answer = renderer.answer(given)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
