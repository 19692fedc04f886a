"""Seconds between the places at which they were measured. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds by two quantities, each measured at one or more ascending places: seconds[row][column]."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        """Straight between the places; before the first as at the first; beyond the last as between the last two, but
        never less than at the last."""
        return self.row(row).at(column)

    def row(self, row: float) -> "Row":
        """All that is at one place of the first quantity."""
        lower, upper, share = _between(self.rows, row)
        return Row(self.columns, self.seconds[lower], self.seconds[upper], share)


class Row:
    """A line between two rows of a grid, to be asked more than once."""

    def __init__(self, columns: Sequence[float], below: Sequence[float], above: Sequence[float], share: float) -> None:
        self._columns, self._below, self._above, self._share = columns, below, above, share

    def at(self, column: float) -> float:
        """As Grid.at has it."""
        left, right, part = _between(self._columns, column)
        below, above, share = self._below, self._above, self._share
        low = below[left] + part * _rise(below[left], below[right], part)
        high = above[left] + part * _rise(above[left], above[right], part)
        return low + share * _rise(low, high, share)


def _between(places: Sequence[float], at: float) -> tuple[int, int, float]:
    """The places on either side, and how far it is from the one to the other: more than 1 beyond the last."""
    if at <= places[0] or len(places) == 1:
        return 0, 0, 0.0
    right = bisect_left(places, at, 1, len(places) - 1)
    return right - 1, right, (at - places[right - 1]) / (places[right] - places[right - 1])


def _rise(start: float, end: float, share: float) -> float:
    return end - start if share <= 1 else max(0.0, end - start) + min(0.0, end - start) / share
