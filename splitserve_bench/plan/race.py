"""Which plan is probed next, so that all are known roughly soon, and then the best two well. Pure.

Each plan has two searches for its knee (compare/search.py):

1. The survey, by quick probes, until a rate passes and STEP times as much fails. A plan is probed first at the rate
   with which it would equal what the second best has reached, and left alone when it fails STEP below that too.
2. The race, by whole probes, of the plans that the survey leaves, until the best two are known well. A plan is probed
   first where the survey says that it is, once others have reached something at what the second best has reached; who
   fails there is left alone, as is any that surely does not reach it.

More would be known of the others, but nothing that decides. In both come first those that promise most.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from splitserve_bench.compare.search import Counted, Goal, Probe, RateSearch, SearchResult
from splitserve_bench.plan.fleets import Played
from splitserve_bench.plan.knee import KneeSearch

LEADERS: Final = 2
AHEAD: Final = 8  # probes under way at a time, on however many processes
STEP: Final = 1.3  # between rates in the survey: estimates are not that far off
NEAR: Final = 1.1  # between rates in the race until one passes and one fails
SURVEYED: Final = 8  # quick probes of a plan at most
SAME: Final = 1e-9  # no difference of rates but one of rounding
SURE: Final = 2  # probes that a knee takes beyond its bisection, about


@dataclass(slots=True)
class Runner:
    """A plan in the race. `weight` is what its rates are divided by, `promise` its estimate, divided."""

    goal: Goal
    weight: float
    promise: float
    search: RateSearch
    played: list[Played] = field(default_factory=list)
    survey: "Runner | None" = None  # what it was in the survey, once that is over
    is_running: bool = False

    @property
    def result(self) -> SearchResult:
        return self.search.result()

    @property
    def reached(self) -> float:
        """Its best so far, divided; 0 for nothing."""
        return (self.result.best_rate or 0.0) / self.weight

    @property
    def has_only_passed(self) -> bool:
        """Whether nothing but its promise says where it ends."""
        return self.result.failing_rate is None and self.result.best_rate is not None

    @property
    def most(self) -> float:
        """What it can still turn out to reach, divided; the promise until a probe has failed."""
        above = self.result.knee_high or self.result.failing_rate
        return above / self.weight if above is not None else max(self.promise, self.reached)

    @property
    def ceiling(self) -> float:
        """What the survey is sure that it does not reach, divided."""
        high = self.survey.result.knee_high if self.survey is not None else None
        return high / self.weight if high is not None else math.inf

    @property
    def num_left(self) -> int:
        """Probes that its knee takes from now on, about."""
        low, high = self.result.best_rate, self.result.failing_rate
        ratio = high / low if low and high else self.goal.step**2
        return math.ceil(math.log2(max(1.0, math.log(ratio) / math.log1p(self.goal.tolerance)))) + SURE

    def begin(self, at_least: float) -> None:
        """Before its first probe: what others have reached, divided."""
        if at_least:
            self.search = type(self.search)(replace(self.goal, first_rate=at_least * self.weight))

    def in_race(self, goal: Goal) -> "Runner":
        """The same plan after the survey, which has a rate that passes."""
        assert self.result.best_rate is not None
        goal = replace(goal, first_rate=self.result.best_rate, step=NEAR)
        return Runner(goal, self.weight, self.reached, KneeSearch(goal), survey=self)


def surveyed(goal: Goal, weight: float, promise: float) -> Runner:
    """A plan before the race."""
    goal = replace(goal, tolerance=STEP * (1 + SAME) - 1, step=STEP, max_probes=SURVEYED, most_seeds=1)
    return Runner(goal, weight, promise, RateSearch(goal))


class Race:
    """Ask for probes, as many at a time as there is room for, and record what they found."""

    def __init__(self, goals: Sequence[tuple[Goal, float, float]], *, leaders: int = LEADERS) -> None:
        """For each plan what is searched for, its weight, and its promise. So many leaders are known well."""
        self._leaders = leaders
        self._goals = [goal for goal, _, _ in goals]
        self.runners = [surveyed(*each) for each in goals]
        self.is_survey = True

    @property
    def most_ahead(self) -> int:
        """Probes under way at a time: no more than there are leaders, until there is something to equal."""
        return AHEAD if self._enough > 0 else min(AHEAD, self._leaders)

    @property
    def num_plans(self) -> int:
        """In the survey, or in the race."""
        return sum(map(self._is_in, self.runners))

    def going_on(self) -> list[Runner]:
        """Of these, those of which more is to be known, that promise most first."""
        waiting = [self.runners[index] for index in self._waiting()]
        going_on = [runner for runner in waiting if runner.search.next_probe() is not None]
        return [*(runner for runner in self.runners if runner.is_running), *going_on]

    @property
    def num_left(self) -> int:
        """Probes that are still to come in the survey, or in the race, about."""
        leading = sorted(self.going_on(), key=lambda runner: -runner.most)
        num_alone = 0 if self.is_survey else self._leaders
        return sum(runner.num_left if place < num_alone else 1 for place, runner in enumerate(leading))

    def next(self) -> tuple[int, Probe] | None:
        """Another probe of a plan that has none under way; None when there is none, as long as no other ends."""
        chosen = self._choose()
        if chosen is None and self.is_survey and not any(runner.is_running for runner in self.runners):
            self._end_survey()
            chosen = self._choose()
        return chosen

    def record(self, index: int, played: Played) -> None:
        """Takes in what a probe found."""
        runner = self.runners[index]
        runner.is_running = False
        runner.played.append(played)
        runner.search.record(Counted(played.rate, played.num_good, played.num_counted, played.num_effective))

    @property
    def _enough(self) -> float:
        """What the last of the leaders has reached, divided."""
        reached = sorted((runner.reached for runner in self.runners if self._is_in(runner)), reverse=True)
        return reached[self._leaders - 1] if len(reached) >= self._leaders else 0.0

    def _waiting(self) -> list[int]:
        """Plans that may still matter and have no probe under way, those that promise most first."""
        enough = self._enough
        least = enough / STEP * (1 + SAME) if self.is_survey else enough

        def matters(runner: Runner) -> bool:
            if not runner.played:
                return runner.ceiling > enough
            return runner.has_only_passed or runner.most > least or runner.reached >= enough > 0

        waiting = [
            (-runner.most, index)
            for index, runner in enumerate(self.runners)
            if not runner.is_running and self._is_in(runner) and matters(runner)
        ]
        return [index for _, index in sorted(waiting)]

    def _is_in(self, runner: Runner) -> bool:
        return self.is_survey or runner.survey is not None

    def _choose(self) -> tuple[int, Probe] | None:
        enough = self._enough
        for index in self._waiting():
            runner = self.runners[index]
            if not runner.played:
                runner.begin(enough)
            if (probe := runner.search.next_probe()) is not None:
                runner.is_running = True
                return index, probe
        return None

    def _end_survey(self) -> None:
        """Who has reached something, and may still be among the leaders, goes on."""
        least = self._enough / STEP
        self.runners = [
            runner.in_race(goal) if runner.reached > 0 and (runner.has_only_passed or runner.most > least) else runner
            for runner, goal in zip(self.runners, self._goals, strict=True)
        ]
        self.is_survey = False


class Turns:
    """The probes of a race in an order that is the same on any machine: as many are under way as the race has ahead,
    whether or not there is a process for each, and what they found is recorded in the order in which they were asked
    for."""

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
        while len(self._under_way) < self._race.most_ahead and (chosen := self._race.next()) is not None:
            self._waiting.append(chosen)
            self._under_way.append(chosen[0])
