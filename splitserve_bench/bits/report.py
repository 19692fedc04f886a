"""What `splitserve doctor --check-bits` shows."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from splitserve.commands.terminal import plain_table
from splitserve_bench.bits.check import BitsFigures
from splitserve_bench.bits.histories import Played


def bits_view(figures: BitsFigures) -> Group:
    """What is promised, a line for each history, and what came of it."""
    described = ", ".join(f"{name} {value}" for name, value in sorted(figures.engine.items()))
    return Group(
        Text(f"{figures.model}: {described}"),
        Text(figures.promise),
        "",
        histories_table(figures.histories),
        "",
        Text(conclusion(figures), style="bold"),
    )


def histories_table(histories: tuple[Played, ...]) -> Table:
    """What became of the bits in each, and what shows that it took place."""
    table = plain_table("history", "bits", "shown by")
    for played in histories:
        style = "green" if played.is_good else "yellow" if played.difference is None else "red"
        table.add_row(played.history, Text(outcome(played), style=style), played.shown_by)
    return table


def outcome(played: Played) -> str:
    """In a word or two."""
    if (difference := played.difference) is not None:
        what = "token" if difference.is_token else "log-probabilities"
        return f"differ: request {difference.question}, {what} {difference.token}"
    return "ok" if played.took_place else "not played"


def conclusion(figures: BitsFigures) -> str:
    """In one sentence."""
    num_histories = len(figures.histories)
    if differing := [played.history for played in figures.histories if played.difference is not None]:
        return f"{len(differing)} of {num_histories} histories changed bits of answers: {', '.join(differing)}"
    if missing := [played.history for played in figures.histories if not played.took_place]:
        return f"no history changed a bit, but of {num_histories} some could not be played: {', '.join(missing)}"
    return f"none of {num_histories} histories changed a bit of a token or a log-probability"
