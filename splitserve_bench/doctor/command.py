"""`splitserve doctor`."""

import dataclasses
import json
from pathlib import Path
from typing import Final

import click

from serving_core.extras import needs
from serving_core.settings import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from splitserve.commands.terminal import report, stdout
from splitserve.launch.models import resolve
from splitserve.signals import run_to_end
from splitserve_bench.engine.command import COUNTS

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
@click.option(
    "--save",
    "save_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Measure more, and write to this file what `splitserve simulate --profile` needs.",
)
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
    save_path: Path | None,
    as_json: bool,
) -> None:
    """Measure what a node of MODEL does on cores of this machine: prompts, decode steps, hand-over of KV; and say from
    which prompt and output lengths on a prefill node and a decode node beat two nodes that do both."""
    from splitserve_bench.doctor.doctor import DoctorBench, measure_doctor
    from splitserve_bench.doctor.report import doctor_view, pays_lines

    sizes = DoctorBench(cores, running, tuple(sorted(prompt_tokens)), tuple(sorted(output_tokens)), repeats)
    settings = EngineSettings(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    local = resolve(model, report)

    async def main() -> None:
        figures = await measure_doctor(local.folder, settings, sizes, report)
        if save_path is not None:
            from splitserve_bench.doctor.saving import measure_profile

            profile = await measure_profile(local, settings, sizes, figures.costs.corridor.bytes_per_s, report)
            profile.save(save_path)
            report(f"written: {save_path}")
        if as_json:
            click.echo(json.dumps({**dataclasses.asdict(figures), "conclusions": pays_lines(figures)}))
        else:
            stdout.print(doctor_view(figures))

    run_to_end(main())
