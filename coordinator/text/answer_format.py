"""Describe how a model writes its outputs: whether it thinks first, and the format of its tool calls."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from coordinator.text import reasoning
from coordinator.text.calls.json_calls import (
    HERMES_CLOSE,
    HERMES_OPEN,
    MISTRAL_TAG,
    HermesReader,
    Llama3Reader,
    MistralReader,
)
from coordinator.text.calls.pythonic import PythonicReader
from coordinator.text.calls.reader import BLANKS, CallReader, Kind, Piece
from coordinator.text.reasoning import ReasoningReader, Thoughts

AUTO, NONE, THINK = "auto", "none", "think"
UNTOLD: Final = "hermes"  # the format that a model is told to use when its chat template has none
READERS: Final[Mapping[str, type[CallReader]]] = {
    "hermes": HermesReader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
    "pythonic": PythonicReader,
}
TAGS: Final = {"hermes": HERMES_OPEN, "mistral": MISTRAL_TAG}  # of calls that may stand anywhere in an output
CALL_FORMATS: Final = (AUTO, *READERS, NONE)
REASONING_FORMATS: Final = (AUTO, THINK, NONE)

# Words of a chat template that identify its call format; the first match wins.
_WORDS: Final = {
    "pythonic": re.compile(r"func_name1\("),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "llama3": re.compile(r"<\|python_tag\|>|\"parameters\": dictionary of argument name"),
    "hermes": re.compile(r"<tool_call>"),
}
_OTHERS: Final = re.compile(r"<function=|<arg_key>|<tool_calls>")  # formats whose tags enclose or contain hermes'
_TOOLS: Final = re.compile(r"\btools\b")  # the variable of a template


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Output format of one model.

    `calls` is a key of READERS or NONE. With `shows_tools`, the system message lists the tools, since the chat template
    does not.
    """

    calls: str = NONE
    thinks: bool = False
    shows_tools: bool = False

    @property
    def has_calls(self) -> bool:
        return self.calls != NONE

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls are recognized by a special token alone, which must stay in the text."""
        return self.calls == "mistral"

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of thoughts and calls, which stay in the text where a tokenizer has them as special tokens."""
        thoughts = (reasoning.OPEN, reasoning.CLOSE) if self.thinks else ()
        return (*thoughts, HERMES_OPEN, HERMES_CLOSE) if self.calls == "hermes" else thoughts

    def reader(
        self,
        prompt_end: str,
        names: Collection[str],
        forced: type[CallReader] | None = None,
        *,
        is_held: bool = False,
        keeps_blanks: bool = False,
    ) -> "AnswerReader":
        """Return a reader for one output that may call the tools in `names`.

        With `is_held`, the output has a required format, and either consists of calls or has none. `keeps_blanks` keeps
        the blanks after the thoughts, which may belong to that format. With `forced`, the output must be calls, which
        that reader parses.
        """
        thoughts: ReasoningReader | None = None
        expected = reasoning.thoughts_behind(prompt_end)
        if self.thinks and not (is_held and expected is Thoughts.NONE):
            thoughts = ReasoningReader(has_begun=expected is Thoughts.BEGUN, keeps_blanks=keeps_blanks)
        calls: Reader | None = None
        if forced is not None:
            calls = forced(names)
        elif names:
            calls = READERS[self.calls](names, is_held=is_held)
            if is_held and (tag := TAGS.get(self.calls)):
                calls = _FromTag(calls, tag)
        return AnswerReader(thoughts, calls)


PLAIN: Final = AnswerFormat()


class Reader(Protocol):
    """Parse the text after the thoughts."""

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the next text makes certain."""

    def finish(self) -> list[Piece]:
        """Return the remaining pieces, when the text has ended."""


class _FromTag:
    """Parse calls if the output begins with the tag; all other output is text, whatever it looks like."""

    def __init__(self, calls: Reader, tag: str) -> None:
        self._calls = calls
        self._tag = tag
        self._opening = ""
        self._has_calls: bool | None = None  # None: not known yet

    def feed(self, text: str) -> list[Piece]:
        if self._has_calls is None:
            self._opening += text
            begun = self._opening.lstrip(BLANKS)[: len(self._tag)]
            if begun != self._tag and self._tag.startswith(begun):
                return []
            self._has_calls, text = begun == self._tag, self._opening
        return self._calls.feed(text) if self._has_calls else [Piece(Kind.TEXT, text)]

    def finish(self) -> list[Piece]:
        if self._has_calls:
            return self._calls.finish()
        return [Piece(Kind.TEXT, self._opening)] if self._has_calls is None and self._opening else []


class AnswerReader:
    """Parse one output as its text comes: thoughts first, then text and calls."""

    def __init__(self, thoughts: ReasoningReader | None, calls: "Reader | None") -> None:
        self._thoughts = thoughts
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the next text makes certain."""
        return self._pieces(*(self._thoughts.feed(text) if self._thoughts else ("", text)))

    def finish(self) -> list[Piece]:
        """Return the remaining pieces, when the text has ended."""
        pieces = self._pieces(*self._thoughts.finish()) if self._thoughts else []
        return [*pieces, *(self._calls.finish() if self._calls else ())]

    def _pieces(self, thought: str, text: str) -> list[Piece]:
        pieces = [Piece(Kind.REASONING, thought)] if thought else []
        if self._calls is not None and text:
            return pieces + self._calls.feed(text)
        return [*pieces, Piece(Kind.TEXT, text)] if text else pieces


def answer_format(calls: str, thoughts: str, template: str) -> AnswerFormat:
    """Return the format for these settings.

    A setting of AUTO is derived from the chat template. If the template shows no call format that can be parsed, the
    server lists the tools and states the format itself.
    """
    found = _calls_of(template)
    is_auto = calls == AUTO
    shows_tools = template != "" and (found == NONE if is_auto else _TOOLS.search(template) is None)
    if is_auto:
        calls = UNTOLD if shows_tools else found
    thinks = reasoning.CLOSE in template if thoughts == AUTO else thoughts == THINK
    return AnswerFormat(calls, thinks, shows_tools)


def _calls_of(template: str) -> str:
    found = next((name for name, words in _WORDS.items() if words.search(template)), NONE)
    return NONE if found == "hermes" and _OTHERS.search(template) else found
