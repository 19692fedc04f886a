"""What the steps of a node take, wherever that is known from. Pure."""

from typing import Protocol

from splitserve_bench.simulate.costs import ProfileCosts, StepLoad
from splitserve_bench.simulate.profile import Profile


class Steps(Protocol):
    """Seconds of a step."""

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


def floor_once_s(steps: Steps, load: StepLoad) -> float:
    """A step of both where none was measured: the sum, less one of the two floors, since weights are read and kernels
    started once."""
    floor_s = min(steps.answers_s(1, 0), steps.chunk_s(1, 0))
    return answers_part_s(steps, load) + chunk_part_s(steps, load) - floor_s


def answers_part_s(steps: Steps, load: StepLoad) -> float:
    """As if the answers were alone."""
    return steps.answers_s(load.num_answers, load.num_cached / load.num_answers)


def chunk_part_s(steps: Steps, load: StepLoad) -> float:
    """As if the prompts were alone."""
    return steps.chunk_s(load.num_prompt_tokens, load.num_before / load.num_prompt_tokens)


class MeasuredSteps:
    """Of a profile that `splitserve doctor --save` has written, for estimates: of a node beside another one at work
    that reads one prompt after the other."""

    def __init__(self, profile: Profile) -> None:
        self._steps, self._costs = profile.steps, ProfileCosts(profile)

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        return self._steps.answers.at(num_answers, context_tokens) + self._steps.overhead_s

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        return self._steps.prompts.at(num_tokens, before_tokens) + self._steps.overhead_s

    def both_s(self, load: StepLoad) -> float:
        return self._costs.step_s(load)
