"""How a model writes its answers: whether it thinks first, and what its calls of tools look like."""

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
UNTOLD: Final = "hermes"  # how a model is to call tools whose chat template does not tell it
READERS: Final[Mapping[str, type[CallReader]]] = {
    "hermes": HermesReader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
    "pythonic": PythonicReader,
}
TAGS: Final = {"hermes": HERMES_OPEN, "mistral": MISTRAL_TAG}  # of calls that may stand anywhere in an answer
CALL_FORMATS: Final = (AUTO, *READERS, NONE)
REASONING_FORMATS: Final = (AUTO, THINK, NONE)

# By what a chat template shows or tells of calls, each is known; the first that fits is taken.
_WORDS: Final = {
    "pythonic": re.compile(r"func_name1\("),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "llama3": re.compile(r"<\|python_tag\|>|\"parameters\": dictionary of argument name"),
    "hermes": re.compile(r"<tool_call>"),
}
_OTHERS: Final = re.compile(r"<function=|<arg_key>|<tool_calls>")  # within or around tags that are those of hermes
_TOOLS: Final = re.compile(r"\btools\b")  # the variable of a template


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Of one model. `calls` is one of READERS or none. With `shows_tools` the chat template does not show them: the
    system message does."""

    calls: str = NONE
    thinks: bool = False
    shows_tools: bool = False

    @property
    def has_calls(self) -> bool:
        return self.calls != NONE

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls are known by a special token alone, which must not be left out of the text."""
        return self.calls == "mistral"

    @property
    def tags(self) -> tuple[str, ...]:
        """What thoughts and calls are known by, and stays in the text where a tokenizer has it as a special token."""
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
        """For one answer, which may call the tools of these names. One that `is_held` to a form has calls in its place
        or none, and `keeps_blanks` behind its thoughts if those may be of the form; one that is held to calls is what
        the `forced` reader reads."""
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
    """Of what is behind the thoughts."""

    def feed(self, text: str) -> list[Piece]:
        """What the next piece of text makes certain."""

    def finish(self) -> list[Piece]:
        """The rest, when no more text will come."""


class _FromTag:
    """Calls where the tag begins the answer, and else text, whatever its words look like."""

    def __init__(self, calls: Reader, tag: str) -> None:
        self._calls = calls
        self._tag = tag
        self._opening = ""
        self._has_calls: bool | None = None  # not known yet

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
    """Reads one answer as its text comes: thoughts first, then text and calls."""

    def __init__(self, thoughts: ReasoningReader | None, calls: "Reader | None") -> None:
        self._thoughts = thoughts
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        """What the next piece of text makes certain."""
        return self._pieces(*(self._thoughts.feed(text) if self._thoughts else ("", text)))

    def finish(self) -> list[Piece]:
        """The rest, when no more text will come."""
        pieces = self._pieces(*self._thoughts.finish()) if self._thoughts else []
        return [*pieces, *(self._calls.finish() if self._calls else ())]

    def _pieces(self, thought: str, text: str) -> list[Piece]:
        pieces = [Piece(Kind.REASONING, thought)] if thought else []
        if self._calls is not None and text:
            return pieces + self._calls.feed(text)
        return [*pieces, Piece(Kind.TEXT, text)] if text else pieces


def answer_format(calls: str, thoughts: str, template: str) -> AnswerFormat:
    """Return the format by its settings, which the words of the chat template decide where they say auto. A template
    that tells nothing of calls that can be read leaves it to us to show the tools, and how to call them."""
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
