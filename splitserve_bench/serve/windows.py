"""What became of the requests of a load in stages: by stage, by window of time, and in the highest stage. Pure."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from splitserve_bench.serve.metrics import Distribution, Limits, e2el_s, is_good, ttft_s
from splitserve_bench.serve.records import Outcome
from splitserve_bench.serve.stages import Stage, highest_of

WINDOW_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Window:
    """Requests by when they were due. Each sending is counted once: good, complete but late, turned away with or
    without a word about when to come back, or failed."""

    start_s: float
    end_s: float
    num_good: int
    num_late: int
    num_refused_until: int  # told when to come back
    num_refused: int  # not told
    num_failed: int

    @property
    def num_offered(self) -> int:
        return self.num_admitted + self.num_refused_until + self.num_refused

    @property
    def num_admitted(self) -> int:
        """Those that were not turned away."""
        return self.num_good + self.num_late + self.num_failed

    @property
    def goodput_per_s(self) -> float:
        return self.num_good / (self.end_s - self.start_s)

    @property
    def attainment(self) -> float | None:
        """None where nothing came."""
        return self.num_good / self.num_offered if self.num_offered else None

    def to_json(self) -> dict[str, Any]:
        derived = ("num_offered", "num_admitted", "goodput_per_s", "attainment")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True, slots=True)
class HighestStage:
    """The requests that were due while the rate was highest, and the goodput of the stage before. The goodputs before
    are None where no stage is before."""

    window: Window
    mean_before_per_s: float | None  # good requests/s of the whole stage before
    best_before_per_s: float | None  # those of its best window
    refusal_s: Distribution  # from sending to refusal
    ttft_s: Distribution  # of the admitted

    @property
    def admitted_good(self) -> float | None:
        """Share of the admitted that were good; None where nothing was admitted."""
        return _ratio(self.window.num_good, self.window.num_admitted)

    @property
    def of_mean_before(self) -> float | None:
        """Goodput over that of the stage before; None where there was none."""
        return _ratio(self.window.goodput_per_s, self.mean_before_per_s)

    @property
    def of_best_before(self) -> float | None:
        """Goodput over that of the best window of the stage before; None where there was none."""
        return _ratio(self.window.goodput_per_s, self.best_before_per_s)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.window.to_json(),
            "admitted_good": self.admitted_good,
            "mean_before_per_s": self.mean_before_per_s,
            "best_before_per_s": self.best_before_per_s,
            "of_mean_before": self.of_mean_before,
            "of_best_before": self.of_best_before,
            "refusal_ms": {"median": _ms(self.refusal_s.median), "max": _ms(self.refusal_s.max)},
            "ttft_ms": {
                "median": _ms(self.ttft_s.median),
                "p90": _ms(self.ttft_s.percentile(90)),
                "max": _ms(self.ttft_s.max),
            },
        }


@dataclass(frozen=True, slots=True)
class StageFindings:
    """`back_s` is from the end of the highest stage until goodput is back, None when it is not, or nothing followed."""

    attainment: float  # from which on goodput is back
    stages: tuple[Stage, ...]
    by_stage: tuple[Window, ...]
    windows: tuple[Window, ...]
    highest: HighestStage
    back_s: float | None

    @property
    def is_sent_after(self) -> bool:
        """Whether requests were due after the highest stage."""
        return any(each.num_offered for each in self.by_stage if each.start_s >= self.highest.window.end_s)

    @property
    def seconds_after(self) -> float:
        """How long requests were sent after the highest stage."""
        return self.stages[-1].end_s - self.highest.window.end_s

    def to_json(self) -> dict[str, Any]:
        by_stage = [
            {"times": stage.times, "rate_per_s": stage.rate_per_s, **window.to_json()}
            for stage, window in zip(self.stages, self.by_stage, strict=True)
        ]
        return {
            "attainment": self.attainment,
            "back_s": self.back_s,
            "highest": self.highest.to_json(),
            "by_stage": by_stage,
            "windows": [window.to_json() for window in self.windows],
        }


def findings_of(
    outcomes: Sequence[Outcome], stages: Sequence[Stage], limits: Limits, attainment: float
) -> StageFindings:
    """Return what became of a load of these stages; goodput is back where this share of the requests is good."""
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


def windows_of(outcomes: Sequence[Outcome], limits: Limits, start_s: float, end_s: float) -> list[Window]:
    """Return a window for every WINDOW_S; the last one may be shorter."""
    num_windows = math.ceil((end_s - start_s) / WINDOW_S)
    edges_s = [start_s + number * WINDOW_S for number in range(num_windows)] + [end_s]
    return _windows_between(outcomes, limits, edges_s)


def window_of(due: Sequence[Outcome], limits: Limits, start_s: float, end_s: float) -> Window:
    """Count the requests of one window, all of which `due` are."""
    refused = [outcome for outcome in due if outcome.is_refused]
    num_failed = sum(bool(outcome.error) and not outcome.is_refused for outcome in due)
    num_good = sum(is_good(outcome, limits) for outcome in due)
    num_until = sum(outcome.retry_after_s is not None for outcome in refused)
    return Window(
        start_s=start_s,
        end_s=end_s,
        num_good=num_good,
        num_late=len(due) - num_good - len(refused) - num_failed,
        num_refused_until=num_until,
        num_refused=len(refused) - num_until,
        num_failed=num_failed,
    )


def back_after_s(windows: Sequence[Window], attainment: float) -> float | None:
    """Return how long after the start of the first of these windows goodput is back: until the first one whose share of
    good requests is at least `attainment`, as is that of it and all later ones together. None when it never is."""
    num_good = num_offered = 0
    back_s = None
    for window in reversed(windows):
        num_good, num_offered = num_good + window.num_good, num_offered + window.num_offered
        if window.attainment is not None and min(window.attainment, num_good / num_offered) >= attainment:
            back_s = window.start_s - windows[0].start_s
    return back_s


def _highest(
    outcomes: Sequence[Outcome], stages: Sequence[Stage], limits: Limits, start_s: float, end_s: float
) -> HighestStage:
    due = _due(outcomes, [start_s, end_s])[0]
    before = next((stage for stage in stages if stage.end_s == start_s), None)
    mean_per_s, best_per_s = (None, None) if before is None else _goodputs(outcomes, limits, before)
    return HighestStage(
        window=window_of(due, limits, start_s, end_s),
        mean_before_per_s=mean_per_s,
        best_before_per_s=best_per_s,
        refusal_s=Distribution(tuple(e2el_s(each) for each in due if each.is_refused)),
        ttft_s=Distribution(tuple(first_s for each in due if (first_s := ttft_s(each)) is not None)),
    )


def _goodputs(outcomes: Sequence[Outcome], limits: Limits, stage: Stage) -> tuple[float, float]:
    """Return good requests/s of the stage, and of its best window of full length; of a shorter stage twice its own."""
    (whole,) = _windows_between(outcomes, limits, [stage.start_s, stage.end_s])
    full = windows_of(outcomes, limits, stage.start_s, stage.end_s)[: int(stage.seconds // WINDOW_S)]
    return whole.goodput_per_s, max((window.goodput_per_s for window in full), default=whole.goodput_per_s)


def _windows_between(outcomes: Sequence[Outcome], limits: Limits, edges_s: Sequence[float]) -> list[Window]:
    return [
        window_of(due, limits, start_s, end_s)
        for due, (start_s, end_s) in zip(_due(outcomes, edges_s), pairwise(edges_s), strict=True)
    ]


def _due(outcomes: Sequence[Outcome], edges_s: Sequence[float]) -> list[list[Outcome]]:
    """Return the requests that were due between each edge, itself included, and the next."""
    in_order = sorted(outcomes, key=lambda outcome: outcome.scheduled_s)
    places = [bisect_left(in_order, edge_s, key=lambda outcome: outcome.scheduled_s) for edge_s in edges_s]
    return [in_order[first:last] for first, last in pairwise(places)]


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
