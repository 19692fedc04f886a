"""What things take in a simulation. Pure."""

from collections.abc import Sequence
from typing import Final, Protocol

from serving_core.requests import Work
from splitserve_bench.simulate.profile import Profile

LEAST_STEP_S: Final = 1e-6  # a clock that stood still would never end
START_TOKENS: Final = 256  # of the prompt whose speed a node knows when it starts


class Costs(Protocol):
    """What one node's work takes, in seconds."""

    def step_s(self, works: Sequence[Work]) -> float: ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """What a node knows of itself at start; 0: nothing."""
        ...

    def message_s(self) -> float:
        """From the coordinator to a node, or back."""
        ...

    def latency_s(self) -> float:
        """Of a transfer, beside its bytes."""
        ...

    def bytes_s(self, num_bytes: int) -> float:
        """Of so many bytes of KV on their way."""
        ...


class ProfileCosts:
    """As a profile says."""

    def __init__(self, profile: Profile) -> None:
        self._steps, self._corridor, self._control = profile.steps, profile.corridor, profile.control
        self.prefill_tokens_per_s = START_TOKENS / profile.steps.prompts.at(START_TOKENS, 0)

    def step_s(self, works: Sequence[Work]) -> float:
        """Answers, whose shares are of one token each, and chunks of prompts are computed one after the other."""
        num_answers = num_cached = num_prompt_tokens = num_before = 0
        for work in works:
            if work.num_tokens == 1:
                num_answers += 1
                num_cached += work.start
            else:
                num_prompt_tokens += work.num_tokens
                num_before += work.start * work.num_tokens
        steps, seconds = self._steps, 0.0
        if num_answers:
            seconds += steps.answers.at(num_answers, num_cached / num_answers)
        if num_prompt_tokens:
            seconds += steps.prompts.at(num_prompt_tokens, num_before / num_prompt_tokens)
        if num_answers and num_prompt_tokens:
            seconds *= steps.mixed_factor
        return max(LEAST_STEP_S, seconds + steps.overhead_s)

    def message_s(self) -> float:
        return self._control.message_s

    def latency_s(self) -> float:
        return self._corridor.latency_s

    def bytes_s(self, num_bytes: int) -> float:
        return num_bytes / self._corridor.bytes_per_s
