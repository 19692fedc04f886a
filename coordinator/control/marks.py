"""What prompts have in common, by block. Pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field


def num_leading(marks: Sequence[int], known: Container[int]) -> int:
    """How many of a prompt's marks are among these, which have with each all those before it too."""
    return bisect_left(marks, True, key=lambda mark: mark not in known)


@dataclass(slots=True)
class Marks:
    """Those of some prompts (Prompt.marks): who has a mark has all those before it too."""

    num_repeated: int = 0  # by so many fewer they would be if each counted once
    _known: set[int] = field(default_factory=set)
    _more: Counter[int] = field(default_factory=Counter)  # of those that several have: who has it beside the first

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, mark: object) -> bool:
        return mark in self._known

    def num_shared(self, marks: Sequence[int]) -> int:
        """Of one of the prompts, with these marks: how many of them another one has too."""
        return num_leading(marks, self._more)

    def num_spared(self, marks: Sequence[int]) -> float:
        """Of one of the prompts, with these marks: how many the others have for it, where all that have a mark have an
        equal part of it."""
        shares = [self._more[mark] for mark in marks[: self.num_shared(marks)]]
        return sum(num_more / (num_more + 1) for num_more in shares)

    def add(self, marks: Sequence[int]) -> None:
        """One more prompt."""
        num_known = num_leading(marks, self._known)
        self._more.update(marks[:num_known])
        self._known.update(marks)
        self.num_repeated += num_known

    def remove(self, marks: Sequence[int]) -> None:
        """One of the prompts."""
        num_shared, more = self.num_shared(marks), self._more
        for mark in marks[:num_shared]:
            more[mark] -= 1
            if not more[mark]:
                del more[mark]
        self._known.difference_update(marks[num_shared:])
        self.num_repeated -= num_shared
