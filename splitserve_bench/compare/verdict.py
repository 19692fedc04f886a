"""Say which contender wins, by how much, and what the others lose their requests to. Pure.

Contenders are compared by their knees, and request by request where they had the same ones: a heavy stretch of a load
is heavy for everybody, so shares of the same requests go up and down together, and their difference is known better
than either. Requests of one run are not independent: the differences, in the order of sending, count as fewer
independent ones.

Why a contender lost requests that another one kept is read from the decision on each, and from what the coordinator
expected of it: expected_ttft_s and the like in the timeline, for refused requests in the refusal. What a server does
not report is not known, and medians are over what is known.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias

from coordinator.control.slo import MS
from splitserve.commands.terminal import PHASE_NAMES
from splitserve_bench.compare.contenders import AUTO, COLOCATED, PEER, SPLIT
from splitserve_bench.compare.search import Probe, SearchResult, plain
from splitserve_bench.serve.metrics import (
    Judged,
    Limits,
    Misses,
    e2el_s,
    effective_size,
    missed,
    paired_interval,
    tpot_s,
    ttft_s,
)
from splitserve_bench.serve.records import Outcome

MIXED: Final = "its decode includes the prompts that are computed between those tokens"
POINTS: Final = 100

Kept: TypeAlias = Mapping[Probe, Sequence[bool]]  # which requests of a probe were good
Probes: TypeAlias = Mapping[Probe, Sequence[Judged]]  # of each the requests, in the order of sending
REFUSED: Final = "refused at arrival"
DEFERRED: Final = "deferred too long"
LATE: Final = "went behind all others (late)"
EXPECTED_LATE: Final = "begun although it was expected late"
QUEUE: Final = "prefill queue longer than expected"
PREFILL: Final = "prefill longer than expected"
ON_ITS_WAY: Final = "late between server and client"
DECODE: Final = "decode step longer than expected"
LENGTH: Final = "E2EL, which no server is told"
FAILED: Final = "failed"
DECISIONS: Final = (REFUSED, DEFERRED, LATE, EXPECTED_LATE, QUEUE, PREFILL, ON_ITS_WAY, DECODE, LENGTH, FAILED)
TTFT, TPOT, E2EL, NO_LIMIT = "TTFT", "TPOT", "E2EL", ""


# ---- knees ----


@dataclass(frozen=True, slots=True)
class Standing:
    """The result of one contender, and its misses at its lowest failing rate, None when no rate failed."""

    name: str
    kind: str
    result: SearchResult
    misses: Misses | None


def verdict(standings: Sequence[Standing]) -> list[str]:
    """Return the verdict as sentences. A difference counts when the intervals of the knees do not overlap.

    First the winner or that there is none; then splitting against colocation; our best against each peer; and what each
    contender loses its requests to.
    """
    ranked = sorted(standings, key=lambda each: each.result.best_rate or 0.0, reverse=True)
    sentences = [_winner(ranked)] if len(ranked) > 1 else []
    best = {kind: each for each in reversed(ranked) for kind in [each.kind]}
    if COLOCATED in best and SPLIT in best:
        sentences.append(_disaggregation(best[SPLIT], best[COLOCATED], sentences))
    if AUTO in best and (SPLIT in best or COLOCATED in best):
        static = [best[kind] for kind in (SPLIT, COLOCATED) if kind in best]
        sentences.append(_duel(best[AUTO], max(static, key=lambda each: each.result.best_rate or 0.0)))
    ours = next((each for each in ranked if each.kind != PEER), None)
    if ours is not None:
        sentences += [_duel(ours, each) for each in ranked if each.kind == PEER]
    return list(dict.fromkeys(sentences + [_loses_to(each) for each in ranked]))


def knee_of(result: SearchResult) -> str:
    """Return the interval of the knee in words, with "?" for an end that is not known."""
    low, high = result.knee_low, result.knee_high
    return f"{'0' if low is None else plain(low)} to {'?' if high is None else plain(high)}"


def is_above(one: SearchResult, other: SearchResult) -> bool:
    """Return whether the 95 % interval of the first knee lies wholly above that of the second.

    False if the ends to compare are not both known.
    """
    return one.knee_low is not None and other.knee_high is not None and one.knee_low > other.knee_high


def rate_of(result: SearchResult) -> str:
    """Return the best rate in words, with the interval of its knee."""
    interval = f"({knee_of(result)})"
    if result.best_rate is None:
        return f"no tested rate {interval}"
    above = "" if result.failing_rate is not None else "at least "
    return f"{above}{plain(result.best_rate)} req/s {interval}"


def main_cause(misses: Misses) -> str:
    """Return what most of the misses are due to, in words; "" without misses."""
    for name, _, phases in misses.causes:
        return ": ".join([name, *(PHASE_NAMES[phase] for phase in list(phases)[:1])])
    return ""


def _winner(ranked: Sequence[Standing]) -> str:
    first, *others = ranked
    close = [each.name for each in others if not is_above(first.result, each.result)]
    if first.result.best_rate is None:
        return "No winner: no contender reaches the goal at any tested rate."
    if close:
        return (
            f"No winner: {first.name} reaches {rate_of(first.result)}, and so may {_listed(close)}: intervals overlap."
        )
    return f"{first.name} wins: {_against(first, others[0])}."


def _disaggregation(split: Standing, colocated: Standing, said: Sequence[str]) -> str:
    """Compare the best split to the best colocated cluster, without the figures when a sentence in `said` has them."""
    sign, figures = _compared(split, colocated)
    outcome = f"Disaggregation {('neither wins nor loses', 'wins', 'loses')[sign]}"
    return f"{outcome}." if any(figures in sentence for sentence in said) else f"{outcome}: {figures}."


def _duel(one: Standing, other: Standing) -> str:
    sign, figures = _compared(one, other)
    if not sign:
        return f"{one.name} and {other.name} cannot be told apart: {figures}."
    return f"{one.name} {'beats' if sign > 0 else 'loses to'} {other.name}: {figures}."


def _compared(one: Standing, other: Standing) -> tuple[int, str]:
    """Return 1 when the first is surely better, -1 when the other is, else 0; and the figures, better ones first."""
    if is_above(one.result, other.result):
        return 1, _against(one, other)
    if is_above(other.result, one.result):
        return -1, _against(other, one)
    return 0, f"{_against(one, other)}; intervals overlap"


def _against(one: Standing, other: Standing) -> str:
    """Return the figures of two, with their ratio, and its least and greatest value where those are known."""
    first, second = one.result, other.result
    sentence = f"{one.name} {rate_of(first)}, {other.name} {rate_of(second)}"
    if first.best_rate and second.best_rate:
        sentence += f", {first.best_rate / second.best_rate:.2f}x"
        if first.knee_low and first.knee_high and second.knee_low and second.knee_high:
            sentence += f" ({first.knee_low / second.knee_high:.2f}x to {first.knee_high / second.knee_low:.2f}x)"
    return sentence


def _loses_to(standing: Standing) -> str:
    result, misses = standing.result, standing.misses
    if misses is None or result.failing_rate is None:
        return f"{standing.name} lost too few requests at every tested rate: its limit is not known."
    mixed = f"; {MIXED}" if standing.kind in (COLOCATED, AUTO) and "decode_s" in misses.tpot_phases else ""
    parts = []
    for name, count, phases in misses.causes:
        where = ", ".join(f"{PHASE_NAMES[phase]} {number}" for phase, number in phases.items())
        parts.append(f"{name} ({count}: {where})" if where else f"{name} ({count})")
    return f"{standing.name} loses its requests at {plain(result.failing_rate)} req/s to {_listed(parts)}{mixed}."


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


# ---- request by request ----


@dataclass(frozen=True, slots=True)
class Paired:
    """Two contenders at one rate, over the requests that both have had.

    As differences cluster, the pairs say as much as num_effective independent ones.
    """

    one: str
    other: str
    rate: float
    num_total: int
    num_one_alone: int  # good with `one` and not with `other`
    num_other_alone: int
    num_effective: float

    @property
    def difference(self) -> float:
        """Return the first contender's share of good requests minus the other's."""
        return (self.num_one_alone - self.num_other_alone) / self.num_total

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the difference."""
        return paired_interval(
            self.num_one_alone / self.num_total, self.num_other_alone / self.num_total, self.num_effective
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the difference and its interval."""
        return {**asdict(self), "difference": self.difference, "interval": list(self.interval)}


def pairs_of(everybody: Mapping[str, Kept]) -> list[Paired]:
    """Return every two contenders at every rate at which they had the same probes, ascending by rate.

    `everybody` has by name which requests of each probe were good.
    """
    pairs = [
        _paired(one, other, rate, everybody)
        for one, other in combinations(everybody, 2)
        for rate in {probe.rate for probe in everybody[one].keys() & everybody[other].keys()}
    ]
    return sorted(pairs, key=lambda pair: pair.rate)


def paired_sentences(pairs: Sequence[Paired]) -> Iterator[str]:
    """Yield for each rate a sentence that compares its best contender to each other one."""
    for rate in dict.fromkeys(pair.rate for pair in pairs):
        ahead: dict[str, dict[str, tuple[float, float, float]]] = {}  # of whom, by how much, at least and at most
        here = [pair for pair in pairs if pair.rate == rate]
        for pair in here:
            by, (low, high) = pair.difference, pair.interval
            ahead.setdefault(pair.one, {})[pair.other] = by, low, high
            ahead.setdefault(pair.other, {})[pair.one] = -by, -high, -low
        best = max(ahead, key=lambda name: sum(by for by, _, _ in ahead[name].values()))
        parts = [
            f"{'' if low > 0 else 'not surely '}more than {other} by {by * POINTS:.1f} points ({low * POINTS:+.1f} to "
            f"{high * POINTS:+.1f})"
            for other, (by, low, high) in sorted(ahead[best].items(), key=lambda each: each[1][0])
        ]
        sizes = sorted({pair.num_total for pair in here if best in (pair.one, pair.other)})
        count = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        yield f"At {plain(rate)} req/s, of the same {count} requests, {best} keeps {', '.join(parts)}."


def _paired(one: str, other: str, rate: float, everybody: Mapping[str, Kept]) -> Paired:
    probes = sorted(
        (probe for probe in everybody[one].keys() & everybody[other].keys() if probe.rate == rate),
        key=lambda probe: probe.seed,
    )
    series = [
        [first - second for first, second in zip(everybody[one][probe], everybody[other][probe], strict=True)]
        for probe in probes
    ]
    return Paired(
        one=one,
        other=other,
        rate=rate,
        num_total=sum(map(len, series)),
        num_one_alone=sum(each.count(1) for each in series),
        num_other_alone=sum(each.count(-1) for each in series),
        num_effective=sum(map(effective_size, series)),
    )


# ---- decisions ----


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost request: the decision and the limit by which it was lost, with the expected and the actual seconds.

    Seconds are None where they are not known. `margin_s` is the part of the limit that the coordinator wanted to keep
    free.
    """

    decision: str
    limit: str
    predicted_s: float | None = None
    actual_s: float | None = None
    margin_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """How many requests were lost by one decision and limit, with medians in milliseconds, None where none is known."""

    decision: str
    limit: str
    num_lost: int
    predicted_ms: float | None
    actual_ms: float | None
    margin_ms: float | None
    limit_ms: float | None


@dataclass(frozen=True, slots=True)
class Causes:
    """The requests at one rate that `loser` lost and `keeper` kept, by cause, the most frequent first."""

    loser: str
    keeper: str
    rate: float
    num_total: int
    num_lost: int
    causes: tuple[Cause, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def loss_of(outcome: Outcome, limits: Limits) -> Loss:
    """Return the decision by which a request was lost that was not good. The first that holds:

    - It failed: FAILED.
    - It was refused. By a node, as its time in the node's queue shows (prefill_queue_s): EXPECTED_LATE if its first
      token was expected after its limit when it was sent to the node, else QUEUE. After it was deferred: DEFERRED.
      Else: REFUSED. The figures of the latter two are those of its limit on TPOT if it has one and its first token was
      expected so early that the margin was left, else those of its limit on TTFT. The actual time is not known.
    - It missed its limit on TTFT. One that was marked late: LATE. One that was deferred for longer than the margin, and
      would have kept the limit without that: DEFERRED. One whose first token was expected after the limit:
      EXPECTED_LATE. Else what exceeded its expectation most: QUEUE (expected_ttft_s less expected_prefill_s), PREFILL
      (expected_prefill_s), or ON_ITS_WAY, the rest of the client's TTFT (0). Without expectations, what took most.
    - It missed its limit on TPOT: DECODE.
    - It missed its limit on E2EL: LENGTH.
    """
    if outcome.error and not outcome.is_refused:
        return Loss(FAILED, NO_LIMIT)
    if outcome.is_refused:
        return _refused(outcome, limits)
    names = missed(outcome, limits)
    if "ttft" in names:
        return _first_token(_late_by(outcome, limits), outcome, limits)
    if "tpot" in names:
        return _tokens(DECODE, outcome, limits)
    assert names, "it was not good"
    return Loss(LENGTH, E2EL, actual_s=e2el_s(outcome), limit_s=limits.e2el_s)


def causes_of(losses: Iterable[Loss]) -> tuple[Cause, ...]:
    """Return how often each decision and limit lost a request, most frequent first, equals in DECISIONS' order."""
    groups: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.decision, loss.limit), []).append(loss)
    causes = [
        Cause(
            *named,
            len(group),
            _median_ms(each.predicted_s for each in group),
            _median_ms(each.actual_s for each in group),
            _median_ms(each.margin_s for each in group),
            _median_ms(each.limit_s for each in group),
        )
        for named, group in groups.items()
    ]
    return tuple(sorted(causes, key=lambda each: (-each.num_lost, DECISIONS.index(each.decision), each.limit)))


