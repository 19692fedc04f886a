"""The same load on real clusters and in the simulator, side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from splitserve_bench.compare.arena import Arena
from splitserve_bench.compare.contenders import COLOCATED, SPLIT, ClusterContender
from splitserve_bench.serve.metrics import Limits, Summary, summarize
from splitserve_bench.serve.misses import FIRST_TOKEN_PHASES, LATER_PHASES, is_complete
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import Profile

FLEETS: Final = (FleetSize(1, 1), FleetSize(0, 0, 2))  # split, colocated
ATTAINMENT_TARGET: Final = 0.05  # most difference of the shares
MEDIAN_TARGET: Final = 0.15  # most difference of medians, of the real one


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load on one fleet, real or simulated; None where no request had such a time. phases_s are means: of a
    request those up to the first token, of a token after it the others."""

    attainment: float
    ttft_s: float | None
    tpot_s: float | None
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """What was measured, and what was simulated."""

    fleet: str
    request_rate: float
    real: Figures
    simulated: Figures

    @property
    def attainment_difference(self) -> float:
        return self.simulated.attainment - self.real.attainment

    @property
    def ttft_difference(self) -> float | None:
        """Of the medians, as a share of the real one."""
        return _share(self.simulated.ttft_s, self.real.ttft_s)

    @property
    def tpot_difference(self) -> float | None:
        """Of the medians, as a share of the real one."""
        return _share(self.simulated.tpot_s, self.real.tpot_s)

    @property
    def is_close(self) -> bool:
        """Whether every difference is within its target."""
        medians = [each for each in (self.ttft_difference, self.tpot_difference) if each is not None]
        is_attainment_close = abs(self.attainment_difference) <= ATTAINMENT_TARGET
        return is_attainment_close and all(abs(each) <= MEDIAN_TARGET for each in medians)

    def largest_phase(self, phases: Sequence[str]) -> tuple[str, float]:
        """Of these phases the one whose mean differs most, and by how many seconds it is longer in the simulation."""
        differences = {
            name: self.simulated.phases_s.get(name, 0.0) - self.real.phases_s.get(name, 0.0) for name in phases
        }
        return max(differences.items(), key=lambda each: abs(each[1]))


async def run_both(
    arena: Arena,
    profile: Profile,
    size: FleetSize,
    planned: Sequence[PlannedRequest],
    warm_up: Sequence[PlannedRequest],
    *,
    request_rate: float,
    limits: Limits,
    max_concurrency: int | None,
    request_timeout_s: float,
) -> Pair:
    """Starts a cluster of this size, and simulates one. Raises BenchError and LaunchError."""
    kind = COLOCATED if size.both else SPLIT
    contender = ClusterContender(str(size), kind, size.prefill, size.decode, size.both)
    real = await arena.run(
        contender,
        warm_up,
        planned,
        max_concurrency=max_concurrency,
        request_timeout_s=request_timeout_s,
        on_progress=lambda progress: None,
    )
    simulated = simulate(profile, size, planned, max_concurrency=max_concurrency, request_timeout_s=request_timeout_s)
    return Pair(str(size), request_rate, figures_of(real, limits), figures_of(simulated, limits))


def figures_of(outcomes: Sequence[Outcome], limits: Limits) -> Figures:
    """What they amount to."""
    summary: Summary = summarize(outcomes, limits)
    latencies = summary.latencies_s
    phases = {name: _mean(outcomes, name, per_token=False) for name in FIRST_TOKEN_PHASES}
    phases |= {name: _mean(outcomes, name, per_token=True) for name in LATER_PHASES}
    return Figures(summary.attainment, latencies["ttft"].median, latencies["tpot"].median, phases)


def _mean(outcomes: Sequence[Outcome], phase: str, *, per_token: bool) -> float:
    seconds = [
        outcome.timeline.get(phase, 0.0) / (max(1, outcome.num_output_tokens - 1) if per_token else 1)
        for outcome in outcomes
        if outcome.timeline is not None and is_complete(outcome)
    ]
    return statistics.fmean(seconds) if seconds else 0.0


def _share(simulated: float | None, real: float | None) -> float | None:
    return simulated / real - 1 if simulated is not None and real else None
