"""Compare contenders: find the highest request rate of each at which enough requests are good.

All searches advance together, one probe of each contender in a round, so that whatever disturbs the machine for a while
disturbs everybody; each round begins with another contender. Probes of one rate and number send the same requests at
the same moments to everybody.

Every objective has searches of its own. Where the limits are sent with the requests, results under one objective say
nothing of another; where they are not, one measured load is judged by all. A load that is saved is not measured again.
"""

import asyncio
import hashlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, Final

import click

from serving_core.errors import SettingsError, SplitServeError
from serving_core.flags import NATIVE
from serving_core.model_files.config import read_model_config
from splitserve.commands.terminal import report, stderr, stdout, waiting
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.code_version import SERVING, code_digest, files_digest
from splitserve_bench.compare.arena import Arena
from splitserve_bench.compare.comparison import Comparison, Entry, Forecaster, ProbeRun, by_cores, concluded, judged_by
from splitserve_bench.compare.contenders import ClusterContender, Contender, PeerContender
from splitserve_bench.compare.report import comparison_json, comparison_view, save_comparison
from splitserve_bench.compare.search import Goal, Probe, RateSearch, plain
from splitserve_bench.compare.slo import (
    Scales,
    Slo,
    Unloaded,
    fit_unloaded,
    judge,
    sample,
)
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.command import Dataset
from splitserve_bench.serve.datasets import at_rate, clipped_words, fit, plan
from splitserve_bench.serve.generator import describe
from splitserve_bench.serve.metrics import Limits, Summary, tpot_s, ttft_s, with_limits
from splitserve_bench.serve.records import (
    OPENAI,
    Outcome,
    PlannedRequest,
    Progress,
    ServedModel,
    Target,
    load_digest,
    to_outcome,
)
from splitserve_bench.serve.results import request_lines, write_whole
from splitserve_bench.serve.workload import Source
from splitserve_bench.simulate.profile import read_profile

ARGUMENTS: Final = "arguments.json"
OUTCOME_FIELDS: Final = frozenset(field.name for field in fields(Outcome))
MAX_TRACED: Final = 100_000  # requests that are read of a trace
SAMPLE: Final = 200  # drawn requests from which a share is estimated
WARM_UP_REQUESTS: Final = 8
MOST_REQUESTS: Final = 5000  # of one probe
WARM_UP, UNLOADED = 0.0, -1.0  # rates that no probe has, for the seeds of loads that are none


@dataclass(frozen=True, slots=True)
class CompareBench:
    """How much is measured, and what counts: limits, or multiples (scales) of a request's time on an idle reference."""

    criteria: tuple[Limits | Scales, ...]  # each judged for itself
    send_limits: bool  # whether requests to clusters of ours have the limits that they are judged by
    own_unloaded: bool  # whether scales also count from what each contender itself takes; for at_rates
    attainment: float
    tolerance: float
    max_probes: int
    first_rate: float | None  # None: estimated from the unloaded reference
    at_rates: tuple[float, ...]  # instead of a search
    num_prompts: int  # of a probe, at least
    seconds: float  # for which a probe sends requests, at least
    request_timeout_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """All that the flags say about a comparison. `flags` of `splitserve up` are for every cluster of ours."""

    model: LocalModel
    cores: Sequence[int]
    flags: Mapping[str, Any]
    contenders: Sequence[Contender]
    reference: Contender
    dataset: Dataset
    bench: CompareBench
    profiles: Sequence[Path]
    save_dir: Path | None
    as_json: bool

    def about(self) -> dict[str, Any]:
        """Return the fields of the JSON object that say what was compared."""
        return {
            "model": self.model.name,
            "cores": len(self.cores),
            "engine_flags": dict(self.flags),
            "dataset": asdict(self.dataset),
            "bench": asdict(self.bench),
        }

    def arguments(self) -> dict[str, Any]:
        """Return what must be equal in a saved comparison and one that continues it, the code's digest among it."""
        contenders = [asdict(each) for each in self.contenders]
        made_by = {"code": code_digest(SERVING), "kernels": os.environ.get(NATIVE, "")}
        return {**self.about(), "contenders": contenders, "model_files": files_digest(self.model.folder), **made_by}


