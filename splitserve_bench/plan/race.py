"""Choose which plan is probed next, so that all are known roughly soon, and then the best two well. Pure.

Each plan has two searches for its knee, the highest rate at which enough requests are good (compare/search.py):

1. The survey, by quick probes, until a rate passes and STEP times as much fails. A plan is probed first at the rate
   with which it would equal what the second best has reached, and left alone when it fails STEP below that too.
2. The race, by whole probes, of the plans that the survey leaves, until the best two are known well. A plan is probed
   first where the survey found its knee, once others have reached something at what the second best has reached; a
   plan that fails there is left alone, as is any that surely does not reach it.

Probing the others more would decide nothing. In both stages the plans that promise most come first.

Near the knee the log odds of a good request fall about straight with the log of the rate. A line through the probes
(weighted by the independent requests that each stands for) crosses the goal at the knee; the interval is Fieller's, of
all rates at which the line may cross it. So each probe adds to what is known of the knee, wherever it is.
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
    """The rate at which attainment crosses the goal, and its 95 % interval; None for an end that no probe shows."""

    rate: float
    low: float | None
    high: float | None

    def is_within(self, tolerance: float) -> bool:
        """Return whether both ends of the interval are known and within this share of the rate."""
        factor = 1 + tolerance
        return bool(self.low and self.high and self.high <= self.rate * factor and self.low * factor >= self.rate)


class KneeSearch(RateSearch):
    """Search the knee by a bracket, as RateSearch does, and by a line through all probes.

    The bracket is narrowed to the tolerance about the place where the line crosses the goal; then probes follow near
    there until the line's interval is as narrow on either side. Neither alone would do: an attainment that falls off a
    cliff is no line, and a bracket may be one by chance.
    """

    def next_probe(self) -> Probe | None:
        """Return the probe to run next; None when the search is over."""
        found, knee = super().next_probe(), self._knee()
        best, failing = bracket(self.curve(), self._goal.attainment)
        if knee is None or best is None or failing is None or self._num_probes >= self._goal.max_probes:
            return found
        if failing.rate > best.rate * (1 + self._goal.tolerance):
            return Probe(self._between(best.rate, failing.rate, knee.rate), 0)
        return None if knee.is_within(self._goal.tolerance) else self._near(knee.rate)

    def result(self) -> SearchResult:
        """Return what is known now, with the knee's interval by the line where there is one."""
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
        """Return a rate on the side of the knee where the bracket is wider; half way when the line leaves no room."""
        side = self._goal.tolerance / 2.5
        rate = knee * (1 + side) if high / knee > knee / low else knee / (1 + side)
        return rate if low * (1 + side / 2) < rate < high / (1 + side / 2) else math.sqrt(low * high)

    def _near(self, rate: float) -> Probe:
        """Return a probe of the closest probed rate, for more requests there; if none is close, of this one."""
        close = math.log1p(self._goal.tolerance / 2)
        known = min(self._counts, key=lambda each: abs(math.log(each / rate)))
        num_seeds = len(self._counts[known])
        if abs(math.log(known / rate)) > close or num_seeds >= MOST_SEEDS:
            return Probe(rate, len(self._counts.get(rate, ())))
        return Probe(known, num_seeds)


