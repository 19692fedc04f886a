"""Define the command `splitserve doctor`."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from serving_core.errors import SettingsError
from serving_core.process.cpus import allowed_cpus
from serving_core.process.extras import needs
from serving_core.settings import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from splitserve.commands.terminal import report
from splitserve.launch.models import LocalModel
from splitserve.signals import run_to_end
from splitserve_bench.engine.command import COUNTS
from splitserve_bench.models import writing_model
from splitserve_bench.options import NewFile, Size, json_option, option
from splitserve_bench.report import print_figures

if TYPE_CHECKING:
    from splitserve_bench.doctor.environment import Environment
    from splitserve_bench.doctor.measure import DoctorBench

MOST_RUNNING: Final = 256


@click.command()
@click.argument("model", default="")
@option("--cores", default=1, type=click.IntRange(1), help="Give each node this many cores.")
@option(
    "--running",
    default=8,
    type=click.IntRange(1, MOST_RUNNING),
    help="Decode this many sequences at the same time on each of two nodes.",
)
@option("--prompt-tokens", default="64,256,512,1024,2048", type=COUNTS, help="Measure prompts of these many tokens.")
@option("--output-tokens", default="16,64,256", type=COUNTS, help="Simulate outputs of these many tokens.")
@option("--dtype", default="auto", type=click.Choice(DTYPES), help="Compute in this dtype.")
@option("--quantization", default="none", type=click.Choice(QUANTIZATIONS), help="Quantize the weights, as nodes do.")
@option(
    "--kv-cache-dtype", default="auto", type=click.Choice(KV_CACHE_DTYPES), help="Store KV in this dtype, as nodes do."
)
@click.option(
    "--weights-memory-bytes",
    default=0,
    type=Size(),
    help="Keep this much of the weights in memory, as nodes do; further layers are on disk.",
)
@option("--weights-disk-path", default="", help="Put offloaded weights into this folder, as nodes do.")
@option("--repeats", default=3, type=click.IntRange(1), help="Measure each figure this many times.")
@option(
    "--save",
    "save_path",
    type=NewFile(),
    help="Measure more, and write to this file what `splitserve simulate --profile` needs.",
)
@option(
    "--check-bits",
    is_flag=True,
    help="Instead, ask the same alone, in a crowd, in chunks, through migrations, kills and more: "
    "exit code 1 unless all outputs have the same bits.",
)
@option("--batch-invariant", is_flag=True, help="Make bits independent of the batch, as nodes do.")
@option("--tp", default=1, type=click.IntRange(1), help="Let each node have this many ranks, with --check-bits.")
@json_option
@needs("node")
def doctor(
    model: str,
    cores: int,
    running: int,
    prompt_tokens: tuple[int, ...],
    output_tokens: tuple[int, ...],
    repeats: int,
    save_path: Path | None,
    check_bits: bool,
    tp: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show the environment and the command that serves MODEL here. Then measure what a node of MODEL does on cores of
    this machine: prompts, decode steps, KV transfers; and simulate how many requests a prefill node and a decode node
    keep within their limits, two mixed nodes, and one node of all their cores. Or, with --check-bits, whether answers
    have the same bits whatever happened to them."""
    if check_bits and save_path is not None:
        raise SettingsError("--check-bits measures nothing that --save could write")
    if tp != 1 and not check_bits:
        raise SettingsError("--tp is for --check-bits: what is measured is a node of one rank")
    if check_bits:
        _check_bits(writing_model(model, report), flags, cores, tp, as_json)
        return
    from splitserve_bench.doctor.environment import find_environment
    from splitserve_bench.doctor.measure import DoctorBench

    environment = find_environment(model, allowed_cpus())
    if not as_json:
        click.echo("\n".join([*environment.lines(), ""]))
    local = writing_model(model, report)
    sizes = DoctorBench(cores, running, tuple(sorted(prompt_tokens)), tuple(sorted(output_tokens)), repeats)
    _measure(local, EngineSettings(**flags), sizes, save_path, environment if as_json else None)


def _measure(
    model: LocalModel,
    settings: EngineSettings,
    sizes: "DoctorBench",
    save_path: Path | None,
    environment: "Environment | None",
) -> None:
    """Measure the model and print what was found; with `save_path` write a profile to it too.

    With an environment, which was not printed then, everything is one JSON object.
    """
    from splitserve_bench.doctor.measure import measure_doctor
    from splitserve_bench.doctor.report import conclusions, doctor_view

    async def main() -> None:
        figures = await measure_doctor(model, settings, sizes, report)
        more = {} if environment is None else {"environment": dataclasses.asdict(environment)}
        as_json = environment is not None
        print_figures(figures, doctor_view, as_json=as_json, **more, conclusions=conclusions(figures))
        if save_path is not None:
            from splitserve_bench.doctor.measure import measure_profile

            profile = await measure_profile(model, settings, sizes, figures.costs.kv_transfer.bytes_per_s, report)
            profile.save(save_path)
            report(f"written: {save_path}")

    run_to_end(main())


def _check_bits(model: LocalModel, flags: Mapping[str, Any], cores: int, tp_size: int, as_json: bool) -> None:
    """Check the bits of outputs on clusters, print what was found, and exit with code 1 when bits differ."""
    from splitserve_bench.bits import BitsBench, BitsFigures, bits_view, check_bits, conclusion

    found: list[BitsFigures] = []

    async def main() -> None:
        found.append(await check_bits(model, flags, BitsBench(cores=cores, tp_size=tp_size), allowed_cpus(), report))

    run_to_end(main())
    [figures] = found
    print_figures(figures, bits_view, as_json=as_json, conclusion=conclusion(figures))
    if figures.differs:
        sys.exit(1)
