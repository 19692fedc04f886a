"""Render chat templates in a helper process: `python -m coordinator.text.rendering`.

A process of its own (coordinator/text/program.py), since a template may not terminate. The process gets the template,
then one conversation after the other, and answers each with its text, the template's refusal, the problem of a field,
or the failure. A question without messages is answered with the names of the templates that lose the user's text.

A template takes the content of a message as a text, or as OpenAI's list of parts, over which it loops. To find out
which, a message of each role is rendered in both forms; the form whose text appears in the result is used.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.text.answering import answer_lines, line

# Tools for chat templates without support for tools: a message lists the tools and the format of calls; calls and
# results become text. The content of other messages stays a text or a list of texts.

Message = dict[str, Any]

SYSTEM, USER, TOOL = "system", "user", "tool"
FORMS: Final = {  # format of a call, by the formats of answer_format
    "hermes": '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>',
    "llama3": '{{"name": {name}, "parameters": {arguments}}}',
    "mistral": '[TOOL_CALLS] [{{"name": {name}, "arguments": {arguments}}}]',
    "pythonic": "[{name}({arguments})]",
}


def description(tools: Sequence[Any], form: str) -> str:
    """Return the text that describes the tools to a model, and how to call one in the format `form`, a key of FORMS.

    `tools` are OpenAI's JSON objects.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = _call(form, "function-name", '{"argument-name": "value"}', 'argument_name="value"')
    return (
        "You may call functions to assist with the user query. These are their signatures, each in a line of JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call one, write its name and its arguments in this form:\n{example}"
    )


def with_description(messages: Sequence[Message], text: str, role: str) -> list[Message]:
    """Return the conversation with `text` added to the first message of a role: behind a system message, before others.

    Without a message of this role, a new first message has the text.
    """
    at = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages]
    content = messages[at]["content"]
    *before, last = first, *behind = [content] if isinstance(content, str) else content
    told = [*before, _paragraphs(last, text)] if role == SYSTEM else [_paragraphs(text, first), *behind]
    said = {**messages[at], "content": told[0] if isinstance(content, str) else told}
    return [*messages[:at], said, *messages[at + 1 :]]


def with_calls_as_text(messages: Sequence[Message], form: str) -> list[Message]:
    """Return the conversation with tool calls as text in the format `form` (see FORMS), and results as user messages.

    Raises KeyError, TypeError or AttributeError for calls that are not function calls.
    """
    told: list[Message] = []
    follows_results = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == TOOL:
            content, role = f"<tool_response>\n{_text(content)}\n</tool_response>", USER
        if follows_results and role == USER:  # templates expect user and assistant alternately
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{_text(content)}"}
        elif calls := message.get("tool_calls"):
            texts = [_text(content), *(_call_of(call, form) for call in calls)]
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            told.append({**others, "content": "\n".join(filter(None, texts))})
        else:
            told.append({**message, "role": role, "content": content})
        follows_results = message["role"] == TOOL or (follows_results and role == USER)
    return told


def _text(content: str | Sequence[str]) -> str:
    return content if isinstance(content, str) else "\n".join(content)


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _call_of(call: Mapping[str, Any], form: str) -> str:
    function = call["function"]
    name, arguments = str(function["name"]), function["arguments"]
    if isinstance(arguments, str):
        return _call(form, name, arguments, arguments)
    keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return _call(form, name, json.dumps(arguments, ensure_ascii=False), keywords)


def _call(form: str, name: str, arguments: str, keywords: str) -> str:
    if form == "pythonic":
        return FORMS[form].format(name=name, arguments=keywords)
    return FORMS[form].format(name=json.dumps(name, ensure_ascii=False), arguments=arguments)