def causes_between(loser: str, keeper: str, probes: Mapping[str, Probes]) -> Iterator[Causes]:
    """Yield for each rate, ascending, at which both had the same probes why `loser` lost requests that `keeper` kept.

    `probes` has by name each probe's outcomes with their limits.
    """
    own, others = probes[loser], probes[keeper]
    shared = sorted(own.keys() & others.keys(), key=lambda probe: (probe.rate, probe.seed))
    for rate in dict.fromkeys(probe.rate for probe in shared):
        pairs = [pair for probe in shared if probe.rate == rate for pair in zip(own[probe], others[probe], strict=True)]
        losses = [loss_of(*one) for one, other in pairs if other.is_good and not one.is_good]
        yield Causes(loser, keeper, rate, len(pairs), len(losses), causes_of(losses))


def _refused(outcome: Outcome, limits: Limits) -> Loss:
    if _reported(outcome, "prefill_queue_s"):
        return _first_token(EXPECTED_LATE if _is_expected_late(outcome, limits) else QUEUE, outcome, limits)
    decision = DEFERRED if _reported(outcome, "deferred_s") else REFUSED
    first_s, margin_s = _reported(outcome, "expected_ttft_s"), _margin_s(outcome) or 0.0
    is_early = first_s is not None and (limits.ttft_s is None or first_s + margin_s <= limits.ttft_s)
    is_by_tokens = limits.tpot_s is not None and (is_early or limits.ttft_s is None)
    figures = _tokens if is_by_tokens else _first_token
    return figures(decision, outcome, limits)


