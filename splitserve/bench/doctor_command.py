"""`splitserve doctor`."""

import dataclasses
import json
from typing import Final

import click

from engine.extras import needs
from engine.settings import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from splitserve.bench.engine_command import COUNTS
from splitserve.models import resolve
from splitserve.signals import run_to_end
from splitserve.terminal import report, stdout

MOST_RUNNING: Final = 256


@click.command()
@click.argument("model", default="")
@click.option("--cores", default=1, show_default=True, type=click.IntRange(1), help="Cores of one node.")
@click.option(
    "--running",
    default=8,
    show_default=True,
    type=click.IntRange(1, MOST_RUNNING),
    help="Answers that run at the same time, for each of two nodes.",
)
@click.option("--prompt-tokens", default="64,256,512,1024,2048", show_default=True, type=COUNTS, help="Of prompts.")
@click.option("--output-tokens", default="16,64,256,1024", show_default=True, type=COUNTS, help="Of answers.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES), help="Compute dtype.")
@click.option("--quantization", default="none", show_default=True, type=click.Choice(QUANTIZATIONS))
@click.option("--kv-cache-dtype", default="auto", show_default=True, type=click.Choice(KV_CACHE_DTYPES))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="How often each is measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@needs("node")
def doctor(
    model: str,
    cores: int,
    running: int,
    prompt_tokens: tuple[int, ...],
    output_tokens: tuple[int, ...],
    dtype: str,
    quantization: str,
    kv_cache_dtype: str,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure what a node of MODEL does on cores of this machine: prompts, decode steps, hand-over of KV; and say from
    which prompt and output lengths on a prefill node and a decode node beat two nodes that do both."""
    from splitserve.bench.doctor import DoctorBench, measure_doctor
    from splitserve.bench.doctor_report import doctor_view, pays_lines

    sizes = DoctorBench(cores, running, tuple(sorted(prompt_tokens)), tuple(sorted(output_tokens)), repeats)
    settings = EngineSettings(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    folder = resolve(model, report).folder

    async def main() -> None:
        figures = await measure_doctor(folder, settings, sizes, report)
        if as_json:
            click.echo(json.dumps({**dataclasses.asdict(figures), "conclusions": pays_lines(figures)}))
        else:
            stdout.print(doctor_view(figures))

    run_to_end(main())
