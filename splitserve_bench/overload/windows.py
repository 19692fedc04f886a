"""What became of the requests that came within a stretch of time, and from when on they were good again. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from splitserve_bench.serve.metrics import Limits, is_good
from splitserve_bench.serve.records import Outcome

WINDOW_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Window:
    """Requests by when they were due. Each of them is counted once: good, complete but late, turned away with or
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
        return self.num_good + self.num_late + self.num_refused_until + self.num_refused + self.num_failed

    @property
    def goodput_per_s(self) -> float:
        return self.num_good / (self.end_s - self.start_s)

    @property
    def attainment(self) -> float | None:
        """None where nothing came."""
        return self.num_good / self.num_offered if self.num_offered else None

    def to_json(self) -> dict[str, Any]:
        derived = ("num_offered", "goodput_per_s", "attainment")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def window_of(outcomes: Sequence[Outcome], limits: Limits, start_s: float, end_s: float) -> Window:
    """Of those that were due from start_s on and before end_s."""
    due = [outcome for outcome in outcomes if start_s <= outcome.scheduled_s < end_s]
    refused = [outcome for outcome in due if outcome.is_refused]
    failed = [outcome for outcome in due if outcome.error and not outcome.is_refused]
    num_good = sum(is_good(outcome, limits) for outcome in due)
    num_until = sum(outcome.retry_after_s is not None for outcome in refused)
    return Window(
        start_s=start_s,
        end_s=end_s,
        num_good=num_good,
        num_late=len(due) - num_good - len(refused) - len(failed),
        num_refused_until=num_until,
        num_refused=len(refused) - num_until,
        num_failed=len(failed),
    )


def windows_of(outcomes: Sequence[Outcome], limits: Limits, start_s: float, end_s: float) -> list[Window]:
    """One for every WINDOW_S; the last one may be shorter."""
    num_windows = math.ceil((end_s - start_s) / WINDOW_S)
    edges = [start_s + number * WINDOW_S for number in range(num_windows)] + [end_s]
    return [window_of(outcomes, limits, edges[i], edges[i + 1]) for i in range(num_windows)]


def back_after_s(windows: Sequence[Window], attainment: float) -> float | None:
    """How long after the start of the first of these windows goodput is back: until the first one whose share of good
    requests is at least `attainment`, as is that of it and all later ones together. None when it never is."""
    for number, window in enumerate(windows):
        rest = windows[number:]
        num_good, num_offered = sum(each.num_good for each in rest), sum(each.num_offered for each in rest)
        if window.attainment is not None and min(window.attainment, num_good / num_offered) >= attainment:
            return window.start_s - windows[0].start_s
    return None
