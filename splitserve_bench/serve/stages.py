"""Summarize the requests of a load in stages: by stage, by window of time, and in the stage with the highest rate."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from rich.console import Group

from splitserve.commands.terminal import plain_table
from splitserve_bench.report import known
from splitserve_bench.serve.arrivals import Stage
from splitserve_bench.serve.metrics import Distribution, Limits, e2el_s, in_ms, is_good, ttft_s
from splitserve_bench.serve.records import Outcome

WINDOW_S: Final = 5.0
COUNTS: Final = ("offered", "good", "good/s", "share", "late", "refused until", "refused", "failed")
MEANING: Final = (
    "requests count where they were due, and again where they came back; late ones are complete; refused until: turned "
    "away, and told when to come back"
)


@dataclass(frozen=True, slots=True)
class Window:
    """Counts of the requests that were due within a time. Each sending of a request counts once.

    It was good, complete but late, refused with or without a time to come back (`num_refused_until`, `num_refused`), or
    failed.
    """

    start_s: float
    end_s: float
    num_good: int
    num_late: int
    num_refused_until: int  # with a time to come back
    num_refused: int  # without one
    num_failed: int

    @property
    def num_offered(self) -> int:
        """Return the number of all requests that were due."""
        return self.num_admitted + self.num_refused_until + self.num_refused

    @property
    def num_admitted(self) -> int:
        """Return the number of requests that were not refused."""
        return self.num_good + self.num_late + self.num_failed

    @property
    def goodput_per_s(self) -> float:
        """Return the good requests a second."""
        return self.num_good / (self.end_s - self.start_s)

    @property
    def attainment(self) -> float | None:
        """Return the share of good requests among all that were due; None if none was."""
        return _ratio(self.num_good, self.num_offered)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and what is derived from them."""
        derived = ("num_offered", "num_admitted", "goodput_per_s", "attainment")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True, slots=True)
