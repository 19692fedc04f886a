"""What `splitserve bench serve` makes of the outcomes: a table or JSON, files, pictures."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from serving_core.errors import SettingsError
from serving_core.extras import require
from splitserve.commands.terminal import report, stdout
from splitserve_bench.serve.metrics import Summary, parse_goodput, summarize
from splitserve_bench.serve.plots import plot_latencies, plot_timeline
from splitserve_bench.serve.records import Outcome, last_sendings
from splitserve_bench.serve.results import (
    Run,
    file_name,
    parse_metrics,
    parse_percentiles,
    request_lines,
    result_json,
)
from splitserve_bench.serve.serve_options import ServeOptions
from splitserve_bench.serve.serve_report import serve_view
from splitserve_bench.serve.stages_report import plot_stages, stages_view
from splitserve_bench.serve.windows import StageFindings, findings_of
from splitserve_bench.serve.workloads import Workload


class Reporting:
    """Made before the load, so that flags and folders that cannot be used are found then: SettingsError, BenchError."""

    def __init__(self, options: ServeOptions) -> None:
        if options.plots is not None:
            require("bench")
        self._options = options
        self._limits = parse_goodput(options.goodput)
        self._metrics = parse_metrics(options.percentile_metrics)
        self._percentiles = parse_percentiles(options.metric_percentiles)
        self._metadata = options.metadata_pairs()
        self._is_saved = options.save_result or options.save_detailed
        results = options.result_dir / (options.result_filename or "any.json")
        for folder in ([results.parent] if self._is_saved else []) + ([options.plots] if options.plots else []):
            _make(folder)

    def begin(self, model: str, workload: Workload, request_rate_per_s: float) -> Run:
        """The run that starts now, at this rate or at stages of it. A file that has less than was asked for is told."""
        options = self._options
        if len(workload.planned) < (options.num_prompts or 0):
            report(f"the data set has {len(workload.planned)} requests, not the {options.num_prompts} of --num-prompts")
        return Run(
            started_at=datetime.now().astimezone(),
            backend=options.backend_name,
            model_id=model,
            tokenizer_id=str(options.tokenizer) if options.tokenizer else None,
            label=options.label,
            request_rate_per_s=request_rate_per_s,
            burstiness=options.burstiness,
            ramp=options.ramp,
            stages=workload.stages,
            max_concurrency=options.max_concurrency,
            num_gpus=options.num_gpus,
            num_clipped=workload.num_clipped,
            metadata=self._metadata,
        )

    def show(self, outcomes: Sequence[Outcome], run: Run) -> None:
        """On stdout, and wherever it is asked for. Raises SettingsError for a file that cannot be written."""
        summary = summarize(last_sendings(outcomes), self._limits)
        findings = findings_of(outcomes, run.stages, self._limits, self._options.attainment) if run.stages else None
        try:
            if self._is_saved:
                self._save(outcomes, summary, run, findings)
            if self._options.plots is not None:
                self._draw(outcomes, findings, self._options.plots)
        finally:
            self._print(summary, run, findings)

    def show_stopped(self, outcomes: Sequence[Outcome], num_planned: int, run: Run) -> None:
        """What came before the load was stopped, or broke off, without its stages; nothing is saved."""
        last = last_sendings(outcomes)
        report(f"stopped: {num_planned - len(last)} of {num_planned} requests have no outcome, and do not count here")
        if last and not self._options.as_json:
            self._print(summarize(last, self._limits), run, None)

    def _print(self, summary: Summary, run: Run, findings: StageFindings | None) -> None:
        if self._options.as_json:
            click.echo(json.dumps(self._json(summary, run, findings)))
            return
        stdout.print(serve_view(summary, run, metrics=self._metrics, percentiles=self._percentiles))
        if findings is not None:
            stdout.print("", stages_view(findings), sep="\n")

    def _json(self, summary: Summary, run: Run, findings: StageFindings | None) -> dict[str, object]:
        return result_json(
            summary,
            run,
            detailed=self._options.save_detailed,
            metrics=self._metrics,
            percentiles=self._percentiles,
            findings=findings,
        )

    def _save(self, outcomes: Sequence[Outcome], summary: Summary, run: Run, findings: StageFindings | None) -> None:
        path = self._options.result_dir / (self._options.result_filename or file_name(run))
        _write(path, [json.dumps(self._json(summary, run, findings))])
        if self._options.save_detailed:
            lines = [json.dumps(line) for line in request_lines(outcomes)]
            _write(path.with_name(f"{path.stem}.requests.jsonl"), lines)

    def _draw(self, outcomes: Sequence[Outcome], findings: StageFindings | None, folder: Path) -> None:
        paths = [folder / name for name in ("latencies.png", "timeline.png", "stages.png")]
        try:
            plot_latencies(last_sendings(outcomes), self._limits, paths[0])
            plot_timeline(outcomes, paths[1])
            if findings is not None:
                plot_stages(findings, paths[2])
        except OSError as error:
            raise SettingsError(f"{folder}: {error.strerror}") from error
        report(f"pictures: {', '.join(map(str, paths if findings is not None else paths[:2]))}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be made: {error.strerror}") from error


def _write(path: Path, lines: Sequence[str]) -> None:
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
    report(f"written: {path}")
