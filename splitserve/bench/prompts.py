"""Random prompts for the benches, and how their answers are sampled."""

from random import Random
from typing import Any, Final

SEED: Final = 0
# Whatever the model's folder recommends: the likeliest tokens, as many as were asked for, at the least cost.
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}


class Prompts:
    """Random prompts of one length, the same ones in every run and none twice."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._random = Random(SEED)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens

    def draw(self) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=self._num_tokens)
