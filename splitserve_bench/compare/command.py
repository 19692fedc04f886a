"""Define the command `splitserve bench compare`.

What it measures with is imported when it runs, so that help is quick.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import click

from serving_core.errors import SettingsError
from serving_core.process.cpus import allowed_cpus
from serving_core.process.extras import needs, require
from splitserve.commands.terminal import report
from splitserve.signals import run_to_end
from splitserve_bench.compare.contenders import (
    KINDS,
    ClusterContender,
    contenders,
    parse_custom,
    parse_peer,
    parse_split,
)
from splitserve_bench.models import writing_model
from splitserve_bench.options import PAIR, ListOf, NumberRange, RepeatingCommand, json_option, option, options_of
from splitserve_bench.serve.command import (
    ABOVE_0,
    FILE,
    LENGTH,
    NEW_FOLDER,
    check_burstiness,
    client_options,
    dataset_of,
    named,
    send_limits_option,
    shape_options,
)

if TYPE_CHECKING:
    from splitserve_bench.compare.run import CompareBench

LOWEST_RATE, HIGHEST_RATE = 1e-4, 1e5
# Flags of a cluster that a contender sets, that the comparison needs for itself, or that are secrets.
OWN_FLAGS: Final = frozenset(
    {"model", "prefill", "decode", "mixed", "host", "grpc_port", "http_host", "http_port", "log_dir", "config"}
    | {"api_key", "api_key_file", "fleet_secret", "trusted_network"}
    | {"tls_cert", "tls_key", "tls_ca", "tls_verify_clients"}
)


def parse_rate(text: str) -> float:
    """Return the requests per second that a text means. Raises ValueError outside LOWEST_RATE to HIGHEST_RATE."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ValueError(f"{text!r} is not a rate from {LOWEST_RATE:g} to {HIGHEST_RATE:g} requests/s")
    return rate


def parse_kind(text: str) -> str:
    """Return the text. Raises ValueError unless it is a kind of contender."""
    if text not in KINDS:
        raise ValueError(f"{text!r} is none of {', '.join(KINDS)}")
    return text


def parse_engine_flag(text: str, given_by: str = "--engine-flag") -> tuple[str, Any]:
    """Return name and value of a flag of `splitserve up` from NAME=VALUE, with the value as that flag takes it.

    Raises SettingsError, which names the flag `given_by`, for an unknown flag, one that the comparison sets itself, and
    a value that the flag refuses.
    """
    from splitserve.commands.serve import up

    name, separator, value = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    flags = {parameter.name: parameter for parameter in up.params if parameter.name not in OWN_FLAGS}
    if not separator or name not in flags:
        raise SettingsError(f"{given_by} {text}: not NAME=VALUE with a flag of `splitserve up` that may be set here")
    try:
        return name, flags[name].type.convert(value, None, None)
    except click.BadParameter as error:
        raise SettingsError(f"{given_by} {text}: {error.message}") from error


class CompareCommand(RepeatingCommand):
    """The command, whose --goodput and --slo-scale take several pairs. Each --slo-scale is an objective of its own."""

    lists: ClassVar = {"--goodput": PAIR, "--slo-scale": PAIR}
    joined: ClassVar = frozenset({"--slo-scale"})


contender_options = options_of(
    option(
        "--cores", default=0, type=click.IntRange(0), help="Give each contender's nodes this many CPUs; 0 takes all."
    ),
    option(
        "--splits",
        type=ListOf("1P+1D,...", parse_split),
        help="Compare these splits into prefill and decode nodes; default: all.",
    ),
    option(
        "--kinds",
        default=",".join(KINDS),
        type=ListOf("KIND,...", parse_kind),
        help="Compare contenders of these kinds.",
    ),
    option(
        "--peer",
        "peers",
        multiple=True,
        metavar="NAME=URL",
        help="Compare with this running server of OpenAI's completions API: NAME=URL; give it again for more.",
    ),
    option(
        "--engine-flag",
        "engine_flags",
        multiple=True,
        metavar="NAME=VALUE",
        help="Start all clusters with this flag of `splitserve up`; give it again for more.",
    ),
    option(
        "--contender",
        "customs",
        multiple=True,
        metavar="'NAME=NODES FLAG=VALUE ...'",
        help="Compare one more cluster with flags of `splitserve up`, such as 'sum=1P+1B policy=sum'; "
        "give it again for more.",
    ),
)
load_options = options_of(
    shape_options(256, 32),
    option("--num-prompts", default=100, type=LENGTH, help="Send at least this many requests in a probe."),
    option(
        "--seconds",
        default=20.0,
        type=NumberRange(min=0),
        help="Let a probe last for at least this many seconds, but for a trace that is shorter, and for "
        "more than 5000 requests.",
    ),
    client_options(120.0),
)
goal_options = options_of(
    option(
        "--goodput",
        multiple=True,
        metavar="ttft:MS tpot:MS",
        help="Judge requests by these limits in ms: ttft, tpot, e2el.",
    ),
    option(
        "--slo-scale",
        multiple=True,
        metavar="ttft:X tpot:X",
        help="Judge requests by these multiples of what they take alone on the colocated cluster of all "
        "cores; give it again for others.",
    ),
    send_limits_option(default=True),
    option(
        "--own-unloaded",
        is_flag=True,
        help="With --at-rates: judge the same requests by multiples of what each contender takes alone itself, too.",
    ),
    option(
        "--attainment",
        default=0.9,
        type=NumberRange(0, 1, min_open=True, max_open=True),
        help="Ask for this share of good requests among those offered.",
    ),
    option("--tolerance", default=0.1, type=ABOVE_0, help="Find a rate to this share of it."),
    option("--max-probes", default=12, type=LENGTH, help="Probe each contender at most this many times."),
    option("--first-rate", type=NumberRange(LOWEST_RATE, HIGHEST_RATE), help="Begin all searches at this rate."),
    option("--at-rates", type=ListOf("R,R,...", parse_rate), help="Do not search: send these rates to all contenders."),
)
output_options = options_of(
    option(
        "--profile",
        "profiles",
        multiple=True,
        type=FILE,
        help="Simulate the loads of clusters too, with nodes of this profile of `doctor --save`, and "
        "show how close that comes; give it again for nodes of another size.",
    ),
    option(
        "--save-dir",
        type=NEW_FOLDER,
        help="Write every probe as soon as it is over, logs, and pictures to this folder. What is there "
        "already, by the same arguments and code, is not measured again.",
    ),
    json_option,
)


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
    from splitserve_bench.compare.run import CompareOptions, compare_contenders

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
    dataset = dataset_of(values)
    dataset.check()
    check_burstiness(dataset.name, dataset.burstiness)
    bench, local = _bench(values), writing_model(model, report)
    options = CompareOptions(local, cores, flags, chosen, everyone[0], dataset, bench, profiles, save_dir, as_json)
    run_to_end(compare_contenders(options))


def cores_of(number: int) -> list[int]:
    """Return the numbers of the first `number` CPUs that this process may use; of all for 0.

    Raises SettingsError when there are fewer.
    """
    allowed = allowed_cpus() or list(range(number or os.cpu_count() or 1))
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
    criteria = (parse_goodput(values["goodput"]),) if values["goodput"] else scales or (DEFAULT_SCALES,)
    return CompareBench(criteria=criteria, **{**named(CompareBench, values), "at_rates": values["at_rates"] or ()})


def _parse_contender(text: str) -> ClusterContender:
    return parse_custom(text, lambda flag: parse_engine_flag(flag, "--contender"))


def _parsed(flag: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise SettingsError(f"{flag} {error}") from error
