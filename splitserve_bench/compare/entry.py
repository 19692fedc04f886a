"""What the comparison knows of each contender, and what it found in the end. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from splitserve_bench.compare.contenders import Contender
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

    @property
    def counted(self) -> Counted:
        judgement = self.judgement
        return Counted(self.probe.rate, judgement.num_good, judgement.num_total, judgement.num_effective)


@dataclass(slots=True)
class Entry:
    """One contender with its search and its probes. A failure ends the search: one sentence, "" without one."""

    contender: Contender
    search: Search
    runs: list[ProbeRun] = field(default_factory=list)
    failure: str = ""

    def next_probe(self) -> Probe | None:
        return None if self.failure else self.search.next_probe()

    def record(self, run: ProbeRun) -> None:
        self.runs.append(run)
        self.search.record(run.counted)

    def pairs_at(self, rate: float) -> list[tuple[PlannedRequest, Outcome]]:
        """The requests of all probes of that rate."""
        return [pair for run in self.runs if run.probe.rate == rate for pair in run.pairs]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found. `verdict` are sentences."""

    goal: Goal
    slo: Slo
    unloaded: Unloaded | None
    entries: tuple[Entry, ...]
    verdict: tuple[str, ...] = ()


def standing(entry: Entry, slo: Slo) -> Standing:
    """What the verdict needs to know."""
    result = entry.search.result()
    failing = result.failing_rate
    misses = None if failing is None else judge(slo, entry.pairs_at(failing)).misses
    return Standing(entry.contender.name, entry.contender.kind, result, misses)


def standings(entries: Sequence[Entry], slo: Slo) -> list[Standing]:
    """Of those that were probed, and did not drop out."""
    return [standing(entry, slo) for entry in entries if entry.runs and not entry.failure]


def judged_by(slo: Slo, comparison: Comparison) -> Comparison:
    """The same probes of fixed rates, judged by another objective."""
    entries = tuple(_judged_by(slo, entry, comparison.goal) for entry in comparison.entries)
    return replace(comparison, slo=slo, entries=entries, verdict=tuple(verdict(standings(entries, slo))))


def _judged_by(slo: Slo, entry: Entry, goal: Goal) -> Entry:
    search = FixedRates(goal, [run.probe.rate for run in entry.runs])
    judged = Entry(entry.contender, search, failure=entry.failure)
    for run in entry.runs:
        judged.record(replace(run, judgement=judge(slo, run.pairs)))
    return judged
