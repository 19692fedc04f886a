"""`splitserve bench`."""

import dataclasses
import json

import click

from splitserve.bench.engine import EngineBench, measure_engine
from splitserve.bench.report import figures_table
from splitserve.launcher import run_until_signal
from splitserve.models import resolve
from splitserve.terminal import report, stdout


@click.group()
def bench() -> None:
    """Measure a cluster on this machine."""


@bench.command()
@click.argument("model", default="")
@click.option("--streams", default=8, show_default=True, type=click.IntRange(2), help="Answers at the same time.")
@click.option("--prompt-tokens", default=512, show_default=True, type=click.IntRange(1), help="Length of the prompts.")
@click.option("--output-tokens", default=192, show_default=True, type=click.IntRange(8), help="Length of the answers.")
@click.option("--repeats", default=10, show_default=True, type=click.IntRange(1), help="Answers one after the other.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def engine(model: str, streams: int, prompt_tokens: int, output_tokens: int, repeats: int, as_json: bool) -> None:
    """Start one prefill and one decode node for MODEL; measure start, memory, handoff and streaming."""
    local = resolve(model, report)
    sizes = EngineBench(streams, prompt_tokens, output_tokens, repeats)

    async def work() -> None:
        figures = await measure_engine(local, sizes, report)
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(figures)))
        else:
            stdout.print(figures_table(figures, sizes))

    if run_until_signal(work()):
        raise click.Abort
