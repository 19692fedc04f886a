"""Random prompts for the benches."""

from random import Random
from typing import Final

SEED: Final = 0


class Prompts:
    """Random prompts of one length, the same ones in every run and none twice."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._random = Random(SEED)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens

    def draw(self) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=self._num_tokens)
