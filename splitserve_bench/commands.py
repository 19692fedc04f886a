"""`splitserve bench`. What a command measures with is imported when it runs, so that help is quick."""

import dataclasses
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import click

from serving_core.extras import needs
from serving_core.layout import QUANTIZED_DTYPES
from serving_core.settings import DEVICES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from splitserve.commands.plan_transfer import layout_of
from splitserve.commands.terminal import report, stdout
from splitserve.signals import run_to_end
from splitserve_bench.compare.command import compare_command
from splitserve_bench.device.device_command import device_command
from splitserve_bench.dominance.command import dominance_command
from splitserve_bench.engine.command import engine_command
from splitserve_bench.engine.prompts_command import prompts_command
from splitserve_bench.models import writing_model
from splitserve_bench.options import ListOf
from splitserve_bench.serve.command import serve_command
from splitserve_bench.simulate.reality_command import reality_command
from splitserve_bench.speculation.command import speculation_command

TRANSPORTS: Final = ("zmq-shm", "zmq-ipc", "zmq-tcp", "zmq-curve", "torch_dist-gloo", "loopback")
ON_DEVICES: Final = ("torch_dist-nccl", "torch_dist-ipc")  # between two CUDA devices, and on one
PROMPT_TOKENS: Final = (16, 128, 512, 2048, 8192)
OVERLAP_PROMPT_TOKENS: Final = (16, 32, 64, 128, 256, 512, 1024)
CONTEXT_TOKENS: Final = (128, 512, 2048)
LONGEST_SENTENCE: Final = 400  # characters

Command = Callable[..., None]


class Overview(click.Group):
    """A group whose help has the first sentence of each command whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            lines = [(name, self.commands[name].get_short_help_str(LONGEST_SENTENCE)) for name in sorted(self.commands)]
            formatter.write_dl(lines)


@click.group(cls=Overview)
def bench() -> None:
    """Measure the engine, a cluster, or any server."""


bench.add_command(engine_command)
bench.add_command(device_command)
bench.add_command(prompts_command)
bench.add_command(serve_command)
bench.add_command(compare_command)
bench.add_command(dominance_command)
bench.add_command(reality_command)
bench.add_command(speculation_command)


def parse_division(text: str) -> tuple[int, int]:
    """Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is not of the form STAGESxRANKS, such as 2x1")
    return int(found[1]), int(found[2])


DIVISIONS: Final = ListOf("STAGESxRANKS,...", parse_division)


def as_json_option(command: Command) -> Command:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")(command)


def prompt_tokens_option(default: Sequence[int]) -> Callable[[Command], Command]:
    """--prompt-tokens, several times."""
    return click.option(
        "--prompt-tokens",
        default=default,
        show_default=True,
        multiple=True,
        type=click.IntRange(1),
        help="Length of the prompts; give it again for more.",
    )


def count_option(name: str, default: int, text: str, *, minimum: int = 1) -> Callable[[Command], Command]:
    """A whole number."""
    return click.option(name, default=default, show_default=True, type=click.IntRange(minimum), help=text)


@bench.command()
@click.argument("model", default="")
@count_option("--streams", 8, "Answers at the same time.", minimum=2)
@count_option("--prompt-tokens", 512, "Length of the prompts.")
@count_option("--output-tokens", 192, "Length of the answers.", minimum=8)
@count_option("--repeats", 10, "Answers one after the other.")
@as_json_option
@needs("node")
def cluster(model: str, streams: int, prompt_tokens: int, output_tokens: int, repeats: int, as_json: bool) -> None:
    """Start one prefill and one decode node for MODEL; measure start, memory, handoff and streaming."""
    from splitserve_bench.clusters.cluster import ClusterBench, measure_cluster
    from splitserve_bench.report import cluster_table

    sizes = ClusterBench(streams, prompt_tokens, output_tokens, repeats)
    measured = measure_cluster(writing_model(model, report), sizes, report)
    _run(measured, dataclasses.asdict, lambda figures: cluster_table(figures, sizes), as_json)


