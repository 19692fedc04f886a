"""`splitserve bench prompts`."""

import dataclasses
import json

import click

from serving_core.extras import needs
from serving_core.settings import QUANTIZATIONS
from splitserve.commands.terminal import plain_table, report, stdout
from splitserve_bench.engine.command import PROMPTS, model_folder
from splitserve_bench.engine.figures import PromptSize
from splitserve_bench.engine.random_models import SHAPES


@click.command("prompts")
@click.argument("model", default="")
@click.option("--shape", type=click.Choice(tuple(SHAPES)), help="Random weights of this model's sizes, not a MODEL.")
@click.option("--layers", default=0, type=click.IntRange(0), help="Only so many layers of the --shape.")
@click.option(
    "--quantization",
    "quantizations",
    multiple=True,
    default=("w8a8",),
    show_default=True,
    type=click.Choice(QUANTIZATIONS[1:]),
    help="What to measure beside the weights as they are. May be repeated.",
)
@click.option("--threads", default=0, type=click.IntRange(0), help="Threads; by default what torch takes.")
@click.option("--prompts", default="1x512,1x1024,16x128", show_default=True, type=PROMPTS, help="Prompts to prefill.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1), help="How often each is measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@needs("node")
def prompts_command(
    model: str,
    shape: str | None,
    layers: int,
    quantizations: tuple[str, ...],
    threads: int,
    prompts: tuple[PromptSize, ...],
    repeats: int,
    as_json: bool,
) -> None:
    """Measure in turn how fast the engine reads prompts with weights as they are and quantized."""
    if model and shape:
        raise click.UsageError("give a MODEL or --shape, not both")
    if layers and not shape:
        raise click.UsageError("--layers goes with --shape")
    from splitserve_bench.engine.quantized_prompts import measure_quantized_prompts

    with model_folder(model, shape, layers, report) as folder:
        rows = measure_quantized_prompts(folder, list(dict.fromkeys(quantizations)), prompts, repeats, threads, report)
    if as_json:
        click.echo(json.dumps({"prompts": [dataclasses.asdict(row) for row in rows]}))
        return
    table = plain_table(
        "prompts", "weights", numbers=("tokens/s", "of none", "by CPU time", "products alone", "share of these")
    )
    for row in rows:
        rate = f"{row.product_flops_per_s / 1e9:.0f} G/s"
        told = (f"{row.tokens_per_s:.0f}", f"{row.ratio:.2f}", f"{row.cpu_ratio:.2f}", rate, f"{row.product_share:.0%}")
        table.add_row(str(row.prompts), row.quantization, *told)
    stdout.print(table)
    stdout.print("medians of turns; products alone: the best of several shapes, weights packed as the engine's")
