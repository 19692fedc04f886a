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

from serving_core.errors import SettingsError
from serving_core.extras import needs, require
from serving_core.flags import NATIVE
from splitserve.commands.terminal import report, stderr, stdout, waiting
from splitserve.launch.models import LocalModel
from splitserve.signals import run_to_end
from splitserve_bench.code_version import SERVING, code_digest, files_digest
from splitserve_bench.compare.compare_options import (
    CompareCommand,
    contender_options,
    goal_options,
    load_options,
    output_options,
    parse_engine_flag,
)
from splitserve_bench.compare.contenders import ClusterContender, Contender, contenders, parse_custom, parse_peer
from splitserve_bench.errors import BenchError
from splitserve_bench.models import writing_model
from splitserve_bench.serve.serve_options import check_burstiness, check_dataset, check_prompts

if TYPE_CHECKING:
    from splitserve_bench.compare.entry import Comparison
    from splitserve_bench.compare.run import Compare, CompareBench
    from splitserve_bench.compare.workload import Dataset


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
    profiles: Sequence[Path]
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

    def arguments(self) -> dict[str, Any]:
        """What a saved comparison must have in common with one that goes on with it."""
        contenders = [asdict(each) for each in self.contenders]
        made_by = {"code": code_digest(SERVING), "kernels": os.environ.get(NATIVE, "")}
        return {**self.about(), "contenders": contenders, "model_files": files_digest(self.model.folder), **made_by}


@click.command("compare", cls=CompareCommand)
@click.argument("model", default="")
@contender_options
@load_options
@goal_options
@output_options
@needs("node")
def compare_command(
    model: str, save_dir: Path | None, profiles: tuple[Path, ...], as_json: bool, **values: Any
) -> None:
    """Find the highest request rate of MODEL at which enough requests are good: with prefill and decode on the same
    nodes, with every split of the cores, with each prompt where it is faster, and with other servers.

    Without --goodput and --slo-scale, limits are those of --slo-scale ttft:6 tpot:1.5. Clusters are told the limits of
    each request (--no-send-limits: not), and so have a load of their own for each --slo-scale.
    """
    cores = cores_of(values["cores"])
    peers = [_parsed("--peer", parse_peer, text) for text in values["peers"]]
    flags = dict(parse_engine_flag(text) for text in values["engine_flags"])
    customs = [_parsed("--contender", _parse_contender, text) for text in values["customs"]]
    everyone = contenders(len(cores), values["splits"] or (), peers, customs)
    if save_dir is not None:
        require("bench")  # for its pictures
    chosen = [each for each in everyone if each.kind in values["kinds"]]
    if not chosen:
        raise SettingsError(f"nobody takes part: no contender of {', '.join(values['kinds'])} on {len(cores)} cores")
    bench, dataset = _bench(values), _dataset(values)
    local = writing_model(model, report)
    asked = Asked(local, cores, flags, chosen, everyone[0], dataset, bench, profiles, save_dir, as_json)
    run_to_end(compare_contenders(asked))


async def compare_contenders(asked: Asked) -> None:
    """Compare, and show what was found; when it is stopped, what was found until then."""
    with waiting("Comparing") as show:
        # Without a terminal, lines of finished probes are enough.
        comparing = await _prepare(asked, show if stderr.is_terminal else lambda text: None)
        try:
            found = await comparing.run(asked.contenders, asked.reference)
        except asyncio.CancelledError:
            if comparing.found and not asked.as_json:
                stdout.print("Stopped: these searches are not over.")
                _show(comparing.found, asked)
            raise
    _show(found, asked)
    if asked.save_dir is not None:
        _save(found, asked, asked.save_dir)


