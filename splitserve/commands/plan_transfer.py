"""Define `splitserve plan-transfer`: the KV heads that each prefill rank sends to each decode rank, and their size."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from rich.markup import escape

from kv_transfer.descriptor import MAX_TP
from kv_transfer.plan import ANY_LAYER, Grid, Holding, describe, holdings, plan_nodes
from serving_core.layout import KVLayout
from serving_core.model_files.config import read_model_config
from serving_core.settings import KV_CACHE_DTYPES, EngineSettings
from serving_core.sharding import check_num_ranks
from serving_core.units import size_of
from splitserve.commands.terminal import report, stdout
from splitserve.launch.models import resolve

MOST_DRAWN_HEADS: Final = 64  # more do not fit on a terminal
HELD, NOT_HELD = "■", "·"


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """One rank of a node, and the KV heads and layers that it holds.

    Layers and bytes are None without a model; prompt_bytes count the whole blocks of a prompt.
    """

    rank: int
    first_head: int
    num_heads: int
    first_layer: int | None
    num_layers: int | None
    token_bytes: int | None
    prompt_bytes: int | None


@dataclass(frozen=True, slots=True)
class PlannedChannel:
    """One pair of ranks, and the KV heads that one sends to the other. Layers and bytes are as in PlannedRank."""

    prefill_rank: int
    decode_rank: int
    first_head: int
    num_heads: int
    first_layer: int | None
    num_layers: int | None
    token_bytes: int | None
    prompt_bytes: int | None


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Two nodes and the channels between them. `lines` describe them in words."""

    num_kv_heads: int
    num_layers: int | None
    prefill_ranks: tuple[PlannedRank, ...]
    decode_ranks: tuple[PlannedRank, ...]
    channels: tuple[PlannedChannel, ...]
    lines: tuple[str, ...]


def plan_transfer(
    prefill: Grid, decode: Grid, num_kv_heads: int, layout: KVLayout | None = None, prompt_tokens: int = 0
) -> TransferPlan:
    """Return which KV heads go from which rank of a prefill node to which rank of a decode node.

    `prefill` and `decode` are the nodes' numbers of ranks. `layout`, of the whole model, gives layers and bytes, those
    of a prompt for `prompt_tokens` tokens; without it there are no stages.
    """
    layers = ANY_LAYER if layout is None else layout.layers

    def part_of(held: Holding) -> tuple[int, int, int | None, int | None, int | None, int | None]:
        heads = (held.heads.start, len(held.heads))
        if layout is None:
            return *heads, None, None, None, None
        part = layout.with_layers(held.layers).with_heads(len(held.heads))
        prompt_bytes = part.num_blocks_for(prompt_tokens) * part.block_bytes
        return *heads, held.layers.start, len(held.layers), part.token_bytes, prompt_bytes

    def ranks(grid: Grid) -> tuple[PlannedRank, ...]:
        held = holdings(grid, num_kv_heads, layers)
        return tuple(PlannedRank(rank, *part_of(each)) for rank, each in enumerate(held))

    prefill_ranks, channels = ranks(prefill), []
    for copy in plan_nodes(prefill, decode, num_kv_heads, layers):
        first = prefill_ranks[copy.source_rank].first_head + copy.source_heads.start
        moved = Holding(copy.layers, range(first, first + len(copy.source_heads)))
        channels.append(PlannedChannel(copy.source_rank, copy.destination_rank, *part_of(moved)))
    return TransferPlan(
        num_kv_heads=num_kv_heads,
        num_layers=None if layout is None else layout.num_layers,
        prefill_ranks=prefill_ranks,
        decode_ranks=ranks(decode),
        channels=tuple(channels),
        lines=tuple(describe(prefill, decode, num_kv_heads, layers)),
    )


def picture(plan: TransferPlan) -> list[str]:
    """Return the plan as lines: for each channel, the sending rank, the heads that it sends, and the receiving rank.

    Ranks that send nothing come last. A rank is not repeated in the next line.
    """
    rows: list[tuple[str, str, str]] = []
    last: PlannedChannel | None = None
    for channel in plan.channels:
        source = _rank_text(plan.prefill_ranks[channel.prefill_rank], plan)
        target = _rank_text(plan.decode_ranks[channel.decode_rank], plan)
        is_same_source = last is not None and last.prefill_rank == channel.prefill_rank
        is_same_target = last is not None and last.decode_rank == channel.decode_rank
        rows.append(("" if is_same_source else source, _moved(channel, plan), "" if is_same_target else target))
        last = channel
    senders = {channel.prefill_rank for channel in plan.channels}
    silent = [_rank_text(rank, plan) for rank in plan.prefill_ranks if rank.rank not in senders]
    left = max(len("prefill node"), *(len(_rank_text(rank, plan)) for rank in plan.prefill_ranks))
    middle = max(len(label) for _, label, _ in rows) + 2
    lines = [f"{'prefill node'.ljust(left)}  {' ' * (middle + 5)}  decode node"]
    lines += [f"{a.ljust(left)}  ──{f' {label} '.center(middle, '─')}──▶  {b}".rstrip() for a, label, b in rows]
    return lines + [f"{text.ljust(left)}  sends nothing" for text in silent]


