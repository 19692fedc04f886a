"""Which plan is probed next, so that the best two are known well and the others as far as that takes. Pure.

Each plan has its search for the knee (compare/search.py). A plan is left alone as soon as it surely does not reach what
the second best has reached: more would be known of it, but nothing that decides. First come those that promise most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from splitserve_bench.compare.search import Counted, Goal, Probe, RateSearch, SearchResult
from splitserve_bench.plan.fleets import Played

LEADERS: Final = 2


@dataclass(slots=True)
class Runner:
    """A plan in the race. `weight` is what its rates are divided by, `promise` its estimate, divided."""

    search: RateSearch
    weight: float
    promise: float
    played: list[Played] = field(default_factory=list)
    is_running: bool = False

    @property
    def reached(self) -> float:
        """What surely or not is its best so far, divided; 0 for nothing."""
        return (self.search.result().best_rate or 0.0) / self.weight

    @property
    def most(self) -> float:
        """What it can still turn out to reach, divided; the promise until a probe has failed."""
        result = self.search.result()
        above = result.knee_high or result.failing_rate
        return above / self.weight if above is not None else max(self.promise, self.reached)


class Race:
    """Ask for probes, as many at a time as there is room for, and record what they found."""

    def __init__(self, goals: Sequence[tuple[Goal, float, float]]) -> None:
        """For each plan what is searched for, its weight, and its promise."""
        self.runners = [Runner(RateSearch(goal), weight, promise) for goal, weight, promise in goals]

    def next(self) -> tuple[int, Probe] | None:
        """Another probe of a plan that has none under way; None when there is none, as long as no other ends."""
        reached = sorted((runner.reached for runner in self.runners), reverse=True)
        enough = reached[LEADERS - 1] if len(reached) >= LEADERS else 0.0
        waiting = [
            (runner.most, -index)
            for index, runner in enumerate(self.runners)
            if not runner.is_running and (not runner.played or runner.most > enough or runner.reached >= enough)
        ]
        for _, negative in sorted(waiting, reverse=True):
            runner = self.runners[-negative]
            if (probe := runner.search.next_probe()) is not None:
                runner.is_running = True
                return -negative, probe
        return None

    def record(self, index: int, played: Played) -> None:
        """Takes in what a probe found."""
        runner = self.runners[index]
        runner.is_running = False
        runner.played.append(played)
        runner.search.record(Counted(played.rate, played.num_good, played.num_counted, played.num_effective))

    def results(self) -> list[SearchResult]:
        """What is known of each plan."""
        return [runner.search.result() for runner in self.runners]
