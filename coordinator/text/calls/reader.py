"""Parse tool calls from an output's text as it comes.

A reader takes text in pieces of any size. A possible call is held back until it is certain; what turns out to be no
call is returned as text, unchanged. Every format has its own reader.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import ClassVar, Final, TypeVar

from coordinator.text.stop_strings import StopMatcher

R = TypeVar("R")
Steps = Generator[None, str, R]
"""A parser that is sent one character after the other."""

MAX_CALLS: Final = 128  # of one output
MAX_HELD_CHARS: Final = 2**15
NAME: Final = re.compile(r"[\w.:/@$-]{1,128}")
BLANKS: Final = " \t\r\n"


class Kind(Enum):
    """Kind of a piece of an output."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()  # begins a call; the piece is the name
    ARGUMENTS = auto()  # of the latest call, in JSON


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an output."""

    kind: Kind
    text: str


class CallReader(ABC):
    """Parse one output that may call the tools in `names`.

    With `is_held`, the output has a required format or is calls: only a name followed by an object of arguments is a
    call, and anything else that looks like a call belongs to the format.

    Blanks before calls, and at the end of an output with calls, are left out. Calls beyond MAX_CALLS are text, and so
    is all text after more than MAX_HELD_CHARS of a possible call. Arguments are returned as the model wrote them, even
    if the output was cut short.
    """

    offered_only: ClassVar[bool] = False  # calls of tools outside `names` are text

    def __init__(self, names: Collection[str], *, is_held: bool = False) -> None:
        self._names = names
        self._is_held = is_held
        self._pieces: list[Piece] = []
        self._held: list[str] = []  # characters that have been read and are not decided yet
        self._last = ""  # the last character taken
        self._num_calls = 0
        self._is_in_call = False
        self._lacks_arguments = False
        self._tells_arguments = False  # characters taken are arguments, and not held
        self._steps = self._to_the_end()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the next text makes certain."""
        for char in text:
            self._steps.send(char)
            if len(self._held) > MAX_HELD_CHARS:
                self._give_up()
        return self._told()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces, when the text has ended."""
        self._steps.close()
        if self._is_in_call:  # and was cut short
            self._held.clear()
        if not self._num_calls or "".join(self._held).strip(BLANKS):
            self._release()
        return self._told()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Parse calls, until only text can follow."""

    def _to_the_end(self) -> Steps[None]:
        yield from self._read()
        yield from self._plain()

    def _plain(self) -> Steps[None]:
        self._release()
        while True:
            self._say((yield))

    def _give_up(self) -> None:
        self._steps.close()
        if self._is_in_call:
            self._end()
        self._steps = self._plain()
        next(self._steps)

    # ---- pieces from characters ----

    def _take(self, char: str) -> str:
        """Hold a character, or return it as part of the arguments."""
        if self._tells_arguments:
            self._tell(Kind.ARGUMENTS, char)
        else:
            self._held.append(char)
        self._last = char
        return char

    def _tell(self, kind: Kind, text: str) -> None:
        self._pieces.append(Piece(kind, text))

    def _release(self) -> None:
        """Return the held characters as text."""
        self._tell(Kind.TEXT, "".join(self._held))
        self._held.clear()

    def _begin(self, name: str) -> bool:
        """Begin a call of this name in place of the held characters. Returns False if no such call is possible."""
        is_offered = name in self._names or not self.offered_only
        if not is_offered or not NAME.fullmatch(name) or self._num_calls == MAX_CALLS:
            return False
        self._tell(Kind.CALL, name)
        self._num_calls += 1
        self._is_in_call = self._lacks_arguments = True
        self._held.clear()
        return True

    def _argue(self, arguments: str) -> None:
        """Add to the arguments of the current call."""
        self._tell(Kind.ARGUMENTS, arguments)
        self._lacks_arguments = False

    def _end(self) -> None:
        """End the current call."""
        if self._lacks_arguments:
            self._argue("{}")
        self._is_in_call = self._tells_arguments = False

    def _told(self) -> list[Piece]:
        """Return the pieces, with adjacent ones of a kind joined."""
        told: list[Piece] = []
        for kind, same in groupby(self._pieces, lambda piece: piece.kind):
            if kind is Kind.CALL:
                told += same
            elif text := "".join(piece.text for piece in same):
                told.append(Piece(kind, text))
        self._pieces.clear()
        return told

    # ---- steps that formats share ----

    def _until(self, *tags: str) -> Steps[str]:
        """Return text, held characters first, up to one of these tags.

        The tag is held, with the blanks before it. The last character taken may begin it.
        """
        last = self._held.pop() if self._held else ""
        text = "".join(self._held)
        self._held.clear()
        self._say(text)
        matcher = StopMatcher(tags)
        self._say(matcher.feed(last))
        try:
            while matcher.matched is None:
                self._say(matcher.feed((yield)))
        except GeneratorExit:
            self._say(matcher.flush())
            raise
        self._held.append(matcher.matched)
        return matcher.matched

    def _say(self, text: str) -> None:
        """Return text; blanks at its end wait for the text after them."""
        self._held += text
        if text.strip(BLANKS):
            whole = "".join(self._held)
            words = whole.rstrip(BLANKS)
            self._tell(Kind.TEXT, words)
            self._held = [*whole[len(words) :]]

    def _opening(self, tag: str) -> Steps[str]:
        """Read the first solid character of the output, after the tag if the output begins with it; empty for an
        incomplete tag."""
        char = yield from self._solid()
        if char != tag[0]:
            return char
        for expected in tag[1:]:
            if self._take((yield)) != expected:
                return ""
        return (yield from self._solid())

    def _solid(self) -> Steps[str]:
        """Read the next character that is not blank."""
        while (char := self._take((yield))) in BLANKS:
            pass
        return char

    def _string(self, quote: str = '"') -> Steps[str]:
        """Read a string after its opening quote, and return its contents as written."""
        start = len(self._held)
        while (char := self._take((yield))) != quote:
            if char == "\\":
                self._take((yield))
        return "".join(self._held[start:-1])