def knee_of(curve: Sequence[Counted], attainment: float) -> Knee | None:
    """Return the knee by a line through these counts, ascending by rate.

    None unless one rate passes, a higher one fails, and the line falls.
    """
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
    """Return the log odds at 0, their slope, and both variances with the covariance between; None of one rate."""
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
    """Return the 95 % interval in which a falling line crosses 0; None for both ends when it may not fall."""
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
    """A plan in the race, with its search.

    `weight` is what the objective divides its rates by, `promise` its estimated rate, divided by it; `survey` is its
    state in the survey once that is over.
    """

    goal: Goal
    weight: float
    promise: float
    search: RateSearch
    played: list[Played] = field(default_factory=list)
    survey: "Runner | None" = None  # what it was in the survey, once that is over
    is_running: bool = False

    @property
    def result(self) -> SearchResult:
        """Return what its search has found."""
        return self.search.result()

    @property
    def reached(self) -> float:
        """Return its best passed rate, divided by its weight; 0 when none has passed."""
        return (self.result.best_rate or 0.0) / self.weight

    @property
    def has_only_passed(self) -> bool:
        """Return whether some rate has passed and none has failed, so that only its promise says where it ends."""
        return self.result.failing_rate is None and self.result.best_rate is not None

    @property
    def most(self) -> float:
        """Return the highest rate it can still reach, divided by its weight: its promise until a probe fails."""
        above = self.result.knee_high or self.result.failing_rate
        return above / self.weight if above is not None else max(self.promise, self.reached)

    @property
    def ceiling(self) -> float:
        """Return the rate that it surely does not reach by the survey, over its weight; infinite when not known."""
        high = self.survey.result.knee_high if self.survey is not None else None
        return high / self.weight if high is not None else math.inf

    @property
    def num_left(self) -> int:
        """Return about how many probes its knee takes from now on."""
        low, high = self.result.best_rate, self.result.failing_rate
        ratio = high / low if low and high else self.goal.step**2
        return math.ceil(math.log2(max(1.0, math.log(ratio) / math.log1p(self.goal.tolerance)))) + SURE

    def begin(self, at_least: float) -> None:
        """Set its first rate to the one that equals `at_least`, what others have reached; 0 leaves its own."""
        if at_least:
            self.search = type(self.search)(replace(self.goal, first_rate=at_least * self.weight))

    def in_race(self, goal: Goal) -> "Runner":
        """Return the plan's runner in the race, with this goal. The survey must have found a rate that passes."""
        assert self.result.best_rate is not None
        goal = replace(goal, first_rate=self.result.best_rate, step=NEAR)
        return Runner(goal, self.weight, self.reached, KneeSearch(goal), survey=self)


def surveyed(goal: Goal, weight: float, promise: float) -> Runner:
    """Return the runner of a plan in the survey, with this goal, weight and promise."""
    goal = replace(goal, tolerance=STEP * (1 + SAME) - 1, step=STEP, max_probes=SURVEYED, most_seeds=1)
    return Runner(goal, weight, promise, RateSearch(goal))


class Race:
    """Choose the probes of a search: take the next one as long as there is one, and record what each found."""

    def __init__(self, goals: Sequence[tuple[Goal, float, float]], *, leaders: int = LEADERS) -> None:
        """`goals` has for each plan what is searched for, its weight, and its promise.

        The best `leaders` plans are to be known well.
        """
        self._leaders = leaders
        self._goals = [goal for goal, _, _ in goals]
        self.runners = [surveyed(*each) for each in goals]
        self.is_survey = True

    @property
    def most_ahead(self) -> int:
        """Return how many probes may run at a time: as many as leaders until these have passed a rate, then AHEAD."""
        return AHEAD if self._enough > 0 else min(AHEAD, self._leaders)

    @property
    def num_plans(self) -> int:
        """Return the number of plans in the current stage: the survey, or the race."""
        return sum(map(self._is_in, self.runners))

    def going_on(self) -> list[Runner]:
        """Return the runners of plans that have a probe running or need another, those that promise most first."""
        waiting = [self.runners[index] for index in self._waiting()]
        going_on = [runner for runner in waiting if runner.search.next_probe() is not None]
        return [*(runner for runner in self.runners if runner.is_running), *going_on]

    @property
    def num_left(self) -> int:
        """Return about how many probes are still to come in the current stage."""
        leading = sorted(self.going_on(), key=lambda runner: -runner.most)
        num_alone = 0 if self.is_survey else self._leaders
        return sum(runner.num_left if place < num_alone else 1 for place, runner in enumerate(leading))

    def next(self) -> tuple[int, Probe] | None:
        """Return the number of a plan and its next probe, which counts as running from now on.

        None when there is none before another probe ends, or at all. Begins the race when the survey is over.
        """
        chosen = self._choose()
        if chosen is None and self.is_survey and not any(runner.is_running for runner in self.runners):
            self._end_survey()
            chosen = self._choose()
        return chosen

    def record(self, index: int, played: Played) -> None:
        """Record what the running probe of plan number `index` found."""
        runner = self.runners[index]
        runner.is_running = False
        runner.played.append(played)
        runner.search.record(Counted(played.rate, played.num_good, played.num_counted, played.num_effective))

    @property
    def _enough(self) -> float:
        """Return what the last of the leaders has reached, divided by its weight; 0 when there are fewer."""
        reached = sorted((runner.reached for runner in self.runners if self._is_in(runner)), reverse=True)
        return reached[self._leaders - 1] if len(reached) >= self._leaders else 0.0

    def _waiting(self) -> list[int]:
        """Return the numbers of plans that may still be among the best and have no probe running, best first."""
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
        """Begin the race with the plans that reached something and may still be among the leaders."""
        least = self._enough / STEP
        self.runners = [
            runner.in_race(goal) if runner.reached > 0 and (runner.has_only_passed or runner.most > least) else runner
            for runner, goal in zip(self.runners, self._goals, strict=True)
        ]
        self.is_survey = False


