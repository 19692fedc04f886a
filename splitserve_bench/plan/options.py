"""The flags of `splitserve plan`; those of a load are named as in `bench serve`."""

import math
from pathlib import Path
from typing import Any, Final

import click

from serving_core.settings import KV_CACHE_DTYPES, QUANTIZATIONS
from splitserve_bench.options import PAIR, ListOf, NewFile, NumberRange, Size, options_of, repeat_flags
from splitserve_bench.plan.asked import MOST_COUNTED, Asked, AskedLoad, AskedNodes
from splitserve_bench.plan.devices import DEVICES, INFINIBAND, LINK_NAMES
from splitserve_bench.serve.serve_options import ABOVE_0, RANDOM, TRACES, check_burstiness, check_dataset

COUNT: Final = click.IntRange(1)
MOST_GPUS: Final = 1024
MOST_TP: Final = 64
SLO: Final = ("--goodput", "--slo")
# Fields that are called like their flags.
NODE_FLAGS: Final = (
    *("table_model", "host_link", "gpus_per_host"),
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "weights_memory_bytes"),
    *("quantization", "kv_cache_dtype"),
)
LOAD_FLAGS: Final = (
    *("dataset_name", "length_scale", "random_input_len", "random_output_len", "random_range_ratio"),
    *("burstiness", "seed"),
)
SEARCH_FLAGS: Final = (
    "candidates",
    "goodput",
    "attainment",
    "tolerance",
    "max_probes",
    "num_prompts",
    "seconds",
    "all_plans",
)


class PlanGroup(click.Group):
    """Takes several pairs after one flag, as vLLM's command does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flags(args, dict.fromkeys(SLO, PAIR)))


def parse_name(text: str) -> str:
    """A hardware's, as presets and tables call it."""
    return text.lower()


