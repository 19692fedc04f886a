"""Estimate the duration of a node's next step and its compute rates from recent steps. No I/O, no clock.

Rates of prefill and decode are measured separately, also where one step does both: in a mixed step, the usual time of a
decode step with as many sequences is not counted as prefill.

The model of a step, in seconds: a constant, plus a weight per sequence and per cached token, plus a constant for
several sequences (a single sequence often runs other, faster code). Prefill chunks add a constant, a weight per token,
and a weight per pair of a token and one before it: a chunk of n tokens after p takes a + b·n + c·(p·n + n²/2). The
seven weights are a least-squares fit of relative errors that forgets old steps.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Final, NamedTuple

NUM_RECENT: Final = 64  # steps of each kind
MIN_TELLING_TOKENS: Final = 16  # with fewer prompt tokens, a step's fixed cost hides their cost
START_TOKENS: Final = 256  # weight, in tokens, of the rate measured at the start


class _Prefilled(NamedTuple):
    num_tokens: int
    num_decoding: int
    step_s: float


class StepRates:
    """Measure rates over recent steps; the last 64 steps of each kind count."""

    def __init__(self, start_tokens_per_s: float = 0.0) -> None:
        """Start without steps, with a rate in prompt tokens/s that was measured before the first step; 0: unknown."""
        self._decoded: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)  # requests, seconds
        self._prefilled: deque[_Prefilled] = deque(maxlen=NUM_RECENT)
        self._lone_s: deque[float] = deque(maxlen=NUM_RECENT)  # of steps that decoded one request
        self._small: deque[_Prefilled] = deque(maxlen=NUM_RECENT)  # prefill steps with too few tokens to be informative
        if start_tokens_per_s > 0:
            self._prefilled.append(_Prefilled(START_TOKENS, 0, START_TOKENS / start_tokens_per_s))

    def add(self, num_prompt_tokens: int, num_decoding: int, step_s: float) -> None:
        """Add a step of `step_s` seconds that computed prompt tokens, and one token each of `num_decoding` requests."""
        if num_prompt_tokens:
            prefilled = self._prefilled if num_prompt_tokens >= MIN_TELLING_TOKENS else self._small
            prefilled.append(_Prefilled(num_prompt_tokens, num_decoding, step_s))
        elif num_decoding:
            self._decoded.append((num_decoding, step_s))
            if num_decoding == 1:
                self._lone_s.append(step_s)

    @property
    def decode_step_s(self) -> float:
        """Return the median seconds of the recent decode-only steps; 0 before the first."""
        return statistics.median([step_s for _, step_s in self._decoded]) if self._decoded else 0.0

    @property
    def lone_step_s(self) -> float:
        """Return the median seconds of the last (at most 64) decode-only steps of a single request, however old.

        Until there is one, returns the median of the recent decode-only steps with the fewest requests; 0 before the
        first.
        """
        return statistics.median(self._lone_s) if self._lone_s else self._usual_decode_s({1})[1]

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the prompt tokens/s of steps that only prefill; 0: unknown.

        This is the median over the recent steps, weighted by their prompt tokens. Steps of fewer than 16 tokens count
        only while there are no others.
        """
        return self._rate(self._prefilled) or self._rate(self._small)

    def _rate(self, steps: Sequence[_Prefilled]) -> float:
        weighted: list[tuple[float, int]] = []
        usual_s = self._usual_decode_s({step.num_decoding for step in steps})
        for step in steps:
            prefill_s = step.step_s - usual_s[step.num_decoding]
            if prefill_s > 0:  # otherwise the noise exceeds the difference
                weighted.append((step.num_tokens / prefill_s, step.num_tokens))
        return _weighted_median(weighted)

    def _usual_decode_s(self, numbers: Collection[int]) -> dict[int, float]:
        """Return, for each number of requests, the median seconds of the decode steps with the nearest number; 0 if
        unknown.
        """
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
    """Return the least value that, with all smaller ones, has half of the weight; 0 without values."""
    half, sum_so_far = sum(weight for _, weight in weighted) / 2, 0
    for value, weight in sorted(weighted):
        sum_so_far += weight
        if sum_so_far >= half:
            return value
    return 0.0