class Turns:
    """The probes of a race in an order that is the same on any machine.

    As many run at a time as the race allows, whether or not there is a process for each, and what they found is
    recorded in the order in which they were chosen.
    """

    def __init__(self, race: Race) -> None:
        self._race = race
        self._waiting: deque[tuple[int, Probe]] = deque()  # for a process
        self._under_way: deque[int] = deque()  # those too
        self._played: dict[int, Played] = {}  # whose turn has not come
        self._ask()

    def next(self) -> tuple[int, Probe] | None:
        """Return a plan's number and a probe for a free process; None when there is none before another probe ends."""
        return self._waiting.popleft() if self._waiting else None

    def record(self, index: int, played: Played) -> list[int]:
        """Record what a probe of plan `index` found, and return the plans whose results the race has now taken."""
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
RACE: Final = 16  # probes of a race, about, as long as the survey has not decided which plans are in it
LONGER: Final = 2.0  # a probe of the race than one of the survey, about


@dataclass(slots=True)
class Progress:
    """The progress of a race between these plans, in words. Rates are shown for all `cells` together."""

    race: Race
    plans: tuple[Plan, ...]
    cells: int
    began_s: float  # the survey, or the race
    is_survey: bool = True
    num_played: int = 0  # probes
    num_before: int = 0  # of them, in the survey, once that is over
    best: tuple[str, ...] = ()

    def played(self, now: float) -> bool:
        """Record that a probe has ended, and return whether other plans are the best ones now."""
        self.num_played += 1
        if self.is_survey and not self.race.is_survey:
            self.is_survey, self.began_s, self.num_before = False, now, self.num_played
        best, self.best = self.best, tuple(f"{self.plans[index]}" for index, _ in self._leading())
        return best != self.best

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of plans that the survey or the race is done with, and the number of all plans in it."""
        return self.race.num_plans - len(self.race.going_on()), self.race.num_plans

    def line(self, now: float) -> str:
        """Return in one line how many plans are done, which are best, and about how long it still takes.

        `now` is in seconds.
        """
        done, total = self.counts
        stage = "surveyed" if self.race.is_survey else "in the race decided"
        leading = [f"{self.plans[index]} {self._rates_of(runner)}" for index, runner in self._leading()]
        best = f"best so far {', then '.join(leading)}" if leading else "none reaches the goal yet"
        return f"{done} of {total} plans {stage}; {best}; {self._left(now)}"

    def _leading(self) -> list[tuple[int, Runner]]:
        """Return number and runner of the best plans: by the race, or by the survey until one passes in the race."""
        entered = [runner if self.race.is_survey or runner.survey else None for runner in self.race.runners]
        if not any(runner is not None and runner.reached for runner in entered):
            entered = [runner and (runner.survey or runner) for runner in entered]
        known = [(index, runner) for index, runner in enumerate(entered) if runner is not None and runner.reached]
        return sorted(known, key=lambda each: -each[1].reached)[:NAMED]

    def _rates_of(self, runner: Runner) -> str:
        """Return in words at which rate, of all cells, a plan passed, and at which it failed."""
        low, high = runner.result.best_rate, runner.result.failing_rate
        about = "" if runner.survey is not None else "about "  # quick probes find rather too much
        upto = f" to {plain(high * self.cells)}" if high else " or more"
        return f"at {about}{plain((low or 0.0) * self.cells)}{upto} req/s"

    def _left(self, now: float) -> str:
        """Return in words about how long it still takes, by the mean time of the probes of this stage."""
        num_played = self.num_played - self.num_before
        if not num_played:
            return "time left not known"
        num_left = self.race.num_left + (RACE * LONGER if self.race.is_survey else 0)
        return f"about {duration_of((now - self.began_s) / num_played * num_left)} left"
