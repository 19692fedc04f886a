"""Print figures: as tables, or as one JSON object."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from splitserve.commands.terminal import plain_table, stdout

Row = TypeVar("Row")


def print_figures(figures: Any, view: Callable[[Any], RenderableType], *, as_json: bool, **more: Any) -> None:
    """Print a dataclass as its view or as JSON, which has `more` beside its fields."""
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(figures), **more}))
    else:
        stdout.print(view(figures))


def table_of(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    """Return a table with these columns, the first of words and the others of numbers."""
    first, *numbers = columns
    table = plain_table(first, numbers=tuple(numbers))
    for row in rows:
        table.add_row(*(escape(text(row)) for text in columns.values()))
    return table
