"""What the simulator says of the loads that clusters have had, and how close that is."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from serving_core.errors import SettingsError
from splitserve_bench.compare.contenders import ClusterContender
from splitserve_bench.compare.entry import Comparison, ProbeRun
from splitserve_bench.compare.paired import POINTS
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import Profile

SIMULATED_FLAGS: Final = frozenset({"policy", "admission", "roles", "kv_lending"})


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Simulates clusters of ours that share so many cores, where there is a profile of nodes of their size, and their
    flags are such as the simulator has."""

    profiles: Mapping[int, Profile]  # by cores of a node
    num_cores: int
    flags: Mapping[str, Any]  # of all clusters

    def outcomes(
        self, contender: ClusterContender, planned: Sequence[PlannedRequest], request_timeout_s: float
    ) -> list[Outcome] | None:
        """What would become of a load; None where that cannot be said."""
        if self.why_not(contender):
            return None
        counts = contender.prefill, contender.decode, contender.both
        profile = self.profiles[self._cores(contender)]
        flags = {name: value for name, value in self._flags(contender).items() if name not in profile.flags}
        size = FleetSize(*counts, **flags, nodes_per_machine=contender.num_nodes)
        return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=request_timeout_s)

    def why_not(self, contender: ClusterContender) -> str:
        """Why its loads are not simulated; empty where they are."""
        profile = self.profiles.get(self._cores(contender))
        if profile is None:
            return f"no --profile is of nodes of {self._cores(contender)} cores"
        given = {name: value for name, value in self._flags(contender).items() if name not in SIMULATED_FLAGS}
        for name in sorted(given.keys() | profile.flags.keys()):
            flag = f"--{name.replace('_', '-')}"
            if name not in profile.flags:
                return f"the simulator does not know {flag}"
            if given.get(name) != profile.flags[name]:
                return f"its nodes are not those of the profile, which have {flag} {profile.flags[name]}"
        return ""

    def _cores(self, contender: ClusterContender) -> int:
        return self.num_cores // contender.num_nodes

    def _flags(self, contender: ClusterContender) -> dict[str, Any]:
        return {**self.flags, **dict(contender.flags)}


def by_cores(profiles: Sequence[Profile]) -> dict[int, Profile]:
    """Raises SettingsError when two are of nodes of one size."""
    found = {profile.cores: profile for profile in profiles}
    if len(found) < len(profiles):
        raise SettingsError("two --profile are of nodes with the same number of cores")
    return found


def forecast_sentences(comparison: Comparison) -> Iterator[str]:
    """How far apart the shares of good requests are, load by load and over all, and whether contenders that are surely
    apart come in the same order."""
    runs = [run for entry in comparison.entries for run in entry.runs if run.simulated is not None]
    if not runs:
        return
    for run in runs:
        measured, simulated = run.judgement.attainment, _simulated(run)
        yield (
            f"{run.contender}, {run.probe.rate:g} req/s: {measured:.1%} measured, {simulated:.1%} simulated "
            f"({_points(run):+.1f} points)"
        )
    apart = sorted(abs(_points(run)) for run in runs)
    orders = _orders(comparison)
    yield (
        f"The simulation is {statistics.median(apart):.1f} points off in the median of {len(runs)} loads, "
        f"{apart[-1]:.1f} at worst; of {len(orders)} pairs that are surely apart it has {sum(orders)} in this order."
    )


def _orders(comparison: Comparison) -> list[bool]:
    """For every two contenders that are surely apart at a rate, whether the simulation has them in the same order."""
    at: dict[tuple[str, float], list[float]] = {}
    for entry in comparison.entries:
        for run in entry.runs:
            if run.simulated is not None:
                at.setdefault((run.contender, run.probe.rate), []).append(_simulated(run))
    orders = []
    for pair in comparison.paired:
        one, other = at.get((pair.one, pair.rate)), at.get((pair.other, pair.rate))
        low, high = pair.interval
        if one and other and not low <= 0 <= high:
            orders.append((statistics.fmean(one) - statistics.fmean(other)) * pair.difference > 0)
    return orders


def _points(run: ProbeRun) -> float:
    return (_simulated(run) - run.judgement.attainment) * POINTS


def _simulated(run: ProbeRun) -> float:
    assert run.simulated is not None
    return run.simulated.attainment
