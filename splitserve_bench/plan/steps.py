"""What the steps of a node take that was measured. Pure."""

from splitserve_bench.simulate.costs import ProfileCosts, StepLoad
from splitserve_bench.simulate.profile import Profile


class MeasuredSteps:
    """Of a profile that `splitserve doctor --save` has written, for estimates: of a node beside another one at work
    that reads one prompt after the other."""

    def __init__(self, profile: Profile) -> None:
        self._overhead_s, self._costs = profile.steps.overhead_s, ProfileCosts(profile)

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        return self._costs.answers_s(num_answers, context_tokens) + self._overhead_s

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        return self._costs.chunk_s(num_tokens, before_tokens) + self._overhead_s

    def both_s(self, load: StepLoad) -> float:
        return self._costs.step_s(load)
