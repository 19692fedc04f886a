"""What one request costs while nothing else runs: TTFT by prompt length, and TPOT. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from splitserve_bench.serve.records import PlannedRequest

QUANTILES: Final = (0.0, 0.5, 0.9, 1.0)  # of the prompt lengths
REPEATS: Final = 3  # requests of about each length


@dataclass(frozen=True, slots=True)
class Unloaded:
    """TTFT is ttft_base_s + ttft_s_per_token times the tokens of the prompt."""

    ttft_base_s: float
    ttft_s_per_token: float
    tpot_s: float

    def ttft_s(self, num_prompt_tokens: int) -> float:
        return self.ttft_base_s + self.ttft_s_per_token * num_prompt_tokens

    def answer_s(self, planned: PlannedRequest) -> float:
        """From the request to the last token."""
        return self.ttft_s(len(planned.prompt)) + self.tpot_s * (planned.output_tokens - 1)


def sample(planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """REPEATS different requests of about each of some prompt lengths, all to be sent as soon as the one before it has
    ended; answers of several tokens where there are such."""
    candidates = [each for each in planned if each.output_tokens > 1] or list(planned)
    ordered = sorted(candidates, key=lambda each: len(each.prompt))
    last = len(ordered) - REPEATS
    chosen: dict[int, PlannedRequest] = {}
    for quantile in QUANTILES:
        start = max(0, min(last, round(quantile * (len(ordered) - 1))))
        chosen |= {each.index: each for each in ordered[start : start + REPEATS]}
    return [replace(each, index=index, send_at_s=0.0) for index, each in enumerate(chosen.values())]


def fit_unloaded(ttfts: Iterable[tuple[int, float]], tpots_s: Sequence[float]) -> Unloaded:
    """The line through pairs of prompt tokens and TTFT, one at least, that has the least relative errors; neither its
    base nor its slope is below 0. The median of the TPOTs, or 0 without any. TTFTs are above 0."""
    base_s, s_per_token = _line(list(ttfts))
    return Unloaded(base_s, s_per_token, statistics.median(tpots_s) if tpots_s else 0.0)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope by least squares, each point weighted by the inverse square of its seconds."""
    weights = [1 / seconds**2 for _, seconds in points]
    mean_tokens = _mean(weights, [tokens for tokens, _ in points])
    mean_s = _mean(weights, [seconds for _, seconds in points])
    spread = _mean(weights, [(tokens - mean_tokens) ** 2 for tokens, _ in points])
    if spread == 0:
        return mean_s, 0.0
    together = _mean(weights, [(tokens - mean_tokens) * (seconds - mean_s) for tokens, seconds in points])
    slope = max(0.0, together / spread)
    base_s = mean_s - slope * mean_tokens
    if base_s >= 0:
        return base_s, slope
    squares = _mean(weights, [tokens**2 for tokens, _ in points])
    return 0.0, _mean(weights, [tokens * seconds for tokens, seconds in points]) / squares


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