@bench.command()
@click.argument("model", default="")
@click.option(
    "--transport",
    "transports",
    default=TRANSPORTS,
    show_default=True,
    multiple=True,
    type=click.Choice((*TRANSPORTS, *ON_DEVICES)),
    help="What moves the blocks; give it again for more.",
)
@prompt_tokens_option(PROMPT_TOKENS)
@click.option(
    "--block-size",
    "block_sizes",
    default=(EngineSettings().block_size,),
    show_default=True,
    multiple=True,
    type=click.IntRange(1, 1024),
    help="Tokens in one block; give it again for more.",
)
@click.option("--kv-cache-dtype", default="auto", show_default=True, type=click.Choice(KV_CACHE_DTYPES))
@click.option("--scattered", is_flag=True, help="Blocks of a prompt lie anywhere in the pool, not side by side.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(DEVICES[1:]), help="Where the pools are.")
@count_option("--repeats", 9, "Transfers of each kind.")
@as_json_option
@needs("node")
def transfer(
    model: str,
    transports: tuple[str, ...],
    prompt_tokens: tuple[int, ...],
    block_sizes: tuple[int, ...],
    kv_cache_dtype: str,
    scattered: bool,
    device: str,
    repeats: int,
    as_json: bool,
) -> None:
    """Move the KV of prompts of MODEL between two processes, over each transport, beside plain copies and sockets."""
    from splitserve_bench.corridor.transfer import TransferBench, TransferReport, measure_transfer
    from splitserve_bench.report import transfer_views

    layouts = [layout_of(model, block_size, kv_cache_dtype) for block_size in dict.fromkeys(block_sizes)]
    lengths = tuple(dict.fromkeys(prompt_tokens))
    sizes = TransferBench(tuple(dict.fromkeys(transports)), lengths, repeats, scattered, device)

    async def measure() -> list[TransferReport]:
        return [await measure_transfer(layout, sizes, report) for layout in layouts]

    def to_json(reports: list[TransferReport]) -> list[dict[str, Any]]:
        return [{**dataclasses.asdict(each), "layout": each.layout.uniform_fields()} for each in reports]

    _run(measure(), to_json, transfer_views, as_json)


@bench.command()
@click.argument("model", default="")
@count_option("--conversations", 8, "Chats of two turns.")
@count_option("--turn-tokens", 300, "New text in each turn.")
@count_option("--requests", 16, "Requests with a shared beginning.")
@count_option("--shared-tokens", 1000, "Length of the shared beginning.")
@count_option("--own-tokens", 60, "What follows it in each request.")
@count_option("--output-tokens", 48, "Length of the answers.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES), help="Compute dtype.")
@as_json_option
@needs("node")
def reuse(model: str, dtype: str, as_json: bool, **counts: int) -> None:
    """Ask clusters of MODEL with and without prefix caching the same; show what it saves."""
    from splitserve_bench.clusters.reuse import ReuseBench, measure_reuse
    from splitserve_bench.report import reuse_table

    sizes = ReuseBench(
        num_conversations=counts["conversations"],
        turn_tokens=counts["turn_tokens"],
        num_requests=counts["requests"],
        shared_tokens=counts["shared_tokens"],
        own_tokens=counts["own_tokens"],
        output_tokens=counts["output_tokens"],
        dtype=dtype,
    )
    _run(measure_reuse(writing_model(model, report), sizes, report), _records, reuse_table, as_json)


@bench.command()
@click.argument("model", default="")
@click.option(
    "--divisions",
    default="1x1,2x1,1x2",
    show_default=True,
    type=DIVISIONS,
    help="Stages, and ranks of each of them.",
)
@count_option("--prompt-tokens", 512, "Length of the prompts.")
@count_option("--prompts", 4, "Prompts, and answers, at once.", minimum=2)
@count_option("--output-tokens", 32, "Length of the answers.", minimum=8)
@count_option("--repeats", 5, "Prompts one after the other, and how often several are asked at once.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES), help="Compute dtype.")
@as_json_option
@needs("node")
def ranks(model: str, divisions: tuple[tuple[int, int], ...], dtype: str, as_json: bool, **counts: int) -> None:
    """Divide MODEL by layers and within layers, over ranks on the same CPUs: times, and what each rank holds."""
    from splitserve_bench.clusters.ranks import Division, RanksBench, measure_ranks
    from splitserve_bench.report import ranks_table

    sizes = RanksBench(counts["prompt_tokens"], counts["prompts"], counts["output_tokens"], counts["repeats"], dtype)
    ways = [Division(*each) for each in divisions]
    _run(measure_ranks(writing_model(model, report), ways, sizes, report), _records, ranks_table, as_json)


@bench.command("kv-tiers")
@click.argument("model", default="")
@count_option("--chats", 8, "Chats with the same system prompt.", minimum=2)
@count_option("--turns", 4, "Turns of each.", minimum=2)
@count_option("--system-tokens", 256, "Length of the system prompt.")
@count_option("--turn-tokens", 128, "New text in each turn.")
@count_option("--output-tokens", 16, "Length of the answers.")
@count_option("--pool-blocks", 64, "KV blocks in each pool, too few for all chats.")
@count_option("--tier-bytes", 2**30, "Size of the second tier.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES), help="Compute dtype.")
@as_json_option
@needs("node")
def kv_tiers(model: str, dtype: str, as_json: bool, **counts: int) -> None:
    """Ask clusters of MODEL with small pools the same: without a second tier, with one in memory and in a file."""
    from splitserve_bench.clusters.tiers import TiersBench, measure_tiers
    from splitserve_bench.report import tiers_table

    sizes = TiersBench(
        num_chats=counts["chats"],
        num_turns=counts["turns"],
        system_tokens=counts["system_tokens"],
        turn_tokens=counts["turn_tokens"],
        output_tokens=counts["output_tokens"],
        pool_blocks=counts["pool_blocks"],
        tier_bytes=counts["tier_bytes"],
        dtype=dtype,
    )
    _run(measure_tiers(writing_model(model, report), sizes, report), _records, tiers_table, as_json)


@bench.command()
@click.argument("model", default="")
@prompt_tokens_option(OVERLAP_PROMPT_TOKENS)
@count_option("--repeats", 9, "Prompts of each length.")
@as_json_option
@needs("node")
def overlap(model: str, prompt_tokens: tuple[int, ...], repeats: int, as_json: bool) -> None:
    """Find the prompt length of MODEL from which it pays to send KV blocks while the prompt is computed."""
    from splitserve_bench.clusters.overlap import measure_overlap, pays_from
    from splitserve_bench.report import overlap_view

    measured = measure_overlap(writing_model(model, report), sorted(set(prompt_tokens)), repeats, report)
    _run(
        measured,
        lambda figures: {"pays_from_tokens": pays_from(figures), "lengths": _records(figures)},
        overlap_view,
        as_json,
    )


@bench.command("kv-cache")
@click.argument("model", default="")
@click.option(
    "--kv-cache-dtype",
    "dtypes",
    default=QUANTIZED_DTYPES,
    show_default=True,
    multiple=True,
    type=click.Choice(QUANTIZED_DTYPES),
    help="What to compare with the model's own dtype; give it again for more.",
)
@click.option(
    "--context-tokens",
    "contexts",
    default=CONTEXT_TOKENS,
    show_default=True,
    multiple=True,
    type=click.IntRange(1),
    help="Length of the prompts; give it again for more.",
)
@as_json_option
@needs("node")
def kv_cache(model: str, dtypes: tuple[str, ...], contexts: tuple[int, ...], as_json: bool) -> None:
    """Compare answers of MODEL with an 8-bit KV cache to those with its own dtype."""
    from splitserve_bench.accuracy.kv_cache import measure_accuracy
    from splitserve_bench.report import accuracy_table

    folder = writing_model(model, report).folder
    figures = measure_accuracy(folder, list(dict.fromkeys(dtypes)), sorted(set(contexts)), report)
    _show(figures, _records, accuracy_table, as_json)


@bench.command()
@click.argument("model", default="")
@as_json_option
@needs("node")
def weights(model: str, as_json: bool) -> None:
    """Compare MODEL with quantized weights to MODEL as it is: perplexity, likeliest tokens, answers, memory."""
    from splitserve_bench.accuracy.weights_accuracy import measure_weights_accuracy
    from splitserve_bench.report import weights_table

    folder = writing_model(model, report).folder
    figures = measure_weights_accuracy(folder, QUANTIZATIONS[1:], report)
    _show(figures, _records, weights_table, as_json)


def _records(figures: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in figures]


def _run(
    work: Coroutine[Any, Any, Any], to_json: Callable[[Any], Any], to_view: Callable[[Any], Any], as_json: bool
) -> None:
    """Measures, and shows the figures. A signal stops it."""

    async def main() -> None:
        _show(await work, to_json, to_view, as_json)

    run_to_end(main())


def _show(figures: Any, to_json: Callable[[Any], Any], to_view: Callable[[Any], Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(to_json(figures)))
    else:
        stdout.print(to_view(figures))
