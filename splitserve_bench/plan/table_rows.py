"""Rows of a CSV file whose columns and kinds of values are known. Anything else is refused by line and value."""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from splitserve_bench.errors import BenchError

MOST_ROWS: Final = 1_000_000


class Row:
    """One line, whose values are checked as they are asked for."""

    def __init__(self, values: dict[str, str], where: str) -> None:
        self._values, self._where = values, where

    def text(self, name: str) -> str:
        """Not empty."""
        if not (value := self._values[name].strip()):
            raise BenchError(f"{self._where}: {name} is empty")
        return value

    def count(self, name: str, minimum: int = 0) -> int:
        """A whole number, written as one or as a float."""
        value = self.number(name)
        if value != int(value) or value < minimum:
            raise BenchError(f"{self._where}: {name} must be a whole number of at least {minimum}, not {value:g}")
        return int(value)

    def positive(self, name: str) -> float:
        """A number above 0."""
        if not (value := self.number(name)) > 0:
            raise BenchError(f"{self._where}: {name} must be above 0, not {value:g}")
        return value

    def number(self, name: str) -> float:
        """Finite."""
        try:
            value = float(self._values[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BenchError(f"{self._where}: {name} must be a number, not {self._values[name][:80]!r}")
        return value


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Of a file with at least these columns. Raises BenchError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise BenchError(f"{path}, line 1: no column {', '.join(missing)}")
            for number, values in enumerate(reader):
                where = f"{path}, line {reader.line_num}"
                if number >= MOST_ROWS:
                    raise BenchError(f"{where}: more than {MOST_ROWS} rows")
                if None in values or any(value is None for value in values.values()):
                    raise BenchError(
                        f"{where}: {len(reader.fieldnames or ())} values are needed, as the first line has"
                    )
                yield Row(values, where)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
