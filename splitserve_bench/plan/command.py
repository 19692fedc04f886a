"""Define the command `splitserve plan`. Its flags of a load are those of `bench serve`.

What it searches with is imported when it runs, so that help is quick.
"""

import json
import math
import os
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import click

from serving_core.process.cpus import allowed_cpus
from serving_core.settings import KV_CACHE_DTYPES, QUANTIZATIONS
from splitserve.commands.terminal import counting, report, stderr, stdout
from splitserve.signals import run_to_end
from splitserve_bench.options import (
    PAIR,
    ListOf,
    NewFile,
    NumberRange,
    RepeatingCommand,
    Size,
    json_option,
    option,
    options_of,
)
from splitserve_bench.plan.hardware import DEVICES, INFINIBAND, LINK_NAMES
from splitserve_bench.plan.loads import MOST_COUNTED, LoadOptions
from splitserve_bench.serve.command import (
    ABOVE_0,
    RANDOM,
    TRACES,
    burstiness_option,
    check_burstiness,
    check_dataset,
    length_scale_option,
    named,
)

if TYPE_CHECKING:
    from splitserve_bench.plan.candidates import PlanOptions
    from splitserve_bench.plan.nodes import NodeOptions
    from splitserve_bench.plan.race import Race
    from splitserve_bench.plan.search import Study

EVERY: Final = 10  # simulations, a line of progress at least where there is no terminal
COUNT: Final = click.IntRange(1)
MOST_GPUS: Final = 1024
MOST_TP: Final = 64
LEAST_TP: Final = (1, 2, 3, 4, 8)  # of which a profile's node has the smallest that the model fits on
SLO: Final = ("--goodput", "--slo")


class PlanGroup(RepeatingCommand, click.Group):
    """The command group, whose --goodput takes several pairs after one flag, as vLLM's command does."""

    lists: ClassVar = dict.fromkeys(SLO, PAIR)


