"""One search, made alike in the process that leads it and in those that simulate: plans, loads and probes."""

from dataclasses import dataclass

from serving_core.errors import SettingsError
from splitserve_bench.compare.search import Goal
from splitserve_bench.plan.asked import Asked
from splitserve_bench.plan.fleets import Played, play
from splitserve_bench.plan.loads import Loads
from splitserve_bench.plan.nodes import Machines, machines_of
from splitserve_bench.plan.plans import Estimates, Plan, candidates, weight_of
from splitserve_bench.plan.race import Race
from splitserve_bench.serve.metrics import Limits, parse_goodput

FIRST_SHARE = 0.7  # of its estimate, the rate at which a plan is probed first
MOST_REQUESTS = 20_000  # of a probe
USUAL_TPOT_S = 0.05  # of answers, where no limit says how long they may take


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that a search knows before its first probe."""

    asked: Asked
    machines: Machines
    limits: Limits
    loads: Loads
    mean_output_tokens: float
    plans: tuple[Plan, ...]
    estimates: tuple[float, ...]  # of each plan, requests a second of a cell

    def race(self) -> Race:
        asked = self.asked
        goals = []
        for plan, estimate in zip(self.plans, self.estimates, strict=True):
            goal = Goal(FIRST_SHARE * estimate, asked.attainment, asked.tolerance, asked.max_probes)
            weight = weight_of(plan, asked.objective)
            goals.append((goal, weight, estimate / weight))
        return Race(goals)

    def probe(self, index: int, rate: float, seed: int) -> Played:
        """Simulates one plan at one rate. Before the requests that count come those of the time that an answer takes at
        its limit, and after them as many again, so that the fleet is as full as it will be."""
        asked, limits = self.asked, self.limits
        fill_s = self.mean_output_tokens * (limits.tpot_s or USUAL_TPOT_S) + (limits.ttft_s or 0.0)
        num_counted = min(MOST_REQUESTS // 2, max(asked.num_prompts, round(rate * asked.seconds)))
        num_before = min(MOST_REQUESTS // 4, round(rate * fill_s))
        planned = self.loads.load(rate, num_counted + 2 * num_before, seed)
        return play(
            self.plans[index],
            planned,
            limits,
            rate=rate,
            num_before=num_before,
            num_counted=num_counted,
            door_s=self.machines.door_s,
        )


def study_of(asked: Asked) -> Study:
    """Raises SettingsError, ModelError and BenchError for what cannot be searched."""
    if not asked.goodput:
        raise SettingsError("--goodput is needed: without limits every rate is good")
    limits = parse_goodput(asked.goodput)
    machines = machines_of(asked.nodes)
    loads = Loads(asked.load, machines.vocab_size, machines.max_model_len)
    lengths = loads.lengths()
    estimates = Estimates(lengths, limits)
    plans = tuple(candidates(asked, machines, estimates, lengths.longest_tokens))
    if not plans:
        raise SettingsError(
            f"no node holds requests of {lengths.longest_tokens} tokens on {asked.gpus // asked.cells} devices"
        )
    if not all(weight_of(plan, asked.objective) > 0 for plan in plans):
        raise SettingsError(f"--{asked.objective} needs a figure above 0 for all hardware: --price, --watts")
    expected = tuple(max(estimates.of(plan.pools), 1e-3) for plan in plans)
    return Study(asked, machines, limits, loads, lengths.mean_output_tokens, plans, expected)