def parse_tp(text: str) -> int:
    """Raises ValueError."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_TP):
        raise ValueError(f"{text!r} is no parallel size from 1 to {MOST_TP}")
    return int(text)


def parse_figure(text: str) -> tuple[str, float]:
    """NAME=NUMBER. Raises ValueError."""
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (name and value > 0 and math.isfinite(value)):
        raise ValueError(f"{text!r} is not HARDWARE=NUMBER with a number above 0")
    return name.lower(), value


NAMES: Final = ListOf("NAME,...", parse_name)
FIGURES: Final = ListOf("NAME=NUMBER,...", parse_figure)
PRESETS: Final = ", ".join(DEVICES)

model_option = click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the model's config.json; its weights are not needed.",
)
profile_help = (
    "What steps take: a file of `splitserve doctor --save`, DistServe's JSON, splitwise-sim's perf_model.csv, "
    "or a folder of LLMServingSim's with tpN folders. Without it they are worked out from the hardware's data sheet."
)
table_model_option = click.option("--table-model", default="", help="Which model of the table, where it has several.")
link_option = click.option(
    "--link", type=click.Choice(LINK_NAMES), help="Of devices of a host; by default the hardware's own."
)
memory_option = click.option(
    "--device-memory", default=0, type=Size(), help="Of one device, such as 80GiB; default: the hardware's."
)
node_options = options_of(
    click.option("--max-model-len", default=0, type=click.IntRange(0), help="Tokens of a request; else the model's."),
    click.option(
        "--max-num-batched-tokens",
        default=0,
        type=click.IntRange(0),
        help="Of a node's step; default: a profile's, else that of nodes on such devices.",
    ),
    click.option("--max-num-seqs", default=0, type=click.IntRange(0, 1024), help="Of a node; default: likewise."),
    click.option(
        "--weights-memory-bytes",
        default=0,
        type=Size(),
        help="Most that a device holds of the weights, such as 60GiB, as of `splitserve up`: layers beyond are in host "
        "memory, or on a disk beside a CPU; default: nodes hold all.",
    ),
    click.option(
        "--quantization",
        default="none",
        show_default=True,
        type=click.Choice(QUANTIZATIONS),
        help="Of the weights, as of `splitserve up`.",
    ),
    click.option(
        "--kv-cache-dtype",
        default="auto",
        show_default=True,
        type=click.Choice(KV_CACHE_DTYPES),
        help="Of keys and values, as of `splitserve up`.",
    ),
)
hardware_options = options_of(
    model_option,
    click.option("--profile", type=click.Path(exists=True, path_type=Path), help=profile_help),
    table_model_option,
    click.option("--hardware", type=NAMES, help=f"Of all nodes: {PRESETS}, or as the table calls it."),
    click.option("--prefill-hardware", type=NAMES, help="Of nodes that read; several are all tried."),
    click.option("--decode-hardware", type=NAMES, help="Of nodes that write; several are all tried."),
    link_option,
    click.option(
        "--host-link", default=INFINIBAND, show_default=True, type=click.Choice(LINK_NAMES), help="Between hosts."
    ),
    memory_option,
)
fleet_options = options_of(
    click.option("--gpus", type=click.IntRange(1, MOST_GPUS), help="Devices in all."),
    click.option("--gpus-per-host", default=8, show_default=True, type=click.IntRange(1, MOST_TP)),
    click.option(
        "--cells",
        default=0,
        type=click.IntRange(0),
        help="Equal clusters that share the load, each with a coordinator of its own; default: one for each host.",
    ),
    click.option("--tp", "tp_sizes", default="1,2,4,8", show_default=True, type=ListOf("N,...", parse_tp)),
    click.option(
        "--pp",
        "pp_sizes",
        default="1",
        show_default=True,
        type=ListOf("N,...", parse_tp),
        help="Stages of a node, of each of the sizes of --tp.",
    ),
    node_options,
)
objective_options = options_of(
    click.option("--cost", "objective", flag_value="cost", help="Search for the most requests a dollar."),
    click.option("--power", "objective", flag_value="power", help="Search for the most requests a second a kilowatt."),
    click.option("--price", type=FIGURES, help="Dollars an hour of a device: h100=4.75,a100=2.2 (the defaults)."),
    click.option("--watts", type=FIGURES, help="Of a device: h100=700,a100=400 (the defaults)."),
)
load_options = options_of(
    click.option(
        "--dataset-name", "--dataset", default=RANDOM, show_default=True, type=click.Choice((RANDOM, *TRACES))
    ),
    click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of a trace."),
    click.option("--length-scale", default=1.0, show_default=True, type=ABOVE_0, help="Times a trace's lengths."),
    click.option("--random-input-len", default=1024, show_default=True, type=COUNT),
    click.option("--random-output-len", default=128, show_default=True, type=COUNT),
    click.option("--random-range-ratio", default=0.0, show_default=True, type=NumberRange(0, 1, max_open=True)),
    click.option("--burstiness", default=1.0, show_default=True, type=ABOVE_0, help="1 is Poisson; random only."),
)
search_options = options_of(
    click.option(*SLO, multiple=True, metavar="ttft:MS tpot:MS", help="Limits that a good request meets, in ms."),
    click.option("--attainment", default=0.9, show_default=True, type=NumberRange(0, 1, min_open=True)),
    click.option("--tolerance", default=0.03, show_default=True, type=ABOVE_0, help="Of the goodput."),
    click.option("--candidates", default=20, show_default=True, type=COUNT, help="Most plans that are simulated."),
    click.option("--all", "all_plans", is_flag=True, help="Find every plan's knee, not only those of the best two."),
    click.option("--max-probes", default=12, show_default=True, type=COUNT, help="Of a plan, beyond quick ones."),
    click.option(
        "--num-prompts",
        default=200,
        show_default=True,
        type=click.IntRange(1, MOST_COUNTED),
        help="Requests that count, at least.",
    ),
    click.option(
        "--seconds",
        default=2.0,
        show_default=True,
        type=ABOVE_0,
        help=f"For which they come, at least, but for more than {MOST_COUNTED} requests.",
    ),
    click.option("--seed", default=0, show_default=True, type=click.IntRange(0)),
    click.option("--jobs", default=0, type=click.IntRange(0, 256), help="Processes; default: one for each CPU."),
)
output_options = options_of(
    click.option("--plot", type=NewFile(), help="Picture of the knees (PNG)."),
    click.option("--save", "save_path", type=NewFile(), help="The JSON object."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables."),
)


def asked_of(flags: dict[str, Any]) -> Asked:
    """From the flags by their names. Raises click.UsageError and SettingsError for those that contradict each other."""
    gpus, per_host = flags["gpus"], flags["gpus_per_host"]
    if gpus is None:
        raise click.UsageError("--gpus N is needed: how many devices there are")
    cells = flags["cells"] or (gpus // per_host if gpus % per_host == 0 else 1)
    if gpus % cells:
        raise click.UsageError(f"--cells {cells}: {gpus} devices cannot be divided evenly into so many")
    check_dataset(flags["dataset_name"], flags["dataset_path"], flags["length_scale"])
    check_burstiness(flags["dataset_name"], flags["burstiness"])
    return Asked(
        nodes=asked_nodes_of(flags),
        load=AskedLoad(dataset_path=_text(flags["dataset_path"]), **{name: flags[name] for name in LOAD_FLAGS}),
        cells=cells,
        objective=flags["objective"] or "device",
        **{name: flags[name] for name in ("gpus", *SEARCH_FLAGS)},
    )


def asked_nodes_of(flags: dict[str, Any]) -> AskedNodes:
    """From the flags of nodes by their names."""
    own = flags["hardware"] or ()
    readers, writers = (tuple(flags[f"{role}_hardware"] or own) for role in ("prefill", "decode"))
    return AskedNodes(
        model=_text(flags["model"]),
        profile=_text(flags["profile"]),
        prefill_hardware=readers,
        decode_hardware=writers,
        both_hardware=tuple(dict.fromkeys((*own, *readers, *writers))),
        link=flags["link"] or "",
        tp_sizes=tuple(sorted(flags["tp_sizes"])),
        pp_sizes=tuple(sorted(flags.get("pp_sizes", (1,)))),
        device_memory_bytes=flags["device_memory"],
        dollars_per_h=flags["price"] or (),
        watts=flags["watts"] or (),
        **{name: flags[name] for name in NODE_FLAGS},
    )


def _text(path: Path | None) -> str:
    return str(path.absolute()) if path is not None else ""
