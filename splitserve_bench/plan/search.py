"""Set up one search, alike in the process that leads it and in those that simulate: plans, loads and probes.

`python -m splitserve_bench.plan.search SETUP` is a worker of it (splitserve_bench/crew.py); SETUP is the text of
`PlanOptions.to_json`. Its jobs are the arguments of Study.probe, and their results its figures.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from serving_core.errors import SettingsError
from splitserve_bench.compare.search import Goal
from splitserve_bench.crew import Job, run_crew, work
from splitserve_bench.plan.candidates import (
    USUAL_TPOT_S,
    Estimates,
    Plan,
    PlanOptions,
    candidates,
    options_from_json,
    weight_of,
)
from splitserve_bench.plan.fleets import ENOUGH_TOKENS, Played, play
from splitserve_bench.plan.loads import MOST_COUNTED, Loads
from splitserve_bench.plan.nodes import Machines, machines_of
from splitserve_bench.plan.race import LEADERS, Race, Turns
from splitserve_bench.serve.metrics import Limits, parse_goodput, with_limits

MODULE: Final = "splitserve_bench.plan.search"
FIRST_SHARE: Final = 0.9  # of its estimate, the rate at which a plan is probed first
MOST_BEFORE: Final = 5_000  # requests of a probe that do not count
QUICK_FILL: Final = 0.5  # of the time in which a fleet fills, that a quick probe waits
QUICK_COUNT: Final = 0.25  # of the requests that count
AFTER: Final = 1.5  # times the requests that come until the last that counts is known


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that a search knows before its first probe."""

    options: PlanOptions
    machines: Machines
    limits: Limits
    loads: Loads
    estimates: Estimates
    plans: tuple[Plan, ...]

    def race(self) -> Race:
        """Return the race between the plans, not yet begun."""
        options = self.options
        entries = []
        for plan in self.plans:
            estimate = self.estimates.of(plan.pools)
            goal = Goal(FIRST_SHARE * estimate, options.attainment, options.tolerance, options.max_probes)
            weight = weight_of(plan, options.objective)
            entries.append((goal, weight, estimate / weight))
        return Race(entries, leaders=len(entries) if options.all_plans else LEADERS)

    def probe(self, index: int, rate: float, seed: int, *, is_quick: bool = False) -> Played:
        """Simulate plan `index` of `plans` at `rate` requests/s, and return what became of the requests that count.

        Requests that fill the fleet come before those that count, and enough to keep it full after them. A quick probe
        has fewer of both, and rather overstates attainment.
        """
        options, plan, limits = self.options, self.plans[index], self.limits
        fill_s = self.estimates.fill_s(plan.pools, rate) * (QUICK_FILL if is_quick else 1)
        first_s = limits.ttft_s or 0.0
        after_s = AFTER * (first_s + ENOUGH_TOKENS * (limits.tpot_s or USUAL_TPOT_S))
        num_before = round(min(MOST_BEFORE, rate * (fill_s + first_s)))
        num_counted = max(options.num_prompts, rate * options.seconds) * (QUICK_COUNT if is_quick else 1)
        num_counted = math.ceil(min(MOST_COUNTED, num_counted))
        num_after = math.ceil(min(MOST_BEFORE, rate * after_s))
        planned = with_limits(self.loads.load(rate, num_before + num_counted + num_after, seed), lambda each: limits)
        return play(
            plan,
            planned,
            limits,
            rate=rate,
            num_before=num_before,
            num_counted=num_counted,
            api_server_s=self.machines.api_server_s,
            attainment=options.attainment,
        )


def study_of(options: PlanOptions) -> Study:
    """Return the search that the flags ask for, ready to begin.

    Raises SettingsError when no plan is possible or flags are missing, ModelError when the model's config.json cannot
    be used, and BenchError when the trace cannot.
    """
    if not options.goodput:
        raise SettingsError("--goodput is needed: without limits every rate is good")
    limits = parse_goodput(options.goodput)
    machines = machines_of(options.nodes)
    loads = Loads(options.load, machines.vocab_size, machines.max_model_len)
    lengths = loads.lengths()
    estimates = Estimates(lengths, limits)
    plans = tuple(candidates(options, machines, estimates, lengths.longest_tokens))
    if not plans:
        raise SettingsError(_why_none(machines, options.gpus // options.cells, lengths.longest_tokens))
    if not all(weight_of(plan, options.objective) > 0 for plan in plans):
        names = ", ".join(dict.fromkeys(kind.hardware for kind in machines.kinds))
        raise SettingsError(f"--{options.objective} needs a figure above 0 of all hardware, {names}: --price, --watts")
    return Study(options, machines, limits, loads, estimates, plans)


def _why_none(machines: Machines, num_devices: int, longest_tokens: int) -> str:
    """Return why there is no plan for a cell of so many devices."""
    least = min(kind.num_devices for kind in machines.kinds)
    if least > num_devices:
        return f"the smallest node has {least} devices, and a cell has {num_devices}: --tp, --pp, --gpus or --cells"
    return f"no node holds requests of {longest_tokens} tokens on {num_devices} devices"


async def run_race(race: Race, options: PlanOptions, num_workers: int, on_played: Callable[[], None]) -> None:
    """Run all probes of a race on `num_workers` processes; the result is the same with any number of them.

    `on_played` is called after each probe. The processes are gone at the end. Raises BenchError when one ends or is not
    done in time.
    """
    turns = Turns(race)

    def next_job() -> tuple[int, Job] | None:
        if (chosen := turns.next()) is None:
            return None
        index, probe = chosen
        return index, {"index": index, "rate": probe.rate, "seed": probe.seed, "is_quick": race.is_survey}

    def record(index: int, played: dict[str, Any]) -> None:
        for _ in turns.record(index, Played(**played)):
            on_played()

    await run_crew(MODULE, options.to_json(), num_workers, next_job, record)


def prepare(setup: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Set up the search of the JSON text; return the function of a job: from a probe's arguments to its figures.

    Raises SplitServeError for a search that cannot be set up.
    """
    study = study_of(options_from_json(setup))
    return lambda job: dataclasses.asdict(study.probe(**job))


if __name__ == "__main__":
    work(prepare)
