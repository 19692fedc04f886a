"""Describe how a model writes its outputs: whether it thinks first, and the format of its tool calls."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from coordinator.text import reasoning
from coordinator.text.calls import harmony, pythonic
from coordinator.text.calls.harmony import HARMONY, HarmonyReader
from coordinator.text.calls.json_calls import (
    HERMES_CLOSE,
    HERMES_OPEN,
    MISTRAL_ARGUMENTS,
    MISTRAL_TAG,
    PYTHON_TAG,
    HermesReader,
    Llama3Reader,
    MistralReader,
)
from coordinator.text.calls.markup import MARKUPS, TOKEN, MarkupReader
from coordinator.text.calls.pythonic import PythonicReader
from coordinator.text.calls.reader import BLANKS, CallReader, Kind, Piece, Tools
from coordinator.text.reasoning import THINK, ReasoningReader, Thoughts

AUTO, NONE = "auto", "none"
UNTOLD: Final = "hermes"  # the format that a model is told to use when its chat template has none
HARMONYS_THOUGHTS: Final = "openai_gptoss"
READERS: Final[Mapping[str, Callable[..., CallReader]]] = {
    "hermes": HermesReader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
    "pythonic": PythonicReader,
    HARMONY: HarmonyReader,
    **{name: partial(MarkupReader, markup) for name, markup in MARKUPS.items()},
}
TAGS: Final = {  # of calls that may stand anywhere in an output
    "hermes": HERMES_OPEN,
    "mistral": MISTRAL_TAG,
    **{name: markup.opening for name, markup in MARKUPS.items() if not markup.dropped},
}
WITH_CHANNELS: Final = (HARMONY, *(name for name, markup in MARKUPS.items() if markup.dropped))
"""Formats with markup around plain text too, which is parsed whether or not there are tools."""

OPENINGS: Final = {**TAGS, HARMONY: harmony.CHANNEL, "kimi_k3": "<|open|>"}
"""Tags with which calls begin, of which there is no text."""

ANSWERS: Final = {
    HARMONY: ("<|channel|>final<|message|>", ""),
    "kimi_k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
}
"""Markup before and after an output's text, by format of calls."""