class StageFindings:
    """What became of a load in stages, by stage and by window.

    `highest` has for JSON the window of the highest rate, beside the goodput of the stage before, None where there is
    none. `back_s` is from its end until goodput is back; None when it does not come back, or nothing followed.
    """

    attainment: float  # from which on goodput is back
    stages: tuple[Stage, ...]
    by_stage: tuple[Window, ...]
    windows: tuple[Window, ...]
    highest: dict[str, Any]
    back_s: float | None

    @property
    def back_sentence(self) -> str:
        """Return in words how long after the highest stage goodput was back."""
        end_s = self.highest["end_s"]
        if not any(each.num_offered for each in self.by_stage if each.start_s >= end_s):
            return "Nothing was sent after the highest stage: whether goodput comes back is not known."
        wanted = f"{self.attainment:.0%} of the requests good"
        if self.back_s is None:
            seconds = self.stages[-1].end_s - end_s
            return f"Goodput was not back within the {seconds:g} s after the highest stage: {wanted}."
        if self.back_s == 0:
            return f"Goodput was back at once after the highest stage: {wanted}."
        return f"Goodput was back for what came {self.back_s:g} s after the highest stage and later: {wanted}."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of all findings."""
        by_stage = [
            {"times": stage.times, "rate_per_s": stage.rate_per_s, **window.to_json()}
            for stage, window in zip(self.stages, self.by_stage, strict=True)
        ]
        return {
            "attainment": self.attainment,
            "back_s": self.back_s,
            "highest": self.highest,
            "by_stage": by_stage,
            "windows": [window.to_json() for window in self.windows],
        }


def findings_of(
    outcomes: Sequence[Outcome], stages: Sequence[Stage], limits: Limits, attainment: float
) -> StageFindings:
    """Return what became of a load of these stages.

    Goodput is back when the share `attainment` of the requests is good.
    """
    start_s, end_s = highest_of(stages)
    last_s = stages[-1].end_s
    edges_s = [stages[0].start_s, *(stage.end_s for stage in stages)]
    return StageFindings(
        attainment=attainment,
        stages=tuple(stages),
        by_stage=tuple(_windows_between(outcomes, limits, edges_s)),
        windows=tuple(windows_of(outcomes, limits, 0.0, last_s)),
        highest=_highest(outcomes, stages, limits, start_s, end_s),
        back_s=back_after_s(windows_of(outcomes, limits, end_s, last_s), attainment),
    )


def highest_of(stages: Sequence[Stage]) -> tuple[float, float]:
    """Return start and end in seconds of the highest rate: to the end of the last stage that has it."""
    most = max(stage.rate_per_s for stage in stages)
    highest = [stage for stage in stages if stage.rate_per_s == most]
    return highest[0].start_s, highest[-1].end_s


def windows_of(outcomes: Sequence[Outcome], limits: Limits, start_s: float, end_s: float) -> list[Window]:
    """Return the counts of each WINDOW_S seconds from start to end; the last window may be shorter."""
    num_windows = math.ceil((end_s - start_s) / WINDOW_S)
    edges_s = [start_s + number * WINDOW_S for number in range(num_windows)] + [end_s]
    return _windows_between(outcomes, limits, edges_s)


def back_after_s(windows: Sequence[Window], attainment: float) -> float | None:
    """Return how many seconds after the start of these windows goodput is back; None when it never is.

    It is back from the first window on whose share of good requests is at least `attainment`, as is that of it and all
    later ones together.
    """
    num_good = num_offered = 0
    back_s = None
    for window in reversed(windows):
        num_good, num_offered = num_good + window.num_good, num_offered + window.num_offered
        if window.attainment is not None and min(window.attainment, num_good / num_offered) >= attainment:
            back_s = window.start_s - windows[0].start_s
    return back_s


def _highest(
    outcomes: Sequence[Outcome], stages: Sequence[Stage], limits: Limits, start_s: float, end_s: float
) -> dict[str, Any]:
    (due,) = _due(outcomes, [start_s, end_s])
    (window,) = _windows_between(outcomes, limits, [start_s, end_s])
    mean_per_s = best_per_s = None
    if before := next((stage for stage in stages if stage.end_s == start_s), None):
        (whole,) = _windows_between(outcomes, limits, [before.start_s, before.end_s])
        full = windows_of(outcomes, limits, before.start_s, before.end_s)[: int(before.seconds // WINDOW_S)]
        mean_per_s = whole.goodput_per_s  # of a stage that has no window of full length, its best one, too
        best_per_s = max((each.goodput_per_s for each in full), default=mean_per_s)
    refusals_s = Distribution(tuple(e2el_s(each) for each in due if each.is_refused))
    ttfts_s = Distribution(tuple(first_s for each in due if (first_s := ttft_s(each)) is not None))
    ttfts_ms = {"median": in_ms(ttfts_s.median), "p90": in_ms(ttfts_s.percentile(90)), "max": in_ms(ttfts_s.max)}
    return {
        **window.to_json(),
        "admitted_good": _ratio(window.num_good, window.num_admitted),
        "mean_before_per_s": mean_per_s,
        "best_before_per_s": best_per_s,
        "of_mean_before": _ratio(window.goodput_per_s, mean_per_s),
        "of_best_before": _ratio(window.goodput_per_s, best_per_s),
        "refusal_ms": {"median": in_ms(refusals_s.median), "max": in_ms(refusals_s.max)},
        "ttft_ms": ttfts_ms,
    }


def _windows_between(outcomes: Sequence[Outcome], limits: Limits, edges_s: Sequence[float]) -> list[Window]:
    """Return the counts between each edge and the next."""
    windows = []
    for due, (start_s, end_s) in zip(_due(outcomes, edges_s), pairwise(edges_s), strict=True):
        refused = [outcome for outcome in due if outcome.is_refused]
        num_failed = sum(bool(outcome.error) and not outcome.is_refused for outcome in due)
        num_good = sum(is_good(outcome, limits) for outcome in due)
        num_until = sum(outcome.retry_after_s is not None for outcome in refused)
        num_late = len(due) - num_good - len(refused) - num_failed
        windows.append(Window(start_s, end_s, num_good, num_late, num_until, len(refused) - num_until, num_failed))
    return windows


def _due(outcomes: Sequence[Outcome], edges_s: Sequence[float]) -> list[list[Outcome]]:
    """Return the requests that were due between each edge, itself included, and the next."""
    in_order = sorted(outcomes, key=lambda outcome: outcome.scheduled_s)
    places = [bisect_left(in_order, edge_s, key=lambda outcome: outcome.scheduled_s) for edge_s in edges_s]
    return [in_order[first:last] for first, last in pairwise(places)]


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


# ---- for people ----


def stages_view(findings: StageFindings) -> Group:
    """Return tables of stages and windows, how the highest stage went, and whether goodput came back."""
    stages = plain_table("stage", numbers=("req/s", *COUNTS))
    for stage, window in zip(findings.stages, findings.by_stage, strict=True):
        stages.add_row(_seconds(window.start_s, window.end_s), f"{stage.rate_per_s:.3g}", *_cells(window))
    windows = plain_table("window", numbers=COUNTS)
    for window in findings.windows:
        windows.add_row(_seconds(window.start_s, window.end_s), *_cells(window))
    lines = [*_highest_lines(findings.highest), f"[bold]{findings.back_sentence}[/]"]
    return Group(stages, "", windows, MEANING, "", *lines)


def _highest_lines(found: dict[str, Any]) -> list[str]:
    before = ""
    if found["mean_before_per_s"] is not None:
        before = (
            f": {known(found['of_mean_before'], '.0%')} of the {found['mean_before_per_s']:.2f} of the stage before, "
            f"{known(found['of_best_before'], '.0%')} of the {found['best_before_per_s']:.2f} of its best window"
        )
    num_refused = found["num_refused_until"] + found["num_refused"]
    lines = [
        f"highest stage, {_seconds(found['start_s'], found['end_s'])}: {found['goodput_per_s']:.2f} good requests/s"
        f"{before}",
        f"  admitted: {found['num_admitted']} of {found['num_offered']}, {known(found['admitted_good'], '.0%')} of "
        f"them good; TTFT {_listed_ms(found['ttft_ms'])}",
    ]
    if num_refused:
        lines.append(f"  refused: {num_refused}; from sending to refusal {_listed_ms(found['refusal_ms'])}")
    return lines


def _seconds(start_s: float, end_s: float) -> str:
    return f"{start_s:g} to {end_s:g} s"


def _cells(window: Window) -> list[str]:
    others = (window.num_late, window.num_refused_until, window.num_refused, window.num_failed)
    share = known(window.attainment, ".0%")
    return [str(window.num_offered), str(window.num_good), f"{window.goodput_per_s:.2f}", share, *map(str, others)]


def _listed_ms(statistics_ms: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {known(each, '.0f')} ms" for name, each in statistics_ms.items())