def parse_size(text: str) -> int:
    """Return the parallel size that a text means. Raises ValueError unless it is a whole number from 1 to MOST_TP."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_TP):
        raise ValueError(f"{text!r} is no parallel size from 1 to {MOST_TP}")
    return int(text)


def parse_figure(text: str) -> tuple[str, float]:
    """Parse NAME=NUMBER, and return the name in lower case and the number.

    Raises ValueError without a name, or for a number that is not finite and above 0.
    """
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (name and value > 0 and math.isfinite(value)):
        raise ValueError(f"{text!r} is not HARDWARE=NUMBER with a number above 0")
    return name.lower(), value


NAMES: Final = ListOf("NAME,...", str.lower)
FIGURES: Final = ListOf("NAME=NUMBER,...", parse_figure)
SIZES: Final = ListOf("N,...", parse_size)
PRESETS: Final = ", ".join(DEVICES)

node_options = options_of(
    option(
        "--model",
        type=click.Path(exists=True, file_okay=False),
        help="Plan for the model of this folder's config.json; its weights are not needed.",
    ),
    option(
        "--link",
        type=click.Choice(LINK_NAMES),
        help="Join the devices of a host by this link; default: the hardware's own.",
    ),
    click.option(
        "--device-memory",
        "device_memory_bytes",
        default=0,
        type=Size(),
        help="Give each device this much memory, such as 80GiB; default: the hardware's.",
    ),
    click.option(
        "--max-model-len",
        default=0,
        type=click.IntRange(0),
        help="Allow requests this many tokens; default: the model's limit.",
    ),
    click.option(
        "--max-num-batched-tokens",
        default=0,
        type=click.IntRange(0),
        help="Compute at most this many tokens in a node's step; default: a profile's, else that of "
        "nodes on such devices.",
    ),
    click.option(
        "--max-num-seqs",
        default=0,
        type=click.IntRange(0, 1024),
        help="Run at most this many sequences on a node; default: a profile's, else that of nodes on such devices.",
    ),
    click.option(
        "--weights-memory-bytes",
        default=0,
        type=Size(),
        help="Keep at most this much of the weights on a device, such as 60GiB, as `splitserve up` does: "
        "further layers are in host memory, or on a disk beside a CPU; default: all.",
    ),
    option(
        "--quantization",
        default="none",
        type=click.Choice(QUANTIZATIONS),
        help="Quantize the weights, as `splitserve up` does.",
    ),
    option(
        "--kv-cache-dtype",
        default="auto",
        type=click.Choice(KV_CACHE_DTYPES),
        help="Store keys and values in this dtype, as `splitserve up` does.",
    ),
)
fleet_options = options_of(
    option(
        "--profile",
        "profiles",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False),
        help="Read the seconds that a node takes from this profile of `splitserve doctor --save`; give "
        "it again for other kinds of node. Default: a roofline of the hardware's data sheet.",
    ),
    option("--hardware", type=NAMES, help=f"Plan with this hardware for all nodes: {PRESETS}, or as profiles call it."),
    option("--prefill-hardware", type=NAMES, help="Plan with this hardware for prefill nodes; several are all tried."),
    option("--decode-hardware", type=NAMES, help="Plan with this hardware for decode nodes; several are all tried."),
    option("--host-link", default=INFINIBAND, type=click.Choice(LINK_NAMES), help="Join hosts by this link."),
    option("--gpus", type=click.IntRange(1, MOST_GPUS), help="Divide this many devices."),
    option("--gpus-per-host", default=8, type=click.IntRange(1, MOST_TP), help="Put this many devices on a host."),
    click.option(
        "--cells",
        default=0,
        type=click.IntRange(0),
        help="Divide the devices into this many equal clusters that share the load, each with a "
        "coordinator of its own; default: one for each host.",
    ),
    option("--tp", "tp_sizes", default="1,2,4,8", type=SIZES),
    option(
        "--pp",
        "pp_sizes",
        default="1",
        type=SIZES,
        help="Try these numbers of pipeline stages, of each of the sizes of --tp.",
    ),
)
objective_options = options_of(
    option("--cost", "objective", flag_value="cost", help="Search for the most requests a dollar."),
    option("--power", "objective", flag_value="power", help="Search for the most requests a second a kilowatt."),
    option("--price", type=FIGURES, help="Price a device at these dollars an hour: h100=4.75,a100=2.2 (the defaults)."),
    option("--watts", type=FIGURES, help="Count these watts for a device: h100=700,a100=400 (the defaults)."),
)
load_options = options_of(
    option("--dataset-name", "--dataset", default=RANDOM, type=click.Choice((RANDOM, *TRACES))),
    option("--dataset-path", type=click.Path(exists=True, dir_okay=False), help="Read the trace from this file."),
    length_scale_option,
    option("--random-input-len", default=1024, type=COUNT),
    option("--random-output-len", default=128, type=COUNT),
    option("--random-range-ratio", default=0.0, type=NumberRange(0, 1, max_open=True)),
    burstiness_option,
)
search_options = options_of(
    option(*SLO, multiple=True, metavar="ttft:MS tpot:MS", help="Judge requests by these limits in ms."),
    option("--attainment", default=0.9, type=NumberRange(0, 1, min_open=True)),
    option("--tolerance", default=0.03, type=ABOVE_0, help="Find the goodput to this share of it."),
    option("--candidates", default=20, type=COUNT, help="Simulate at most this many plans."),
    option("--all", "all_plans", is_flag=True, help="Find every plan's knee, not only those of the best two."),
    option(
        "--max-probes",
        default=12,
        type=COUNT,
        help="Simulate a plan at most this many times, beyond quick simulations.",
    ),
    option(
        "--num-prompts", default=200, type=click.IntRange(1, MOST_COUNTED), help="Count at least this many requests."
    ),
    option(
        "--seconds",
        default=2.0,
        type=ABOVE_0,
        help=f"Let them come for at least this many seconds, but for more than {MOST_COUNTED} requests.",
    ),
    option("--seed", default=0, type=click.IntRange(0)),
    click.option(
        "--jobs",
        default=0,
        type=click.IntRange(0, 256),
        help="Simulate in this many processes; default: one for each CPU.",
    ),
)


@click.group("plan", cls=PlanGroup, invoke_without_command=True)
@node_options
@fleet_options
@objective_options
@load_options
@search_options
@json_option
@click.pass_context
def plan_command(context: click.Context, /, jobs: int, as_json: bool, **flags: Any) -> None:
    """Find how to divide --gpus devices into prefill nodes, decode nodes and mixed nodes, and with how many
    ranks each, for the most good requests a second: by simulation, with the decisions of the real coordinator and the
    real nodes."""
    if context.invoked_subcommand is not None:
        return
    from splitserve_bench.plan.report import best_commands, findings_of, plan_json, plan_view, words_of
    from splitserve_bench.plan.search import study_of

    options = plan_options_of(flags)
    study = study_of(options)
    for line in study.machines.unfit:
        report(f"left out: {line}")
    if clipped := study.loads.clipped():
        report(clipped)
    report(f"{len(study.plans)} plans: {', '.join(map(str, study.plans))}")
    race = study.race()
    _run(study, race, options, jobs or len(allowed_cpus()) or os.cpu_count() or 1)
    found = findings_of(study, race)
    if as_json:
        click.echo(json.dumps(plan_json(study, found)))
    else:
        stdout.print(plan_view(study, found))
        for line in (*words_of(found, options.objective), *best_commands(study, found)):
            stdout.print(line, markup=False, soft_wrap=True)  # so that commands can be copied


@plan_command.command("profile")
@node_options
@option("--hardware", required=True, type=click.Choice(list(DEVICES)), help="Take this hardware for the node.")
@option("--tp", type=click.IntRange(1, MOST_TP), help="Default: the smallest size that the model fits on.")
@option("--save", "save_path", required=True, type=NewFile(), help="Write the profile to this file.")
def profile_command(hardware: str, tp: int | None, save_path: Path, **flags: Any) -> None:
    """Write the profile of one node, worked out from the hardware's data sheet, for `splitserve simulate --profile`."""
    from splitserve_bench.plan.nodes import machines_of

    sizes = (tp,) if tp is not None else LEAST_TP
    kind = machines_of(_nodes_of({**flags, "hardware": (hardware,), "tp_sizes": sizes})).kinds[0]
    kind.profile.save(save_path)
    report(f"written: {save_path}, of {kind.hardware} TP {kind.tp}")


