"""The findings of a search as a table, as JSON and as a picture."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from serving_core.errors import SettingsError
from splitserve.commands.terminal import plain_table
from splitserve_bench.compare.search import plain
from splitserve_bench.plan.asked import OBJECTIVES
from splitserve_bench.plan.commands import commands_of
from splitserve_bench.plan.findings import Finding, finding_json, words_of
from splitserve_bench.plan.fleets import Played, percentile
from splitserve_bench.plan.study import Study
from splitserve_bench.serve.plots import AttainmentPoint, plot_attainment

MOST_CURVES: Final = 6
MS: Final = 1e3


def plan_view(study: Study, found: list[Finding]) -> Group:
    """What was asked, and the table."""
    asked = study.asked
    limits = ", ".join(f"{name.upper()} ≤ {s * MS:g} ms" for name, s in study.limits.by_name().items())
    cells = f", {asked.cells} cells of {asked.gpus // asked.cells}" if asked.cells > 1 else ""
    head = f"{study.machines.name}: {asked.gpus} devices{cells}; {asked.attainment:.0%} of requests with {limits}"
    return Group(escape(head), "", _table(found, asked.cells, asked.objective), "")


def best_commands(study: Study, found: list[Finding]) -> list[str]:
    """Those that run the best plan; none where no plan reaches the goal."""
    return commands_of(study, found[0].plan) if found and found[0].value else []


def _table(found: list[Finding], cells: int, objective: str) -> Table:
    what, _ = OBJECTIVES[objective]
    table = plain_table("plan", numbers=("req/s", what, "knee", "attained", "P90 TTFT", "P90 TPOT", "probes"))
    table.add_column("loses by")
    for each in found:
        best, failed = each.at(each.result.best_rate), each.at(each.result.failing_rate)
        low, high = each.knee
        table.add_row(
            str(each.plan),
            _goodput(each, cells),
            plain(each.value) if each.value else "-",
            f"{plain(low) if low else '0'} to {plain(high) if high else '?'}",
            f"{each.result.attainment:.1%}" if each.result.attainment is not None else "-",
            *(_milliseconds(best, name) for name in ("ttfts_s", "tpots_s")),
            str(each.num_probes),
            ", ".join(f"{name} {count}" for name, count in _causes(failed)),
        )
    return table


def plan_json(study: Study, found: list[Finding]) -> dict[str, Any]:
    """With the same words as the table."""
    return {
        "model": study.machines.name,
        "asked": json.loads(study.asked.to_json()),
        "words": words_of(found, study.asked.objective),
        "commands": best_commands(study, found),
        "plans": [finding_json(each, study.asked.cells) for each in found],
        "unfit": list(study.machines.unfit),
    }


def save(text: str, path: Path) -> None:
    """Raises SettingsError."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def draw(study: Study, found: list[Finding], path: Path) -> None:
    """The knees of the best plans, of those with more than one rate. Raises SettingsError."""
    what, _ = OBJECTIVES[study.asked.objective]
    points = [
        AttainmentPoint(str(each.plan), counted.rate * each.scale, counted.attainment, counted.interval)
        for each in [each for each in found if len(each.curve) > 1][:MOST_CURVES]
        for counted in each.curve
    ]
    try:
        plot_attainment(points, study.asked.attainment, path, rate=f"request rate, {what}")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def _goodput(finding: Finding, cells: int) -> str:
    """Of all cells; of a plan of which only failures are known, below what."""
    best, failing = finding.result.best_rate, finding.result.failing_rate
    if best is not None:
        return plain(best * cells)
    return f"< {plain(failing * cells)}" if failing is not None else "-"


def _milliseconds(played: list[Played], name: str) -> str:
    """The P90 over all requests of the probes."""
    p90_s = percentile([each_s for each in played for each_s in getattr(each, name)])
    return f"{p90_s * MS:.1f} ms" if p90_s and math.isfinite(p90_s) else "-"


def _causes(played: list[Played]) -> list[tuple[str, int]]:
    """The most frequent first."""
    return sum((Counter(each.missed) for each in played), Counter[str]()).most_common()
