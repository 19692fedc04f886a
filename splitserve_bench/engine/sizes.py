"""How much `splitserve bench engine` measures. Torch-free."""

from dataclasses import dataclass
from typing import Final

STEP_TOKENS: Final = 512  # of prompts in one step, unless another number is given


@dataclass(frozen=True, slots=True)
class PromptSize:
    """As many prompts of one length."""

    count: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.count}x{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class EngineBench:
    """The sizes of what is measured, each of them `repeats` times. Batches and contexts ascend."""

    prompts: tuple[PromptSize, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    step_tokens: int = STEP_TOKENS
