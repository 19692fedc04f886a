"""Separate thoughts, between two tags, from the rest of an output, as its text comes."""

import codecs
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coordinator.text.stop_strings import StopMatcher

MAX_BLANKS: Final = 64  # before a tag


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags around thoughts. The tag `answer`, if there is one, begins the rest of the output, and ends thoughts too.

    `behind` is what a model writes between the thoughts and a call or a required format.
    """

    open: str
    close: str
    answer: str = ""
    behind: str = ""


THINK: Final = "think"
TAGS: Final[Mapping[str, Tags]] = {
    THINK: Tags("<think>", "</think>"),
    "gemma4": Tags("<|channel>thought\n", "<channel|>"),
    "kimi_k3": Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "openai_gptoss": Tags("<|channel|>analysis<|message|>", "<|end|>", behind="<|start|>assistant"),
}
"""Tags of thoughts by reasoning format."""


class Thoughts(StrEnum):
    """Whether an output has thoughts."""

    NONE = "none"
    POSSIBLE = "possible"
    BEGUN = "begun"  # by the prompt


def thoughts_behind(prompt: str, reasoning: str = THINK) -> Thoughts:
    """Return whether the output after a prompt has thoughts, by the tags at the end of the prompt.

    `prompt` may be its end alone. `reasoning` is a key of TAGS.
    """
    words, tags = prompt.rstrip(), TAGS[reasoning]
    if words.endswith(tags.open.rstrip()):
        return Thoughts.BEGUN
    has_ended = words.endswith(tags.close) or (tags.answer != "" and words.endswith(tags.answer))
    return Thoughts.NONE if has_ended else Thoughts.POSSIBLE


def ends_thinking(prompt: str, reasoning: str = THINK) -> bool:
    """Return whether a prompt ends with the opening tag of thoughts, so that the output begins within them.

    `prompt` may be its end alone. `reasoning` is a key of TAGS.
    """
    return thoughts_behind(prompt, reasoning) is Thoughts.BEGUN


class ReasoningReader:
    """Separate the thoughts of one output from the rest of its text.

    An output that does not begin with the tag has no thoughts, unless the prompt has begun them. Blanks within and
    after both tags are left out; `keeps_blanks` keeps those after the closing tag.
    """

    def __init__(self, reasoning: str = THINK, *, has_begun: bool, keeps_blanks: bool = False) -> None:
        self._tags = TAGS[reasoning]
        self._keeps_blanks = keeps_blanks
        self._is_thinking = self._skips_blanks = has_begun
        self._is_over = False  # all further text is outside of thoughts
        self._opening = ""
        self._blanks = ""  # at the end of the thoughts so far
        self._closing = StopMatcher([*filter(None, (self._tags.close, self._tags.answer))])

    @property
    def has_thoughts(self) -> bool:
        """Return whether the output has begun with thoughts."""
        return self._is_thinking

    @property
    def is_over(self) -> bool:
        """Return whether no thoughts can follow: they have ended, or the output has none."""
        return self._is_over

    def feed(self, text: str) -> tuple[str, str]:
        """Add the next text, and return the thoughts and the other text that are certain now."""
        thoughts, words = list[str](), list[str]()
        for char in text:
            if self._skips_blanks and char.isspace():
                continue
            self._skips_blanks = False
            if self._is_over:
                words.append(char)
            elif self._is_thinking:
                thoughts.append(self._think(char))
            else:
                words.append(self._open(char))
        return "".join(thoughts), "".join(words)

    def finish(self) -> tuple[str, str]:
        """Return the remaining thoughts and other text, when the text has ended."""
        if self._is_over:
            return "", ""
        return (self._blanks + self._closing.flush(), "") if self._is_thinking else ("", self._opening)

    def _open(self, char: str) -> str:
        self._opening += char
        begun, tag = self._opening.lstrip(), self._tags.open
        if begun == tag:
            self._is_thinking = self._skips_blanks = True
            return ""
        if tag.startswith(begun) and len(self._opening) <= MAX_BLANKS:
            return ""
        self._is_over = True
        return self._opening

    def _think(self, char: str) -> str:
        thought = self._blanks + self._closing.feed(char)
        end = max(len(thought.rstrip()), len(thought) - MAX_BLANKS)
        self._blanks = thought[end:]
        if self._closing.matched is not None:
            self._is_over, self._skips_blanks = True, not self._keeps_blanks
        return thought[:end]


class ThoughtCounter:
    """Count the thinking tokens of one output, tags included."""

    def __init__(self, token_bytes: Callable[[int], bytes], reasoning: str = THINK, *, has_begun: bool) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reader = ReasoningReader(reasoning, has_begun=has_begun)
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        return self._num_read if self._reader.has_thoughts else 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the output, until its thoughts are over."""
        for token_id in token_ids:
            if self._reader.is_over:
                return
            self._reader.feed(self._decoder.decode(self._token_bytes(token_id)))
            self._num_read += 1
