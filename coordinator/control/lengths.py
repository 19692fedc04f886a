"""How long answers become, as those that ended lately tell. Pure.

What a request allows, its max_tokens, is often far more than what comes. TetriInfer (arXiv 2401.11181) predicts lengths
by a model; here the answers of the same load are asked.
"""

from collections import deque
from typing import Final

MAX_SAMPLES: Final = 256
MIN_SAMPLES: Final = 16
MOST: Final = 0.75  # of the answers that came as far got no more


class Lengths:
    """Of the answers that have ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=MAX_SAMPLES)

    def ended(self, num_tokens: int) -> None:
        """An answer got so many."""
        self._lengths.append(num_tokens)

    def left(self, num_output: int, most: int) -> int:
        """How many an answer with so many will hardly exceed; `most`, what its request still allows, where too few came
        as far."""
        further = sorted(each - num_output for each in self._lengths if each > num_output)
        return most if len(further) < MIN_SAMPLES else min(most, further[int(MOST * len(further))])
