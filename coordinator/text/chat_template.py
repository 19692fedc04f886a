"""Renders a model folder's chat template in a sandbox, the way transformers' apply_chat_template does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving_core.errors import ModelError, RequestError
from serving_core.reasons import BAD_PARAM

MAX_ERROR_CHARS = 200


class ChatTemplate:
    """Messages to the text of a prompt that ends where the assistant's answer begins.

    `variables` are the special tokens by name, such as bos_token. Raises ModelError when the source does not parse.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is broken: {error.message}, in its line {error.lineno}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises RequestError when the template refuses the messages."""
        try:
            # Templates ask whether tools and documents are none; undefined would not be.
            return self._template.render(
                **self._variables, messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            reason = str(error)[:MAX_ERROR_CHARS]
            raise RequestError(BAD_PARAM, f"the chat template refuses the messages: {reason}", field="chat") from error


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here its content simply stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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
