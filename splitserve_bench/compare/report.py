"""Show a comparison as tables, return it as JSON, and write it to files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from splitserve.commands.terminal import plain_table
from splitserve_bench.compare.comparison import Comparison, Entry, ProbeRun, forecast_sentences, standing
from splitserve_bench.compare.contenders import PEER
from splitserve_bench.compare.search import plain
from splitserve_bench.compare.verdict import Causes, knee_of, main_cause
from splitserve_bench.serve.metrics import in_ms
from splitserve_bench.serve.plots import AttainmentPoint, plot_attainment
from splitserve_bench.serve.report import lag_warnings
from splitserve_bench.serve.results import write_whole

PERCENTILES: Final = (50, 90, 99)
LATENCIES: Final = ("ttft", "tpot")
NOTE: Final = (
    "knee: where attainment crosses the goal, with 95 % confidence; latencies, in ms, are those of complete requests "
    "at the goodput or, without one, at the lowest rate; beside the limit that most requests miss is the phase that "
    "most of those were long in; decode includes the prompts that the same node computes meanwhile"
)
UNKNOWN_OF_PEERS: Final = (
    "how many cores it has, and what KV it keeps of earlier runs, is not known here; it is asked over HTTP, our "
    "clusters over gRPC"
)

REPEATED: Final = (
    "part of these requests had been sent when the comparison was stopped; a server that keeps KV, and was not started "
    "again, answers them sooner"
)


def comparison_view(comparison: Comparison) -> Group:
    """Return the goal, a table of all contenders, the verdict, reasons to doubt it, and the causes of lost requests."""
    goal = f"{comparison.goal.attainment:.0%} of the offered requests good: {comparison.objective}"
    is_fixed = any(entry.search.at_rates for entry in comparison.entries)
    table = rates_table(comparison) if is_fixed else search_table(comparison)
    lines = [f"[bold]{escape(sentence)}[/]" for sentence in comparison.verdict[:1]]
    lines += [escape(sentence) for sentence in comparison.verdict[1:]]
    lines += ["", *map(escape, forecast_sentences(comparison))]
    doubts = [f"[yellow]{escape(line)}[/]" for line in warnings(comparison)]
    causes = [part for each in comparison.causes if each.num_lost for part in ("", *causes_view(each))]
    return Group(escape(goal), "", table, "", NOTE, "", *lines, *doubts, *causes)


def search_table(comparison: Comparison) -> Table:
    """Return a table with each contender's best rate and its figures there; without one, at its lowest rate."""
    table = _table(("goodput, req/s", "knee", "next rate failed"))
    for entry in comparison.entries:
        result = entry.search.result()
        rate = result.failing_rate if result.best_rate is None else result.best_rate
        goodput = "none" if result.best_rate is None else plain(result.best_rate)
        cells = [
            "out" if entry.failure else goodput,
            knee_of(result),
            "?" if result.failing_rate is None else plain(result.failing_rate),
        ]
        cells += _figures(entry, rate, result.failing_rate) if rate is not None else []
        table.add_row(escape(entry.contender.name), *cells)
    return table


def rates_table(comparison: Comparison) -> Table:
    """Return a table with a row for each contender and each rate that was probed."""
    table = _table(("rate, req/s",))
    for entry in comparison.entries:
        for counted in entry.search.curve():
            figures = _figures(entry, counted.rate, counted.rate)
            table.add_row(escape(entry.contender.name), plain(counted.rate), *figures)
        if entry.failure:
            table.add_row(escape(entry.contender.name), "out")
    return table


def causes_view(causes: Causes) -> tuple[str, Table]:
    """Return a sentence about how many requests were lost, and a table of their causes."""
    loser, keeper, rate = escape(causes.loser), escape(causes.keeper), plain(causes.rate)
    sentence = f"At {rate} req/s {loser} lost {causes.num_lost} of {causes.num_total} requests that {keeper} kept:"
    table = plain_table("decision", "limit on", numbers=("lost", "predicted", "actual", "margin", "limit, ms"))
    for each in causes.causes:
        medians = (each.predicted_ms, each.actual_ms, each.margin_ms, each.limit_ms)
        table.add_row(each.decision, each.limit, str(each.num_lost), *map(_short, medians))
    return sentence, table


