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


class Steps(Protocol):
    """Seconds of steps."""

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        """A token for each of so many answers, with so many tokens before it."""
        ...

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        """So many tokens of prompts, with so many before them: as of one chunk, below 0 where it is several short ones
        (StepLoad.num_before). What was measured for one chunk alone says no less than without any before it."""
        ...

    def both_s(self, load: StepLoad) -> float:
        """Answers and prompts in one step."""
        ...


def seconds_of(steps: Steps, load: StepLoad) -> float:
    """A step of whatever there is to compute; of nothing, none."""
    if load.num_answers and load.num_prompt_tokens:
        return steps.both_s(load)
    if load.num_answers:
        return steps.answers_s(load.num_answers, load.num_cached / load.num_answers)
    if load.num_prompt_tokens:
        return steps.chunk_s(load.num_prompt_tokens, load.num_before / load.num_prompt_tokens)
    return 0.0


def together_s(steps: Steps, load: StepLoad, beside_factor: float = 1.0) -> float:
    """A step of both computes the products of all its tokens at once, whosesoever they are: answers in it take what so
    many more tokens of prompts do, and what they do beyond that, which is more of the head, and their own attention."""
    num_answers, num_tokens = load.num_answers, load.num_answers + load.num_prompt_tokens
    num_before = load.num_before + num_pairs(0, load.num_prompt_tokens) - num_pairs(0, num_tokens)
    fresh_s = steps.answers_s(num_answers, 0)
    head_s = max(0.0, fresh_s - steps.chunk_s(num_answers, 0))
    attention_s = steps.answers_s(num_answers, load.num_cached / num_answers) - fresh_s
    return steps.chunk_s(num_tokens, num_before / num_tokens) + head_s + beside_factor * attention_s


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
        self._answers: dict[float, Row] = {}  # by how many there are, of those that were asked for
        start_s = profile.steps.prompts.at(START_TOKENS, 0) * self._prompts_factor
        self.prefill_tokens_per_s = START_TOKENS / max(LEAST_STEP_S, start_s)

    def step_s(self, load: StepLoad) -> float:
        seconds = self._steps.overhead_s + seconds_of(self, load)
        if load.num_prompt_tokens and load.is_first:
            seconds += self._steps.prompt_overhead_s
        return max(LEAST_STEP_S, seconds)

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        """Without overheads, as chunk_s and both_s."""
        row = self._answers.get(num_answers)
        if row is None:
            row = self._answers[num_answers] = self._steps.answers.row(num_answers)
        return row.at(context_tokens) * self._answers_factor

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        return self._steps.prompts.at(num_tokens, before_tokens) * self._prompts_factor

    def both_s(self, load: StepLoad) -> float:
        return together_s(self, load, self._steps.attention_beside_factor)

    def message_s(self, sent_s: float) -> float:
        return self._control.message_s

    def latency_s(self) -> float:
        return self._corridor.latency_s

    def bytes_s(self, num_bytes: int) -> float:
        return num_bytes / self._corridor.bytes_per_s
