"""`splitserve bench compare`. What it measures with is imported when it runs, so that help is quick."""

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import SettingsError
from engine.extras import needs
from splitserve.bench.compare.compare_options import (
    CompareCommand,
    contender_options,
    goal_options,
    load_options,
    output_options,
    parse_engine_flag,
)
from splitserve.bench.compare.contenders import Contender, contenders, parse_peer
from splitserve.bench.serve.serve_options import RANDOM
from splitserve.models import LocalModel, resolve
from splitserve.signals import run_to_end
from splitserve.terminal import report, stderr, stdout, waiting

if TYPE_CHECKING:
    from splitserve.bench.compare.entry import Comparison
    from splitserve.bench.compare.run import Compare, CompareBench
    from splitserve.bench.compare.slo import Scales
    from splitserve.bench.compare.workload import Dataset


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be compared. `flags` go to every cluster of ours."""

    model: LocalModel
    cores: Sequence[int]
    flags: Mapping[str, Any]
    contenders: Sequence[Contender]
    reference: Contender
    dataset: "Dataset"
    bench: "CompareBench"
    also: Sequence["Scales"]  # that the same requests are judged by
    save_dir: Path | None
    as_json: bool

    def about(self) -> dict[str, Any]:
        """For the JSON object."""
        return {
            "model": self.model.name,
            "cores": len(self.cores),
            "engine_flags": dict(self.flags),
            "dataset": asdict(self.dataset),
            "bench": asdict(self.bench),
        }


@click.command("compare", cls=CompareCommand)
@click.argument("model", default="")
@contender_options
@load_options
@goal_options
@output_options
@needs("node")
def compare_command(model: str, save_dir: Path | None, as_json: bool, **values: Any) -> None:
    """Find the highest request rate of MODEL at which enough requests are good: with prefill and decode on the same
    nodes, with every split of the cores, with each prompt where it is faster, and with other servers.

    Without --goodput and --slo-scale, limits are those of --slo-scale ttft:6 tpot:1.5.
    """
    cores = cores_of(values["cores"])
    peers = [_parsed("--peer", parse_peer, text) for text in values["peers"]]
    flags = dict(parse_engine_flag(text) for text in values["engine_flags"])
    everyone = contenders(len(cores), values["splits"] or (), peers)
    chosen = [each for each in everyone if each.kind in values["kinds"]]
    if not chosen:
        raise SettingsError(f"nobody takes part: no contender of {', '.join(values['kinds'])} on {len(cores)} cores")
    bench, dataset = _bench(values), _dataset(values)
    local = resolve(model, report)
    asked = Asked(local, cores, flags, chosen, everyone[0], dataset, bench, _also(values), save_dir, as_json)
    run_to_end(_compare(asked))


async def _compare(asked: Asked) -> None:
    """Shows what was found; when it is stopped, what was found until then."""
    with waiting("Comparing") as show:
        # Without a terminal, lines of finished probes are enough.
        comparing = await _prepare(asked, show if stderr.is_terminal else lambda text: None)
        try:
            await comparing.run(asked.contenders, asked.reference)
        except asyncio.CancelledError:
            if comparing.found is not None and not asked.as_json:
                stdout.print("Stopped: these searches are not over.")
                _show(comparing.found, asked)
            raise
    assert comparing.found is not None
    _show(comparing.found, asked)


async def _prepare(asked: Asked, show: Callable[[str], None]) -> "Compare":
    """Makes sure that peers answer and that folders can be made. Raises BenchError and SettingsError."""
    from splitserve.bench.compare.arena import Arena, describe_peers
    from splitserve.bench.compare.compare_report import save_probe
    from splitserve.bench.compare.run import Compare
    from splitserve.bench.compare.workload import Workload, served_by_all

    peers = await describe_peers(asked.contenders)
    served = served_by_all(asked.model, asked.flags.get("max_model_len") or None, list(peers.values()))
    workload = Workload(asked.dataset, served)
    if share := workload.clipped_share():
        report(f"{share:.1%} of the requests are longer than {served.max_model_len} tokens, and are clipped to that")
    folder = asked.save_dir or Path(tempfile.mkdtemp(prefix="splitserve-compare-"))
    probes, logs = folder / "probes", folder / "logs"
    try:
        for each in (probes, logs):
            each.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--save-dir {folder} cannot be made: {error.strerror}") from error
    report(f"{', '.join(each.name for each in asked.contenders)}; probes and logs: {folder}")
    arena = Arena(asked.model, asked.cores, asked.flags, logs, report)
    return Compare(asked.bench, workload, arena, report=report, show=show, on_probe=lambda run: save_probe(run, probes))


def _show(comparison: "Comparison", asked: Asked) -> None:
    from splitserve.bench.compare.compare_report import comparison_json, comparison_view, save_comparison
    from splitserve.bench.compare.entry import judged_by
    from splitserve.bench.compare.slo import RelativeSlo

    also: list[Comparison] = []
    if comparison.unloaded is not None:
        also = [judged_by(RelativeSlo(scales, comparison.unloaded), comparison) for scales in asked.also]
    if asked.save_dir is not None:
        save_comparison(comparison, also, asked.about(), asked.save_dir)
    if asked.as_json:
        click.echo(json.dumps(comparison_json(comparison, also, asked.about())))
        return
    for each in (comparison, *also):
        stdout.print(comparison_view(each))


def cores_of(number: int) -> list[int]:
    """So many of the CPUs that this process may use, the first ones; all for 0. Raises SettingsError."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(number or os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    if number > len(allowed):
        raise SettingsError(f"--cores {number} is more than this process may use: {len(allowed)}")
    return allowed[: number or None]


def _bench(values: Mapping[str, Any]) -> "CompareBench":
    from splitserve.bench.compare.run import CompareBench
    from splitserve.bench.compare.slo import DEFAULT_SCALES, parse_scales
    from splitserve.bench.serve.metrics import parse_goodput

    if values["goodput"] and values["slo_scale"]:
        raise click.UsageError("give --goodput or --slo-scale, not both")
    scales = parse_scales(values["slo_scale"]) if values["slo_scale"] else DEFAULT_SCALES
    names = {"attainment", "tolerance", "max_probes", "first_rate"}
    names |= {"num_prompts", "seconds", "request_timeout_s", "seed"}
    return CompareBench(
        criterion=parse_goodput(values["goodput"]) if values["goodput"] else scales,
        at_rates=values["at_rates"] or (),
        **{name: values[name] for name in names},
    )


def _also(values: Mapping[str, Any]) -> list["Scales"]:
    from splitserve.bench.compare.slo import parse_scales

    if values["also_slo_scale"] and (values["goodput"] or not values["at_rates"]):
        raise click.UsageError("--also-slo-scale needs --at-rates, and limits that are multiples")
    return [parse_scales([text]) for text in values["also_slo_scale"]]


def _dataset(values: Mapping[str, Any]) -> "Dataset":
    from splitserve.bench.compare.workload import Dataset

    if values["dataset_name"] != RANDOM and not values["dataset_path"]:
        raise click.UsageError(f"--dataset-name {values['dataset_name']} needs --dataset-path")
    return Dataset(
        name=values["dataset_name"],
        path=values["dataset_path"],
        **{
            name: values[name]
            for name in ("length_scale", "random_input_len", "random_output_len", "random_range_ratio", "burstiness")
        },
    )


def _parsed(flag: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise SettingsError(f"{flag} {error}") from error
