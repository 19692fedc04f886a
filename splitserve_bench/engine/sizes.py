"""Define how much `splitserve bench engine` measures. Torch-free."""

from dataclasses import dataclass
from typing import Final

STEP_TOKENS: Final = 512  # of prompts in one step, unless another number is given


@dataclass(frozen=True, slots=True)
class PromptSize:
    """`count` prompts of `num_tokens` tokens each."""

    count: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.count}x{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What is measured, each of it `repeats` times. `batches` and `contexts` (in tokens) ascend."""

    prompts: tuple[PromptSize, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    step_tokens: int = STEP_TOKENS
