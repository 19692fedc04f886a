"""Decide whether a request is good: by limits for all, or by multiples of what it takes while nothing else runs.

Relative limits are Splitwise's: slowdowns against the same request alone on a reference system. The reference is the
colocated cluster with one node on all cores, whichever contender is judged. A request's limit on TTFT grows with its
prompt, as its unloaded TTFT does; those on TPOT are the same for all; those on E2EL are multiples of both together.
Unlike Splitwise's, they are limits of single requests, a share of which must meet all of them: that is DistServe's
attainment.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.control.slo import MS
from splitserve_bench.serve.metrics import Judged, Limits, Summary, parse_pairs, summarize_judged
from splitserve_bench.serve.records import Outcome, PlannedRequest

QUANTILES: Final = (0.0, 0.5, 0.9, 1.0)  # of the prompt lengths
REPEATS: Final = 3  # requests of about each length


@dataclass(frozen=True, slots=True)
class Scales:
    """Multiples of the times that a request takes alone, which are its limits; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __str__(self) -> str:
        scales = {"TTFT": self.ttft, "TPOT": self.tpot, "E2EL": self.e2el}
        return ", ".join(f"{name} ≤ {scale:g} x" for name, scale in scales.items() if scale is not None)


DEFAULT_SCALES: Final = Scales(ttft=6.0, tpot=1.5)  # Splitwise's for the 99th and the 90th percentile


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The times of a request while nothing else runs.

    TTFT is ttft_base_s + ttft_s_per_token times its prompt tokens.
    """

    ttft_base_s: float
    ttft_s_per_token: float
    tpot_s: float

    def ttft_s(self, num_prompt_tokens: int) -> float:
        """Return the seconds to the first token of a request with so many prompt tokens."""
        return self.ttft_base_s + self.ttft_s_per_token * num_prompt_tokens

    def answer_s(self, planned: PlannedRequest) -> float:
        """Return the seconds from sending a request to its last token."""
        return self.ttft_s(len(planned.prompt)) + self.tpot_s * (planned.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: equal limits for all requests, or multiples of their times on an idle reference."""

    criterion: Limits | Scales
    unloaded: Unloaded | None = None

    def limits_of(self, planned: PlannedRequest) -> Limits:
        """Return this request's limits in seconds: those of all, or multiples of its times on an idle reference."""
        if isinstance(self.criterion, Limits):
            return self.criterion
        assert self.unloaded is not None
        return Limits(
            ttft_s=_scaled(self.criterion.ttft, self.unloaded.ttft_s(len(planned.prompt))),
            tpot_s=_scaled(self.criterion.tpot, self.unloaded.tpot_s),
            e2el_s=_scaled(self.criterion.e2el, self.unloaded.answer_s(planned)),
        )

    def __str__(self) -> str:
        if isinstance(self.criterion, Limits):
            return str(self.criterion)
        assert self.unloaded is not None
        base_ms, token_ms = self.unloaded.ttft_base_s * MS, self.unloaded.ttft_s_per_token * MS
        bases = {
            "TTFT": (self.criterion.ttft, f" ({base_ms:.3g} ms + {token_ms:.3g} ms a prompt token)"),
            "TPOT": (self.criterion.tpot, f" ({self.unloaded.tpot_s * MS:.3g} ms)"),
            "E2EL": (self.criterion.e2el, ""),
        }
        parts = [f"{name} ≤ {scale:g} x unloaded{base}" for name, (scale, base) in bases.items() if scale is not None]
        return ", ".join(parts)


def judge(slo: Slo, pairs: Sequence[tuple[PlannedRequest, Outcome]]) -> Summary:
    """Return the summary of all requests with their outcomes, each judged by limits of its own."""
    return summarize_judged([Judged(outcome, slo.limits_of(planned)) for planned, outcome in pairs])


def parse_scales(words: Sequence[str]) -> Scales:
    """Return the scales that words such as `ttft:6 tpot:1.5` mean, each word one or several pairs.

    A later pair of the same name replaces an earlier one. Raises BenchError for a text of another form.
    """
    return Scales(**parse_pairs(words, "a scale is NAME:FACTOR, above 0", lambda value: value > 0))


def sample(planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Return REPEATS requests of about each of some prompt lengths (QUANTILES), to be sent one after the other.

    Requests with outputs of several tokens are taken where there are any.
    """
    candidates = [each for each in planned if each.output_tokens > 1] or list(planned)
    ordered = sorted(candidates, key=lambda each: len(each.prompt))
    last = len(ordered) - REPEATS
    chosen: dict[int, PlannedRequest] = {}
    for quantile in QUANTILES:
        start = max(0, min(last, round(quantile * (len(ordered) - 1))))
        chosen |= {each.index: each for each in ordered[start : start + REPEATS]}
    return [replace(each, index=index, send_at_s=0.0) for index, each in enumerate(chosen.values())]


def fit_unloaded(ttfts: Iterable[tuple[int, float]], tpots_s: Sequence[float]) -> Unloaded:
    """Return the times of a request alone, from pairs of prompt tokens and TTFT, at least one, and from TPOTs.

    The line through the pairs has the least relative errors, and neither its base nor its slope is below 0. TPOT is the
    median, or 0 without any. TTFTs must be above 0.
    """
    base_s, s_per_token = _line(list(ttfts))
    return Unloaded(base_s, s_per_token, statistics.median(tpots_s) if tpots_s else 0.0)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return base and slope by least squares, each point weighted by the inverse square of its seconds."""
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


def _scaled(scale: float | None, unloaded_s: float) -> float | None:
    return None if scale is None else scale * unloaded_s
