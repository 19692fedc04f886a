"""How long answers become, as those that ended lately tell. Pure.

What a request allows, its max_tokens, is often far more than what comes. TetriInfer (arXiv 2401.11181) predicts lengths
by a model; here the answers of the same load are asked.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Final

MAX_SAMPLES: Final = 256
MIN_SAMPLES: Final = 16
MOST: Final = 0.75  # of the answers that came as far got no more


class Lengths:
    """Of the answers that have ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []  # the same: every placement asks, and answers end less often

    def ended(self, num_tokens: int) -> None:
        """An answer got so many."""
        self._lengths.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._lengths) > MAX_SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]

    def left(self, num_output: int, most: int) -> int:
        """How many an answer with so many will hardly exceed, at most `most`, what its request still allows. Where too
        few came as far that is as many again; while few are known it is what is allowed."""
        first = bisect_right(self._sorted, num_output)
        num_further = len(self._sorted) - first
        if num_further < MIN_SAMPLES:
            return min(most, num_output) if num_output and len(self._sorted) >= MIN_SAMPLES else most
        return min(most, self._sorted[first + int(MOST * num_further)] - num_output)
