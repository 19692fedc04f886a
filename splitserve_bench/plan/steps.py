"""What the steps of a node take, wherever that is known from. Pure."""

from typing import Protocol

from splitserve_bench.simulate.costs import ProfileCosts, StepLoad, StepSeconds
from splitserve_bench.simulate.profile import Profile


class Steps(StepSeconds, Protocol):
    """Seconds of any step."""

    def both_s(self, load: StepLoad) -> float:
        """Answers and prompts in one step."""
        ...


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