def _late_by(outcome: Outcome, limits: Limits) -> str:
    assert limits.ttft_s is not None, "it missed the limit"
    if _reported(outcome, "is_late"):
        return LATE
    first_s, deferred_s = ttft_s(outcome), _reported(outcome, "deferred_s") or 0.0
    margin_s = _margin_s(outcome) or 0.0
    if first_s is not None and deferred_s > margin_s and first_s - deferred_s <= limits.ttft_s:
        return DEFERRED
    if _is_expected_late(outcome, limits):
        return EXPECTED_LATE
    queue_s, prefill_s = (_reported(outcome, name) or 0.0 for name in ("prefill_queue_s", "prefill_s"))
    expected_s = _reported(outcome, "expected_prefill_s") or 0.0
    expected_queue_s = max(0.0, (_reported(outcome, "expected_ttft_s") or 0.0) - expected_s)
    beyond_s = {QUEUE: queue_s - expected_queue_s, PREFILL: prefill_s - expected_s}
    beyond_s[ON_ITS_WAY] = 0.0 if first_s is None else first_s - queue_s - prefill_s
    return max(beyond_s, key=lambda decision: beyond_s[decision])


def _is_expected_late(outcome: Outcome, limits: Limits) -> bool:
    first_s = _reported(outcome, "expected_ttft_s")
    return first_s is not None and limits.ttft_s is not None and first_s > limits.ttft_s


def _first_token(decision: str, outcome: Outcome, limits: Limits) -> Loss:
    predicted_s = _reported(outcome, "expected_ttft_s")
    return Loss(decision, TTFT, predicted_s, ttft_s(outcome), _margin_s(outcome), limits.ttft_s)


def _tokens(decision: str, outcome: Outcome, limits: Limits) -> Loss:
    return Loss(decision, TPOT, _reported(outcome, "expected_tpot_s"), tpot_s(outcome), None, limits.tpot_s)


def _reported(outcome: Outcome, name: str) -> float | None:
    """Return a figure of the server's timeline; None when it has none, or 0, which stands for not known."""
    return (outcome.timeline or {}).get(name) or None


def _margin_s(outcome: Outcome) -> float | None:
    """Return the margin of the limit on TTFT that the coordinator planned with; None where it planned nothing."""
    return (outcome.timeline or {}).get("ttft_margin_s") if _reported(outcome, "expected_ttft_s") else None


def _median_ms(values_s: Iterable[float | None]) -> float | None:
    known = [value_s for value_s in values_s if value_s is not None]
    return statistics.median(known) * MS if known else None
