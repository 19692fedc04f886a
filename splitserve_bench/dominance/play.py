"""Plays a grid: what is not saved yet is simulated on several processes, and saved at once."""

from collections.abc import Callable
from typing import Any, Final

from splitserve.signals import run_to_end
from splitserve_bench.crew import Job, run_crew
from splitserve_bench.dominance.grid import Grid
from splitserve_bench.dominance.runs import Figures, Run, Runs

MODULE: Final = "splitserve_bench.dominance.worker"


def play(grid: Grid, runs: Runs, jobs: int, on_done: Callable[[int, int, Run | None], None]) -> dict[Run, Figures]:
    """All figures of the grid. `on_done` is told how many simulations have been done, how many are to be, and the last
    one. Raises BenchError."""
    found = {run: figures for run in grid.runs() if (figures := runs.find(run)) is not None}
    missing = [run for run in grid.runs() if run not in found]
    num_done, left = 0, iter(missing)
    on_done(num_done, len(missing), None)

    def next_job() -> tuple[Run, Job] | None:
        run = next(left, None)
        return None if run is None else (run, run.to_json())

    def record(run: Run, figures: dict[str, Any]) -> None:
        nonlocal num_done
        found[run] = Figures(**figures)
        runs.save(run, found[run])
        num_done += 1
        on_done(num_done, len(missing), run)

    if missing:
        run_to_end(run_crew(MODULE, "", min(jobs, len(missing)), next_job, record))
    return found
