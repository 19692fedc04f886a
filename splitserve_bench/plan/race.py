"""Which plan is probed next, so that the best two are known well and the others as far as that takes. Pure.

Each plan has its search for the knee (compare/search.py). The first probe of a plan is at the rate with which it would
equal what the second best has reached: a plan that fails there is left alone, as is any that surely does not reach it.
More would be known of these, but nothing that decides. First come those that promise most.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from splitserve_bench.compare.search import Counted, Goal, Probe, RateSearch, SearchResult
from splitserve_bench.plan.fleets import Played

LEADERS: Final = 2
AHEAD: Final = 8  # probes under way at a time, on however many processes


@dataclass(slots=True)
class Runner:
    """A plan in the race. `weight` is what its rates are divided by, `promise` its estimate, divided."""

    goal: Goal
    weight: float
    promise: float
    search: RateSearch
    played: list[Played] = field(default_factory=list)
    is_running: bool = False

    @property
    def result(self) -> SearchResult:
        return self.search.result()

    @property
    def reached(self) -> float:
        """Its best so far, divided; 0 for nothing."""
        return (self.result.best_rate or 0.0) / self.weight

    @property
    def most(self) -> float:
        """What it can still turn out to reach, divided; the promise until a probe has failed."""
        above = self.result.knee_high or self.result.failing_rate
        return above / self.weight if above is not None else max(self.promise, self.reached)

    def begin(self, at_least: float) -> None:
        """Before its first probe: what others have reached, divided."""
        if at_least:
            self.search = RateSearch(replace(self.goal, first_rate=at_least * self.weight))


class Race:
    """Ask for probes, as many at a time as there is room for, and record what they found."""

    def __init__(self, goals: Sequence[tuple[Goal, float, float]], *, leaders: int = LEADERS) -> None:
        """For each plan what is searched for, its weight, and its promise. So many leaders are known well."""
        self._leaders = leaders
        self.runners = [Runner(goal, weight, promise, RateSearch(goal)) for goal, weight, promise in goals]

    def next(self) -> tuple[int, Probe] | None:
        """Another probe of a plan that has none under way; None when there is none, as long as no other ends."""
        reached = sorted((runner.reached for runner in self.runners), reverse=True)
        enough = reached[self._leaders - 1] if len(reached) >= self._leaders else 0.0
        waiting = [
            (-runner.most, index)
            for index, runner in enumerate(self.runners)
            if not runner.is_running and (not runner.played or runner.most > enough or runner.reached >= enough > 0)
        ]
        for _, index in sorted(waiting):
            runner = self.runners[index]
            if not runner.played:
                runner.begin(enough)
            if (probe := runner.search.next_probe()) is not None:
                runner.is_running = True
                return index, probe
        return None

    def record(self, index: int, played: Played) -> None:
        """Takes in what a probe found."""
        runner = self.runners[index]
        runner.is_running = False
        runner.played.append(played)
        runner.search.record(Counted(played.rate, played.num_good, played.num_counted, played.num_effective))


class Turns:
    """The probes of a race in an order that is the same on any machine: up to AHEAD are under way, whether or not there
    is a process for each, and what they found is recorded in the order in which they were asked for."""

    def __init__(self, race: Race) -> None:
        self._race = race
        self._waiting: deque[tuple[int, Probe]] = deque()  # for a process
        self._under_way: deque[int] = deque()  # those too
        self._played: dict[int, Played] = {}  # whose turn has not come
        self._ask()

    def next(self) -> tuple[int, Probe] | None:
        """Another probe for a process; None when there is none, as long as no other ends."""
        return self._waiting.popleft() if self._waiting else None

    def record(self, index: int, played: Played) -> list[int]:
        """Takes in what a probe found: the plans of which the race knows more now."""
        self._played[index] = played
        recorded = []
        while self._under_way and self._under_way[0] in self._played:
            recorded.append(self._under_way.popleft())
            self._race.record(recorded[-1], self._played.pop(recorded[-1]))
            self._ask()
        return recorded

    def _ask(self) -> None:
        while len(self._under_way) < AHEAD and (chosen := self._race.next()) is not None:
            self._waiting.append(chosen)
            self._under_way.append(chosen[0])