class Workload:
    """Plan loads for one model: the same data set at any rate, with other requests for every seed.

    Of a trace the seed chooses the stretch that is replayed, of texts the order, so that probes may share some
    requests.
    """

    def __init__(self, dataset: Dataset, model: ServedModel, folder: Path | None = None) -> None:
        """Read the data set; texts need the model's folder, for its tokenizer.

        Raises BenchError when the data set cannot be read or the vocabulary's size is not known, and ModelError for a
        folder without a tokenizer.
        """
        if model.vocab_size is None:
            raise BenchError("without the size of the vocabulary no prompts can be drawn")
        self._burstiness = dataset.burstiness
        self._max_model_len = model.max_model_len
        self._source = Source(dataset, model.vocab_size, folder, MAX_TRACED)

    def load(self, rate: float, num_requests: int, seed: int) -> list[PlannedRequest]:
        """Plan `num_requests` requests at a mean rate per second, or all requests of a file that has fewer.

        An infinite rate sends all at once.
        """
        if traced := self._source.traced:
            start = Random(f"{seed} stretch").randrange(max(1, len(traced) - num_requests + 1))
            stretch = at_rate(traced[start : start + num_requests], rate)
            shapes, send_at_s = self._source.replayed(stretch, seed), [each.at_s for each in stretch]
        else:
            shapes = self._source.drawn(num_requests, Random(f"{seed} shapes"))
            send_at_s = send_times_s(len(shapes), rate, self._burstiness, Random(f"{seed} arrivals"))
        if self._max_model_len is not None:
            shapes = list(fit(shapes, self._max_model_len).shapes)
        return plan(shapes, send_at_s)

    def clipped_share(self) -> float:
        """Return the share of the data set's requests that are too long for some contender, and so clipped."""
        if self._max_model_len is None:
            return 0.0
        return self._source.clipped_share(self._max_model_len, SAMPLE, Random(0))


def served_by_all(model: LocalModel, max_model_len: int | None, peers: Sequence[ServedModel]) -> ServedModel:
    """Return the model with the greatest length of a request that our clusters and all peers take.

    `max_model_len` is the flag of our clusters, None without it.
    """
    config = read_model_config(model.folder)
    lengths = [config.max_position_embeddings, max_model_len, *(peer.max_model_len for peer in peers)]
    return ServedModel(model.name, min(length for length in lengths if length is not None), config.vocab_size)


