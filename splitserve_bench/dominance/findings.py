"""What a grid shows: who keeps how many requests where, and what the first contender has over the best other. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final

from splitserve_bench.dominance.contenders import Contender
from splitserve_bench.dominance.grid import Cell, Grid
from splitserve_bench.dominance.runs import Figures, Run
from splitserve_bench.serve.spread import mean_interval

MOST_BELOW: Final = 0.02  # of a contender that dominates


@dataclass(frozen=True, eq=False)
class Finding:
    """One cell: the figures of each contender by seed, the first one's first."""

    cell: Cell
    figures: Mapping[Contender, Sequence[Figures]]

    def attainments(self, contender: Contender) -> list[float]:
        """By seed."""
        return [each.attainment for each in self.figures[contender]]

    def attainment(self, contender: Contender) -> float:
        """The mean over the seeds."""
        return fmean(self.attainments(contender))

    @property
    def first(self) -> Contender:
        return next(iter(self.figures))

    @cached_property
    def best_other(self) -> Contender:
        """By the mean; the chance in it is on its side."""
        others = [each for each in self.figures if each != self.first and not each.is_beside]
        return max(others, key=self.attainment)

    @property
    def differences(self) -> list[float]:
        """Of the first and the best other one, by seed: both had the same requests."""
        pairs = zip(self.attainments(self.first), self.attainments(self.best_other), strict=True)
        return [first - other for first, other in pairs]

    @property
    def difference(self) -> float:
        return fmean(self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the difference, at 95 %, over the seeds; None where these do not tell."""
        return mean_interval(self.differences)

    @property
    def is_below(self) -> bool:
        return self.difference < -MOST_BELOW

    def total(self, contender: Contender) -> Figures:
        """Over the seeds."""
        counts: Counter[str] = Counter()
        phases: Counter[str] = Counter()
        for each in self.figures[contender]:
            numbers = asdict(each)
            phases.update(numbers.pop("phases"))
            counts.update(numbers)
        return Figures(**counts, phases=dict(phases.most_common()))

    def to_json(self) -> dict[str, Any]:
        return {
            "trace": self.cell.trace,
            "rate": self.cell.rate,
            "limits": self.cell.limits.label,
            "ttft_ms": self.cell.limits.ttft_s * 1e3,
            "tpot_ms": self.cell.limits.tpot_s * 1e3,
            "best_other": self.best_other.name,
            "difference": self.difference,
            "interval": self.interval and list(self.interval),
            "contenders": {
                each.name: {
                    "attainment": self.attainment(each),
                    "attainments": self.attainments(each),
                    **asdict(self.total(each)),
                }
                for each in self.figures
            },
        }


def findings_of(grid: Grid, found: Mapping[Run, Figures]) -> list[Finding]:
    """In the order of the cells."""
    return [
        Finding(
            cell,
            {each: [found[grid.run(cell, each, seed)] for seed in range(grid.num_seeds)] for each in grid.contenders},
        )
        for cell in grid.cells
    ]


def mean_difference(findings: Sequence[Finding]) -> float:
    return fmean(each.difference for each in findings)


def worst_of(findings: Sequence[Finding]) -> Finding:
    return min(findings, key=lambda each: each.difference)
