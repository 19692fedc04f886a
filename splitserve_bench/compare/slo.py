"""What makes a request good: the same limits for all, or multiples of what the request takes while nothing else runs.

Relative limits are Splitwise's: slowdowns against the same request alone on a reference system. The reference is the
colocated cluster with one node on all cores, whoever is judged. A request's limit on TTFT grows with its prompt, as
its unloaded TTFT does; those on TPOT are the same for all; those on E2EL are multiples of both together. Unlike
Splitwise's, they are limits of single requests, a share of which must meet all of them: that is DistServe's attainment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from splitserve_bench.compare.unloaded import Unloaded
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.metrics import Limits, missed, parse_pairs
from splitserve_bench.serve.misses import Misses, count_misses, is_complete
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.spread import effective_size

MS: Final = 1e3


class Slo(Protocol):
    """A service level objective."""

    def limits_of(self, planned: PlannedRequest) -> Limits:
        """What this request may take."""
        ...

    def __str__(self) -> str:
        """In a few words."""
        ...


@dataclass(frozen=True, slots=True)
class Scales:
    """Multiples of what a request takes alone; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __str__(self) -> str:
        scales = {"TTFT": self.ttft, "TPOT": self.tpot, "E2EL": self.e2el}
        return ", ".join(f"{name} ≤ {scale:g} x" for name, scale in scales.items() if scale is not None)


DEFAULT_SCALES: Final = Scales(ttft=6.0, tpot=1.5)  # Splitwise's for the 99th and the 90th percentile


@dataclass(frozen=True, slots=True)
class FixedSlo:
    """The same limits for every request."""

    limits: Limits

    def limits_of(self, planned: PlannedRequest) -> Limits:
        return self.limits

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {seconds * MS:g} ms" for name, seconds in self.limits.by_name().items())


@dataclass(frozen=True, slots=True)
class RelativeSlo:
    """Limits relative to the unloaded reference."""

    scales: Scales
    unloaded: Unloaded

    def limits_of(self, planned: PlannedRequest) -> Limits:
        return Limits(
            ttft_s=_scaled(self.scales.ttft, self.unloaded.ttft_s(len(planned.prompt))),
            tpot_s=_scaled(self.scales.tpot, self.unloaded.tpot_s),
            e2el_s=_scaled(self.scales.e2el, self.unloaded.answer_s(planned)),
        )

    def __str__(self) -> str:
        base_ms, token_ms = self.unloaded.ttft_base_s * MS, self.unloaded.ttft_s_per_token * MS
        bases = {
            "TTFT": (self.scales.ttft, f" ({base_ms:.3g} ms + {token_ms:.3g} ms a prompt token)"),
            "TPOT": (self.scales.tpot, f" ({self.unloaded.tpot_s * MS:.3g} ms)"),
            "E2EL": (self.scales.e2el, ""),
        }
        parts = [f"{name} ≤ {scale:g} x unloaded{base}" for name, (scale, base) in bases.items() if scale is not None]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Which of the offered requests were good, in the order of sending, and why the others were not. num_effective
    independent requests would say as much (spread.py)."""

    are_good: tuple[bool, ...]
    num_effective: float
    misses: Misses

    @property
    def num_good(self) -> int:
        return sum(self.are_good)

    @property
    def num_total(self) -> int:
        return len(self.are_good)

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_total


def judge(slo: Slo, pairs: Sequence[tuple[PlannedRequest, Outcome]]) -> Judgement:
    """Every offered request with what became of it, in the order of sending, each by limits of its own."""
    judged = [(outcome, missed(outcome, slo.limits_of(planned))) for planned, outcome in pairs]
    are_good = tuple(is_complete(outcome) and not names for outcome, names in judged)
    return Judgement(are_good, effective_size(are_good), count_misses(judged))


def parse_scales(words: Sequence[str]) -> Scales:
    """Scales from words such as `ttft:6 tpot:1.5`, each word one or several such pairs; a later pair of the same name
    wins. Anything else is a BenchError."""
    return Scales(**parse_pairs(words, "a scale is NAME:FACTOR", _factor))


def _factor(text: str, pair: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise BenchError(f"{pair!r} has no factor") from error
    if not (value > 0 and math.isfinite(value)):
        raise BenchError(f"a factor must be above 0, not {pair!r}")
    return value


def _scaled(scale: float | None, unloaded_s: float) -> float | None:
    return None if scale is None else scale * unloaded_s
