"""What prompts have in common, by block. Pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Marks:
    """Those of some prompts (Prompt.marks): who has a mark has all those before it too."""

    _counts: Counter[int] = field(default_factory=Counter)
    _num_marks: int = 0  # each as often as there are prompts with it

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, mark: object) -> bool:
        return mark in self._counts

    @property
    def num_repeated(self) -> int:
        """By how many fewer they would be if each counted once."""
        return self._num_marks - len(self._counts)

    def num_shared(self, marks: Sequence[int]) -> int:
        """Of one of the prompts, with these marks: how many of them another one has too."""
        return bisect_left(marks, True, key=lambda mark: self._counts[mark] < 2)

    def add(self, marks: Sequence[int]) -> None:
        """One more prompt."""
        self._counts.update(marks)
        self._num_marks += len(marks)

    def remove(self, marks: Sequence[int]) -> None:
        """One of the prompts."""
        counts = self._counts
        for mark in marks:
            counts[mark] -= 1
            if not counts[mark]:
                del counts[mark]
        self._num_marks -= len(marks)
