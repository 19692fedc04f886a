"""Reads the calls of tools out of an answer's text, as it comes.

A reader takes the text in pieces, however it is cut. What may become a call is held until that is certain, and what
turns out to be none is text, to the letter. Every format is a reader of its own, which says what a call looks like.
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
"""Is sent one character after the other."""

MAX_CALLS: Final = 128  # of one answer
MAX_HELD_CHARS: Final = 2**15
NAME: Final = re.compile(r"[\w.:/@$-]{1,128}")
BLANKS: Final = " \t\r\n"


class Kind(Enum):
    """What a piece of an answer is."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()  # begins; the piece is its name
    ARGUMENTS = auto()  # of the call that has begun last, in JSON


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    kind: Kind
    text: str


class CallReader(ABC):
    """Reads one answer. `names` are the tools that it may call. One that `is_held` to a form, or to calls in place of
    it, has calls with an object of arguments behind the name alone: what else looks like a call is of the form.

    Blanks before calls are left out, and those at the end of an answer with calls. Calls beyond MAX_CALLS are text, and
    so is all that follows more than MAX_HELD_CHARS of what may be a call. Arguments are told as the model wrote them:
    where the answer was cut short, they are too.
    """

    offered_only: ClassVar[bool] = False  # what looks like a call of another tool than those of `names` is text

    def __init__(self, names: Collection[str], *, is_held: bool = False) -> None:
        self._names = names
        self._is_held = is_held
        self._pieces: list[Piece] = []
        self._held: list[str] = []  # read, and neither told nor dropped
        self._last = ""  # character that was taken
        self._num_calls = 0
        self._is_in_call = False
        self._lacks_arguments = False
        self._tells_arguments = False  # of what is taken, instead of holding it
        self._steps = self._to_the_end()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """What the next piece of text makes certain."""
        for char in text:
            self._steps.send(char)
            if len(self._held) > MAX_HELD_CHARS:
                self._give_up()
        return self._told()

    def finish(self) -> list[Piece]:
        """The rest, when no more text will come."""
        self._steps.close()
        if self._is_in_call:  # and cut short
            self._held.clear()
        if not self._num_calls or "".join(self._held).strip(BLANKS):
            self._release()
        return self._told()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads calls, until all that may follow is text."""

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

    # ---- what becomes of what was read ----

    def _take(self, char: str) -> str:
        """The character, which is held, or told as one of the arguments."""
        if self._tells_arguments:
            self._tell(Kind.ARGUMENTS, char)
        else:
            self._held.append(char)
        self._last = char
        return char

    def _tell(self, kind: Kind, text: str) -> None:
        self._pieces.append(Piece(kind, text))

    def _release(self) -> None:
        """What is held is text."""
        self._tell(Kind.TEXT, "".join(self._held))
        self._held.clear()

    def _begin(self, name: str) -> bool:
        """A call of this name takes the place of what is held. False where there can be none."""
        is_offered = name in self._names or not self.offered_only
        if not is_offered or not NAME.fullmatch(name) or self._num_calls == MAX_CALLS:
            return False
        self._tell(Kind.CALL, name)
        self._num_calls += 1
        self._is_in_call = self._lacks_arguments = True
        self._held.clear()
        return True

    def _argue(self, arguments: str) -> None:
        """The arguments of the call that has begun, or their beginning."""
        self._tell(Kind.ARGUMENTS, arguments)
        self._lacks_arguments = False

    def _end(self) -> None:
        """The call that has begun is over."""
        if self._lacks_arguments:
            self._argue("{}")
        self._is_in_call = self._tells_arguments = False

    def _told(self) -> list[Piece]:
        """What there is to tell, in as few pieces as can be."""
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
        """Tell text, what is held first, up to one of these tags. The tag is held, with the blanks before it. The last
        character taken may begin it."""
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
        """Tells text; blanks at its end wait for what follows them."""
        self._held += text
        if text.strip(BLANKS):
            whole = "".join(self._held)
            words = whole.rstrip(BLANKS)
            self._tell(Kind.TEXT, words)
            self._held = [*whole[len(words) :]]

    def _opening(self, tag: str) -> Steps[str]:
        """The first solid character of the answer, behind the tag if it begins with it; empty for half a tag."""
        char = yield from self._solid()
        if char != tag[0]:
            return char
        for expected in tag[1:]:
            if self._take((yield)) != expected:
                return ""
        return (yield from self._solid())

    def _solid(self) -> Steps[str]:
        """The next character that is no blank."""
        while (char := self._take((yield))) in BLANKS:
            pass
        return char

    def _string(self, quote: str = '"') -> Steps[str]:
        """Behind the quote that begins a string: what stands in it, as it is written."""
        start = len(self._held)
        while (char := self._take((yield))) != quote:
            if char == "\\":
                self._take((yield))
        return "".join(self._held[start:-1])
