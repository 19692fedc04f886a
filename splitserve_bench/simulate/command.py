"""Define the command `splitserve simulate`. What it simulates with is imported when it runs, so that help is quick."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click

from coordinator.settings import CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.flags import fields_of
from splitserve.commands.terminal import report
from splitserve_bench.options import ListOf, option, options_of
from splitserve_bench.serve.command import (
    CAPACITY_CONCURRENCY,
    ServeCommand,
    ServeOptions,
    dataset_options,
    obey_retry_after_option,
    pace_options,
    result_options,
    send_limits_option,
    stages_options,
    tokenizer_option,
)

if TYPE_CHECKING:
    from splitserve_bench.simulate.fleet import FleetSize
    from splitserve_bench.simulate.profile import Profile

CLOCK_START: Final = datetime(1970, 1, 1, tzinfo=UTC)  # of every simulation, so that equal ones have equal results
MOST_OF_A_ROLE: Final = 1024
# Of a load that goes to no server, and of which nothing is written.
NO_SERVER: Final[dict[str, Any]] = {
    "server": None, "host": None, "port": None, "endpoint": "", "model": "", "api_key": None, "extra_body": "{}",
    "tls_ca": "", "tls_cert": "", "tls_key": "",
    "vocab_size": None, "ignore_eos": True, "num_warmups": 0,
}  # fmt: skip


def parse_rate(text: str) -> float:
    """Return the requests a second that a text means; it may be inf.

    Raises ValueError unless it is a number above 0.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"{text!r} is not a number above 0, nor inf")
    return rate


def node_count(role: str, text: str) -> Any:
    """Return the option that says how many nodes there are of a role; `text` is its help."""
    return option(f"--{role}", default=0, type=click.IntRange(0, MOST_OF_A_ROLE), help=text)


def coordinator_option(name: str) -> Any:
    """Return an option with the default, choices and help of the coordinator's flag of this name."""
    (field,) = (field for field, _ in fields_of(CoordinatorSettings) if field.name == name)
    choices = click.Choice(field.metadata["choices"])
    flag = f"--{name.replace('_', '-')}"
    return option(flag, default=field.default, type=choices, help=field.metadata["help"])


def simulated_options(backend: str, request_rate: float, **flags: Any) -> ServeOptions:
    """Return the options of a load at one rate that goes to no server: flags not given have NO_SERVER's values.

    Without --goodput no limits are sent. `backend` names the fleet in results.
    """
    given = {**NO_SERVER, **flags, "send_limits": flags["send_limits"] and bool(flags["goodput"])}
    return ServeOptions(backend=backend, request_rate=request_rate, **given)


profile_option = option(
    "--profile",
    "profile_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the seconds that a node takes from this profile, which `splitserve doctor --save FILE` has written.",
)
tokenizer_of_texts = tokenizer_option(
    "Count the tokens of sharegpt's and custom's texts by the tokenizer of this model folder."
)
rates_option = option(
    "--request-rate",
    "request_rates",
    default="inf",
    type=ListOf("R,R,...", parse_rate),
    help="Send this many requests a second, a load for each rate; inf sends all at once, and a trace at its own times.",
)
fleet_options = options_of(
    node_count("prefill", "Simulate this many prefill nodes."),
    node_count("decode", "Simulate this many decode nodes."),
    node_count("mixed", "Simulate this many mixed nodes."),
    *map(coordinator_option, ("roles", "policy", "admission", "remote_prefix_fetch")),
    option(
        "--nodes-per-machine",
        default=2,
        type=click.IntRange(1),
        help="Put this many nodes on each machine, in the order prefill, decode, mixed: where the "
        "profile says so, a node is faster while its neighbours rest.",
    ),
    send_limits_option(default=True),
)


@click.command("simulate", cls=ServeCommand)
@profile_option
@fleet_options
@dataset_options
@tokenizer_of_texts
@rates_option
@pace_options
@stages_options
@obey_retry_after_option
@result_options
def simulate_command(
    profile_path: Path,
    prefill: int,
    decode: int,
    mixed: int,
    roles: str,
    policy: str,
    admission: str,
    remote_prefix_fetch: str,
    nodes_per_machine: int,
    request_rates: tuple[float, ...],
    **flags: Any,
) -> None:
    """Send a load to a simulated fleet: the real decisions of coordinator and nodes, with steps, transfers and messages
    that take what they took where the profile was measured. Prints what `bench serve` prints; with --json, one object a
    line for each rate. The same arguments give the same output."""
    from splitserve_bench.simulate.fleet import FleetSize
    from splitserve_bench.simulate.profile import read_profile

    size = FleetSize(prefill, decode, mixed, roles, policy, admission, remote_prefix_fetch, nodes_per_machine)
    size.check()
    if len(request_rates) > 1 and (flags["result_filename"] or flags["plots"]):
        raise SettingsError("--result-filename and --plots are of one load: give one --request-rate with them")
    profile = read_profile(profile_path)
    for rate in request_rates:
        _simulate(profile, size, simulated_options(f"simulated-{size}", rate, **flags))


def _simulate(profile: "Profile", size: "FleetSize", options: ServeOptions) -> None:
    """Simulate one load, and print and save its figures."""
    from splitserve_bench.serve.metrics import parse_goodput, with_limits
    from splitserve_bench.serve.records import load_digest
    from splitserve_bench.serve.report import Reporting
    from splitserve_bench.serve.workload import workload_of
    from splitserve_bench.simulate.fleet import simulate

    options.check()
    options.check_pace()
    reporting = Reporting(options)
    if options.wants_capacity:
        options = replace(options, request_rate=_capacity_per_s(profile, size, options))
    workload = workload_of(options, profile.node.max_model_len, profile.node.vocab_size)
    limits = parse_goodput(options.goodput)
    planned = with_limits(workload.planned, lambda each: limits) if options.send_limits else workload.planned
    sending = options.max_concurrency, options.request_timeout_s, workload.stages, options.seed
    conditions = (profile, size, limits, *sending, options.attainment, options.obey_retry_after)
    digest = load_digest(conditions, planned)
    run = replace(reporting.begin(profile.model, workload, options.request_rate), started_at=CLOCK_START, digest=digest)
    began_s = perf_counter()
    found = simulate(
        profile,
        size,
        planned,
        max_concurrency=options.max_concurrency,
        request_timeout_s=options.request_timeout_s,
        obey_retry_after=options.obey_retry_after,
        seed=options.seed,
    )
    seconds, num_tokens = perf_counter() - began_s, sum(outcome.num_output_tokens for outcome in found.outcomes)
    report(f"{num_tokens} output tokens simulated in {seconds:.1f} s, {num_tokens / seconds:.0f} a second")
    reporting.show(found.outcomes, replace(run, tier=found.tier))


def _capacity_per_s(profile: "Profile", size: "FleetSize", options: ServeOptions) -> float:
    """Simulate the requests that measure a capacity in a closed loop; report and return it in requests a second."""
    from splitserve_bench.serve.report import capacity_line
    from splitserve_bench.serve.workload import capacity_load, capacity_per_s
    from splitserve_bench.simulate.fleet import simulate

    planned = capacity_load(options, profile.node.max_model_len, profile.node.vocab_size).planned
    found = simulate(
        profile, size, planned, max_concurrency=CAPACITY_CONCURRENCY, request_timeout_s=options.request_timeout_s
    )
    rate = capacity_per_s(found.outcomes)
    report(capacity_line(rate))
    return rate