def warnings(comparison: Comparison) -> list[str]:
    """Return reasons to doubt the figures, a sentence each; an empty list when there are none."""
    lines = [f"{entry.contender.name} is out: {entry.failure}" for entry in comparison.entries if entry.failure]
    for entry in comparison.entries:
        if not (entry.search.at_rates or entry.failure or entry.search.result().is_settled):
            lines.append(f"{entry.contender.name}: the search ended before the knee was found as closely as wanted")
        if entry.contender.kind == PEER:
            lines.append(f"{entry.contender.name}: {UNKNOWN_OF_PEERS}")
        if repeated := [plain(run.probe.rate) for run in entry.runs if run.is_repeated]:
            lines.append(f"{entry.contender.name}, {', '.join(repeated)} req/s: {REPEATED}")
        for run in entry.runs:
            where = f"{entry.contender.name}, {plain(run.probe.rate)} req/s"
            lines += [f"{where}: {line}" for line in lag_warnings(run.summary)]
    return lines


def comparison_json(found: Sequence[Comparison], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of all that was found but the single requests.

    `about` has fields that say what was compared. The first objective's findings are fields of the object, those of the
    others a list, `also`.
    """
    first, *others = map(_found_json, found)
    return {**about, **first, "also": others}


def _found_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "goal": asdict(comparison.goal),
        "slo": comparison.objective,
        "unloaded": asdict(comparison.unloaded) if comparison.unloaded is not None else None,
        "contenders": [_entry_json(entry) for entry in comparison.entries],
        "paired": [pair.to_json() for pair in comparison.paired],
        "causes": [causes.to_json() for causes in comparison.causes],
        "verdict": list(comparison.verdict),
        "forecast": list(forecast_sentences(comparison)),
    }


def save_comparison(found: Sequence[Comparison], about: Mapping[str, Any], folder: Path) -> None:
    """Write the JSON object and pictures of attainment by rate to a folder: attainment.png, attainment-2.png, ...

    There is a picture for each objective. Raises BenchError or OSError when a file cannot be written.
    """
    write_whole(folder / "comparison.json", json.dumps(comparison_json(found, about), indent=2))
    for number, judged in enumerate(found, 1):
        points = [
            AttainmentPoint(entry.contender.name, each.rate, each.attainment, each.interval)
            for entry in judged.entries
            for each in entry.search.curve()
        ]
        name = "attainment.png" if number == 1 else f"attainment-{number}.png"
        plot_attainment(points, judged.goal.attainment, folder / name)


def _entry_json(entry: Entry) -> dict[str, Any]:
    found = standing(entry)
    return {
        "name": found.name,
        "kind": found.kind,
        "slo": str(entry.slo),
        "failure": entry.failure,
        "result": asdict(found.result),
        "loses_by": main_cause(found.misses) if found.misses is not None else "",
        "probes": [_run_json(run) for run in entry.runs],
    }


def _run_json(run: ProbeRun) -> dict[str, Any]:
    summary = run.summary
    return {
        "number": run.number,
        "rate": run.probe.rate,
        "seed": run.probe.seed,
        "num_good": summary.num_good,
        "num_total": summary.num_offered,
        "num_effective": summary.num_effective,
        "attainment": summary.attainment,
        "attainment_interval": list(summary.attainment_interval),
        "is_repeated": run.is_repeated,
        "misses": asdict(summary.misses),
        "simulated_attainment": None if run.simulated is None else run.simulated.attainment,
        "duration_s": summary.duration_s,
        "output_tokens_per_s": summary.per_s(summary.total_output_tokens),
        "send_lag_p99_ms": in_ms(summary.send_lag_s.percentile(99)),
        **{
            f"p{each}_{name}_ms": in_ms(summary.latencies_s[name].percentile(each))
            for name in LATENCIES
            for each in PERCENTILES
        },
    }


def _figures(entry: Entry, rate: float, losing_rate: float | None) -> list[str]:
    """Return cells for attainment and latencies at `rate`, and the main cause of losses at `losing_rate`, if any."""
    counted = next(each for each in entry.search.curve() if each.rate == rate)
    low, high = counted.interval
    latencies_s = entry.summary_at(rate).latencies_s
    return [
        f"{counted.attainment:.1%} ({low:.0%} to {high:.0%})",
        *(" / ".join(_short(in_ms(latencies_s[name].percentile(each))) for each in PERCENTILES) for name in LATENCIES),
        main_cause(entry.summary_at(losing_rate).misses) if losing_rate is not None else "",
    ]


def _table(numbers: Sequence[str]) -> Table:
    titles = ("attainment", "TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99")
    table = plain_table("contender", numbers=(*numbers, *titles))
    table.add_column("loses by")
    return table


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
