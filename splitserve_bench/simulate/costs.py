"""What things take in a simulation. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from serving_core.costs import num_pairs
from serving_core.requests import Work
from splitserve_bench.simulate.grid import Row
from splitserve_bench.simulate.profile import Profile

LEAST_STEP_S: Final = 1e-6  # a clock that stood still would never end
START_TOKENS: Final = 256  # of the prompt whose speed a node knows when it starts


@dataclass(slots=True)
class StepLoad:
    """What a step computes: a token of each of so many answers with num_cached tokens before them in all, and chunks of
    prompts. One chunk of all their tokens, with num_before / num_prompt_tokens tokens before it, would have as many
    pairs of a token and one before it as they have: below 0 where they are several short ones. Before a step that
    `is_first` the node waited."""

    num_answers: int = 0
    num_cached: int = 0
    num_prompt_tokens: int = 0
    num_before: float = 0.0
    is_first: bool = False


def load_of(works: Iterable[Work]) -> StepLoad:
    """Of a step; a chunk of one token costs what a token of an answer does."""
    load, pairs = StepLoad(), 0.0
    for work in works:
        if work.num_tokens == 1:
            load.num_answers += 1
            load.num_cached += work.start
        else:
            load.num_prompt_tokens += work.num_tokens
            pairs += num_pairs(work.start, work.num_tokens)
    load.num_before = pairs - num_pairs(0, load.num_prompt_tokens)
    return load


class Costs(Protocol):
    """What one node's work takes, in seconds."""

    def step_s(self, load: StepLoad) -> float: ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """What a node knows of itself at start; 0: nothing."""
        ...

    def message_s(self, sent_s: float) -> float:
        """From the coordinator to a node, or back, of one that is sent at this moment."""
        ...

    def latency_s(self) -> float:
        """Of a transfer, beside its bytes."""
        ...

    def bytes_s(self, num_bytes: int) -> float:
        """Of so many bytes of KV on their way."""
        ...


class ProfileCosts:
    """As a profile says, of a node beside another one at work, or of one that is alone on its machine."""

    def __init__(self, profile: Profile, *, is_alone: bool = False) -> None:
        self._steps, self._corridor, self._control = profile.steps, profile.corridor, profile.control
        self._answers_factor = profile.steps.answers_alone_factor if is_alone else 1.0
        self._prompts_factor = profile.steps.prompts_alone_factor if is_alone else 1.0
        self._answers: dict[int, Row] = {}  # by how many there are, of those that were asked for
        start_s = profile.steps.prompts.at(START_TOKENS, 0) * self._prompts_factor
        self.prefill_tokens_per_s = START_TOKENS / max(LEAST_STEP_S, start_s)

    def step_s(self, load: StepLoad) -> float:
        """Answers and prompts together take the sum of both times the mixed factor, but no less than either alone: that
        factor is one of short chunks, which share the reading of the weights."""
        steps, answers_s, prompts_s = self._steps, 0.0, 0.0
        if load.num_answers:
            answers_s = self._row(load.num_answers).at(load.num_cached / load.num_answers) * self._answers_factor
        if load.num_prompt_tokens:
            before_tokens = load.num_before / load.num_prompt_tokens
            prompts_s = steps.prompts.at(load.num_prompt_tokens, before_tokens) * self._prompts_factor
        both = load.num_answers and load.num_prompt_tokens
        together_s = (answers_s + prompts_s) * (steps.mixed_factor if both else 1.0)
        waited_s = steps.prompt_overhead_s if load.num_prompt_tokens and load.is_first else 0.0
        return max(LEAST_STEP_S, max(answers_s, prompts_s, together_s) + steps.overhead_s + waited_s)

    def _row(self, num_answers: int) -> Row:
        if num_answers not in self._answers:
            self._answers[num_answers] = self._steps.answers.row(num_answers)
        return self._answers[num_answers]

    def message_s(self, sent_s: float) -> float:
        return self._control.message_s

    def latency_s(self) -> float:
        return self._corridor.latency_s

    def bytes_s(self, num_bytes: int) -> float:
        return num_bytes / self._corridor.bytes_per_s