def size_lines(plan: TransferPlan, layout: KVLayout, prompt_tokens: int) -> list[str]:
    """Return sizes in words, as lines: of a token, of a prompt, of what each rank holds and each channel sends."""
    num_blocks = layout.num_blocks_for(prompt_tokens)
    total = sum(channel.prompt_bytes or 0 for channel in plan.channels)
    lines = [
        f"one token takes {size_of(layout.token_bytes)} of KV: {layout.num_layers} layers, {layout.heads_text}"
        + (", which every rank holds whole" if layout.is_latent else ", K and V"),
        f"a prompt of {prompt_tokens} tokens is {num_blocks} block{'s'[: num_blocks - 1]} of {layout.block_size}, "
        f"{size_of(num_blocks * layout.block_bytes)}; {size_of(total)} are sent",
    ]
    for role, ranks in (("prefill", plan.prefill_ranks), ("decode", plan.decode_ranks)):
        lines += [f"{role} rank {rank.rank} holds {_of_each(rank)}" for rank in ranks]
    return lines + [
        f"channel prefill rank {channel.prefill_rank} → decode rank {channel.decode_rank} moves {_of_each(channel)}"
        for channel in plan.channels
    ]


@click.command("plan-transfer")
@click.argument("model", required=False)
@click.option(
    "--prefill-tp",
    default=1,
    show_default=True,
    type=click.IntRange(1, MAX_TP),
    help="Let the prefill node have this many tensor-parallel ranks.",
)
@click.option(
    "--decode-tp",
    default=1,
    show_default=True,
    type=click.IntRange(1, MAX_TP),
    help="Let the decode node have this many tensor-parallel ranks.",
)
@click.option(
    "--prefill-pp",
    default=1,
    show_default=True,
    type=click.IntRange(1, MAX_TP),
    help="Let the prefill node have this many pipeline stages.",
)
@click.option(
    "--decode-pp",
    default=1,
    show_default=True,
    type=click.IntRange(1, MAX_TP),
    help="Let the decode node have this many pipeline stages.",
)
@click.option("--kv-heads", type=click.IntRange(1), help="Take this many KV heads instead of those of a MODEL.")
@click.option(
    "--prompt-tokens",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    help="Show the bytes of a prompt of this many tokens.",
)
@click.option(
    "--block-size",
    default=EngineSettings().block_size,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Count this many tokens in a block.",
)
@click.option(
    "--kv-cache-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(KV_CACHE_DTYPES),
    help="Count KV in this dtype.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the picture.")
def plan_transfer_command(
    model: str | None,
    prefill_tp: int,
    decode_tp: int,
    prefill_pp: int,
    decode_pp: int,
    kv_heads: int | None,
    prompt_tokens: int,
    block_size: int,
    kv_cache_dtype: str,
    as_json: bool,
) -> None:
    """Show the KV heads, and with stages the layers, that each prefill rank sends to each decode rank, and their bytes.

    MODEL is a folder or a hub id; without it and without --kv-heads, it is the demo model.
    """
    if model and kv_heads:
        raise click.UsageError("give a MODEL or --kv-heads, not both")
    prefill, decode = Grid(prefill_tp, prefill_pp), Grid(decode_tp, decode_pp)
    if kv_heads and (prefill_pp > 1 or decode_pp > 1):
        raise click.UsageError("stages divide the layers of a MODEL: --kv-heads does not say how many there are")
    for grid in (prefill, decode):
        check_num_ranks(*grid)
    layout = None if kv_heads else layout_of(model or "", block_size, kv_cache_dtype)
    num_kv_heads = layout.num_kv_heads if layout else kv_heads
    assert num_kv_heads is not None
    plan = plan_transfer(prefill, decode, num_kv_heads, layout, prompt_tokens)
    if as_json:
        sizes: dict[str, Any] = {"layout": layout.uniform_fields(), "prompt_tokens": prompt_tokens} if layout else {}
        click.echo(json.dumps({**dataclasses.asdict(plan), **sizes}))
        return
    for paragraph in (picture(plan), plan.lines, size_lines(plan, layout, prompt_tokens) if layout else ()):
        _print(paragraph)


def layout_of(model: str, block_size: int, kv_cache_dtype: str) -> KVLayout:
    """Return the KV cache layout of a model, whose folder is found or downloaded; the dtype auto is the model's own.

    Raises ModelError when the model is not found or its config.json cannot be used.
    """
    config = read_model_config(resolve(model, report).folder)
    return config.kv_layout(block_size, config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        stdout.print(escape(line), soft_wrap=True)
    if lines:
        stdout.print()


def _rank_text(rank: PlannedRank, plan: TransferPlan) -> str:
    width = len(str(max(len(plan.prefill_ranks), len(plan.decode_ranks)) - 1))
    name = f"rank {rank.rank:>{width}}"
    if plan.num_kv_heads > MOST_DRAWN_HEADS:
        return f"{name} {_heads(rank)}{_layers(rank, plan)}"
    after = plan.num_kv_heads - rank.first_head - rank.num_heads
    return f"{name} {NOT_HELD * rank.first_head}{HELD * rank.num_heads}{NOT_HELD * after}{_layers(rank, plan)}"


def _layers(part: PlannedRank | PlannedChannel, plan: TransferPlan) -> str:
    """Return the layers of a part in words; empty for all layers."""
    if part.num_layers is None or part.first_layer is None or part.num_layers == plan.num_layers:
        return ""
    last = part.first_layer + part.num_layers - 1
    return f" layer {last}" if part.num_layers == 1 else f" layers {part.first_layer}-{last}"


def _moved(channel: PlannedChannel, plan: TransferPlan) -> str:
    moved = _heads(channel) + _layers(channel, plan)
    return moved if channel.prompt_bytes is None else f"{moved}, {size_of(channel.prompt_bytes)}"


def _heads(part: PlannedRank | PlannedChannel) -> str:
    last = part.first_head + part.num_heads - 1
    return f"head {last}" if part.num_heads == 1 else f"heads {part.first_head}-{last}"


def _of_each(part: PlannedRank | PlannedChannel) -> str:
    assert part.token_bytes is not None
    assert part.prompt_bytes is not None
    return f"{size_of(part.token_bytes)} of each token, {size_of(part.prompt_bytes)} of the prompt"
