"""What a comparison knows of each contender and finds in the end, and what the simulator says of the same loads."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from serving_core.errors import SettingsError
from splitserve_bench.compare.contenders import AUTO, COLOCATED, SPLIT, ClusterContender, Contender
from splitserve_bench.compare.search import Counted, Goal, Probe, RateSearch
from splitserve_bench.compare.slo import Slo, Unloaded, judge
from splitserve_bench.compare.verdict import (
    POINTS,
    Causes,
    Kept,
    Paired,
    Probes,
    Standing,
    causes_between,
    paired_sentences,
    pairs_of,
    verdict,
)
from splitserve_bench.serve.metrics import Summary, summarize_judged
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import Profile

SIMULATED_FLAGS: Final = frozenset({"policy", "admission", "roles", "remote_prefix_fetch"})


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """A probe: its requests with what became of them, and the figures of these."""

    number: int  # in the order of all probes, from 1
    contender: str
    probe: Probe
    pairs: tuple[tuple[PlannedRequest, Outcome], ...]
    summary: Summary
    is_repeated: bool = False  # part of it was sent before, to a server that may have kept its KV
    simulated: Summary | None = None  # of the same requests in the simulator

    @property
    def counted(self) -> Counted:
        summary = self.summary
        return Counted(self.probe.rate, summary.num_good, summary.num_offered, summary.num_effective)


@dataclass(slots=True)
class Entry:
    """A contender with what it is judged by, its search and its probes. A failure, one sentence, ends the search."""

    contender: Contender
    slo: Slo
    search: RateSearch
    runs: list[ProbeRun] = field(default_factory=list)
    failure: str = ""

    def next_probe(self) -> Probe | None:
        return None if self.failure else self.search.next_probe()

    def record(self, run: ProbeRun) -> None:
        self.runs.append(run)
        self.search.record(run.counted)

    @property
    def kept(self) -> Kept:
        """Return which requests were good."""
        return {run.probe: run.summary.are_good for run in self.runs}

    @property
    def judged(self) -> Probes:
        return {run.probe: run.summary.judged for run in self.runs}

    def summary_at(self, rate: float) -> Summary:
        """Summarize all probes of a rate."""
        return summarize_judged([each for run in self.runs if run.probe.rate == rate for each in run.summary.judged])


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found by one objective. `paired` are the same requests at every two contenders, `causes` why `auto` lost
    those that a fixed mode kept; `verdict` are sentences."""

    goal: Goal
    objective: str
    unloaded: Unloaded | None
    entries: tuple[Entry, ...]
    paired: tuple[Paired, ...] = ()
    causes: tuple[Causes, ...] = ()
    verdict: tuple[str, ...] = ()

    @property
    def is_probed(self) -> bool:
        return any(entry.runs for entry in self.entries)


def standing(entry: Entry) -> Standing:
    """Return what the verdict needs to know of a contender."""
    result = entry.search.result()
    failing = result.failing_rate
    misses = None if failing is None else entry.summary_at(failing).misses
    return Standing(entry.contender.name, entry.contender.kind, result, misses)


def concluded(comparison: Comparison) -> Comparison:
    """Add what follows from the probes of the contenders that did not drop out."""
    entries = [entry for entry in comparison.entries if entry.runs and not entry.failure]
    paired = pairs_of({each.contender.name: each.kept for each in entries})
    sentences = verdict([standing(entry) for entry in entries])
    if all(entry.search.at_rates for entry in entries):
        sentences += paired_sentences(paired)
    return replace(comparison, paired=tuple(paired), causes=tuple(_causes(entries)), verdict=tuple(sentences))


def _causes(entries: Sequence[Entry]) -> Iterator[Causes]:
    """Return why `auto` lost what colocation or a split kept, for each rate."""
    judged = {entry.contender.name: entry.judged for entry in entries}
    for auto in entries:
        for fixed in entries if auto.contender.kind == AUTO else ():
            if fixed.contender.kind in (COLOCATED, SPLIT):
                yield from causes_between(auto.contender.name, fixed.contender.name, judged)


def judged_by(slos: Mapping[str, Slo], objective: str, comparison: Comparison) -> Comparison:
    """Judge the same probes of fixed rates by another objective, each contender that is named by its own."""
    entries = []
    for entry in comparison.entries:
        if slo := slos.get(entry.contender.name):
            search = RateSearch(comparison.goal, entry.search.at_rates)
            judged = Entry(entry.contender, slo, search, failure=entry.failure)
            for run in entry.runs:
                judged.record(replace(run, summary=judge(slo, run.pairs), simulated=None))
            entries.append(judged)
    return replace(comparison, objective=objective, entries=tuple(entries))


# ---- beside the simulator ----


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Simulates clusters of ours that share so many cores, where there is a profile of nodes of their size, and their
    flags are known to the simulator."""

    profiles: Mapping[int, Profile]  # by cores of a node
    num_cores: int
    flags: Mapping[str, Any]  # of all clusters

    def outcomes(
        self, contender: ClusterContender, planned: Sequence[PlannedRequest], request_timeout_s: float
    ) -> list[Outcome] | None:
        """Simulate a load; None where the contender cannot be simulated."""
        if self.why_not(contender):
            return None
        counts = contender.prefill, contender.decode, contender.mixed
        profile = self.profiles[self._cores(contender)]
        flags = {name: value for name, value in self._flags(contender).items() if name not in profile.flags}
        size = FleetSize(*counts, **flags, nodes_per_machine=contender.num_nodes)
        return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=request_timeout_s)

    def why_not(self, contender: ClusterContender) -> str:
        """Return why a contender cannot be simulated; "" where it can."""
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
    """Return profiles by the cores of a node. Raises SettingsError when two are of nodes of one size."""
    found = {profile.cores: profile for profile in profiles}
    if len(found) < len(profiles):
        raise SettingsError("two --profile are of nodes with the same number of cores")
    return found


def forecast_sentences(comparison: Comparison) -> Iterator[str]:
    """Say how far apart the shares of good requests are, load by load and over all, and whether contenders that are
    surely apart come in the same order."""
    runs = [run for entry in comparison.entries for run in entry.runs if run.simulated is not None]
    if not runs:
        return
    for run in runs:
        measured, simulated = run.summary.attainment, _simulated(run)
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
    """Return for every two contenders that are surely apart at a rate whether the simulation has them in the same
    order."""
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
    return (_simulated(run) - run.summary.attainment) * POINTS


def _simulated(run: ProbeRun) -> float:
    assert run.simulated is not None
    return run.simulated.attainment
