"""What a grammar is asked for. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from coordinator.text.answer_format import NONE
from coordinator.text.calls.reader import MAX_CALLS
from coordinator.text.reasoning import Thoughts

MAX_CPU_S: Final = 0.5  # for one grammar
MAX_BYTES: Final = 2**26  # likewise


@dataclass(frozen=True, slots=True)
class Leeway:
    """What an answer may have beside the form that it is held to: thoughts before it, and in its place calls, in the
    format `calls` of answer_format. `tools` are the names of those that may be called, each with the JSON schema of its
    arguments, or nothing for any object. Of a JSON schema that the answer is held to, the definitions that `loose`
    names, or it itself for an empty name, are kept to as far as they can be enforced."""

    thinks: bool = False
    calls: str = NONE
    tools: tuple[tuple[str, str], ...] = ()
    most_calls: int = MAX_CALLS
    loose: tuple[str, ...] = ()


NO_LEEWAY: Final = Leeway()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a grammar is made of. `kind`, `value`, `whitespace` and `closes_objects` are those of to_grammar."""

    kind: str
    value: Hashable
    whitespace: str | None
    leeway: Leeway
    thoughts: Thoughts
    closes_objects: bool = False
