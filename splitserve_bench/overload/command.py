"""`splitserve bench overload`. What it measures with is imported when it runs, so that help is quick."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from serving_core.errors import SettingsError
from serving_core.extras import require
from splitserve.commands.terminal import report, stdout
from splitserve.signals import run_to_end
from splitserve_bench.options import NewFile, NumberRange
from splitserve_bench.serve.serve_options import (
    ServeCommand,
    ServeOptions,
    burstiness_option,
    client_options,
    goodput_option,
    ignore_eos_option,
    json_option,
    length_scale_option,
    send_limits_option,
    shape_options,
    warm_up_option,
    where_options,
)
from splitserve_bench.simulate.command import NO_SERVER, size_options

if TYPE_CHECKING:
    from splitserve_bench.overload.stages import Stage
    from splitserve_bench.serve.metrics import Limits
    from splitserve_bench.serve.records import Outcome, PlannedRequest
    from splitserve_bench.serve.workloads import Workload
    from splitserve_bench.simulate.fleet import FleetSize

STAGES: Final = "0.8x20,3x60,0.5x45"
# The stages say when requests are sent, and how many.
STAGED: Final[dict[str, Any]] = {
    "request_rate": math.inf, "num_prompts": None, "time_scale": 1.0, "max_concurrency": None,
    "ramp_up_strategy": None, "ramp_up_start_rps": None, "ramp_up_end_rps": None,
}  # fmt: skip
OF_SERVER: Final = (
    *("server", "backend", "host", "port", "endpoint", "model", "api_key", "tls_ca", "tls_cert", "tls_key"),
    *("extra_body", "vocab_size", "ignore_eos", "num_warmups"),
)


@dataclass(frozen=True, slots=True)
class Output:
    """Where the findings go, beside stdout."""

    plot: Path | None
    save_path: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be sent, and what counts."""

    options: ServeOptions
    stages: "Sequence[Stage]"
    limits: "Limits"
    attainment: float
    output: Output


@click.command("overload", cls=ServeCommand)
@where_options
@ignore_eos_option
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Simulate a fleet of the nodes that `splitserve doctor --save FILE` has measured, instead of asking a server.",
)
@size_options
@click.option(
    "--stages",
    default=STAGES,
    show_default=True,
    metavar="TIMESxSECONDS,...",
    help="Multiples of --request-rate, and for how long.",
)
@click.option(
    "--request-rate",
    default=1.0,
    show_default=True,
    type=NumberRange(0, 1e5, min_open=True),
    help="Requests a second that stages are multiples of, such as the knee that `bench compare` has found.",
)
@shape_options
@burstiness_option
@length_scale_option
@client_options
@warm_up_option
@goodput_option
@send_limits_option(default=True)
@click.option(
    "--attainment",
    default=0.9,
    show_default=True,
    type=NumberRange(0, 1, min_open=True),
    help="Share of good requests from which goodput is back.",
)
@click.option("--plot", type=NewFile(), help="Picture of it (PNG).")
@click.option("--save", "save_path", type=NewFile(), help="The JSON object, with every request.")
@json_option
def overload_command(
    stages: str,
    request_rate: float,
    attainment: float,
    profile_path: Path | None,
    plot: Path | None,
    save_path: Path | None,
    as_json: bool,
    prefill: int,
    decode: int,
    both: int,
    roles: str,
    policy: str,
    admission: str,
    kv_lending: str,
    nodes_per_machine: int,
    **flags: Any,
) -> None:
    """Send a server more than it can take for a while, then less: goodput by 5-second window, who was turned away and
    told when to come back, and how long it takes until goodput is back. Needs limits (--goodput)."""
    from splitserve_bench.overload.stages import parse_stages
    from splitserve_bench.serve.metrics import parse_goodput
    from splitserve_bench.simulate.fleet import FleetSize

    if plot is not None:
        require("bench")
    options = ServeOptions(**{**NO_SERVER, **STAGED, **flags})
    limits = parse_goodput(options.goodput)
    if not limits.by_name():
        raise SettingsError("without limits nothing is late: give --goodput, such as ttft:500 tpot:40")
    options.check()
    if profile_path is not None:
        _refuse_server_flags(click.get_current_context())
    size = FleetSize(prefill, decode, both, roles, policy, admission, kv_lending, nodes_per_machine)
    if profile_path is None and size != FleetSize(0, 0):
        raise SettingsError("--prefill, --decode, --both and what their coordinator does are simulated: give --profile")
    asked = Asked(options, parse_stages(stages, request_rate), limits, attainment, Output(plot, save_path, as_json))
    if profile_path is not None:
        _simulate(asked, profile_path, size)
    else:
        run_to_end(_measure(asked))


