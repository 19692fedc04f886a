"""A grid as tables, for a terminal or in Markdown, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group
from rich.markup import escape

from splitserve.commands.terminal import PHASES, plain_table
from splitserve_bench.dominance.contenders import Contender
from splitserve_bench.dominance.findings import MOST_BELOW, Finding, mean_difference, worst_of
from splitserve_bench.dominance.grid import Grid, panels

PHASE_WORDS: Final = {field: name for name, field, _, _ in PHASES}

NAMES: Final = (
    "P reads prompts, D writes answers, B does both; then the policy where it is not auto, and timely where requests "
    "that would be late are refused; late requests may be so in both ways."
)


@dataclass(frozen=True, slots=True)
class Panel:
    """A table of the cells that differ by their rate alone; the first cell of a row is a word."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def dominance_view(grid: Grid, findings: Sequence[Finding]) -> Group:
    """The tables, and what they mean."""
    parts: list[Any] = []
    for panel in panels_of(findings):
        word, *numbers = panel.header
        table = plain_table(word, numbers=tuple(numbers))
        for row in panel.rows:
            table.add_row(*map(escape, row))
        parts += [f"[bold]{escape(panel.title)}[/]", table, ""]
    return Group(*parts, NAMES, "", *map(escape, sentences(grid, findings)))


def markdown(grid: Grid, findings: Sequence[Finding]) -> str:
    """The same."""
    lines = []
    for panel in panels_of(findings):
        rule = ("---", *["---:"] * (len(panel.header) - 1))
        lines += [f"**{panel.title}**", "", *map(_row, (panel.header, rule, *panel.rows)), ""]
    return "\n".join([*lines, *(f"- {line}" for line in (NAMES, *sentences(grid, findings)))])


def dominance_json(grid: Grid, findings: Sequence[Finding]) -> dict[str, Any]:
    """All figures, shares as shares."""
    worst = worst_of(findings)
    return {
        "seeds": grid.num_seeds,
        "num_prompts": grid.num_prompts,
        "contender": worst.first.name,
        "mean_difference": mean_difference(findings),
        "num_below": sum(each.is_below for each in findings),
        "worst": findings.index(worst),
        "cells": [each.to_json() for each in findings],
    }


def panels_of(findings: Sequence[Finding]) -> Iterator[Panel]:
    """Attainment in percent by contender and rate, then the difference in points with its interval."""
    by_cell = {each.cell: each for each in findings}
    for (trace, limits), cells in panels(list(by_cell)).items():
        here = [by_cell[cell] for cell in cells]
        contenders = list(here[0].figures)
        rows = [
            (each.name, *(f"{100 * finding.attainment(each):.1f}" for finding in here))
            for each in sorted(contenders, key=lambda each: each.is_beside)
        ]
        rows.append(("best other", *(finding.best_other.name for finding in here)))
        rows.append((f"{contenders[0].name} beyond it", *map(_difference, here)))
        yield Panel(
            f"{trace}, {limits}: requests within both, %",
            ("", *(f"{cell.rate:g} req/s" for cell in cells)),
            tuple(rows),
        )


def sentences(grid: Grid, findings: Sequence[Finding]) -> Iterator[str]:
    """What the grid says, the worst cell named, and what requests are lost to there and in all that are as bad."""
    worst, name = worst_of(findings), findings[0].first.name
    below = sorted((each for each in findings if each.is_below), key=lambda each: each.difference)
    yield (
        f"Seeds: {grid.num_seeds}, of {grid.num_prompts} requests each; {name} is held against the best other fleet of "
        "a cell, with the same requests; the interval of the difference is that of 95 % over the seeds."
    )
    yield (
        f"{name} is {100 * mean_difference(findings):+.1f} points from the best other fleet in the mean of the "
        f"{len(findings)} cells, and more than {100 * MOST_BELOW:g} points below it in {len(below)} of them."
    )
    yield f"Worst: {_compared(worst)}"
    for each in below:
        if each is not worst:
            yield f"Below: {_compared(each)}"


def _compared(finding: Finding) -> str:
    cell, first, other = finding.cell, finding.first, finding.best_other
    return (
        f"{cell.trace} at {cell.rate:g} req/s, {cell.limits.label}, {_difference(finding)} to {other.name}. "
        f"{_lost(finding, first)}; {_lost(finding, other)}."
    )


def _lost(finding: Finding, contender: Contender) -> str:
    total = finding.total(contender)
    counts = {
        "late in TTFT": total.num_late_ttft,
        "late in TPOT": total.num_late_tpot,
        "refused": total.num_refused,
        "failed": total.num_failed,
    }
    lost = ", ".join(f"{100 * count / total.num_total:.1f} % {words}" for words, count in counts.items() if count)
    longest = next(iter(total.phases), None)
    where = f", late ones mostly by {PHASE_WORDS[longest]}" if longest else ""
    return f"{contender.name} loses {lost or 'nothing'}{where}"


def _difference(finding: Finding) -> str:
    """In points; without an interval where there is one seed, or all agree."""
    points = f"{100 * finding.difference:+.1f}"
    if finding.interval is None:
        return points
    low, high = finding.interval
    return f"{points} ({100 * low:+.1f} to {100 * high:+.1f})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