def seed_of(base: int, rate: float, number: int) -> int:
    """Return the seed of the probe of this number at this rate: the same for all contenders.

    Every rate and number has another one, so that a server that keeps KV between probes never sees a prompt again.
    """
    digest = hashlib.blake2s(f"{base} {rate!r} {number}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, slots=True)
class Cell:
    """A load for a contender; `label` says in the file's name which one."""

    contender: Contender
    label: str
    planned: Sequence[PlannedRequest]

    @property
    def name(self) -> str:
        """Return the name of the file that the load is saved as, without its suffix."""
        digest = load_digest(self.contender, self.planned)
        return f"{self.contender.name}-{self.label}-{digest}".replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Measured:
    """The outcomes of a load, in its order.

    `is_repeated`: part of it had been sent before to a server that may have kept its KV, by a run that was stopped.
    """

    outcomes: tuple[Outcome, ...]
    is_repeated: bool = False


class Cells:
    """The saved loads of one comparison, in a folder of their own. `in` says whether a load is saved."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        """Use the comparison in `folder`, or begin one with these arguments.

        Raises SettingsError when the folder holds a comparison with other arguments, or cannot be used.
        """
        self._probes = folder / "probes"
        try:
            self._probes.mkdir(parents=True, exist_ok=True)
            wanted, path = json.loads(json.dumps(arguments)), folder / ARGUMENTS
            if path.exists():
                _check_same(json.loads(path.read_text(encoding="utf-8")), wanted, folder)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--save-dir {folder} cannot be used: {error}") from error
        write_whole(path, json.dumps(wanted, indent=2))

    def __len__(self) -> int:
        return sum(1 for _ in self._probes.glob("[!.]*.json"))

    def __contains__(self, cell: Cell) -> bool:
        return self._path(cell).exists()

    def find(self, cell: Cell) -> Measured | None:
        """Return the saved outcomes of a load, or None when it is not saved.

        Raises BenchError for an unreadable file.
        """
        if cell not in self:
            return None
        path = self._path(cell)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return Measured(tuple(map(_outcome, saved["requests"])), saved["is_repeated"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path.name} cannot be read: remove it, and it will be measured again") from error

    def begin(self, cell: Cell) -> bool:
        """Note in the folder that a load is being measured; return whether it had been begun before and not saved."""
        was_begun = self._mark(cell).exists()
        write_whole(self._mark(cell), "")
        return was_begun

    def save(self, cell: Cell, measured: Measured) -> None:
        """Save the outcomes of a load. Raises BenchError when they cannot be written."""
        saved = {
            "contender": cell.contender.name,
            "load": cell.label,
            "is_repeated": measured.is_repeated,
            "requests": [
                line | {"told_ttft_ms": planned.ttft_ms, "told_tpot_ms": planned.tpot_ms}
                for planned, line in zip(cell.planned, request_lines(measured.outcomes), strict=True)
            ],
        }
        write_whole(self._path(cell), json.dumps(saved))
        self._mark(cell).unlink(missing_ok=True)

    def _path(self, cell: Cell) -> Path:
        return self._probes / f"{cell.name}.json"

    def _mark(self, cell: Cell) -> Path:
        return self._probes / f".{cell.name}.begun"


def _outcome(line: Mapping[str, Any]) -> Outcome:
    return to_outcome({name: value for name, value in line.items() if name in OUTCOME_FIELDS})


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    old, new = _flat(before, ""), _flat(now, "")
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            raise SettingsError(
                f"--save-dir {folder} holds a comparison of other arguments or code: its {name} is {old.get(name)}, "
                f"not {new.get(name)}; give another folder"
            )


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


class ContenderError(BenchError):
    """A contender that cannot be measured any further."""


class Compare:
    """Run one comparison. `report` gets lines that stay, `show` a line about what happens at the moment."""

    def __init__(
        self,
        bench: CompareBench,
        workload: Workload,
        arena: Arena,
        cells: Cells,
        forecaster: Forecaster,
        *,
        report: Report,
        show: Callable[[str], None],
    ) -> None:
        self._bench = bench
        self._workload = workload
        self._arena = arena
        self._cells = cells
        self._forecaster = forecaster
        self._report = report
        self._show = show
        self._num_loads = 0
        self._num_probes = 0
        self._comparisons: tuple[Comparison, ...] = ()
        self._own: dict[str, Unloaded] = {}

    @property
    def found(self) -> tuple[Comparison, ...]:
        """Return what is known now: a comparison by each objective, then by each contender's own unloaded times.

        Empty before anybody was probed.
        """
        found = list(self._comparisons)
        if self._bench.own_unloaded:
            found += map(self._by_own, self._bench.criteria, self._comparisons)
        return tuple(concluded(each) for each in found if each.is_probed)

    async def run(self, contenders: Sequence[Contender], reference: Contender) -> tuple[Comparison, ...]:
        """Advance all searches to their ends, and return what was found.

        A contender that cannot be measured any further is left out from then on, and named. Raises BenchError when the
        unloaded reference cannot be measured, or when no contender is left.
        """
        unloaded = await self._measure_unloaded(reference) if self._needs_unloaded() else None
        failures = await self._measure_own(contenders) if self._bench.own_unloaded else {}
        goal = self._goal(unloaded)
        self._comparisons = tuple(
            self._comparison(goal, Slo(criterion, unloaded), unloaded, contenders, failures)
            for criterion in self._bench.criteria
        )
        number = 0
        while any([await self._round(each, number) for each in self._comparisons]):
            number += 1
        entries = [entry for each in self._comparisons for entry in each.entries]
        if all(entry.failure for entry in entries) or not self.found:
            failed = dict.fromkeys(f"{entry.contender.name}: {entry.failure}" for entry in entries)
            raise BenchError("; ".join(failed))
        return self.found

    def _comparison(
        self,
        goal: Goal,
        slo: Slo,
        unloaded: Unloaded | None,
        contenders: Sequence[Contender],
        failures: Mapping[str, str],
    ) -> Comparison:
        self._report(f"A good request: {slo}.")
        entries = [
            Entry(each, slo, RateSearch(goal, self._bench.at_rates), failure=failures.get(each.name, ""))
            for each in contenders
        ]
        return Comparison(goal, str(slo), unloaded, tuple(entries))

    async def _round(self, comparison: Comparison, number: int) -> bool:
        """Probe each contender once, and return whether there was anything left to do."""
        pending = [(entry, probe) for entry in comparison.entries if (probe := entry.next_probe())]
        first = number % len(pending) if pending else 0
        for entry, probe in pending[first:] + pending[:first]:
            await self._probe(entry, probe)
        return bool(pending)

    async def _probe(self, entry: Entry, probe: Probe) -> None:
        planned = self._planned(entry, probe)
        what = f"{entry.contender.name}, {plain(probe.rate)} req/s"
        cell = Cell(entry.contender, f"{probe.rate:.4g}qps-{probe.seed}", planned)
        is_saved = cell in self._cells
        try:
            measured = await self._measured(cell, what)
        except ContenderError as error:
            entry.failure = str(error)
            self._report(f"{entry.contender.name} is out: {error}")
            return
        self._num_probes += 1
        pairs = tuple(zip(planned, measured.outcomes, strict=True))
        run = ProbeRun(
            self._num_probes,
            entry.contender.name,
            probe,
            pairs,
            judge(entry.slo, pairs),
            measured.is_repeated,
            self._simulated(entry, planned),
        )
        entry.record(run)
        self._report(probe_line(run) + (", as saved" if is_saved else ""))

    def _simulated(self, entry: Entry, planned: Sequence[PlannedRequest]) -> Summary | None:
        if not isinstance(entry.contender, ClusterContender):
            return None
        outcomes = self._forecaster.outcomes(entry.contender, planned, self._bench.request_timeout_s)
        return None if outcomes is None else judge(entry.slo, list(zip(planned, outcomes, strict=True)))

    def _planned(self, entry: Entry, probe: Probe) -> list[PlannedRequest]:
        """Return the requests of a probe; report when the data set or the bound on a probe gives fewer than wanted."""
        bench = self._bench
        wanted = max(bench.num_prompts, math.ceil(probe.rate * bench.seconds))
        num_requests = min(wanted, max(bench.num_prompts, MOST_REQUESTS))
        planned = self._workload.load(probe.rate, num_requests, seed_of(bench.seed, probe.rate, probe.seed))
        if len(planned) < wanted:
            who = "the data set" if len(planned) < num_requests else "a probe"
            self._report(
                f"{entry.contender.name}, {plain(probe.rate)} req/s: {who} has {len(planned)} requests, not the "
                f"{wanted} of {bench.seconds:g} s; a short run may not show a queue that grows slowly"
            )
        has_limits = bench.send_limits and isinstance(entry.contender, ClusterContender)
        return with_limits(planned, entry.slo.limits_of) if has_limits else planned

    async def _measured(self, cell: Cell, what: str, *, is_alone: bool = False) -> Measured:
        """Return a load's outcomes as saved, or measure and save them.

        With `is_alone` requests are sent one after the other, and all must succeed. Raises ContenderError when the load
        fails, and BenchError for files that cannot be used.
        """
        number, self._num_loads = self._num_loads, self._num_loads + 1
        if (saved := self._cells.find(cell)) is not None:
            return saved

        def show(progress: Progress) -> None:
            ended = progress.num_completed + progress.num_failed
            self._show(f"{what}: {progress.num_sent} sent, {ended} of {progress.num_planned} ended")

        self._show(f"{what}: starting")
        was_begun = self._cells.begin(cell)
        try:
            outcomes = await self._arena.run(
                cell.contender,
                self._workload.load(math.inf, WARM_UP_REQUESTS, seed_of(self._bench.seed, WARM_UP, number)),
                cell.planned,
                max_concurrency=1 if is_alone else None,
                request_timeout_s=self._bench.request_timeout_s,
                on_progress=show,
            )
        except SplitServeError as error:
            raise ContenderError(str(error)) from error
        if is_alone and (errors := [outcome.error for outcome in outcomes if outcome.error]):
            raise ContenderError(f"{cell.contender.name} cannot answer: {errors[0]}")
        measured = Measured(tuple(outcomes), was_begun and not isinstance(cell.contender, ClusterContender))
        self._cells.save(cell, measured)
        return measured

    async def _measure_own(self, contenders: Sequence[Contender]) -> dict[str, str]:
        """Measure what requests take alone on each contender; return by name why some cannot be measured."""
        failures = {}
        for each in contenders:
            try:
                self._own[each.name] = await self._measure_unloaded(each)
            except ContenderError as error:
                failures[each.name] = str(error)
                self._report(f"{each.name} is out: {error}")
        return failures

    async def _measure_unloaded(self, contender: Contender) -> Unloaded:
        planned = sample(self._workload.load(math.inf, self._bench.num_prompts, seed_of(self._bench.seed, UNLOADED, 0)))
        cell = Cell(contender, "unloaded", planned)
        outcomes = (await self._measured(cell, f"{contender.name}, unloaded", is_alone=True)).outcomes
        ttfts = [(len(each.prompt), ttft_s(outcome)) for each, outcome in zip(planned, outcomes, strict=True)]
        tpots = [tpot_s(outcome) for outcome in outcomes]
        return fit_unloaded(
            [(tokens, seconds) for tokens, seconds in ttfts if seconds is not None],
            [seconds for seconds in tpots if seconds is not None],
        )

    def _by_own(self, criterion: Limits | Scales, comparison: Comparison) -> Comparison:
        assert isinstance(criterion, Scales)
        slos = {name: Slo(criterion, unloaded) for name, unloaded in self._own.items()}
        return judged_by(slos, f"{criterion} what the request takes alone on the same contender", comparison)

    def _needs_unloaded(self) -> bool:
        is_rate_known = bool(self._bench.at_rates) or self._bench.first_rate is not None
        return any(isinstance(each, Scales) for each in self._bench.criteria) or not is_rate_known

    def _goal(self, unloaded: Unloaded | None) -> Goal:
        bench = self._bench
        first_rate = bench.first_rate or min(bench.at_rates, default=0.0)
        if not first_rate:
            assert unloaded is not None
            planned = self._workload.load(math.inf, bench.num_prompts, seed_of(bench.seed, UNLOADED, 0))
            first_rate = first_rate_of(unloaded, planned)
        return Goal(first_rate, bench.attainment, bench.tolerance, bench.max_probes)


def first_rate_of(unloaded: Unloaded, planned: Sequence[PlannedRequest]) -> float:
    """Return the rate, to two digits, of a server that does one of these requests after the other.

    A search for one that does several at a time may begin there.
    """
    rate = 1 / statistics.fmean(unloaded.answer_s(each) for each in planned)
    return float(f"{rate:.1e}")


def probe_line(run: ProbeRun) -> str:
    """Return the result of a probe in one line."""
    counted = run.counted
    low, high = counted.interval
    return (
        f"{run.contender}, {plain(counted.rate)} req/s: {counted.num_good} of {counted.num_total} good "
        f"({low:.0%} to {high:.0%})"
    )


# ---- the command ----


async def compare_contenders(options: CompareOptions) -> None:
    """Compare the contenders, and print and save what was found; when it is stopped, print what was found until then.

    Raises BenchError when no contender can be measured or a file not be written, and SettingsError for flags that do
    not fit.
    """
    with waiting("Comparing") as show:
        # Without a terminal, lines of finished probes are enough.
        comparing = await _prepare(options, show if stderr.is_terminal else lambda text: None)
        try:
            found = await comparing.run(options.contenders, options.reference)
        except asyncio.CancelledError:
            if comparing.found and not options.as_json:
                stdout.print("Stopped: these searches are not over.")
                _show(comparing.found, options)
            raise
    _show(found, options)
    if options.save_dir is not None:
        try:
            save_comparison(found, options.about(), options.save_dir)
        except OSError as error:
            raise BenchError(f"{options.save_dir} cannot be written to: {error.strerror}") from error


async def _prepare(options: CompareOptions, show: Callable[[str], None]) -> Compare:
    """Ask the peers what they serve, open the folders, read the data set, and return the comparison, not begun.

    Raises BenchError when a peer does not reply, and SettingsError when a folder cannot be used.
    """
    forecaster = Forecaster(by_cores(list(map(read_profile, options.profiles))), len(options.cores), options.flags)
    folder = options.save_dir or Path(tempfile.mkdtemp(prefix="splitserve-compare-"))
    cells = Cells(folder, options.arguments())
    if num_saved := len(cells):
        report(f"saved loads: {num_saved}; only what is missing is measured")
    peers = [each for each in options.contenders if isinstance(each, PeerContender)]
    described = [await describe(Target(OPENAI, each.address)) for each in peers]
    served = served_by_all(options.model, options.flags.get("max_model_len") or None, described)
    workload = Workload(options.dataset, served, options.model.folder)
    if clipped := clipped_words(workload.clipped_share(), served.max_model_len):
        report(clipped)
    report(f"{', '.join(each.name for each in options.contenders)}; probes and logs: {folder}")
    for each in options.contenders if options.profiles else ():
        if isinstance(each, ClusterContender) and (reason := forecaster.why_not(each)):
            report(f"{each.name} is not simulated: {reason}")
    arena = Arena(options.model, options.cores, options.flags, folder / "logs", report)
    return Compare(options.bench, workload, arena, cells, forecaster, report=report, show=show)


def _show(found: Sequence[Comparison], options: CompareOptions) -> None:
    if options.as_json:
        click.echo(json.dumps(comparison_json(found, options.about())))
        return
    for each in found:
        stdout.print(comparison_view(each))
