"""Attainment over the rate, a panel for each trace and limits, as a PNG file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from splitserve_bench.dominance.findings import Finding
from splitserve_bench.dominance.grid import panels
from splitserve_bench.serve.plots import LINES, MARKERS, STYLES, new_figure, save_figure

COLUMNS: Final = 2


def plot_dominance(findings: Sequence[Finding], path: Path) -> None:
    """The first contender's line is the thick one; what is beside is thin."""
    by_cell = {each.cell: each for each in findings}
    parts = panels(list(by_cell))
    num_rows = -(-len(parts) // COLUMNS)
    figure = new_figure(12, 1.2 + 3.6 * num_rows)
    every_axes = figure.subplots(num_rows, COLUMNS, sharey=True, squeeze=False).flat
    for ((trace, limits), cells), axes in zip(parts.items(), every_axes, strict=False):  # which has one more, maybe
        here = sorted((by_cell[cell] for cell in cells), key=lambda each: each.cell.rate)
        for number, contender in enumerate(here[0].figures):
            turn, colour = divmod(number, len(LINES))
            axes.plot(
                [each.cell.rate for each in here],
                [100 * each.attainment(contender) for each in here],
                label=contender.name,
                color=LINES[colour],
                marker=MARKERS[colour],
                linestyle=STYLES[turn % len(STYLES)],
                linewidth=2.8 if number == 0 else 0.8 if contender.is_beside else 1.3,
                markersize=4,
                zorder=3 if number == 0 else 2,
            )
        axes.set(ylim=(0, 102), xlabel="request rate, requests/s", ylabel="requests within both limits, %")
        axes.set_xlim(left=0)
        axes.set_title(f"{trace}, {limits}", loc="left", fontsize="medium")
    for axes in list(every_axes):
        axes.remove()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=5, loc="outside lower center")
    save_figure(figure, path)
