"""What the comparison knows of each contender, and what it found in the end. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from splitserve_bench.compare.causes import Causes, Judged, Probes, causes_between
from splitserve_bench.compare.contenders import AUTO, COLOCATED, SPLIT, Contender
from splitserve_bench.compare.paired import Kept, Paired, paired_sentences, pairs_of
from splitserve_bench.compare.search import Counted, FixedRates, Goal, Probe, RateSearch
from splitserve_bench.compare.slo import Judgement, Slo, judge
from splitserve_bench.compare.unloaded import Unloaded
from splitserve_bench.compare.verdict import Standing, verdict
from splitserve_bench.serve.records import Outcome, PlannedRequest

Search: TypeAlias = RateSearch | FixedRates


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """One probe: its requests with what became of them, and how they were judged."""

    number: int  # in the order of all probes, from 1
    contender: str
    probe: Probe
    pairs: tuple[tuple[PlannedRequest, Outcome], ...]
    judgement: Judgement
    is_repeated: bool = False  # part of it was sent before, to a server that may have kept its KV
    simulated: Judgement | None = None  # of the same requests in the simulator

    @property
    def counted(self) -> Counted:
        judgement = self.judgement
        return Counted(self.probe.rate, judgement.num_good, judgement.num_total, judgement.num_effective)


@dataclass(slots=True)
class Entry:
    """One contender with what it is judged by, its search and its probes. A failure ends the search: one sentence, ""
    without one."""

    contender: Contender
    slo: Slo
    search: Search
    runs: list[ProbeRun] = field(default_factory=list)
    failure: str = ""

    def next_probe(self) -> Probe | None:
        return None if self.failure else self.search.next_probe()

    def record(self, run: ProbeRun) -> None:
        self.runs.append(run)
        self.search.record(run.counted)

    @property
    def kept(self) -> Kept:
        """Which requests were good."""
        return {run.probe: run.judgement.are_good for run in self.runs}

    @property
    def judged(self) -> Probes:
        """What became of all requests."""
        limits_of = self.slo.limits_of
        return {run.probe: [Judged(outcome, limits_of(planned)) for planned, outcome in run.pairs] for run in self.runs}

    def pairs_at(self, rate: float) -> list[tuple[PlannedRequest, Outcome]]:
        """The requests of all probes of that rate."""
        return [pair for run in self.runs if run.probe.rate == rate for pair in run.pairs]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found by one objective, in words. `paired` are the same requests at every two contenders, `causes` why
    `auto` lost those that a fixed mode kept; `verdict` are sentences."""

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
    """What the verdict needs to know."""
    result = entry.search.result()
    failing = result.failing_rate
    misses = None if failing is None else judge(entry.slo, entry.pairs_at(failing)).misses
    return Standing(entry.contender.name, entry.contender.kind, result, misses)


def concluded(comparison: Comparison) -> Comparison:
    """With what follows from the probes of those that did not drop out."""
    entries = [entry for entry in comparison.entries if entry.runs and not entry.failure]
    paired = pairs_of({each.contender.name: each.kept for each in entries})
    sentences = verdict([standing(entry) for entry in entries])
    if all(isinstance(entry.search, FixedRates) for entry in entries):
        sentences += paired_sentences(paired)
    return replace(comparison, paired=tuple(paired), causes=tuple(_causes(entries)), verdict=tuple(sentences))


def _causes(entries: Sequence[Entry]) -> Iterator[Causes]:
    """Of each rate, why `auto` lost what colocation or a split kept."""
    judged = {entry.contender.name: entry.judged for entry in entries}
    for auto in entries:
        for fixed in entries if auto.contender.kind == AUTO else ():
            if fixed.contender.kind in (COLOCATED, SPLIT):
                yield from causes_between(auto.contender.name, fixed.contender.name, judged)


def judged_by(slos: Mapping[str, Slo], objective: str, comparison: Comparison) -> Comparison:
    """The same probes of fixed rates, judged by another objective: each contender that is named by its own."""
    entries = tuple(
        _judged_by(slos[entry.contender.name], entry, comparison.goal)
        for entry in comparison.entries
        if entry.contender.name in slos
    )
    return replace(comparison, objective=objective, entries=entries)


def _judged_by(slo: Slo, entry: Entry, goal: Goal) -> Entry:
    search = FixedRates(goal, [run.probe.rate for run in entry.runs])
    judged = Entry(entry.contender, slo, search, failure=entry.failure)
    for run in entry.runs:
        judged.record(replace(run, judgement=judge(slo, run.pairs), simulated=None))
    return judged
