"""`splitserve bench simulate`. What it measures with is imported when it runs, so that help is quick."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from serving_core.errors import SettingsError
from serving_core.extras import needs
from splitserve.commands.terminal import report, stdout
from splitserve.launch.models import LocalModel
from splitserve.signals import run_to_end
from splitserve_bench.compare.compare_command import cores_of
from splitserve_bench.compare.compare_options import parse_engine_flag
from splitserve_bench.models import writing_model
from splitserve_bench.serve.serve_options import (
    ServeCommand,
    ServeOptions,
    dataset_options,
    goodput_option,
    json_option,
    pace_options,
)
from splitserve_bench.simulate.command import profile_option, rates_option, simulated_options

if TYPE_CHECKING:
    from splitserve_bench.simulate.profile import Profile
    from splitserve_bench.simulate.reality import Pair

NUM_WARM_UPS: Final = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to run."""

    model: LocalModel
    profile: "Profile"
    loads: tuple[ServeOptions, ...]  # one for each rate
    flags: dict[str, Any]  # for all clusters
    save_dir: Path | None


@click.command("simulate", cls=ServeCommand)
@click.argument("model", default="")
@profile_option
@dataset_options
@rates_option
@pace_options
@goodput_option
@click.option(
    "--engine-flag",
    "engine_flags",
    multiple=True,
    metavar="NAME=VALUE",
    help="A flag of `splitserve up` for all clusters, beside those that the profile has; give it again for more.",
)
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for the clusters' logs.")
@json_option
@needs("node")
def reality_command(
    model: str,
    profile_path: Path,
    request_rates: tuple[float, ...],
    engine_flags: tuple[str, ...],
    log_dir: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Send the same loads to real clusters of MODEL and to simulated ones, split (1P+1D) and colocated (2B), and show
    how close the simulation comes."""
    from splitserve_bench.simulate.profile import read_profile

    loads = [simulated_options("reality", rate, tokenizer=Path(model), **flags) for rate in request_rates]
    for options in loads:
        options.check()
        options.check_pace()
    profile, local = read_profile(profile_path), writing_model(model, report)
    if profile.model != local.name:
        raise SettingsError(f"--profile is of {profile.model}, not of {local.name}")
    flags_of_nodes = {**profile.flags, **dict(map(parse_engine_flag, engine_flags))}
    own = tuple(replace(options, tokenizer=local.folder) for options in loads)
    asked = Asked(local, profile, own, flags_of_nodes, log_dir)
    run_to_end(compare_with_clusters(asked, as_json))


async def compare_with_clusters(asked: Asked, as_json: bool) -> None:
    """Show the figures of clusters beside those of their simulations."""
    from splitserve_bench.simulate.reality_report import reality_json, reality_view

    with tempfile.TemporaryDirectory(prefix="splitserve-simulate-") as scratch:
        pairs = await _pairs(asked, asked.save_dir or Path(scratch))
    if as_json:
        click.echo(json.dumps(reality_json(pairs)))
    else:
        stdout.print(reality_view(pairs))


async def _pairs(asked: Asked, logs: Path) -> "list[Pair]":
    from splitserve_bench.compare.arena import Arena
    from splitserve_bench.serve.metrics import parse_goodput
    from splitserve_bench.serve.workloads import warm_up_of, workload_of
    from splitserve_bench.simulate.reality import FLEETS, run_both

    node = asked.profile.node
    arena = Arena(asked.model, cores_of(2 * asked.profile.cores), asked.flags, logs, report)
    pairs = []
    for options in asked.loads:
        workload = workload_of(options, node.max_model_len, node.vocab_size)
        warm_up = warm_up_of(workload, NUM_WARM_UPS, node.vocab_size, options.seed)
        for size in FLEETS:
            report(f"{size}: {len(workload.planned)} requests at {options.request_rate:g} req/s ...")
            pairs.append(
                await run_both(
                    arena,
                    asked.profile,
                    size,
                    workload.planned,
                    warm_up,
                    request_rate=options.request_rate,
                    limits=parse_goodput(options.goodput),
                    max_concurrency=options.max_concurrency,
                    request_timeout_s=options.request_timeout_s,
                )
            )
    return pairs
