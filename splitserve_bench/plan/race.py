"""Which plan is probed next, so that all are known roughly soon, and then the best two well. Pure.

Each plan has two searches for its knee (compare/search.py):

1. The survey, by quick probes, until a rate passes and STEP times as much fails. A plan is probed first at the rate
   with which it would equal what the second best has reached, and left alone when it fails STEP below that too.
2. The race, by whole probes, of the plans that the survey leaves, until the best two are known well. A plan is probed
   first where the survey says that it is, once others have reached something at what the second best has reached; who
   fails there is left alone, as is any that surely does not reach it.

More would be known of the others, but nothing that decides. In both come first those that promise most.

Near the knee the log odds of a good request fall about straight with the log of the rate. A line through the probes
(weighted by the independent requests that each stands for) crosses the goal at the knee; the interval is Fieller's, of
all rates at which the line may cross it. So each probe says something of the knee, wherever it is, while those of two
rates alone would have to be told apart from the goal.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from splitserve.commands.terminal import duration_of
from splitserve_bench.compare.search import MOST_SEEDS, Counted, Goal, Probe, RateSearch, SearchResult, bracket, plain
from splitserve_bench.plan.candidates import Plan
from splitserve_bench.plan.fleets import Played
from splitserve_bench.serve.metrics import Z

ROUNDS: Final = 30  # of Newton's, which ends long before
NARROW: Final = 1e-9
HALF: Final = 0.5  # good and bad requests that each rate is given, so that odds are finite
FAR: Final = 1.3  # a rate that is so many times off the bracket says nothing of the slope in it


@dataclass(frozen=True, slots=True)
class Knee:
    """Where attainment crosses the goal; ends are None where no probe says so."""

    rate: float
    low: float | None
    high: float | None

    def is_within(self, tolerance: float) -> bool:
        """Return whether the interval ends so close to the rate on either side, as a share of it."""
        factor = 1 + tolerance
        return bool(self.low and self.high and self.high <= self.rate * factor and self.low * factor >= self.rate)


class KneeSearch(RateSearch):
    """Brackets the knee as RateSearch does, and narrows the bracket to the tolerance about the place where the line
    crosses the goal; then probes go on near there until the line's interval is as narrow on either side. Neither alone
    would do: an attainment that falls off a cliff is no line, and a bracket may be one by chance."""

    def next_probe(self) -> Probe | None:
        found, knee = super().next_probe(), self._knee()
        best, failing = bracket(self.curve(), self._goal.attainment)
        if knee is None or best is None or failing is None or self._num_probes >= self._goal.max_probes:
            return found
        if failing.rate > best.rate * (1 + self._goal.tolerance):
            return Probe(self._between(best.rate, failing.rate, knee.rate), 0)
        return None if knee.is_within(self._goal.tolerance) else self._near(knee.rate)

    def result(self) -> SearchResult:
        found, knee = super().result(), self._knee()
        if knee is None:
            return found
        assert found.best_rate is not None
        is_settled = found.is_settled and knee.is_within(self._goal.tolerance)
        low, high = knee.low and min(knee.low, found.best_rate), knee.high and max(knee.high, found.best_rate)
        return replace(found, knee_low=low, knee_high=high, is_settled=is_settled)

    @property
    def _num_probes(self) -> int:
        return sum(map(len, self._counts.values()))

    def _knee(self) -> Knee | None:
        return knee_of(self.curve(), self._goal.attainment)

    def _between(self, low: float, high: float, knee: float) -> float:
        """A rate on that side of the knee on which the bracket is wider; half way where the line has none."""
        side = self._goal.tolerance / 2.5
        rate = knee * (1 + side) if high / knee > knee / low else knee / (1 + side)
        return rate if low * (1 + side / 2) < rate < high / (1 + side / 2) else math.sqrt(low * high)

    def _near(self, rate: float) -> Probe:
        """At a rate that was probed, if there is one close by, so that its requests are many."""
        close = math.log1p(self._goal.tolerance / 2)
        known = min(self._counts, key=lambda each: abs(math.log(each / rate)))
        num_seeds = len(self._counts[known])
        if abs(math.log(known / rate)) > close or num_seeds >= MOST_SEEDS:
            return Probe(rate, len(self._counts.get(rate, ())))
        return Probe(known, num_seeds)


def knee_of(curve: Sequence[Counted], attainment: float) -> Knee | None:
    """The knee by these counts, ascending by rate; None unless one rate passes and a higher one fails, on a line that
    falls."""
    best, failing = bracket(curve, attainment)
    if best is None or failing is None or attainment == 1:
        return None
    near = [each for each in curve if best.rate / FAR <= each.rate <= failing.rate * FAR]
    middle = math.log(best.rate)
    line = _line([(math.log(each.rate) - middle, each.attainment, each.num_effective) for each in near])
    if line is None:
        return None
    start, slope, variance = line
    start -= math.log(attainment / (1 - attainment))
    if slope >= 0:
        return None
    at = -start / slope
    low, high = _fieller(start, slope, variance)
    return Knee(
        math.exp(middle + at),
        None if low is None else math.exp(middle + low),
        None if high is None else math.exp(middle + high),
    )


def _line(places: Sequence[tuple[float, float, float]]) -> tuple[float, float, tuple[float, float, float]] | None:
    """The log odds at 0 and their slope, with the variances of both and their covariance between; None of one rate."""
    places = [(x, (share * size + HALF) / (size + 2 * HALF), size + 2 * HALF) for x, share, size in places]
    start, slope = 0.0, 0.0
    for _ in range(ROUNDS):
        odds = [1 / (1 + math.exp(-max(-30.0, min(30.0, start + slope * x)))) for x, _, _ in places]
        weights = [size * odd * (1 - odd) for odd, (_, _, size) in zip(odds, places, strict=True)]
        off = [size * (share - odd) for odd, (_, share, size) in zip(odds, places, strict=True)]
        one, x1, x2 = (sum(w * x**power for w, (x, _, _) in zip(weights, places, strict=True)) for power in (0, 1, 2))
        spread = one * x2 - x1 * x1
        if spread <= NARROW * one * one:
            return None
        along, across = sum(off), sum(each * x for each, (x, _, _) in zip(off, places, strict=True))
        change, turn = (x2 * along - x1 * across) / spread, (one * across - x1 * along) / spread
        start, slope = start + change, slope + turn
        if abs(change) + abs(turn) < NARROW:
            break
    return start, slope, (x2 / spread, -x1 / spread, one / spread)


def _fieller(start: float, slope: float, variance: tuple[float, float, float]) -> tuple[float | None, float | None]:
    """Where a falling line may cross 0 with 95 % confidence."""
    of_start, both, of_slope = (Z * Z * each for each in variance)
    square, half, rest = slope * slope - of_slope, start * slope - both, start * start - of_start
    if square <= 0:
        return None, None
    root = math.sqrt(max(0.0, half * half - square * rest))
    return (-half - root) / square, (-half + root) / square


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
        """Return whether nothing but its promise says where it ends."""
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
        """Record the result of a probe."""
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
        """Record the result of a probe, and return the plans of which the race knows more now."""
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


NAMED: Final = 2  # plans of a line
RACE: Final = 16  # probes of a race, about, as long as the survey has not told who is in it
LONGER: Final = 2.0  # a probe of the race than one of the survey, about


@dataclass(slots=True)
class Progress:
    """Of a race between these plans, for cells of which there are so many."""

    race: Race
    plans: tuple[Plan, ...]
    cells: int
    began_s: float  # the survey, or the race
    is_survey: bool = True
    num_played: int = 0  # probes
    num_before: int = 0  # of them, in the survey, once that is over
    best: tuple[str, ...] = ()

    def played(self, now: float) -> bool:
        """Record that a probe is over, and return whether other plans are best now."""
        self.num_played += 1
        if self.is_survey and not self.race.is_survey:
            self.is_survey, self.began_s, self.num_before = False, now, self.num_played
        best, self.best = self.best, tuple(f"{self.plans[index]}" for index, _ in self._leading())
        return best != self.best

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of plans that the survey or the race is done with, and the number of all plans."""
        return self.race.num_plans - len(self.race.going_on()), self.race.num_plans

    def line(self, now: float) -> str:
        """What is known."""
        done, total = self.counts
        stage = "surveyed" if self.race.is_survey else "in the race decided"
        leading = [f"{self.plans[index]} {self._told(runner)}" for index, runner in self._leading()]
        best = f"best so far {', then '.join(leading)}" if leading else "none reaches the goal yet"
        return f"{done} of {total} plans {stage}; {best}; {self._left(now)}"

    def _leading(self) -> list[tuple[int, Runner]]:
        """Those that are best by the race, or by the survey as long as none has reached anything in the race."""
        entered = [runner if self.race.is_survey or runner.survey else None for runner in self.race.runners]
        if not any(runner is not None and runner.reached for runner in entered):
            entered = [runner and (runner.survey or runner) for runner in entered]
        known = [(index, runner) for index, runner in enumerate(entered) if runner is not None and runner.reached]
        return sorted(known, key=lambda each: -each[1].reached)[:NAMED]

    def _told(self, runner: Runner) -> str:
        """At which rates, of all cells, it is known to pass and to fail."""
        low, high = runner.result.best_rate, runner.result.failing_rate
        about = "" if runner.survey is not None else "about "  # quick probes find rather too much
        upto = f" to {plain(high * self.cells)}" if high else " or more"
        return f"at {about}{plain((low or 0.0) * self.cells)}{upto} req/s"

    def _left(self, now: float) -> str:
        """By what the probes of the survey took, or those of the race."""
        num_played = self.num_played - self.num_before
        if not num_played:
            return "time left not known"
        num_left = self.race.num_left + (RACE * LONGER if self.race.is_survey else 0)
        return f"about {duration_of((now - self.began_s) / num_played * num_left)} left"