def _run(study: "Study", race: "Race", options: "PlanOptions", jobs: int) -> None:
    """Run the probes of the race on `jobs` processes, and show their progress.

    Raises BenchError when a process fails.
    """
    from splitserve_bench.plan.race import Progress
    from splitserve_bench.plan.search import run_race

    began_s = perf_counter()
    progress = Progress(race, study.plans, options.cells, began_s)
    with counting(f"Planning, {len(study.plans)} plans") as show:

        def tell() -> None:
            is_news = progress.played(now := perf_counter())
            if stderr.is_terminal or is_news or progress.num_played % EVERY == 0:
                show(*progress.counts, progress.line(now))

        run_to_end(run_race(race, options, min(jobs, len(study.plans)), tell))
    report(f"{progress.num_played} simulations of {len(study.plans)} plans in {perf_counter() - began_s:.0f} s")


def plan_options_of(flags: dict[str, Any]) -> "PlanOptions":
    """Return the search that the flags ask for.

    Raises UsageError and SettingsError for flags that contradict each other.
    """
    from splitserve_bench.plan.candidates import DEVICE, PlanOptions

    gpus, per_host = flags["gpus"], flags["gpus_per_host"]
    if gpus is None:
        raise click.UsageError("--gpus N is needed: how many devices there are")
    cells = flags["cells"] or (gpus // per_host if gpus % per_host == 0 else 1)
    if gpus % cells:
        raise click.UsageError(f"--cells {cells}: {gpus} devices cannot be divided evenly into so many")
    check_dataset(flags["dataset_name"], flags["dataset_path"], flags["length_scale"])
    check_burstiness(flags["dataset_name"], flags["burstiness"])
    load = LoadOptions(**named(LoadOptions, flags) | {"dataset_path": flags["dataset_path"] or ""})
    own = {"cells": cells, "objective": flags["objective"] or DEVICE}
    return PlanOptions(_nodes_of(flags), load, **named(PlanOptions, flags) | own)


def _nodes_of(flags: dict[str, Any]) -> "NodeOptions":
    """Return the flags of nodes. Those of prices, roles and hosts may be missing, for the profile of one node."""
    from splitserve_bench.plan.nodes import NodeOptions

    own = flags["hardware"] or ()
    prefill, decode = (tuple(flags.get(f"{role}_hardware") or own) for role in ("prefill", "decode"))
    usual: dict[str, Any] = {"profiles": (), "host_link": INFINIBAND, "gpus_per_host": MOST_TP}
    derived = {
        "model": flags["model"] or "",
        "prefill_hardware": prefill,
        "decode_hardware": decode,
        "both_hardware": tuple(dict.fromkeys((*own, *prefill, *decode))),
        "link": flags["link"] or "",
        "tp_sizes": tuple(sorted(flags["tp_sizes"])),
        "pp_sizes": tuple(sorted(flags.get("pp_sizes", (1,)))),
        "dollars_per_h": flags.get("price") or (),
        "watts": flags.get("watts") or (),
    }
    return NodeOptions(**usual | named(NodeOptions, flags) | derived)
