"""`splitserve bench speculation`. What it measures with is imported when it runs, so that help is quick."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.table import Table

from serving_core.extras import needs
from splitserve.commands.terminal import plain_table, report, stdout
from splitserve.launch.models import resolve
from splitserve_bench.engine.command import COUNTS

if TYPE_CHECKING:
    from splitserve_bench.speculation.measure import SpeculationFigures


@click.command("speculation")
@click.argument("model", default="")
@click.option("--batches", default="1,4,16", show_default=True, type=COUNTS, help="Answers at a time.")
@click.option("--num-speculative-tokens", default=8, show_default=True, type=click.IntRange(1, 32), help="As of nodes.")
@click.option("--max-tokens", default=200, show_default=True, type=click.IntRange(2), help="Of each answer.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="With and without, by turns.")
@click.option("--threads", default=0, type=click.IntRange(0), help="Threads; by default what torch takes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@needs("node")
def speculation_command(
    model: str,
    batches: tuple[int, ...],
    num_speculative_tokens: int,
    max_tokens: int,
    repeats: int,
    threads: int,
    as_json: bool,
) -> None:
    """Measure what --speculation lookup gains MODEL: code edits, summaries with quotes, chat, random tokens."""
    from splitserve_bench.speculation.measure import measure_speculation
    from splitserve_bench.speculation.texts import KINDS

    folder = resolve(model, report).folder
    sizes = (num_speculative_tokens, max_tokens, repeats, threads)
    figures = measure_speculation(folder, KINDS, sorted(set(batches)), *sizes, report)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in figures]))
    else:
        stdout.print(speculation_table(figures))


def speculation_table(rows: Sequence["SpeculationFigures"]) -> Table:
    """Rates without and with candidates, and what came of these."""
    numbers = ("batch", "tokens/s off", "lookup", "ratio", "candidates a token", "of them came", "tokens a step")
    table = plain_table("text", numbers=numbers)
    for row in rows:
        table.add_row(
            row.kind,
            str(row.batch),
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.speedup:.2f}",
            f"{row.proposed:.2f}",
            f"{row.accepted:.0%}",
            f"{row.tokens_per_step:.2f}",
        )
    return table