MEMORY: Final = 256  # steps, after which a step weighs a third
KEPT: Final = 1 - 1 / MEMORY
NUM_WEIGHTS: Final = 7
# Weight of the prior against one certain measurement. Least for the constant: while all steps are alike, the constant
# explains their time, not the sequences or cached tokens, which later steps may have more of.
TRUST: Final = (1e-6, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4)
FAR: Final = 4.0  # times the most of any step: beyond that, the estimate is a guess


@dataclass(slots=True)
class StepLoad:
    """Describe the load of a step: sequences that decode one token each, and prefill chunks.

    `num_cached` counts the tokens before those of the sequences, in all. `num_pairs` counts the pairs of a token of a
    chunk and one before it.
    """

    num_sequences: int = 0
    num_cached: int = 0
    num_prompt_tokens: int = 0
    num_pairs: float = 0.0

    def add_chunk(self, start: int, num_tokens: int) -> None:
        """Add a prefill chunk of `num_tokens` tokens of a prompt whose first `start` tokens are computed."""
        self.num_prompt_tokens += num_tokens
        self.num_pairs += num_pairs(start, num_tokens)

    @property
    def figures(self) -> tuple[float, ...]:
        """Return the load as the seven terms that StepWeights multiplies."""
        has_chunks = self.num_prompt_tokens > 0
        has_several = self.num_sequences > 1
        return 1, self.num_sequences, self.num_cached, has_chunks, self.num_prompt_tokens, self.num_pairs, has_several


def num_pairs(start: int, num_tokens: int) -> float:
    return num_tokens * (start + num_tokens / 2)


class StepWeights(NamedTuple):
    """Seconds per unit of each of StepLoad.figures, none below 0."""

    step_s: float = 0.0
    answer_s: float = 0.0
    cached_s: float = 0.0
    chunks_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    several_s: float = 0.0

    def of_step(self, load: StepLoad) -> float:
        """Return the seconds that a step with this load takes."""
        seconds = self.step_s + self.answer_s * load.num_sequences + self.cached_s * load.num_cached
        if load.num_prompt_tokens:
            seconds = seconds + self.chunks_s + self.token_s * load.num_prompt_tokens + self.pair_s * load.num_pairs
        return seconds + self.several_s if load.num_sequences > 1 else seconds

    def num_sequences_within(self, seconds: float, num_cached: float) -> float:
        """Return the most sequences whose decode step takes at most `seconds`; inf if any number does.

        Each sequence has `num_cached` tokens before it.
        """
        each_s, left_s = self.answer_s + num_cached * self.cached_s, seconds - self.step_s
        if left_s < 2 * each_s + self.several_s:
            return float(left_s >= each_s)
        return (left_s - self.several_s) // each_s if each_s > 0 and left_s < inf else inf

    def of_chunk(self, start: int, num_tokens: int, *, is_first: bool) -> float:
        """Return the seconds that a chunk of `num_tokens` tokens, behind `start` tokens of its prompt, adds to a step.

        `is_first`: no other chunk is in the step yet, so `chunks_s` is added.
        """
        return is_first * self.chunks_s + num_tokens * self.token_s + num_pairs(start, num_tokens) * self.pair_s

    def of_prompt(self, start: int, num_tokens: int, most_tokens: int, bare_s: float) -> float:
        """Return the seconds of all steps that prefill `num_tokens` tokens behind `start`, at most `most_tokens` each.

        A step without prefill takes `bare_s` seconds.
        """
        num_steps = ceil(num_tokens / most_tokens)
        return num_steps * (bare_s + self.chunks_s) + self.of_chunk(start, num_tokens, is_first=False)