MAX_CPU_S: Final = 2.0  # processor time for one conversation, independent of how busy the machine is
MAX_BYTES: Final = 2**30
MAX_TEXT_CHARS: Final = 2**23  # twice the size of a request
MAX_ERROR_CHARS: Final = 200
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates; a model may have several
RESERVED: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # request fields
DEVELOPER = "developer"
TRIED_ROLES: Final = (SYSTEM, USER, "assistant", "tool")  # any other role is treated as a user
MARK: Final = secrets.token_hex(16)  # marks the end of a message, or is a trial message's content; in no text
WITNESS: Final = secrets.token_hex(16)  # value of a field that no template knows: appears where a list is printed
MARKED_PARTS: Final = [{"type": "text", "text": MARK, "unknown": WITNESS}]
TRIED_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ContentForms(NamedTuple):
    """Forms in which a template takes the content of a message."""

    as_text: bool
    as_parts: bool


class Refusal(jinja2.TemplateError):
    """The template refuses these messages."""


class BadField(Exception):
    """A request field that no template accepts."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the template environment, with the functions and filters of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class Renderer:
    """Render one template. The template is compiled at first use, which may take long too."""

    def __init__(self, source: str, tool_source: str, variables: Mapping[str, str], kwargs_json: str) -> None:
        self._source = source
        self._tool_source = tool_source or source
        self._variables = variables
        self._kwargs = read_kwargs(kwargs_json)
        self._templates: dict[str, jinja2.Template] = {}
        self._forms: dict[tuple[str, str], ContentForms] = {}

    def answer(self, given: Mapping[str, Any]) -> bytes:
        """Return the answer line to a question: the text of its conversation, or why there is none. Raises nothing.

        A question without messages is answered with the names of the templates that lose the user's text.
        """
        try:
            if "messages" not in given:
                return line({"lossy": ", ".join(self._lossy())})
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
        tools, form = _read("tools_json", given["tools_json"], list), given["tool_form"]
        source = self._tool_source if tools and not form else self._source
        messages = [_message(message, source) for message in given["messages"]]
        if form:
            messages = _with_calls_as_text(messages, form)
        kwargs = read_kwargs(given["template_kwargs_json"])
        goes_on = given["continue_final_message"]
        if goes_on:
            _mark_end(messages[-1])

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            formed = [self._formed(message, source) for message in messages]
            return self._filled(
                source, formed, [] if form else tools, kwargs, is_answered=given["add_generation_prompt"]
            )

        text = _shown_in(messages, description(tools, form), render) if form and tools else render(messages)
        return _up_to_mark(text) if goes_on else text

    def _filled(
        self,
        source: str,
        messages: list[dict[str, Any]],
        tools: list[Any],
        kwargs: Mapping[str, Any],
        *,
        is_answered: bool,
    ) -> str:
        return self._template(source).render(
            {
                **self._variables,
                "documents": None,  # templates test it with `is none`, which an undefined variable would not satisfy
                **self._kwargs,
                **kwargs,
                "messages": messages,
                "tools": tools or None,
                "add_generation_prompt": is_answered,
            }
        )

    def _formed(self, message: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the message with its content as it was sent if the template takes that form, else in the other
        form."""
        forms, said = self._forms_of(source, message["role"]), message["content"]
        texts = [said] if isinstance(said, str) else said
        if forms.as_parts and not (forms.as_text and isinstance(said, str)):
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(texts)}

    def _forms_of(self, source: str, role: str) -> ContentForms:
        """Return the forms in which a template takes content of this role; for a role that it refuses, those of a
        user."""
        role = role if role in TRIED_ROLES else USER
        if (source, role) not in self._forms:
            text, parts = (self._tried(source, role, content) or "" for content in (MARK, MARKED_PARTS))
            found = ContentForms(as_text=MARK in text, as_parts=MARK in parts and WITNESS not in parts)
            is_known = role == USER or any(found)
            self._forms[source, role] = found if is_known else self._forms_of(source, USER)
        return self._forms[source, role]

    def _tried(self, source: str, role: str, content: str | list[dict[str, str]]) -> str | None:
        """Return the lower-case text of a conversation in which the role has this content; None when the template
        fails."""
        messages: list[dict[str, Any]] = [{"role": role, "content": content}]
        if role != USER:
            messages.insert(1 if role == SYSTEM else 0, self._formed({"role": USER, "content": "a"}, source))
        tools = [] if source == self._source else [TRIED_TOOL]
        try:
            return self._filled(source, messages, tools, {}, is_answered=False).lower()
        except Exception:  # noqa: BLE001 - a template can raise anything, and does so again for the conversation
            return None

    def _lossy(self) -> list[str]:
        """Return the names of the templates that render a user's message but never its text."""
        named = {self._tool_source: TOOL_USE, self._source: DEFAULT}
        return [
            name
            for source, name in named.items()
            if not any(self._forms_of(source, USER))
            and any(self._tried(source, USER, content) is not None for content in (MARK, MARKED_PARTS))
        ]

    def _template(self, source: str) -> jinja2.Template:
        if source not in self._templates:
            self._templates[source] = make_environment().from_string(source)
        return self._templates[source]