CALLS_ALIASES: Final = {
    "glm4_moe": "glm45",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "qwen3_coder": "qwen3_xml",
}
REASONING_ALIASES: Final = dict.fromkeys(
    ("deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "glm45", "glm47", "kimi_k2", "qwen3"), THINK
)
"""Further names that vLLM has for the formats."""

CALL_FORMATS: Final = (AUTO, *READERS, *CALLS_ALIASES, NONE)
REASONING_FORMATS: Final = (AUTO, *reasoning.TAGS, *REASONING_ALIASES, NONE)

# Words of a chat template that identify its formats; the first match wins.
_CALLS: Final = {
    name: re.compile(words)
    for name, words in {
        "pythonic": r"func_name1\(",
        "mistral": r"\[TOOL_CALLS\]",
        HARMONY: r"<\|channel\|>",
        "kimi_k3": r"<\|open\|>",
        "kimi_k2": r"<\|tool_calls_section_begin\|>",
        "deepseek_v41": r"｜DSML｜ ",
        "deepseek_v4": r"｜DSML｜tool_calls",
        "deepseek_v32": r"｜DSML｜",
        "deepseek_v3": r"(?s:<｜tool▁call▁begin｜>.*```json)",
        "deepseek_v31": r"<｜tool▁call▁begin｜>",
        "gemma4": r"<\|tool_call>",
        "glm47": r"function-name\}<arg_key>",
        "glm45": r"<arg_key>",
        "qwen3_xml": r"<function=",
        "llama3": r"<\|python_tag\|>|\"parameters\": dictionary of argument name",
        "hermes": r"<tool_call>",
    }.items()
}
_WORDS: Final = {  # all tags of a format
    "hermes": f"{HERMES_OPEN} {HERMES_CLOSE}",
    "llama3": PYTHON_TAG,
    "mistral": f"{MISTRAL_TAG} {MISTRAL_ARGUMENTS} [CALL_ID]",
    "pythonic": " ".join(pythonic.TAGS),
    HARMONY: " ".join(harmony.TAGS),
}
_OTHERS: Final = re.compile(r"<tool_calls>")  # formats whose tags enclose hermes'
_TOOLS: Final = re.compile(r"\btools\b")  # the variable of a template


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Output format of one model.

    `calls` is a key of READERS or NONE, and `reasoning` a key of reasoning.TAGS for a model that thinks. With
    `shows_tools`, the system message lists the tools, since the chat template does not.
    """

    calls: str = NONE
    thinks: bool = False
    shows_tools: bool = False
    reasoning: str = THINK

    @property
    def has_calls(self) -> bool:
        return self.calls != NONE

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags of thoughts and calls, which must stay in the text though they may be special tokens."""
        thoughts = reasoning.TAGS[self.reasoning]
        words = f"{thoughts.open} {thoughts.close}" if self.thinks else ""
        words += MARKUPS[self.calls].words if self.calls in MARKUPS else _WORDS.get(self.calls, "")
        return tuple(dict.fromkeys(TOKEN.findall(words)))

    def reader(
        self,
        prompt_end: str,
        tools: Tools,
        forced: Callable[..., CallReader] | None = None,
        *,
        is_held: bool = False,
        keeps_blanks: bool = False,
    ) -> "AnswerReader":
        """Return a reader for one output, after a prompt whose text ends with `prompt_end`, that may call `tools`.

        With `is_held`, the output has a required format, and either consists of calls or has none. `keeps_blanks` keeps
        the blanks after the thoughts, which may belong to that format. With `forced`, the output must be calls, which
        the reader made by it parses.
        """
        thoughts: ReasoningReader | None = None
        expected = reasoning.thoughts_behind(prompt_end, self.reasoning)
        if self.thinks and self.calls != HARMONY and not (is_held and expected is Thoughts.NONE):
            has_begun = expected is Thoughts.BEGUN
            thoughts = ReasoningReader(self.reasoning, has_begun=has_begun, keeps_blanks=keeps_blanks)
        calls: Reader | None = None
        if forced is not None:
            calls = forced(tools, is_held=True, is_forced=True)
        elif tools or self.calls in WITH_CHANNELS:
            calls = READERS[self.calls](tools, is_held=is_held)
            if is_held and (tag := TAGS.get(self.calls)):
                calls = _FromTag(calls, tag)
        return AnswerReader(thoughts, calls)


PLAIN: Final = AnswerFormat()


class Reader(Protocol):
    """Parse the text after the thoughts."""

    def feed(self, text: str) -> list[Piece]:
        """Add the next text, and return the pieces of the output that are certain now; often none."""

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
        """Add the next text, and return the pieces of the output that are certain now; often none."""
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
    """Return the output format for the settings tool_call_parser (`calls`) and reasoning_parser (`thoughts`).

    AUTO is derived from `template`, the source of the chat template. If the template shows no call format that can be
    parsed, the server lists the tools and states the format itself.
    """
    found = _calls_of(template)
    is_auto = calls == AUTO
    shows_tools = template != "" and (found == NONE if is_auto else _TOOLS.search(template) is None)
    if is_auto:
        calls = UNTOLD if shows_tools else found
    calls = CALLS_ALIASES.get(calls, calls)
    thoughts = _thoughts_of(template) if thoughts == AUTO else REASONING_ALIASES.get(thoughts, thoughts)
    if calls == HARMONY:
        thoughts = HARMONYS_THOUGHTS
    return AnswerFormat(calls, thoughts != NONE, shows_tools, THINK if thoughts == NONE else thoughts)


def _calls_of(template: str) -> str:
    found = next((name for name, words in _CALLS.items() if words.search(template)), NONE)
    return NONE if found == "hermes" and _OTHERS.search(template) else found


def _thoughts_of(template: str) -> str:
    """Return the reasoning format whose closing tag a chat template has; NONE without one."""
    tags = reasoning.TAGS.items()
    return next((name for name, each in tags if each.close in template and name != HARMONYS_THOUGHTS), NONE)
