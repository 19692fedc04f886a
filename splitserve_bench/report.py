"""Print figures as tables or as one JSON object, and write JSON files."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from serving_core.errors import SettingsError
from splitserve.commands.terminal import plain_table, stdout

Row = TypeVar("Row")


def print_figures(figures: Any, view: Callable[[Any], RenderableType], *, as_json: bool, **more: Any) -> None:
    """Print a dataclass of figures: what `view` makes of it, or with `as_json` one JSON object.

    The object has the dataclass's fields, and those given as `more`, which the tables do not show.
    """
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(figures), **more}))
    else:
        stdout.print(view(figures))


def save_json(fields: Mapping[str, Any], path: Path) -> None:
    """Write a JSON object to a file, which is replaced. Raises SettingsError when it cannot be written."""
    try:
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def engine_line(model: str, engine: Mapping[str, str]) -> str:
    """Return the model's name and an engine's description of itself (its `description`) in one line."""
    return f"{model}: {', '.join(f'{name} {value}' for name, value in engine.items())}"


def known(value: float | None, form: str, scale: float = 1) -> str:
    """Return the value times `scale` in a format such as ".1f"; "-" for None, a value that is not known."""
    return "-" if value is None else f"{value * scale:{form}}"


def table_of(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    """Return a table with a line for each row. `columns` are by their titles; each makes the text of a cell of a row.

    The first column is of words, aligned to the left, the others are of numbers, aligned to the right.
    """
    first, *numbers = columns
    table = plain_table(first, numbers=tuple(numbers))
    for row in rows:
        table.add_row(*(escape(text(row)) for text in columns.values()))
    return table
