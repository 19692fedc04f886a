"""Show a load's progress and its figures as tables or JSON, and write its files and pictures."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

import click
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from serving_core.errors import SettingsError
from serving_core.process.extras import require
from splitserve.commands.terminal import PHASE_NAMES, plain_table, report, stderr, stdout, waiting
from splitserve_bench.report import known
from splitserve_bench.serve.command import CAPACITY_CONCURRENCY, CAPACITY_REQUESTS, ServeOptions
from splitserve_bench.serve.metrics import Summary, parse_goodput, summarize
from splitserve_bench.serve.plots import plot_latencies, plot_stages
from splitserve_bench.serve.records import Outcome, Progress, last_sendings
from splitserve_bench.serve.results import (
    Run,
    file_name,
    parse_metrics,
    parse_percentiles,
    read_share,
    request_lines,
    result_json,
    write_whole,
)
from splitserve_bench.serve.session_figures import MAX_TURNS_SHOWN, SessionFigures, session_figures
from splitserve_bench.serve.stages import StageFindings, findings_of, stages_view
from splitserve_bench.serve.workload import Workload

NUM_LINES: Final = 10  # of the progress of a whole load, where there is no terminal
MAX_SEND_LAG_S: Final = 0.010
MAX_SEND_LAG_OF_TTFT: Final = 0.05
MEANING: Final = (
    "latencies are those of complete requests and count from the moment of sending; an output of one token has no TPOT "
    "and meets every limit on it"
)
NAMES: Final = {
    "ttft": "TTFT, sent to first token",
    "tpot": "TPOT, a token after the first",
    "itl": "ITL, between two arrivals",
    "e2el": "E2EL, sent to end",
    "ttst": "TTST, first to second token",
    "client_queue_time": "wait in the generator",
    "e2el_including_client_queue": "E2EL with that wait",
}


class Reporting:
    """Report a load by its flags. Made before the load is sent, so that unusable flags and folders are found then."""

    def __init__(self, options: ServeOptions) -> None:
        """Check the flags about the report, and make the folders of its files.

        Raises SettingsError for a folder that cannot be made, and SettingsError or BenchError for flags.
        """
        if options.plots is not None:
            require("bench")
        self._options = options
        self._limits = parse_goodput(options.goodput)
        parse_metrics(options.percentile_metrics)
        parse_percentiles(options.metric_percentiles)
        options.metadata_pairs()
        self._is_saved = options.save_result or options.save_detailed
        results = (options.result_dir / (options.result_filename or "any.json")).parent
        for folder in [*([results] if self._is_saved else []), *([options.plots] if options.plots else [])]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"{folder} cannot be made: {error.strerror}") from error

    def begin(self, model: str, workload: Workload, request_rate_per_s: float) -> Run:
        """Return the run that starts now, at this rate or at stages of it; report a data set with too few requests."""
        options = self._options
        sessions = {each.session for each in workload.planned} - {None}
        num, what = (len(sessions), "sessions") if sessions else (len(workload.planned), "requests")
        if num < (options.num_prompts or 0):
            report(f"the data set has {num} {what}, not the {options.num_prompts} of --num-prompts")
        started_at = datetime.now().astimezone()
        return Run(started_at, options, model, request_rate_per_s, workload.stages, workload.num_clipped)

    def show(self, outcomes: Sequence[Outcome], run: Run) -> None:
        """Print the figures of a load, and write its files and pictures. `outcomes` are in the order of the load.

        Raises SettingsError or BenchError for a file that cannot be written, after printing.
        """
        summary = summarize(last_sendings(outcomes), self._limits)
        findings = findings_of(outcomes, run.stages, self._limits, self._options.attainment) if run.stages else None
        try:
            if self._is_saved:
                self._save(outcomes, json.dumps(result_json(summary, run, findings)), run)
            if self._options.plots is not None:
                self._draw(outcomes, findings, self._options.plots)
        finally:
            self._print(summary, run, findings)

    def show_stopped(self, outcomes: Sequence[Outcome], num_planned: int, run: Run) -> None:
        """Print the figures of the requests that ended before the load was stopped; nothing is saved."""
        last = last_sendings(outcomes)
        report(f"stopped: {num_planned - len(last)} of {num_planned} requests have no outcome, and do not count here")
        if last and not self._options.as_json:
            self._print(summarize(last, self._limits), run, None)

    def _print(self, summary: Summary, run: Run, findings: StageFindings | None) -> None:
        if self._options.as_json:
            click.echo(json.dumps(result_json(summary, run, findings)))
            return
        stdout.print(serve_view(summary, run))
        if findings is not None:
            stdout.print("", stages_view(findings), sep="\n")

    def _save(self, outcomes: Sequence[Outcome], result: str, run: Run) -> None:
        path = self._options.result_dir / (self._options.result_filename or file_name(run))
        texts = {path: f"{result}\n"}
        if self._options.save_detailed:
            lines = "".join(f"{json.dumps(line)}\n" for line in request_lines(outcomes))
            texts[path.with_name(f"{path.stem}.requests.jsonl")] = lines
        for each, text in texts.items():
            write_whole(each, text)
            report(f"written: {each}")

    def _draw(self, outcomes: Sequence[Outcome], findings: StageFindings | None, folder: Path) -> None:
        paths = [folder / "latencies.png"]
        try:
            plot_latencies(last_sendings(outcomes), self._limits, paths[0])
            if findings is not None:
                paths.append(folder / "stages.png")
                plot_stages(findings, paths[1])
        except OSError as error:
            raise SettingsError(f"{folder}: {error.strerror}") from error
        report(f"pictures: {', '.join(map(str, paths))}")


@contextmanager
def shown_progress(label: str) -> Iterator[Callable[[Progress], None]]:
    """Return a context manager that yields a function which shows progress: on a line that changes.

    Without a terminal it prints a new line for each tenth of the load.
    """
    with waiting(f"{label}: connecting") as show:
        shown = 0

        def tell(progress: Progress) -> None:
            nonlocal shown
            num_ended = progress.num_completed + progress.num_failed
            tenth = num_ended * NUM_LINES // (progress.num_planned or 1)
            if stderr.is_terminal or tenth != shown:
                show(f"{label}: {_progress_text(progress)}")
            shown = tenth

        yield tell


def _progress_text(progress: Progress) -> str:
    elapsed_s = progress.elapsed_s or 1.0
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    return (
        f"{progress.num_completed} of {progress.num_planned} done{failed}, {progress.num_in_flight} under way, "
        f"{progress.elapsed_s:.1f} s, {progress.num_completed / elapsed_s:.2f} requests/s, "
        f"{progress.num_output_tokens / elapsed_s:.1f} tokens/s"
    )


def capacity_line(rate_per_s: float) -> str:
    """Return the capacity, and how it was measured, in words."""
    return f"capacity: {rate_per_s:.4g} requests/s ({CAPACITY_REQUESTS} requests, {CAPACITY_CONCURRENCY} at a time)"


# ---- tables ----


def serve_view(summary: Summary, run: Run) -> Group:
    """Return all figures of a load, one below the other, warnings last."""
    parts: list[object] = [_load_line(run), "", _counts_table(summary, run), ""]
    parts += [*map(escape, _errors_lines(summary)), _latency_table(summary, run.options), MEANING]
    if summary.limits.by_name():
        parts += ["", _attainment_line(summary), *_misses_lines(summary)]
    if (sessions := session_figures(summary)) is not None:
        parts += ["", *_session_parts(sessions)]
    if (returned := summary.returned).num:
        parts += [
            f"sent again when they had been told to: {returned.num}, of which {returned.num_admitted} were admitted, "
            f"and {returned.num_good} of these were good"
        ]
    if phases_s := summary.phases_s:
        means = ", ".join(f"{PHASE_NAMES[field]} {mean_s * 1e3:.1f} ms" for field, mean_s in phases_s.items())
        parts += ["", f"mean of each phase: {means}"]
    if (tier := run.tier) is not None:
        parts += [
            f"KV offload: {tier.num_hits} blocks loaded, {tier.hit_rate:.1%} of those that the pools did not hold, "
            f"in {tier.read_s:.1f} s that prompts waited; computing them would have taken {tier.saved_s:.1f} s more"
        ]
    parts += [f"[yellow]{escape(line)}[/]" for line in lag_warnings(summary, run.options.max_concurrency)]
    return Group(*parts)  # type: ignore[arg-type]


def lag_warnings(summary: Summary, max_concurrency: int | None = None) -> list[str]:
    """Return a sentence when requests were sent too late for such limits to be judged; else an empty list.

    With `max_concurrency` the sentence says that requests waited for it, else that the generator was too slow.
    """
    most_s = MAX_SEND_LAG_S
    if summary.limits.ttft_s is not None:
        most_s = min(most_s, MAX_SEND_LAG_OF_TTFT * summary.limits.ttft_s)
    lag_s = summary.send_lag_s.percentile(99)
    if lag_s is None or lag_s <= most_s:
        return []
    lag = f"warning: the send lag's p99 is {known(lag_s, '.1f', 1e3)} ms, more than {most_s * 1e3:g} ms: "
    if max_concurrency is None:
        return [f"{lag}the generator did not keep up, so the server saw another load than the one asked for"]
    return [
        f"{lag}requests waited in the generator for one of {max_concurrency} places, which TTFT and attainment "
        "do not count"
    ]


def _load_line(run: Run) -> str:
    rate, burstiness = run.request_rate_per_s, f", burstiness {run.options.burstiness:g}"
    if run.stages:
        parts = ", ".join(f"{stage.times:g} times for {stage.seconds:g} s" for stage in run.stages)
        how = f"stages of {rate:.4g} requests/s: {parts}{burstiness}"
    else:
        how = "no fixed rate" if math.isinf(rate) else f"{rate:g} requests/s{burstiness}"
    if run.options.max_concurrency is not None:
        how += f", at most {run.options.max_concurrency} at a time"
    return f"[bold]{escape(run.model_id)}[/] by {escape(run.options.backend_name)}: {how}"


def _counts_table(summary: Summary, run: Run) -> Table:
    total_tokens = summary.total_input_tokens + summary.total_output_tokens
    rows = {
        "requests offered": f"{summary.num_offered}",
        "  complete": f"{summary.num_completed}",
        "  failed": f"{summary.misses.failed}",
        "  refused": f"{summary.misses.refused}",
        "  at once, at most": f"{summary.max_concurrent_requests}",
        "duration": f"{summary.duration_s:.2f} s",
        "prompt tokens of complete requests": f"{summary.total_input_tokens}",
        "output tokens of complete requests": f"{summary.total_output_tokens}",
        "request throughput": f"{summary.per_s(summary.num_completed):.2f} requests/s",
        "output throughput": f"{summary.per_s(summary.total_output_tokens):.1f} tokens/s",
        "  in the best second": f"{summary.max_output_tokens_per_s:.0f} tokens/s",
        "prompt and output throughput": f"{summary.per_s(total_tokens):.1f} tokens/s",
    }
    if summary.limits.by_name():
        rows["request goodput"] = f"{summary.request_goodput_per_s:.2f} requests/s"
    if summary.cached_share is not None:
        rows["prompt tokens not computed"] = f"{summary.cached_share:.1%}"
    if run.tier is not None:
        rows["  loaded from the KV offload"] = f"{read_share(run.tier, summary):.1%}"
    if run.num_clipped:
        rows["requests clipped to what the model takes"] = f"{run.num_clipped}"
    table = plain_table("figure", numbers=("measured",))
    for row in rows.items():
        table.add_row(*row)
    return table


def _errors_lines(summary: Summary) -> list[str]:
    """Return why requests failed or were refused, most frequent first; an empty list when all were complete."""
    frequent = summary.frequent_errors
    if not frequent:
        return []
    num_others = summary.num_failed - sum(count for _, count in frequent)
    lines = [f"  {count} x {error}" for error, count in frequent]
    return ["failed or refused:", *lines, *([f"  and {num_others} others"] if num_others else []), ""]


def _latency_table(summary: Summary, options: ServeOptions) -> Table:
    metrics, percentiles = parse_metrics(options.percentile_metrics), parse_percentiles(options.metric_percentiles)
    numbers = ("mean", "median", "std", *(f"p{each:g}" for each in percentiles), "max")
    table = plain_table("milliseconds", numbers=numbers)
    rows = {NAMES[name]: summary.latencies_s[name] for name in metrics}
    for title, latency_s in {**rows, "send lag of all requests": summary.send_lag_s}.items():
        among = [latency_s.percentile(each) for each in percentiles]
        values_s = [latency_s.mean, latency_s.median, latency_s.std, *among, latency_s.max]
        table.add_row(title, *(known(each_s, ".1f", 1e3) for each_s in values_s))
    return table


def _session_parts(sessions: SessionFigures) -> list[object]:
    """Return the figures of whole sessions as lines, and a table of the first turns and of all after the first."""
    table = plain_table(
        "turn", numbers=("requests", "good", "TTFT p50 ms", "p99", "TPOT p50 ms", "cached", "same node")
    )
    rows = {str(number): turn for number, turn in enumerate(sessions.turns[:MAX_TURNS_SHOWN], start=1)}
    for title, turn in {**rows, "after the first": sessions.later}.items():
        table.add_row(
            title,
            str(turn.num),
            str(turn.num_good),
            known(turn.ttft_s.median, ".1f", 1e3),
            known(turn.ttft_s.percentile(99), ".1f", 1e3),
            known(turn.tpot_s.median, ".1f", 1e3),
            known(turn.cached_share, ".1%"),
            known(turn.same_node_share, ".1%"),
        )
    median_s, most_s = sessions.completion_s.median, sessions.completion_s.percentile(99)
    return [
        f"{sessions.num} sessions, {sessions.num_complete} complete, {sessions.num_good} good in all turns: "
        f"{sessions.goodput_per_s:.3g} good sessions/s; a complete one took {known(median_s, '.1f')} s (median), "
        f"{known(most_s, '.1f')} s (p99)",
        table,
    ]


def _attainment_line(summary: Summary) -> str:
    low, high = summary.attainment_interval
    alone = {"TTFT": summary.attainment_of("ttft"), "TPOT": summary.attainment_of("tpot")}
    parts = "".join(f"; {name} alone {share:.1%}" for name, share in alone.items() if share is not None)
    return (
        f"[bold]attainment {summary.attainment:.1%}[/] (95 % interval {low:.1%} to {high:.1%}): {summary.num_good} of "
        f"{summary.num_offered} offered requests with {summary.limits}{parts}"
    )


def _misses_lines(summary: Summary) -> list[str]:
    """Return which limits the requests missed, and by which phases; an empty list when all were good."""
    causes = summary.misses.causes
    counts = ", ".join(f"{name} {count}" for name, count, _ in causes)
    lines = [f"missed, a request perhaps by several: {counts}"] if counts else []
    for name, _, phases in causes:
        if phases:
            each = ", ".join(f"{PHASE_NAMES[field]} {count}" for field, count in phases.items())
            lines.append(f"  {name} misses by the phase furthest beyond the median of the good requests: {each}")
    return lines
