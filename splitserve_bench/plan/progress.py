"""How far a search is, in words: what is best so far, and how long it goes on. Pure."""

from dataclasses import dataclass
from typing import Final

from splitserve.commands.terminal import duration_of
from splitserve_bench.compare.verdict import plain
from splitserve_bench.plan.plans import Plan
from splitserve_bench.plan.race import Race, Runner

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
        """Takes in that a probe is over; whether others are best now."""
        self.num_played += 1
        if self.is_survey and not self.race.is_survey:
            self.is_survey, self.began_s, self.num_before = False, now, self.num_played
        best, self.best = self.best, tuple(f"{self.plans[index]}" for index, _ in self._leading())
        return best != self.best

    @property
    def counts(self) -> tuple[int, int]:
        """Plans that the survey or the race is done with, and of how many."""
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
