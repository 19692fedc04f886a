"""Why requests missed their limits: which limit, or which end, and which phase of theirs was the long one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from splitserve_bench.serve.records import Outcome

# By the field names of answers.Timeline: the first token comes at the end of the prefill.
FIRST_TOKEN_PHASES: Final = ("prefill_queue_s", "prefill_s")
LATER_PHASES: Final = ("credit_wait_s", "transfer_s", "decode_queue_s", "decode_s")
MOST_ERRORS: Final = 5  # that are told
PHASE_FIELDS: Final = FIRST_TOKEN_PHASES + LATER_PHASES


@dataclass(frozen=True, slots=True)
class Misses:
    """How many requests missed, by cause: a complete answer may miss several limits, a failed or refused request
    counts there alone.

    ttft_phases and tpot_phases are how many of ttft and tpot had which phase as the one that took most beyond the
    median of the good requests (beyond 0 when none was good), most frequent first, of the requests with a timeline.
    For TTFT those are the phases up to the first token. For TPOT they are the later ones, their seconds divided by
    the tokens after the first, so that a long answer is none by itself.
    """

    ttft: int
    tpot: int
    e2el: int
    failed: int
    refused: int
    ttft_phases: Mapping[str, int]
    tpot_phases: Mapping[str, int]


def is_complete(outcome: Outcome) -> bool:
    """Neither failed nor turned away."""
    return not outcome.error and not outcome.is_refused


def frequent_errors(outcomes: Sequence[Outcome]) -> list[tuple[str, int]]:
    """The words of failed and refused requests with how many had them, the most frequent MOST_ERRORS of them."""
    return Counter(outcome.error for outcome in outcomes if not is_complete(outcome)).most_common(MOST_ERRORS)


def count_misses(judged: Sequence[tuple[Outcome, tuple[str, ...]]]) -> Misses:
    """`judged` are all requests with the names of the limits that they missed; those of incomplete ones are ignored."""
    complete = [(outcome, names) for outcome, names in judged if is_complete(outcome)]
    num_refused = sum(outcome.is_refused for outcome, _ in judged)
    limits = Counter(name for _, names in complete for name in names)
    return Misses(
        ttft=limits["ttft"],
        tpot=limits["tpot"],
        e2el=limits["e2el"],
        failed=len(judged) - len(complete) - num_refused,
        refused=num_refused,
        ttft_phases=_longest_phases(complete, "ttft", FIRST_TOKEN_PHASES),
        tpot_phases=_longest_phases(complete, "tpot", LATER_PHASES),
    )


def phase_means(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean seconds by phase of the requests with a timeline; empty when there are none."""
    timelines = [outcome.timeline for outcome in outcomes if outcome.timeline is not None]
    return {name: fmean(each.get(name, 0.0) for each in timelines) for name in PHASE_FIELDS} if timelines else {}


def _longest_phases(
    complete: Sequence[tuple[Outcome, tuple[str, ...]]], limit: str, phases: tuple[str, ...]
) -> dict[str, int]:
    good: list[dict[str, float]] = []
    bad: list[dict[str, float]] = []
    for outcome, names in complete:
        if outcome.timeline is None:
            continue
        parts = 1 if limit == "ttft" else max(1, outcome.num_output_tokens - 1)
        seconds = {name: outcome.timeline.get(name, 0.0) / parts for name in phases}
        if limit in names:
            bad.append(seconds)
        elif not names:
            good.append(seconds)
    usual = {name: median(each[name] for each in good) if good else 0.0 for name in phases}
    longest = Counter(_longest(seconds, usual) for seconds in bad)
    return dict(longest.most_common())


def _longest(seconds: Mapping[str, float], usual: Mapping[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name] - usual[name])
