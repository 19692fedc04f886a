"""`splitserve bench dominance`. What it simulates with is imported when it runs, so that help is quick."""

import json
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click

from serving_core.errors import SettingsError
from serving_core.extras import require
from splitserve.commands.terminal import duration_of, report, stderr, stdout, waiting
from splitserve_bench.dominance.options import contender_options, trace_options
from splitserve_bench.options import NewFile
from splitserve_bench.serve.serve_options import json_option
from splitserve_bench.simulate.command import profile_option

if TYPE_CHECKING:
    from splitserve_bench.dominance.grid import Grid
    from splitserve_bench.dominance.runs import Figures, Run

EVERY: Final = 50  # simulations, a line of progress where there is no terminal


@click.command("dominance")
@profile_option
@trace_options
@contender_options
@click.option(
    "--save-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the figures of each simulation; what is there of an earlier pass, by the same code, is not done "
    "again.",
)
@click.option("--jobs", default=0, show_default=True, type=click.IntRange(0), help="Processes; 0: one on each CPU.")
@click.option("--plot", type=NewFile(), help="Picture of it (PNG).")
@click.option("--markdown", "as_markdown", is_flag=True, help="Tables as in a document.")
@json_option
def dominance_command(
    jobs: int, save_dir: Path | None, plot: Path | None, as_markdown: bool, as_json: bool, **flags: Any
) -> None:
    """Hold one fleet against others in the simulator, over a grid of traces, rates, limits and seeds: who keeps how
    many requests within both limits, and how far the fleet is from the best other one. Each seed begins elsewhere in
    the trace, and everybody has its requests. The same arguments give the same output."""
    from splitserve_bench.dominance.asked import grid_of
    from splitserve_bench.dominance.dominance_report import dominance_json, dominance_view, markdown
    from splitserve_bench.dominance.findings import findings_of

    if plot is not None:
        require("bench")
    grid = grid_of(flags, report)
    folder = save_dir or Path(tempfile.mkdtemp(prefix="splitserve-dominance-"))
    findings = findings_of(grid, _play(grid, folder, jobs or _num_cpus()))
    if as_json:
        click.echo(json.dumps(dominance_json(grid, findings)))
    elif as_markdown:
        click.echo(markdown(grid, findings))
    else:
        stdout.print(dominance_view(grid, findings))
    if plot is not None:
        from splitserve_bench.dominance.picture import plot_dominance

        try:
            plot_dominance(findings, plot)
        except OSError as error:
            raise SettingsError(f"{plot} cannot be written: {error.strerror}") from error
        report(f"picture: {plot}")


def _play(grid: "Grid", folder: Path, jobs: int) -> "dict[Run, Figures]":
    from splitserve_bench.dominance.play import play
    from splitserve_bench.dominance.runs import Runs

    began_s, num_all = perf_counter(), sum(1 for _ in grid.runs())
    report(f"{len(grid.cells)} cells, {len(grid.contenders)} fleets, {grid.num_seeds} seeds; figures: {folder}")
    with waiting("Simulating") as show:

        def tell(num_done: int, num_missing: int, run: "Run | None") -> None:
            if run is None:
                show(f"{num_missing} of {num_all} simulations are not saved yet")
            elif stderr.is_terminal or num_done % EVERY == 0:
                left_s = (perf_counter() - began_s) / num_done * (num_missing - num_done)
                show(f"{num_done} of {num_missing} simulations, seed {run.seed}, {duration_of(left_s)} left")

        return play(grid, Runs(folder), jobs, tell)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
