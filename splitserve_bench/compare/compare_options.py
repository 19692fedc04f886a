"""The flags of `splitserve bench compare`; those of a load are named as in `bench serve`."""

import math
from pathlib import Path
from typing import Any, ClassVar, Final

import click

from serving_core.errors import SettingsError
from splitserve_bench.compare.contenders import KINDS, parse_split
from splitserve_bench.options import PAIR, ListOf, NumberRange, RepeatingCommand, options_of
from splitserve_bench.serve.serve_options import DATASETS, RANDOM, prompt_options, send_limits_option

POSITIVE: Final = NumberRange(min=0, min_open=True)
NOT_NEGATIVE: Final = NumberRange(min=0)
COUNT: Final = click.IntRange(1)
LOWEST_RATE, HIGHEST_RATE = 1e-4, 1e5


def parse_rate(text: str) -> float:
    """Requests per second. Raises ValueError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ValueError(f"{text!r} is not a rate from {LOWEST_RATE:g} to {HIGHEST_RATE:g} requests/s")
    return rate


def parse_kind(text: str) -> str:
    """A kind of contender. Raises ValueError."""
    if text not in KINDS:
        raise ValueError(f"{text!r} is none of {', '.join(KINDS)}")
    return text


def parse_engine_flag(text: str, option: str = "--engine-flag") -> tuple[str, Any]:
    """NAME=VALUE of a flag of `splitserve up`, its value as that flag takes it. Raises SettingsError."""
    from splitserve.commands.serve import up
    from splitserve_bench.compare.arena import OWN_FLAGS

    name, separator, value = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    flags = {parameter.name: parameter for parameter in up.params if parameter.name not in OWN_FLAGS}
    if not separator or name not in flags:
        raise SettingsError(f"{option} {text}: not NAME=VALUE with a flag of `splitserve up` that may be set here")
    try:
        return name, flags[name].type.convert(value, None, None)
    except click.BadParameter as error:
        raise SettingsError(f"{option} {text}: {error.message}") from error


class CompareCommand(RepeatingCommand):
    """Takes several pairs after one flag. Each --slo-scale has scales of its own."""

    lists: ClassVar = {"--goodput": PAIR, "--slo-scale": PAIR}
    joined: ClassVar = frozenset({"--slo-scale"})


contender_options = options_of(
    click.option("--cores", default=0, type=click.IntRange(0), help="CPUs for each contender's nodes; 0 takes all."),
    click.option(
        "--splits", type=ListOf("1P+1D,...", parse_split), help="Prefill and decode nodes; by default all splits."
    ),
    click.option(
        "--kinds",
        default=",".join(KINDS),
        show_default=True,
        type=ListOf("KIND,...", parse_kind),
        help="Which contenders take part.",
    ),
    click.option(
        "--peer",
        "peers",
        multiple=True,
        metavar="NAME=URL",
        help="A server with OpenAI's completions API that runs already; give it again for more.",
    ),
    click.option(
        "--engine-flag",
        "engine_flags",
        multiple=True,
        metavar="NAME=VALUE",
        help="A flag of `splitserve up` for all clusters; give it again for more.",
    ),
    click.option(
        "--contender",
        "customs",
        multiple=True,
        metavar="'NAME=NODES FLAG=VALUE ...'",
        help="One more cluster with flags of `splitserve up`, such as 'sum=1P+1B policy=sum'; give it again for more.",
    ),
)

load_options = options_of(
    click.option("--dataset-name", default=RANDOM, show_default=True, type=click.Choice(DATASETS)),
    click.option(
        "--dataset-path", default="", help="As of `bench serve`; a trace's time axis is stretched to each rate."
    ),
    click.option("--length-scale", default=1.0, show_default=True, type=POSITIVE, help="Factor on a trace's lengths."),
    click.option("--random-input-len", default=256, show_default=True, type=COUNT),
    click.option("--random-output-len", default=32, show_default=True, type=COUNT),
    click.option("--random-range-ratio", default=0.0, show_default=True, type=NumberRange(0, 1, max_open=True)),
    prompt_options,
    click.option("--burstiness", default=1.0, show_default=True, type=POSITIVE, help="1 is Poisson; not of a trace."),
    click.option("--num-prompts", default=100, show_default=True, type=COUNT, help="Requests of a probe, at least."),
    click.option(
        "--seconds",
        default=20.0,
        show_default=True,
        type=NOT_NEGATIVE,
        help="Length of a probe, at least, but for a trace that is shorter, and for more than 5000 requests.",
    ),
    click.option("--request-timeout-s", default=120.0, show_default=True, type=POSITIVE),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Of prompts, lengths and arrivals; take another one when a peer keeps the KV of an earlier comparison.",
    ),
)

goal_options = options_of(
    click.option(
        "--goodput",
        multiple=True,
        metavar="ttft:MS tpot:MS",
        help="Limits that a good request meets, in ms: ttft, tpot, e2el.",
    ),
    click.option(
        "--slo-scale",
        multiple=True,
        metavar="ttft:X tpot:X",
        help="Limits as multiples of what the request takes alone on the colocated cluster of all cores; give it again "
        "for others.",
    ),
    send_limits_option(default=True),
    click.option(
        "--own-unloaded",
        is_flag=True,
        help="With --at-rates: judge the same answers by multiples of what each contender takes alone itself, too.",
    ),
    click.option(
        "--attainment",
        default=0.9,
        show_default=True,
        type=NumberRange(0, 1, min_open=True, max_open=True),
        help="Share of the offered requests that must be good.",
    ),
    click.option("--tolerance", default=0.1, show_default=True, type=POSITIVE, help="How closely a rate is found."),
    click.option("--max-probes", default=12, show_default=True, type=COUNT, help="Of each contender."),
    click.option("--first-rate", type=NumberRange(LOWEST_RATE, HIGHEST_RATE), help="Where all searches begin."),
    click.option("--at-rates", type=ListOf("R,R,...", parse_rate), help="No search: these rates for all contenders."),
)

output_options = options_of(
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Of `doctor --save`: simulate the loads of clusters with such nodes, too, and show how close that comes; "
        "give it again for nodes of another size.",
    ),
    click.option(
        "--save-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for every probe as soon as it is over, logs, and pictures. What is there already, by the same "
        "arguments and code, is not measured again.",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables."),
)
