"""Draw random prompts for the benchmarks, and say how their outputs are sampled."""

from random import Random
from typing import Any, Final

SEED: Final = 0
# Whatever the model's folder recommends: the likeliest tokens, up to max_tokens.
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}


class Prompts:
    """Draw random prompts of `num_tokens` token ids below `vocab_size`.

    Every run draws the same ones, in the same order.
    """

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._random = Random(SEED)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens

    def draw(self) -> list[int]:
        """Return the token ids of the next prompt."""
        return self._random.choices(range(self._vocab_size), k=self._num_tokens)