async def _prepare(asked: Asked, show: Callable[[str], None]) -> "Compare":
    """Makes sure that peers answer and that folders can be used. Raises BenchError and SettingsError."""
    from splitserve_bench.compare.arena import Arena, describe_peers
    from splitserve_bench.compare.cells import Cells
    from splitserve_bench.compare.forecast import Forecaster, by_cores
    from splitserve_bench.compare.run import Compare
    from splitserve_bench.compare.workload import Workload, served_by_all
    from splitserve_bench.serve.datasets import clipped_words
    from splitserve_bench.simulate.profile import read_profile

    forecaster = Forecaster(by_cores(list(map(read_profile, asked.profiles))), len(asked.cores), asked.flags)
    folder = asked.save_dir or Path(tempfile.mkdtemp(prefix="splitserve-compare-"))
    cells = Cells(folder, asked.arguments())
    if num_saved := len(cells):
        report(f"saved loads: {num_saved}; only what is missing is measured")
    peers = await describe_peers(asked.contenders)
    served = served_by_all(asked.model, asked.flags.get("max_model_len") or None, list(peers.values()))
    workload = Workload(asked.dataset, served, asked.model.folder)
    if clipped := clipped_words(workload.clipped_share(), served.max_model_len):
        report(clipped)
    report(f"{', '.join(each.name for each in asked.contenders)}; probes and logs: {folder}")
    for each in asked.contenders if asked.profiles else ():
        if isinstance(each, ClusterContender) and (reason := forecaster.why_not(each)):
            report(f"{each.name} is not simulated: {reason}")
    arena = Arena(asked.model, asked.cores, asked.flags, folder / "logs", report)
    return Compare(asked.bench, workload, arena, cells, forecaster, report=report, show=show)


def _show(found: "Sequence[Comparison]", asked: Asked) -> None:
    from splitserve_bench.compare.compare_report import comparison_json, comparison_view

    if asked.as_json:
        click.echo(json.dumps(comparison_json(found, asked.about())))
        return
    for each in found:
        stdout.print(comparison_view(each))


def _save(found: "Sequence[Comparison]", asked: Asked, folder: Path) -> None:
    """Raises BenchError when it cannot be written."""
    from splitserve_bench.compare.compare_report import save_comparison

    try:
        save_comparison(found, asked.about(), folder)
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror}") from error


def cores_of(number: int) -> list[int]:
    """So many of the CPUs that this process may use, the first ones; all for 0. Raises SettingsError."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(number or os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    if number > len(allowed):
        raise SettingsError(f"--cores {number} is more than this process may use: {len(allowed)}")
    return allowed[: number or None]


def _bench(values: Mapping[str, Any]) -> "CompareBench":
    from splitserve_bench.compare.run import CompareBench
    from splitserve_bench.compare.slo import DEFAULT_SCALES, parse_scales
    from splitserve_bench.serve.metrics import parse_goodput

    if values["goodput"] and values["slo_scale"]:
        raise click.UsageError("give --goodput or --slo-scale, not both")
    if values["own_unloaded"] and (values["goodput"] or not values["at_rates"]):
        raise click.UsageError("--own-unloaded needs --at-rates, and limits that are multiples")
    scales = tuple(dict.fromkeys(parse_scales([text]) for text in values["slo_scale"]))
    names = {"send_limits", "own_unloaded", "attainment", "tolerance", "max_probes", "first_rate"}
    names |= {"num_prompts", "seconds", "request_timeout_s", "seed"}
    return CompareBench(
        criteria=(parse_goodput(values["goodput"]),) if values["goodput"] else scales or (DEFAULT_SCALES,),
        at_rates=values["at_rates"] or (),
        **{name: values[name] for name in names},
    )


def _dataset(values: Mapping[str, Any]) -> "Dataset":
    from splitserve_bench.compare.workload import Dataset

    check_dataset(values["dataset_name"], values["dataset_path"], values["length_scale"])
    check_burstiness(values["dataset_name"], values["burstiness"])
    prompts = (values[name] for name in ("random_prefix_len", "text_output_len", "skip_chat_template"))
    check_prompts(values["dataset_name"], *prompts)
    names = (
        *("length_scale", "random_input_len", "random_output_len", "random_range_ratio"),
        *("random_prefix_len", "text_output_len", "skip_chat_template", "burstiness"),
    )
    return Dataset(
        name=values["dataset_name"],
        path=values["dataset_path"],
        **{name: values[name] for name in names},
    )


def _parse_contender(text: str) -> ClusterContender:
    return parse_custom(text, lambda flag: parse_engine_flag(flag, "--contender"))


def _parsed(flag: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise SettingsError(f"{flag} {error}") from error
