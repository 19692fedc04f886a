"""Define how families of models write calls between tags of their own, as a table, and parse it.

A call has a header with the tool's name, then its arguments: as a JSON object, as parameters between tags, or as
Gemma's objects. Sections, between two tags, hold several calls.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import BLANKS, END, Ends, Steps, Tools
from coordinator.text.calls.values import TEXT, Value, as_json, quoted, types_of

TOKEN: Final = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|｜DSML｜")  # what may be a special token
MAX_HEADER_CHARS: Final = 512
MAX_NOISE_CHARS: Final = 64  # between the tag of a section and its first call


class Arguments(Enum):
    """Form of the arguments of a call."""

    JSON = auto()
    PARAMETERS = auto()  # each between tags
    GEMMA = auto()  # {key:<|"|>text<|"|>,other:1}


@dataclass(frozen=True, slots=True)
class Markup:
    """How a family writes a call.

    In what is written, {name}, {number} and {key} stand for the tool, the call's number and a parameter. Regular
    expressions find the names in what lies between the tags.
    """

    call: str
    call_end: str
    header: str  # what is written between `call` and the arguments
    header_end: str = ""  # the tag that ends the header; empty: the first parameter, or the end of the call
    name: str = r"\s*([^\s<]+)\s*"
    arguments: Arguments = Arguments.PARAMETERS
    arguments_end: str = ""  # what is written between the arguments and `call_end`
    section: str = ""
    section_end: str = ""
    wraps_each: bool = False  # a section has one call
    key: tuple[str, str] = ("", "")  # tags around what names a parameter
    key_name: str = r"\s*(.*?)\s*"
    key_written: str = "{key}"
    value: tuple[str, str] = ("", "")  # tags around a value
    padding: str = ""  # around a value, and no part of it
    between: str = ""  # written after the header and each parameter
    text: str = ""  # regular expression that finds in a parameter's header that its value is text; empty: by the schema
    unclosed: tuple[tuple[str, tuple[str, ...]], ...] = ()  # further ends of values, whose own tag models leave out
    dropped: tuple[str, ...] = ()  # tags around the output's text
    keeps_blanks: bool = False  # the blanks around calls belong to the text

    @property
    def opening(self) -> str:
        """Return the tag with which calls begin: that of a section if there are sections."""
        return self.section or self.call

    @property
    def words(self) -> str:
        """Return all text that the family writes around names and values, joined by spaces."""
        tags = self.section, self.section_end, self.call, self.header, self.header_end, self.call_end, *self.key
        quote = QUOTE if self.arguments is Arguments.GEMMA else ""
        return " ".join((*tags, *self.value, *self.dropped, quote))

    @property
    def ends(self) -> Ends:
        """Return the tags that end a value, each with the tags one of which must follow."""
        followers = (self.key[0], self.call_end)
        tag = self.value[1]
        return {self.padding + tag: followers, tag: followers, **dict(self.unclosed)}


_DEEPSEEK: Final = Markup(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    header="{name}<｜tool▁sep｜>",
    header_end="{",
    name=r"\s*(?:function<｜tool▁sep｜>)?([^\s<]+)\s*(?:<｜tool▁sep｜>|```json)\s*",
    arguments=Arguments.JSON,
    keeps_blanks=True,
)


def _dsml(section: str, prefix: str = "<｜DSML｜") -> Markup:
    end = prefix.replace("<", "</")
    return Markup(
        section=f"{prefix}{section}>",
        section_end=f"{end}{section}>",
        call=f"{prefix}invoke",
        call_end=f"{end}invoke>",
        header=' name="{name}">',
        header_end=">",
        name=r'\s*name="([^"]*)"\s*/?',
        key=(f"{prefix}parameter", ">"),
        key_name=r'\s*name="([^"]*)".*',
        key_written=' name="{key}" string="{is_text}"',
        text=r'string="true"',
        value=("", f"{end}parameter>"),
        between="\n",
    )


_GLM: Final = Markup(
    call="<tool_call>",
    call_end="</tool_call>",
    header="{name}",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    unclosed=(("</tool_call>", (END,)),),
)

MARKUPS: Final[Mapping[str, Markup]] = {
    "deepseek_v3": replace(_DEEPSEEK, header="function<｜tool▁sep｜>{name}\n```json\n", arguments_end="\n```"),
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", "<｜DSML｜ "),
    "gemma4": Markup(
        call="<|tool_call>",
        call_end="<tool_call|>",
        header="call:{name}",
        header_end="{",
        name=r"\s*call:(.*?)\s*",
        arguments=Arguments.GEMMA,
        keeps_blanks=True,
    ),
    "glm45": replace(_GLM, between="\n"),
    "glm47": _GLM,
    "kimi_k2": Markup(
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        header="functions.{name}:{number}<|tool_call_argument_begin|>",
        header_end="{",
        name=r"\s*(?:functions\.)?(.*?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        arguments=Arguments.JSON,
        keeps_blanks=True,
    ),
    "kimi_k3": Markup(
        section="<|open|>tools<|sep|>",
        section_end="<|close|>tools<|sep|>",
        call="<|open|>call",
        call_end="<|close|>call<|sep|>",
        header=' tool="{name}" index="{number}"<|sep|>',
        header_end="<|sep|>",
        name=r'\s*tool="([^"]*)".*',
        key=("<|open|>argument", "<|sep|>"),
        key_name=r'\s*key="([^"]*)".*',
        key_written=' key="{key}" type="{type}"',
        text=r'type="string"',
        value=("", "<|close|>argument<|sep|>"),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        keeps_blanks=True,
    ),
    "qwen3_xml": Markup(
        section="<tool_call>",
        section_end="</tool_call>",
        wraps_each=True,
        call="<function=",
        call_end="</function>",
        header="{name}>",
        header_end=">",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        padding="\n",
        between="\n",
        unclosed=(("\n<parameter=", ()), ("\n</function>", ("</tool_call>",))),
    ),
}


class MarkupReader(JsonCallReader):
    """Parse calls as one family writes them (a Markup), with text before, between and after them."""

    def __init__(self, markup: Markup, tools: Tools, *, is_held: bool = False, is_forced: bool = False) -> None:
        self._markup = markup
        self.keeps_blanks = markup.keeps_blanks
        super().__init__(tools, is_held=is_held, is_forced=is_forced)

    def _read(self) -> Steps[None]:
        markup, ends = self._markup, list[str]()
        while True:
            tag = yield from self._until(*{markup.opening, markup.call}, *markup.dropped, *ends)
            if tag in (*markup.dropped, *ends):
                self._held.clear()
                ends = ends if tag in markup.dropped else []
                continue
            self._is_opened = True
            if tag != markup.call:
                tag = yield from self._first()
            while tag == markup.call:
                tag = yield from self._call_and_next()
                if self._num_calls and markup.section_end:
                    ends = [markup.section_end]  # stray, after text within the section
            if tag:
                self._held.clear()
                ends = []
            self._is_opened = False

    def _first(self) -> Steps[str]:
        """Return the tag of the section's first call, or of the end of an empty one; empty for a section of text."""
        call, end = self._markup.call, self._markup.section_end
        noise = ""
        while len(noise) < MAX_NOISE_CHARS + len(call):
            noise += self._take((yield))
            if noise.endswith(call):
                self._is_opened = True
                return call
            if noise.endswith(end):
                return "" if noise.removesuffix(end).strip(BLANKS) else end
            begun = noise.lstrip(BLANKS)
            self._is_opened = call.startswith(begun) or end.startswith(begun)
        return ""

    def _call_and_next(self) -> Steps[str]:
        """Parse a call after its tag. Returns the tag of the next call or the section's end; empty if text follows."""
        markup = self._markup
        header, tag = yield from self._header(*([markup.header_end] if markup.header_end else self._inner))
        name = re.fullmatch(markup.name, header, re.DOTALL)
        if not tag or not name or not self._begin(name[1]):
            return ""
        match markup.arguments:
            case Arguments.JSON:
                yield from self._told_object()
            case Arguments.GEMMA:
                yield from self._gemma_object()
            case Arguments.PARAMETERS:
                yield from self._parameters(tag, is_whole=bool(markup.text) and header.endswith("/"))
        self._end()
        closing = markup.arguments_end.strip(BLANKS) + markup.call_end, markup.call_end
        if markup.arguments is not Arguments.PARAMETERS and not (yield from self._next(*closing)):
            return ""
        self._held.clear()
        return (yield from self._next(markup.call, *filter(None, [markup.section_end])))

    @property
    def _inner(self) -> tuple[str, str]:
        """Tags that may come within a call."""
        return self._markup.key[0], self._markup.call_end

    def _header(self, *ends: str) -> Steps[tuple[str, str]]:
        """Return the text up to one of the tags, and the tag; an empty tag if the text is too long."""
        start = len(self._held)
        try:
            tag = yield from self._find(ends, MAX_HEADER_CHARS)
        except GeneratorExit:
            if not self._markup.header_end and len("".join(self._held[start:]).split()) > 1:
                self._is_opened = False  # a name has no blanks: the tag is part of a text
            raise
        return "".join(self._held[start:]).removesuffix(tag), tag

    # ---- parameters between tags ----

    def _parameters(self, tag: str, *, is_whole: bool) -> Steps[None]:
        """Parse the parameters of a call after its header, which has ended at this tag."""
        markup, comma = self._markup, ""
        self._argue("{")
        if tag == markup.header_end and not is_whole:
            tag = yield from self._find(self._inner)
        while tag == markup.key[0]:
            self._held.clear()
            named, _ = yield from self._header(markup.key[1])
            if markup.value[0]:
                yield from self._next(markup.value[0])
            self._held.clear()
            key = re.fullmatch(markup.key_name, named, re.DOTALL)
            name = html.unescape(key[1]) if key and markup.text else key[1] if key else named
            self._argue(f"{comma}{quoted(name)}: ")
            tag, comma = (yield from self._value_of(name, named)), ", "
        self._argue("}")

    def _value_of(self, name: str, named: str) -> Steps[str]:
        """Parse a value. Returns the tag of the next parameter or the end of the call."""
        markup = self._markup
        types = types_of(self._tools.get(self._called, {}), name)
        if markup.text:
            types = TEXT if re.search(markup.text, named) else types - TEXT
        value = Value(self._argue, types)

        def end() -> None:
            value.end()
            self._argue("}")
            self._end()

        skipped = markup.padding

        def tell(text: str) -> None:
            nonlocal skipped
            value.add(text.removeprefix(skipped))
            skipped = "" if text else skipped

        tag = yield from self._text_until(markup.ends, tell, end)
        value.end()
        if tag.endswith(markup.key[0]):
            return markup.key[0]
        return markup.call_end

    # ---- Gemma's objects ----

    def _gemma_object(self) -> Steps[None]:
        """Parse an object after its {."""
        self._argue("{")
        closing, comma, char = ["}"], "", ""
        while closing:
            self._held.clear()
            char = char if char.strip(BLANKS) else (yield from self._solid())
            if char == closing[-1]:
                self._argue(closing.pop())
                char, comma = "", ", "
                continue
            if char == ",":
                char = ""
                continue
            self._argue(comma)
            if closing[-1] == "}":
                key, _ = yield from self._bare(char, ":")
                self._argue(f"{quoted(key.removeprefix(QUOTE).removesuffix(QUOTE))}: ")
                char = yield from self._solid()
            comma = ""
            if char in "{[":
                self._argue(char)
                closing.append("}" if char == "{" else "]")
                char = ""
            elif char == QUOTE[0]:
                yield from self._gemma_text()
                char, comma = "", ", "
            else:
                text, char = yield from self._bare(char, ",}]")
                self._argue(as_json(text, frozenset()))
                comma = ", "

    def _bare(self, char: str, ends: str) -> Steps[tuple[str, str]]:
        """Return the text that begins with this character, up to one of the ends, and the end."""
        text = ""
        while char not in ends:
            text += char
            char = self._take((yield))
        return text.strip(BLANKS), char

    def _gemma_text(self) -> Steps[None]:
        """Parse a text after the first character of its tag."""
        yield from self._next(QUOTE[1:])
        value = Value(self._argue, TEXT)
        yield from self._text_until({QUOTE: ()}, value.add, lambda: None)
        value.end()


QUOTE: Final = '<|"|>'