def _refuse_server_flags(context: click.Context) -> None:
    """Raises SettingsError for a flag that a simulation has no server for; those of the environment may be there."""
    given = [name for name in OF_SERVER if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise SettingsError(f"--{given[0].replace('_', '-')} is for a server, and --profile asks none")


async def _measure(asked: Asked) -> None:
    from splitserve_bench.serve.session import connect

    session = await connect(asked.options)
    workload = _workload(asked, session.max_model_len, session.vocab_size)
    await session.warm_up(workload)
    outcomes = await session.send(_told(asked, workload.planned), lambda outcome: None)
    _show(asked, outcomes, {"model": session.model, "backend": session.target.backend})


def _simulate(asked: Asked, profile_path: Path, size: "FleetSize") -> None:
    from splitserve_bench.simulate.fleet import simulate
    from splitserve_bench.simulate.profile import read_profile

    size.check()
    profile = read_profile(profile_path)
    workload = _workload(asked, profile.node.max_model_len, profile.node.vocab_size)
    outcomes = simulate(
        profile,
        size,
        _told(asked, workload.planned),
        max_concurrency=None,
        request_timeout_s=asked.options.request_timeout_s,
    )
    _show(asked, outcomes, {"model": profile.model, "backend": f"simulated-{size}"})


def _workload(asked: Asked, max_model_len: int | None, vocab_size: int) -> "Workload":
    """Raises SettingsError or BenchError for what cannot be sent."""
    from splitserve_bench.overload.stages import staged_load

    workload = staged_load(asked.stages, asked.options, max_model_len, vocab_size)
    if workload.num_clipped:
        report(f"{workload.num_clipped} of {len(workload.planned)} requests are clipped to what the model takes")
    return workload


def _told(asked: Asked, planned: "Sequence[PlannedRequest]") -> "Sequence[PlannedRequest]":
    """With their limits, unless the server is not to know them."""
    from splitserve_bench.serve.told import told

    return told(planned, lambda each: asked.limits) if asked.options.send_limits else planned


def _show(asked: Asked, outcomes: "Sequence[Outcome]", about: dict[str, str]) -> None:
    """On stdout, and wherever it is asked for. Raises SettingsError for a file that cannot be written."""
    from splitserve_bench.overload.findings import findings_json, findings_of
    from splitserve_bench.overload.overload_report import overload_view
    from splitserve_bench.overload.picture import plot_overload

    findings, output = findings_of(outcomes, asked.stages, asked.limits, asked.attainment), asked.output
    if output.as_json:
        click.echo(json.dumps(findings_json(findings, about)))
    else:
        stdout.print(overload_view(findings))
    try:
        if output.save_path is not None:
            output.save_path.write_text(json.dumps(findings_json(findings, about, detailed=True)), encoding="utf-8")
            report(f"written: {output.save_path}")
        if output.plot is not None:
            plot_overload(findings, output.plot)
            report(f"picture: {output.plot}")
    except OSError as error:
        raise SettingsError(f"{error.filename} cannot be written: {error.strerror}") from error
