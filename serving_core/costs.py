"""Estimate what a node's next step takes and how fast it computes, from its recent steps. No I/O, no clock.

Rates of prefill and decode are measured apart, also where one step does both: of a mixed step, the usual time of a
decode step with as many sequences is not counted as the prompt's.

The model of a step, in seconds: a constant, plus a weight per sequence and per cached token, plus a constant once there
are several sequences (one alone is multiplied with the weights by other, often faster code). Chunks of prompts add a
constant, a weight per token, and a weight per pair of a token and one before it: a chunk of n tokens after p takes a +
b·n + c·(p·n + n²/2). The seven weights are a least-squares fit of relative errors that forgets old steps.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
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


MEMORY: Final = 256  # steps, after which one counts for a third
KEPT: Final = 1 - 1 / MEMORY
NUM_WEIGHTS: Final = 7
# In what was believed before the first step, against one that is sure. Least in what a step takes whatever it holds: as
# long as steps are alike it is that, and not the answers or the tokens before them, of which others will hold more.
TRUST: Final = (1e-6, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4)
FAR: Final = 4.0  # times what any step has held: beyond that, what a step takes is a guess


@dataclass(slots=True)
class StepLoad:
    """What a step computes: a token of each of so many answers, with num_cached tokens before them in all, and chunks
    of prompts with so many pairs of a token and one before it."""

    num_answers: int = 0
    num_cached: int = 0
    num_prompt_tokens: int = 0
    num_pairs: float = 0.0

    def add_chunk(self, start: int, num_tokens: int) -> None:
        """A chunk of a prompt, after `start` tokens of it."""
        self.num_prompt_tokens += num_tokens
        self.num_pairs += num_pairs(start, num_tokens)

    @property
    def figures(self) -> tuple[float, ...]:
        """What the weights are of."""
        has_chunks = self.num_prompt_tokens > 0
        has_several = self.num_answers > 1
        return 1, self.num_answers, self.num_cached, has_chunks, self.num_prompt_tokens, self.num_pairs, has_several


def num_pairs(start: int, num_tokens: int) -> float:
    return num_tokens * (start + num_tokens / 2)


class StepWeights(NamedTuple):
    """Seconds of each of StepLoad.figures, none below 0."""

    step_s: float = 0.0
    answer_s: float = 0.0
    cached_s: float = 0.0
    chunks_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    several_s: float = 0.0

    def of_step(self, load: StepLoad) -> float:
        """Seconds of such a step."""
        return sum(weight * figure for weight, figure in zip(self, load.figures, strict=True))

    def num_answers_within(self, seconds: float, num_cached: float) -> float:
        """The most, with so many tokens before each, whose step takes no longer; inf where any number would do."""
        each_s, left_s = self.answer_s + num_cached * self.cached_s, seconds - self.step_s
        if left_s < 2 * each_s + self.several_s:
            return float(left_s >= each_s)
        return (left_s - self.several_s) // each_s if each_s > 0 and left_s < inf else inf

    def of_chunk(self, start: int, num_tokens: int, *, is_first: bool) -> float:
        """What a chunk adds to a step, which has others already unless it is the first."""
        return is_first * self.chunks_s + num_tokens * self.token_s + num_pairs(start, num_tokens) * self.pair_s

    def of_prompt(self, start: int, num_tokens: int, most_tokens: int, bare_s: float) -> float:
        """Return the seconds of all steps that compute these tokens, at most most_tokens in a step, alone but for what
        each takes without prompts, bare_s."""
        num_steps = ceil(num_tokens / most_tokens)
        return num_steps * (bare_s + self.chunks_s) + self.of_chunk(start, num_tokens, is_first=False)


class StepCosts:
    """Learns from steps. What is not asked costs next to nothing: steps are taken in when somebody wants to know."""

    def __init__(self, start_tokens_per_s: float = 0.0) -> None:
        """`start_tokens_per_s`: prompt tokens a second as measured before the first step; 0: not known."""
        self._believed = [0.0] * NUM_WEIGHTS
        self._believed[4] = 1 / start_tokens_per_s if start_tokens_per_s > 0 else 0.0
        self._new: deque[tuple[StepLoad, float]] = deque(maxlen=MEMORY)
        # Of figures over seconds, summed: of each with itself and those after it.
        self._products = [[0.0] * (NUM_WEIGHTS - i) for i in range(NUM_WEIGHTS)]
        self._sums = [0.0] * NUM_WEIGHTS
        self._most = [0.0] * NUM_WEIGHTS  # of each figure, in any step
        self._weights = StepWeights(*self._believed)

    def add(self, load: StepLoad, step_s: float) -> None:
        """Takes in what a step has taken, whose load changes no more."""
        if step_s > 0:
            self._new.append((load, step_s))

    @property
    def weights(self) -> StepWeights:
        """As of now."""
        if self._new:
            while self._new:
                load, step_s = self._new.popleft()
                self._take_in(load.figures, step_s)
            self._weights = self._fit()
        return self._weights

    def step_s(self, load: StepLoad) -> float:
        """Seconds of such a step."""
        return self.weights.of_step(load)

    def expected_s(self, load: StepLoad) -> float:
        """Seconds of such a step; inf where it holds far more of something than any step did."""
        weights = self.weights  # takes new steps in
        is_known = all(figure <= FAR * most for figure, most in zip(load.figures, self._most, strict=True))
        return weights.of_step(load) if is_known else inf

    def chunk_s(self, start: int, num_tokens: int, *, is_first: bool) -> float:
        """What a chunk adds to a step, which has others already unless it is the first."""
        return self.weights.of_chunk(start, num_tokens, is_first=is_first)

    def num_tokens_within(self, seconds: float, start: int, *, is_first: bool) -> float:
        """The longest chunk that adds no more than this to a step; inf where any would do."""
        *_, once_s, token_s, pair_s, _ = self.weights
        left_s, each_s = seconds - is_first * once_s, token_s + start * pair_s
        if not 0 < left_s < inf:
            return max(0.0, left_s)
        root = sqrt(each_s * each_s + 2 * pair_s * left_s)
        return 2 * left_s / (each_s + root) if root > 0 else inf

    @property
    def num_tokens_worth_it(self) -> float:
        """Of a first chunk whose tokens take as long as the chunk would without them; inf where tokens cost nothing."""
        *_, once_s, token_s, _, _ = self.weights
        return once_s / token_s if token_s > 0 else inf

    def _take_in(self, figures: tuple[float, ...], step_s: float) -> None:
        self._most = list(map(max, self._most, figures))
        shares = [figure / step_s for figure in figures]
        for i, (row, share) in enumerate(zip(self._products, shares, strict=True)):
            self._products[i] = [KEPT * old + share * other for old, other in zip(row, shares[i:], strict=True)]
        self._sums = [KEPT * old + share for old, share in zip(self._sums, shares, strict=True)]

    def _fit(self) -> StepWeights:
        """Each weight as it was believed to be as far as steps tell nothing of it. Those that would be below 0 are 0,
        and the others explain the steps without them."""
        sizes = [sqrt(row[0]) or 1.0 for row in self._products]
        weights, places = [0.0] * NUM_WEIGHTS, list(range(NUM_WEIGHTS))
        while places:
            found = self._fit_of(places, sizes)
            if min(found) >= 0:
                for place, weight in zip(places, found, strict=True):
                    weights[place] = weight / sizes[place]
                break
            places = [place for place, weight in zip(places, found, strict=True) if weight >= 0]
        return StepWeights(*weights)

    def _fit_of(self, places: list[int], sizes: list[float]) -> list[float]:
        """Of these figures alone, times their sizes."""
        size = len(places)
        matrix = [[0.0] * size for _ in places]
        for row, i in enumerate(places):
            products, own = self._products[i], sizes[i]
            for column in range(row, size):
                j = places[column]
                matrix[row][column] = matrix[column][row] = products[j - i] / (own * sizes[j])
        right = [self._sums[i] / sizes[i] + TRUST[i] * self._believed[i] * sizes[i] for i in places]
        for row, i in enumerate(places):
            matrix[row][row] += TRUST[i]
        return _solve(matrix, right)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of linear equations with a positive definite matrix, both of which are used up."""
    size = len(right)
    for i, pivot in enumerate(matrix):
        behind = range(i + 1, size)
        for j in behind:
            row = matrix[j]
            factor = row[i] / pivot[i]
            for k in behind:
                row[k] -= factor * pivot[k]
            right[j] -= factor * right[i]
    for i in reversed(range(size)):
        row = matrix[i]
        right[i] = (right[i] - sum([row[j] * right[j] for j in range(i + 1, size)])) / row[i]
    return right
