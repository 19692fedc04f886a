"""How fast a node computes, worked out from its recent steps. Torch-free; no I/O, no clock.

What reads prompts is measured apart from what decodes, also where one step does both: of a mixed step, the usual time
of a step that only decodes as many requests is not the prompt's.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

NUM_RECENT: Final = 64  # steps of each kind
MIN_TELLING_TOKENS: Final = 16  # with fewer prompt tokens, what every step costs hides what they cost
START_TOKENS: Final = 256  # that the rate measured at start weighs


class _Prefilled(NamedTuple):
    num_tokens: int
    num_decoding: int
    step_s: float


class StepRates:
    """Figures over recent steps; of each kind of step the last 64 count."""

    def __init__(self, start_tokens_per_s: float = 0.0) -> None:
        """`start_tokens_per_s`: prompt tokens a second as measured before the first step; 0: not known."""
        self._decoded: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)  # requests, seconds
        self._prefilled: deque[_Prefilled] = deque(maxlen=NUM_RECENT)
        self._lone_s: deque[float] = deque(maxlen=NUM_RECENT)  # of steps that decoded one request
        self._small: deque[_Prefilled] = deque(maxlen=NUM_RECENT)  # prefilled too, but too few tokens to tell much
        if start_tokens_per_s > 0:
            self._prefilled.append(_Prefilled(START_TOKENS, 0, START_TOKENS / start_tokens_per_s))

    def add(self, num_prompt_tokens: int, num_decoding: int, *steps_s: float) -> None:
        """Takes in steps that each computed so many tokens of prompts, and one token of each of num_decoding
        requests."""
        if num_prompt_tokens:
            prefilled = self._prefilled if num_prompt_tokens >= MIN_TELLING_TOKENS else self._small
            prefilled += [_Prefilled(num_prompt_tokens, num_decoding, step_s) for step_s in steps_s]
        elif num_decoding:
            self._decoded += [(num_decoding, step_s) for step_s in steps_s]
            if num_decoding == 1:
                self._lone_s += steps_s

    @property
    def decode_step_s(self) -> float:
        """Median seconds of the recent steps that only decoded; 0 before the first."""
        return statistics.median([step_s for _, step_s in self._decoded]) if self._decoded else 0.0

    @property
    def lone_step_s(self) -> float:
        """Median seconds of the last steps that decoded one request, however long ago; before the first, those of as
        few as there were lately. 0 before the first step."""
        return statistics.median(self._lone_s) if self._lone_s else self._usual_decode_s({1})[1]

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second in steps that do nothing else: the median over the recent steps, weighted by their
        prompt tokens. Steps of fewer than 16 count only while there are no others. 0: not known."""
        return self._rate(self._prefilled) or self._rate(self._small)

    def _rate(self, steps: Sequence[_Prefilled]) -> float:
        weighted: list[tuple[float, int]] = []
        usual_s = self._usual_decode_s({step.num_decoding for step in steps})
        for step in steps:
            prefill_s = step.step_s - usual_s[step.num_decoding]
            if prefill_s > 0:  # otherwise noise is larger than what it is to be told from
                weighted.append((step.num_tokens / prefill_s, step.num_tokens))
        return _weighted_median(weighted)

    def _usual_decode_s(self, numbers: Collection[int]) -> dict[int, float]:
        """For each of these numbers of requests, median seconds of the steps that decoded the number nearest to it; 0
        when unknown."""
        seconds = defaultdict[int, list[float]](list)
        for num_requests, step_s in self._decoded:
            seconds[num_requests].append(step_s)

        def usual_s(number: int) -> float:
            if not number or not seconds:
                return 0.0
            nearest = min(abs(other - number) for other in seconds)
            return statistics.median(
                step_s for other in {number - nearest, number + nearest} for step_s in seconds.get(other, ())
            )

        return {number: usual_s(number) for number in numbers}


def _weighted_median(weighted: Sequence[tuple[float, int]]) -> float:
    """The least value that, with those below it, has half of the weight; 0 of nothing."""
    half, sum_so_far = sum(weight for _, weight in weighted) / 2, 0
    for value, weight in sorted(weighted):
        sum_so_far += weight
        if sum_so_far >= half:
            return value
    return 0.0
