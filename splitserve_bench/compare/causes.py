"""Why a contender lost requests that another one kept: the decision on each, and what was expected of it. Pure.

What was expected is what the server tells (expected_ttft_s and its like of the timeline, for refused requests in the
refusal); what is not told is not known, and medians are over what is known.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from splitserve_bench.compare.search import Probe
from splitserve_bench.compare.slo import MS
from splitserve_bench.serve.metrics import Limits, e2el_s, is_good, missed, tpot_s, ttft_s
from splitserve_bench.serve.records import Outcome

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


class Judged(NamedTuple):
    """What became of a request, and what it could take."""

    outcome: Outcome
    limits: Limits

    @property
    def is_good(self) -> bool:
        return is_good(self.outcome, self.limits)


Probes: TypeAlias = Mapping[Probe, Sequence[Judged]]  # of each the requests, in the order of sending


@dataclass(frozen=True, slots=True)
class Loss:
    """One request that was lost, by which decision and which limit; seconds are None where they are not known. margin_s
    was to be spared of the limit."""

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
    """Of the same requests at one rate: those that `loser` lost and `keeper` kept, the most frequent cause first."""

    loser: str
    keeper: str
    rate: float
    num_total: int
    num_lost: int
    causes: tuple[Cause, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def loss_of(outcome: Outcome, limits: Limits) -> Loss:
    """Return the decision by which a request was lost that was not good. The first that holds:

    - It failed: FAILED.
    - It was refused. By a node, as the time that it was there tells (prefill_queue_s): EXPECTED_LATE where its first
      token was expected after its limit when the node was given it, else QUEUE. After it was deferred: DEFERRED. Else:
      REFUSED. Of the latter two the figures are those of its limit on TPOT if it has one, and its first token was
      expected so early that the margin was left; else those of its limit on TTFT. What it would have taken is not
      known.
    - It missed its limit on TTFT. Late ones: LATE. One that was deferred for longer than the margin, and would have
      kept the limit without that: DEFERRED. One whose first token was expected after the limit: EXPECTED_LATE. Else
      what exceeded its expectation most: QUEUE (expected_ttft_s less expected_prefill_s), PREFILL (expected_prefill_s),
      or ON_ITS_WAY, the rest of the client's TTFT (0). Where nothing was expected that is what took most.
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
    """Return how often each decision and limit lost a request, the most frequent first, equals as in DECISIONS."""
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
    """For each rate, ascending, at which both had the same probes."""
    own, others = probes[loser], probes[keeper]
    shared = sorted(own.keys() & others.keys(), key=lambda probe: (probe.rate, probe.seed))
    for rate in dict.fromkeys(probe.rate for probe in shared):
        pairs = [pair for probe in shared if probe.rate == rate for pair in zip(own[probe], others[probe], strict=True)]
        losses = [loss_of(one.outcome, one.limits) for one, other in pairs if other.is_good and not one.is_good]
        yield Causes(loser, keeper, rate, len(pairs), len(losses), causes_of(losses))


def _refused(outcome: Outcome, limits: Limits) -> Loss:
    if _told(outcome, "prefill_queue_s"):
        return _first_token(EXPECTED_LATE if _is_expected_late(outcome, limits) else QUEUE, outcome, limits)
    decision = DEFERRED if _told(outcome, "deferred_s") else REFUSED
    first_s, margin_s = _told(outcome, "expected_ttft_s"), _margin_s(outcome) or 0.0
    is_early = first_s is not None and (limits.ttft_s is None or first_s + margin_s <= limits.ttft_s)
    is_by_tokens = limits.tpot_s is not None and (is_early or limits.ttft_s is None)
    figures = _tokens if is_by_tokens else _first_token
    return figures(decision, outcome, limits)


def _late_by(outcome: Outcome, limits: Limits) -> str:
    assert limits.ttft_s is not None, "it missed the limit"
    if _told(outcome, "is_late"):
        return LATE
    first_s, deferred_s = ttft_s(outcome), _told(outcome, "deferred_s") or 0.0
    margin_s = _margin_s(outcome) or 0.0
    if first_s is not None and deferred_s > margin_s and first_s - deferred_s <= limits.ttft_s:
        return DEFERRED
    if _is_expected_late(outcome, limits):
        return EXPECTED_LATE
    queue_s, prefill_s = (_told(outcome, name) or 0.0 for name in ("prefill_queue_s", "prefill_s"))
    expected_s = _told(outcome, "expected_prefill_s") or 0.0
    expected_queue_s = max(0.0, (_told(outcome, "expected_ttft_s") or 0.0) - expected_s)
    beyond_s = {QUEUE: queue_s - expected_queue_s, PREFILL: prefill_s - expected_s}
    beyond_s[ON_ITS_WAY] = 0.0 if first_s is None else first_s - queue_s - prefill_s
    return max(beyond_s, key=lambda decision: beyond_s[decision])


def _is_expected_late(outcome: Outcome, limits: Limits) -> bool:
    first_s = _told(outcome, "expected_ttft_s")
    return first_s is not None and limits.ttft_s is not None and first_s > limits.ttft_s


def _first_token(decision: str, outcome: Outcome, limits: Limits) -> Loss:
    predicted_s = _told(outcome, "expected_ttft_s")
    return Loss(decision, TTFT, predicted_s, ttft_s(outcome), _margin_s(outcome), limits.ttft_s)


def _tokens(decision: str, outcome: Outcome, limits: Limits) -> Loss:
    return Loss(decision, TPOT, _told(outcome, "expected_tpot_s"), tpot_s(outcome), None, limits.tpot_s)


def _told(outcome: Outcome, name: str) -> float | None:
    """None for what is not told, and for 0, which is what is not known."""
    return (outcome.timeline or {}).get(name) or None


def _margin_s(outcome: Outcome) -> float | None:
    """0 where nothing was to be spared, None where nothing was planned."""
    return (outcome.timeline or {}).get("ttft_margin_s") if _told(outcome, "expected_ttft_s") else None


def _median_ms(values_s: Iterable[float | None]) -> float | None:
    known = [value_s for value_s in values_s if value_s is not None]
    return statistics.median(known) * MS if known else None
