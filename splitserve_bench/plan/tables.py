"""Tables of step times that others have published, as sources of steps."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from serving_core.errors import SettingsError
from splitserve_bench.plan.devices import Link
from splitserve_bench.plan.model_sizes import ModelSizes
from splitserve_bench.simulate.costs import Steps
from splitserve_bench.simulate.grid import Grid

MOST_BYTES: Final = 2**28  # of a table's file
MS, US = 1e-3, 1e-6


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """What a part of a table is about. hardware is "" where the table does not say."""

    model: str
    hardware: str
    tp: int

    def __str__(self) -> str:
        return f"{self.model}{f' on {self.hardware}' if self.hardware else ''}, TP {self.tp}"


@dataclass(frozen=True, slots=True)
class Check:
    """How well what was fitted on a part of a table says the rest: mean and largest error, as shares of the
    measured."""

    what: str
    num_held_out: int
    mape: float
    worst: float


class Table(Protocol):
    """A table that was read."""

    kind: str

    def entries(self) -> Sequence[Entry]: ...

    def steps(self, entry: Entry, model: ModelSizes, link: Link) -> Steps:
        """Raises BenchError for a model that the entry cannot be of. `link` joins the ranks, where the table leaves
        them out."""
        ...

    def checks(self, entry: Entry, model: ModelSizes | None) -> list[Check]:
        """All that can be checked; some of it only with the model's sizes."""
        ...


def read_table(path: Path) -> Table:
    """A table by its form: DistServe's JSON, splitwise-sim's CSV, or a folder of LLMServingSim's. Raises BenchError and
    SettingsError for what is none of them, or not as it should be."""
    from splitserve_bench.plan.distserve_table import read_distserve
    from splitserve_bench.plan.llmservingsim_table import read_llmservingsim
    from splitserve_bench.plan.splitwise_table import read_splitwise

    if path.is_dir():
        return read_llmservingsim(path)
    if path.stat().st_size > MOST_BYTES:
        raise SettingsError(f"{path} has {path.stat().st_size} bytes; a table has at most {MOST_BYTES}")
    return read_splitwise(path) if path.suffix == ".csv" else read_distserve(path)


def check_of(what: str, pairs: Iterable[tuple[float, float]]) -> list[Check]:
    """From what was predicted and what was measured; none of nothing."""
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return [Check(what, len(errors), statistics.fmean(errors), max(errors))] if errors else []


def left_out(grid: Grid) -> list[tuple[float, float]]:
    """What each place of a grid between others would be said to be without it, and is: along its row, and along its
    column."""
    return _left_out_rows(grid) + _left_out_rows(_turned(grid))


def _left_out_rows(grid: Grid) -> list[tuple[float, float]]:
    pairs = []
    for index in range(1, len(grid.rows) - 1):
        rows = (*grid.rows[:index], *grid.rows[index + 1 :])
        less = Grid(rows, grid.columns, (*grid.seconds[:index], *grid.seconds[index + 1 :]))
        pairs += [
            (less.at(grid.rows[index], column), seconds)
            for column, seconds in zip(grid.columns, grid.seconds[index], strict=True)
        ]
    return pairs


def _turned(grid: Grid) -> Grid:
    return Grid(grid.columns, grid.rows, tuple(zip(*grid.seconds, strict=True)))