def _with_calls_as_text(messages: Sequence[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    try:
        return with_calls_as_text(messages, form)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadField("messages", "have tool_calls that are no calls of functions") from error


def _shown_in(messages: Sequence[dict[str, Any]], text: str, render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Return the rendered conversation with this text in its system message.

    The text goes before the user's message if the template refuses or drops system messages.
    """
    for role in (SYSTEM, USER):
        try:
            rendered = render(with_description(messages, text, role))
        except Refusal:
            if role == USER:
                raise
            continue
        if text in rendered:
            return rendered
    raise BadField("tools_json", "cannot be shown to the model: its chat template leaves them out")


def read_kwargs(text: str) -> dict[str, Any]:
    """Parse the template variables of a JSON object; an empty text has none.

    Raises BadField for any other text, and for a variable that is a field of the request itself.
    """
    kwargs: dict[str, Any] = _read("template_kwargs_json", text, dict)
    for name in RESERVED:
        if name in kwargs:
            raise BadField("template_kwargs_json", f"has {name}, which is a field of its own")
    return kwargs


def _read(field: str, text: str, kind: type[Any]) -> Any:
    """Return a JSON text parsed as this type; an empty text gives an empty value."""
    try:
        value = json.loads(text) if text else kind()
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not valid text
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise BadField(field, f"must be JSON: {'an object' if kind is dict else 'a list'}")
    return value


def _message(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the message in the template's terms.

    The role developer becomes system for a template that does not know it, which would drop its content.
    """
    is_system = message["role"] == DEVELOPER and DEVELOPER not in source
    said = message.get("content_parts") or message["content"]
    known = {"role": SYSTEM if is_system else message["role"], "content": said}
    extra: dict[str, Any] = _read("messages", message.get("extra_json", ""), dict)
    return known | extra | known


def _mark_end(message: dict[str, Any]) -> None:
    """Append the mark to a message's content."""
    said = message["content"]
    mark = MARK + " "
    message["content"] = [*said[:-1], said[-1] + mark] if isinstance(said, list) else said + mark


def _up_to_mark(text: str) -> str:
    """Return the text up to the end of the last message, from which the template may have stripped blanks."""
    at = text.rfind(MARK)
    if at < 0:
        raise BadField("continue_final_message", "is not possible: the chat template leaves the last message out")
    return text[:at] if text.startswith(" ", at + len(MARK)) else text[:at].rstrip()


class _GenerationBlock(Extension):
    """Support {% generation %}, which marks assistant text for training: render its content unchanged."""

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
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _shown(error: jinja2.TemplateError) -> str:
    return str(error)[:MAX_ERROR_CHARS].encode(errors="replace").decode()


def main() -> None:
    answer_lines(lambda given: Renderer(**given).answer)


if __name__ == "__main__":
    main()
