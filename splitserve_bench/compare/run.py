"""Compares contenders: the highest request rate of each at which enough requests are good.

All searches advance together, one probe of each contender in a round, so that whatever disturbs the machine for a
while disturbs everybody; each round begins with another contender. Probes of one rate and number send the same requests
at the same moments to everybody.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from serving_core.errors import SplitServeError
from splitserve.launch.models import Report
from splitserve_bench.compare.arena import Arena
from splitserve_bench.compare.contenders import Contender
from splitserve_bench.compare.entry import Comparison, Entry, ProbeRun, standings
from splitserve_bench.compare.search import FixedRates, Goal, Probe, RateSearch
from splitserve_bench.compare.slo import FixedSlo, RelativeSlo, Scales, Slo, judge
from splitserve_bench.compare.unloaded import Unloaded, fit_unloaded, sample
from splitserve_bench.compare.verdict import plain, verdict
from splitserve_bench.compare.workload import Workload, seed_of
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.metrics import Limits, tpot_s, ttft_s
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.target import Progress

WARM_UP_REQUESTS: Final = 8
MOST_REQUESTS: Final = 5000  # of one probe
WARM_UP, UNLOADED = 0.0, -1.0  # rates that no probe has, for the seeds of loads that are none


@dataclass(frozen=True, slots=True)
class CompareBench:
    """How much is measured, and what counts: limits, or scales of the unloaded reference."""

    criterion: Limits | Scales
    attainment: float
    tolerance: float
    max_probes: int
    first_rate: float | None  # None: estimated from the unloaded reference
    at_rates: tuple[float, ...]  # instead of a search
    num_prompts: int  # of a probe, at least
    seconds: float  # for which a probe sends requests, at least
    request_timeout_s: float
    seed: int


class Compare:
    """One comparison. `show` is told what happens right now, `on_probe` each finished probe."""

    def __init__(
        self,
        bench: CompareBench,
        workload: Workload,
        arena: Arena,
        *,
        report: Report,
        show: Callable[[str], None],
        on_probe: Callable[[ProbeRun], None],
    ) -> None:
        self._bench = bench
        self._workload = workload
        self._arena = arena
        self._report = report
        self._show = show
        self._on_probe = on_probe
        self._num_probes = 0
        self._found: Comparison | None = None

    @property
    def found(self) -> Comparison | None:
        """What is known now; None before anybody is probed."""
        found = self._found
        if found is None or not any(entry.runs for entry in found.entries):
            return None
        return replace(found, verdict=tuple(verdict(standings(found.entries, found.slo))))

    async def run(self, contenders: Sequence[Contender], reference: Contender) -> Comparison:
        """Advances all searches to their ends. A contender that cannot go on is left out from then on, and named.

        Raises BenchError when the unloaded reference cannot be measured, or when nobody is left.
        """
        unloaded = await self._measure_unloaded(reference) if self._needs_unloaded() else None
        slo, goal = self._slo(unloaded), self._goal(unloaded)
        self._report(f"A good request: {slo}.")
        entries = tuple(Entry(each, self._search(goal)) for each in contenders)
        self._found = Comparison(goal, slo, unloaded, entries)
        number = 0
        while pending := [(entry, probe) for entry in entries if (probe := entry.next_probe())]:
            first = number % len(pending)
            for entry, probe in pending[first:] + pending[:first]:
                await self._probe(entry, probe, slo)
            number += 1
        if all(entry.failure for entry in entries) or self.found is None:
            raise BenchError("; ".join(f"{entry.contender.name}: {entry.failure}" for entry in entries))
        return self.found

    async def _probe(self, entry: Entry, probe: Probe, slo: Slo) -> None:
        name, bench = entry.contender.name, self._bench
        num_requests = max(bench.num_prompts, min(MOST_REQUESTS, math.ceil(probe.rate * bench.seconds)))
        planned = self._workload.load(probe.rate, num_requests, seed_of(bench.seed, probe.rate, probe.seed))
        if len(planned) < num_requests:
            self._report(
                f"{name}, {plain(probe.rate)} req/s: the trace has {len(planned)} requests, not the {num_requests} of "
                f"{bench.seconds:g} s; a short run may not show a queue that grows slowly"
            )
        try:
            outcomes = await self._run(entry.contender, planned, f"{name}, {plain(probe.rate)} req/s")
        except SplitServeError as error:
            entry.failure = str(error)
            self._report(f"{name} is out: {error}")
            return
        self._num_probes += 1
        pairs = tuple(zip(planned, outcomes, strict=True))
        run = ProbeRun(self._num_probes, name, probe, pairs, judge(slo, pairs))
        entry.record(run)
        self._report(probe_line(run))
        self._on_probe(run)

    async def _run(
        self, contender: Contender, planned: Sequence[PlannedRequest], what: str, max_concurrency: int | None = None
    ) -> list[Outcome]:
        def show(progress: Progress) -> None:
            ended = progress.num_completed + progress.num_failed
            self._show(f"{what}: {progress.num_sent} sent, {ended} of {progress.num_planned} ended")

        self._show(f"{what}: starting")
        return await self._arena.run(
            contender,
            self._workload.load(math.inf, WARM_UP_REQUESTS, seed_of(self._bench.seed, WARM_UP, self._num_probes)),
            planned,
            max_concurrency=max_concurrency,
            request_timeout_s=self._bench.request_timeout_s,
            on_progress=show,
        )

    async def _measure_unloaded(self, reference: Contender) -> Unloaded:
        planned = sample(self._workload.load(math.inf, self._bench.num_prompts, seed_of(self._bench.seed, UNLOADED, 0)))
        outcomes = await self._run(reference, planned, f"{reference.name}, unloaded", max_concurrency=1)
        if errors := [outcome.error for outcome in outcomes if outcome.error]:
            raise BenchError(f"{reference.name} cannot answer: {errors[0]}")
        ttfts = [(len(each.prompt), ttft_s(outcome)) for each, outcome in zip(planned, outcomes, strict=True)]
        tpots = [tpot_s(outcome) for outcome in outcomes]
        return fit_unloaded(
            [(tokens, seconds) for tokens, seconds in ttfts if seconds is not None],
            [seconds for seconds in tpots if seconds is not None],
        )

    def _needs_unloaded(self) -> bool:
        is_rate_known = bool(self._bench.at_rates) or self._bench.first_rate is not None
        return isinstance(self._bench.criterion, Scales) or not is_rate_known

    def _slo(self, unloaded: Unloaded | None) -> Slo:
        if isinstance(self._bench.criterion, Limits):
            return FixedSlo(self._bench.criterion)
        assert unloaded is not None
        return RelativeSlo(self._bench.criterion, unloaded)

    def _goal(self, unloaded: Unloaded | None) -> Goal:
        bench = self._bench
        first_rate = bench.first_rate or min(bench.at_rates, default=0.0)
        if not first_rate:
            assert unloaded is not None
            planned = self._workload.load(math.inf, bench.num_prompts, seed_of(bench.seed, UNLOADED, 0))
            first_rate = first_rate_of(unloaded, planned)
        return Goal(first_rate, bench.attainment, bench.tolerance, bench.max_probes)

    def _search(self, goal: Goal) -> RateSearch | FixedRates:
        return FixedRates(goal, self._bench.at_rates) if self._bench.at_rates else RateSearch(goal)


def first_rate_of(unloaded: Unloaded, planned: Sequence[PlannedRequest]) -> float:
    """What a server that answers one request after the other could take at most, to two digits: where the search for
    one that answers several at a time may begin."""
    rate = 1 / statistics.fmean(unloaded.answer_s(each) for each in planned)
    return float(f"{rate:.1e}")


def probe_line(run: ProbeRun) -> str:
    """A finished probe in one line."""
    counted = run.counted
    low, high = counted.interval
    return (
        f"{run.contender}, {plain(counted.rate)} req/s: {counted.num_good} of {counted.num_total} good "
        f"({low:.0%} to {high:.0%})"
    )
