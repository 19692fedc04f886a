"""Parse tool calls from an output's text as it comes.

A reader takes text in pieces of any size. A possible call is held back until it is certain; what turns out to be no
call is returned as text, unchanged. Every format has its own reader.
"""

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import Any, ClassVar, Final, TypeVar

from coordinator.text.stop_strings import StopMatcher

R = TypeVar("R")
Steps = Generator[None, str, R]
"""A parser that is sent one character after the other."""

MAX_CALLS: Final = 128  # of one output
MAX_HELD_CHARS: Final = 2**15
MAX_UNTOLD_CHARS: Final = 2**10  # of a call that may be cut short; some seconds of output
NAME: Final = re.compile(r"[\w.:/@$-]{1,128}")
BLANKS: Final = " \t\r\n"

END: Final = ""  # of the output
MAX_BLANKS: Final = 64  # between a tag and the tag that shows that it was one

Ends = Mapping[str, Sequence[str]]
"""Tags that end a text if one of the tags that they map to, or END, follows; blanks may come between. A tag without
such tags ends it alone."""

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of the tools that an output may call, by name."""


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
    """Parse one output that may call the tools in `tools`.

    With `is_held`, the output has a required format or is calls: only a name followed by an object of arguments is a
    call, and anything else that looks like a call belongs to the format.

    A call is returned when it is complete, or when it has more than MAX_UNTOLD_CHARS; from then on, and from the start
    with `is_forced`, its arguments are returned as they come. A call that the end of the output cuts short before that
    is left out with its markup. Blanks before calls, and at the end of an output with calls, are left out unless
    `keeps_blanks` is set. Calls beyond MAX_CALLS are text, and so is all text after more than MAX_HELD_CHARS of a
    possible call.
    """

    offered_only: ClassVar[bool] = False  # calls of tools outside `tools` are text
    keeps_blanks: bool = False

    def __init__(self, tools: Tools, *, is_held: bool = False, is_forced: bool = False) -> None:
        self._tools = tools
        self._is_held = is_held
        self._is_forced = is_forced
        self._pieces: list[Piece] = []
        self._held: list[str] = []  # characters that have been read and are not decided yet
        self._last = ""  # the last character taken
        self._called = ""  # name of the last call
        self._num_calls = 0
        self._is_opened = False  # a tag has begun what may be calls
        self._is_in_call = False
        self._is_untold = False  # the current call may still be cut short
        self._lacks_arguments = False
        self._tells_arguments = False  # characters taken are arguments, and not held
        self._steps = self._to_the_end()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """Add the next text, and return the pieces of the output that are certain now; often none."""
        for char in text:
            self._steps.send(char)
            if len(self._held) > MAX_HELD_CHARS:
                self._give_up()
        return self._told()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces, when the text has ended."""
        self._steps.close()
        if self._is_in_call or self._is_opened:  # and was cut short
            self._held.clear()
        if self._is_untold:
            self._pieces = self._pieces[: _last_call(self._pieces)]
            self._is_untold = False
        if not self._num_calls or self.keeps_blanks or "".join(self._held).strip(BLANKS):
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
        self._is_opened = False
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
        is_offered = name in self._tools or (len(self._tools) > 0 and not self.offered_only)
        if not is_offered or not NAME.fullmatch(name) or self._num_calls == MAX_CALLS:
            return False
        self._tell(Kind.CALL, name)
        self._called = name
        self._num_calls += 1
        self._is_in_call = self._lacks_arguments = True
        self._is_untold = not self._is_forced
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
        self._is_in_call = self._tells_arguments = self._is_untold = False

    def _told(self) -> list[Piece]:
        """Return the pieces before a call that may be cut short, with adjacent ones of a kind joined."""
        told, self._pieces = _joined(self._pieces), []
        if self._is_untold:
            start = _last_call(told)
            if sum(len(piece.text) for piece in told[start:]) > MAX_UNTOLD_CHARS:
                self._is_untold = False
            else:
                told, self._pieces = told[:start], told[start:]
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
        if self.keeps_blanks:
            self._release()
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

    def _opening(self, *tags: str) -> Steps[str]:
        """Read the first solid character of the output, after one of the tags if the output begins with it; empty for
        an incomplete tag."""
        char = yield from self._solid()
        text = char
        while text not in tags:
            if not any(tag.startswith(text) for tag in tags):
                return char if text == char else ""
            text += self._take((yield))
        self._is_opened = True
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

    def _find(self, tags: Sequence[str], most: int = MAX_HELD_CHARS) -> Steps[str]:
        """Hold text up to one of the tags, and return the tag; empty after more than `most` other characters."""
        text = ""
        longest = max(map(len, tags))
        for _ in range(most + longest):
            text = (text + self._take((yield)))[-longest:]
            if tag := next(filter(text.endswith, tags), ""):
                return tag
        return ""

    def _next(self, *tags: str) -> Steps[str]:
        """Hold blanks and one of the tags, and return the tag; empty if anything else comes."""
        text = yield from self._solid()
        while any(tag.startswith(text) for tag in tags):
            if text in tags:
                return text
            text += self._take((yield))
        return ""

    def _text_until(self, ends: Ends, tell: Callable[[str], None], at_end: Callable[[], None]) -> Steps[str]:
        """Pass on text up to one of the ends. Returns the tag that follows, or the end itself if it needs none.

        `at_end` is called if the output ends after one of the ends that END may follow.
        """
        matcher, again = StopMatcher([*ends]), deque[str]()
        while True:
            try:
                tell(matcher.feed(again.popleft() if again else (yield)))
            except GeneratorExit:
                tell(matcher.flush())
                raise
            if (tag := matcher.matched) is None:
                continue
            if not ends[tag]:
                return tag
            matcher, ahead = StopMatcher([*ends]), ""
            while len(ahead) < MAX_BLANKS and any(each.startswith(ahead.lstrip(BLANKS)) for each in ends[tag]):
                if (followed := ahead.lstrip(BLANKS)) and followed in ends[tag]:
                    return followed
                try:
                    ahead += again.popleft() if again else (yield)
                except GeneratorExit:
                    if END in ends[tag] and not ahead.strip(BLANKS):
                        at_end()
                    else:
                        tell(tag + ahead)
                    raise
            tell(tag[0])  # it was text; what follows it may be an end
            again.extendleft(reversed(tag[1:] + ahead))


def _last_call(pieces: list[Piece]) -> int:
    """Return the index of the piece that begins the last call."""
    return max(index for index, piece in enumerate(pieces) if piece.kind is Kind.CALL)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces, with adjacent ones of a kind joined."""
    joined: list[Piece] = []
    for kind, same in groupby(pieces, lambda piece: piece.kind):
        if kind is Kind.CALL:
            joined += same
        elif text := "".join(piece.text for piece in same):
            joined.append(Piece(kind, text))
    return joined
