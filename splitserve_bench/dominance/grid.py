"""The grid: every trace at its rates under all limits, for all contenders and seeds. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from splitserve_bench.dominance.contenders import Contender
from splitserve_bench.dominance.runs import Run
from splitserve_bench.plan.asked import AskedLoad

MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class CellLimits:
    """What each request of a trace may take; `label` as it was asked for."""

    label: str
    ttft_s: float
    tpot_s: float

    def __str__(self) -> str:
        spoken = f"TTFT ≤ {self.ttft_s * MS:.4g} ms, TPOT ≤ {self.tpot_s * MS:.4g} ms"
        return f"{self.label} ({spoken})" if "x" in self.label else spoken


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the grid."""

    trace: str
    load: AskedLoad
    rate: float
    limits: CellLimits


@dataclass(frozen=True, slots=True)
class Grid:
    """`contenders` begins with the one that all others are held against."""

    cells: tuple[Cell, ...]
    contenders: tuple[Contender, ...]
    num_seeds: int
    num_prompts: int
    request_timeout_s: float

    def run(self, cell: Cell, contender: Contender, seed: int) -> Run:
        """The simulation of one contender."""
        return Run(
            profile=contender.profile,
            load=cell.load,
            num_prompts=self.num_prompts,
            rate=cell.rate,
            ttft_s=cell.limits.ttft_s,
            tpot_s=cell.limits.tpot_s,
            fleet=contender.fleet,
            seed=seed,
            request_timeout_s=self.request_timeout_s,
        )

    def runs(self) -> Iterator[Run]:
        """All of them, the first seed's first: wherever it is stopped, whole seeds are there. A trace's follow each
        other."""
        for seed in range(self.num_seeds):
            for cell in self.cells:
                for contender in self.contenders:
                    yield self.run(cell, contender, seed)


def panels(cells: Sequence[Cell]) -> dict[tuple[str, CellLimits], list[Cell]]:
    """Those that differ by their rate alone, by what they have in common."""
    found: dict[tuple[str, CellLimits], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.trace, cell.limits), []).append(cell)
    return found