class StepCosts:
    """Learn a model of a step's duration from steps. Adding a step is cheap: the fit is computed on request."""

    def __init__(self, start_tokens_per_s: float = 0.0) -> None:
        """Start without steps, with a rate in prompt tokens/s that was measured before the first step; 0: unknown."""
        self._believed = [0.0] * NUM_WEIGHTS
        self._believed[4] = 1 / start_tokens_per_s if start_tokens_per_s > 0 else 0.0
        self._new: deque[tuple[StepLoad, float]] = deque(maxlen=MEMORY)
        # Sums of products of each factor (over seconds) with itself and those after it.
        self._products = [[0.0] * (NUM_WEIGHTS - i) for i in range(NUM_WEIGHTS)]
        self._sums = [0.0] * NUM_WEIGHTS
        self._most = [0.0] * NUM_WEIGHTS  # the most of each factor in any step
        self._weights = StepWeights(*self._believed)

    def add(self, load: StepLoad, step_s: float) -> None:
        """Add a step's load and its duration in seconds. The caller must not change the load afterwards."""
        if step_s > 0:
            self._new.append((load, step_s))

    @property
    def weights(self) -> StepWeights:
        """Return the weights that fit the steps added until now; computed anew if steps were added."""
        if self._new:
            while self._new:
                load, step_s = self._new.popleft()
                self._take_in(load.figures, step_s)
            self._weights = self._fit()
        return self._weights

    def step_s(self, load: StepLoad) -> float:
        """Return the expected seconds of a step with this load."""
        return self.weights.of_step(load)

    def expected_s(self, load: StepLoad) -> float:
        """Return the expected seconds of a step with this load; inf if the load far exceeds that of every step."""
        weights = self.weights  # adds pending steps
        is_known = all(figure <= FAR * most for figure, most in zip(load.figures, self._most, strict=True))
        return weights.of_step(load) if is_known else inf

    def chunk_s(self, start: int, num_tokens: int, *, is_first: bool) -> float:
        """Return the seconds that a chunk of `num_tokens`, behind `start` tokens of its prompt, adds to a step.

        `is_first`: the step has no other chunk.
        """
        return self.weights.of_chunk(start, num_tokens, is_first=is_first)

    def num_tokens_within(self, seconds: float, start: int, *, is_first: bool) -> float:
        """Return the longest chunk, in tokens, that adds at most `seconds` to a step; inf if any length does.

        The chunk is behind `start` tokens of its prompt. `is_first`: the step has no other chunk.
        """
        *_, once_s, token_s, pair_s, _ = self.weights
        left_s, each_s = seconds - is_first * once_s, token_s + start * pair_s
        if not 0 < left_s < inf:
            return max(0.0, left_s)
        root = sqrt(each_s * each_s + 2 * pair_s * left_s)
        return 2 * left_s / (each_s + root) if root > 0 else inf

    @property
    def num_tokens_worth_it(self) -> float:
        """Return the length, in tokens, of a step's first chunk at which its tokens take as long as its fixed cost.

        inf if tokens cost nothing.
        """
        *_, once_s, token_s, _, _ = self.weights
        return once_s / token_s if token_s > 0 else inf

    def _take_in(self, figures: tuple[float, ...], step_s: float) -> None:
        self._most = list(map(max, self._most, figures))
        shares = [figure / step_s for figure in figures]
        for i, (row, share) in enumerate(zip(self._products, shares, strict=True)):
            self._products[i] = [KEPT * old + share * other for old, other in zip(row, shares[i:], strict=True)]
        self._sums = [KEPT * old + share for old, share in zip(self._sums, shares, strict=True)]

    def _fit(self) -> StepWeights:
        """Fit the weights. A weight that the steps do not determine keeps its prior; weights that would be negative are
        0, and the others are fitted without them.
        """
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
        """Fit the weights of these factors alone, scaled by their sizes."""
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
    """Solve linear equations with a positive definite matrix; overwrites both arguments."""
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
