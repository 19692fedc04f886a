"""Hold what a comparison finds about each contender, beside what the simulator predicts of the same loads."""

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
    """A probe that was run: its requests with their outcomes, and the summary of these."""

    number: int  # in the order of all probes, from 1
    contender: str
    probe: Probe
    pairs: tuple[tuple[PlannedRequest, Outcome], ...]
    summary: Summary
    is_repeated: bool = False  # part of it was sent before, to a server that may have kept its KV
    simulated: Summary | None = None  # of the same requests in the simulator

    @property
    def counted(self) -> Counted:
        """Return the numbers of good and of all requests at the probe's rate."""
        summary = self.summary
        return Counted(self.probe.rate, summary.num_good, summary.num_offered, summary.num_effective)


@dataclass(slots=True)
class Entry:
    """A contender with the objective that it is judged by, its search and its probes.

    `failure` is "", or one sentence that says why its search has ended early.
    """

    contender: Contender
    slo: Slo
    search: RateSearch
    runs: list[ProbeRun] = field(default_factory=list)
    failure: str = ""

    def next_probe(self) -> Probe | None:
        """Return the probe that the search needs next; None when the search is over or has failed."""
        return None if self.failure else self.search.next_probe()

    def record(self, run: ProbeRun) -> None:
        """Add a probe that was run, for the search to continue from."""
        self.runs.append(run)
        self.search.record(run.counted)

    @property
    def kept(self) -> Kept:
        """Return for each probe which of its requests were good, in the order of sending."""
        return {run.probe: run.summary.are_good for run in self.runs}

    @property
    def judged(self) -> Probes:
        """Return for each probe its outcomes with their limits, in the order of sending."""
        return {run.probe: run.summary.judged for run in self.runs}

    def summary_at(self, rate: float) -> Summary:
        """Return the summary of all probes of a rate together."""
        return summarize_judged([each for run in self.runs if run.probe.rate == rate for each in run.summary.judged])


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found by one objective.

    `paired` compares every two contenders on the same requests; `causes` say why an `auto` cluster lost requests that a
    colocated or split one kept; `verdict` are sentences.
    """

    goal: Goal
    objective: str
    unloaded: Unloaded | None
    entries: tuple[Entry, ...]
    paired: tuple[Paired, ...] = ()
    causes: tuple[Causes, ...] = ()
    verdict: tuple[str, ...] = ()

    @property
    def is_probed(self) -> bool:
        """Return whether any contender has been probed."""
        return any(entry.runs for entry in self.entries)


def standing(entry: Entry) -> Standing:
    """Return what the verdict needs of a contender: its result, and its misses at the lowest rate that fails."""
    result = entry.search.result()
    failing = result.failing_rate
    misses = None if failing is None else entry.summary_at(failing).misses
    return Standing(entry.contender.name, entry.contender.kind, result, misses)


def concluded(comparison: Comparison) -> Comparison:
    """Return the comparison with the pairs, causes and verdict of the contenders that have not dropped out."""
    entries = [entry for entry in comparison.entries if entry.runs and not entry.failure]
    paired = pairs_of({each.contender.name: each.kept for each in entries})
    sentences = verdict([standing(entry) for entry in entries])
    if all(entry.search.at_rates for entry in entries):
        sentences += paired_sentences(paired)
    return replace(comparison, paired=tuple(paired), causes=tuple(_causes(entries)), verdict=tuple(sentences))


def _causes(entries: Sequence[Entry]) -> Iterator[Causes]:
    """Yield for each rate why `auto` lost requests that colocation or a split kept."""
    judged = {entry.contender.name: entry.judged for entry in entries}
    for auto in entries:
        for fixed in entries if auto.contender.kind == AUTO else ():
            if fixed.contender.kind in (COLOCATED, SPLIT):
                yield from causes_between(auto.contender.name, fixed.contender.name, judged)


def judged_by(slos: Mapping[str, Slo], objective: str, comparison: Comparison) -> Comparison:
    """Return the comparison with its probes judged by other objectives, `slos`, by the contenders' names.

    Only probes at fixed rates can be judged again. Contenders that `slos` does not name are left out; `objective`
    describes all of them in words.
    """
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
    """Predict by simulation what becomes of a load on a cluster of ours whose nodes share `num_cores` cores.

    That needs a profile of nodes of the same number of cores, and flags that the simulator knows.
    """

    profiles: Mapping[int, Profile]  # by cores of a node
    num_cores: int
    flags: Mapping[str, Any]  # of all clusters

    def outcomes(
        self, contender: ClusterContender, planned: Sequence[PlannedRequest], request_timeout_s: float
    ) -> list[Outcome] | None:
        """Simulate a load on a contender and return its outcomes; None when the contender cannot be simulated."""
        if self.why_not(contender):
            return None
        counts = contender.prefill, contender.decode, contender.mixed
        profile = self.profiles[self._cores(contender)]
        flags = {name: value for name, value in self._flags(contender).items() if name not in profile.flags}
        size = FleetSize(*counts, **flags, nodes_per_machine=contender.num_nodes)
        return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=request_timeout_s).outcomes

    def why_not(self, contender: ClusterContender) -> str:
        """Return why a contender cannot be simulated; "" when it can."""
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
    """Return profiles by the number of cores of a node. Raises SettingsError when two have the same number."""
    found = {profile.cores: profile for profile in profiles}
    if len(found) < len(profiles):
        raise SettingsError("two --profile are of nodes with the same number of cores")
    return found


def forecast_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield how far apart measured and simulated shares of good requests are: for each load, then in all.

    The last sentence also says of how many pairs of contenders, among those whose measured shares surely differ, the
    simulation has the better one right. Nothing is yielded where nothing was simulated.
    """
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
    """Return for every two contenders that surely differ at a rate whether the simulation has the same one ahead."""
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
