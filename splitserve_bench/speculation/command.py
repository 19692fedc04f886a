"""`splitserve bench speculation`. What it measures with is imported when it runs, so that help is quick."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from serving_core.extras import needs
from serving_core.settings import QUANTIZATIONS, EngineSettings
from splitserve.commands.terminal import plain_table, report, stdout
from splitserve.launch.models import resolve
from splitserve_bench.engine.command import COUNTS

if TYPE_CHECKING:
    from splitserve_bench.speculation.measure import SpeculationFigures
    from splitserve_bench.speculation.peer import PeerFigures

ITSELF = "MODEL"  # as its own draft model


@click.command("speculation")
@click.argument("model", default="")
@click.option("--batches", default="1,4,16", show_default=True, type=COUNTS, help="Answers at a time.")
@click.option("--num-speculative-tokens", default=8, show_default=True, type=click.IntRange(1, 32), help="As of nodes.")
@click.option("--speculative-model", default="", help="A draft model, in place of lookup; MODEL: the model itself.")
@click.option(
    "--speculative-quantization",
    default="none",
    show_default=True,
    type=click.Choice(QUANTIZATIONS),
    help="As of nodes.",
)
@click.option("--draft-layers", type=click.IntRange(1), help="A draft model of the model's first layers, so many.")
@click.option("--free-drafts", is_flag=True, help="As if a draft model took no time: the most it gains.")
@click.option("--max-tokens", default=200, show_default=True, type=click.IntRange(2), help="Of each answer.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="With and without, by turns.")
@click.option("--threads", default=0, type=click.IntRange(0), help="Threads; by default what torch takes.")
@click.option(
    "--llama-cpp", "python", default="", help="A Python with llama-cpp-python: its own prompt lookup, beside."
)
@click.option(
    "--gguf",
    "weights",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="MODEL in llama.cpp's format, for --llama-cpp.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@needs("node")
def speculation_command(
    model: str,
    batches: tuple[int, ...],
    num_speculative_tokens: int,
    speculative_model: str,
    speculative_quantization: str,
    draft_layers: int | None,
    free_drafts: bool,
    max_tokens: int,
    repeats: int,
    threads: int,
    python: str,
    weights: Path | None,
    as_json: bool,
) -> None:
    """Measure what --speculation gains MODEL: code edits, summaries with quotes, chat, random tokens. With --llama-cpp
    that answers the prompts of one answer at a time, too."""
    if bool(python) != (weights is not None):
        raise click.UsageError("--llama-cpp and --gguf go together")
    if python and 1 not in batches:
        raise click.UsageError("--llama-cpp answers one prompt at a time: --batches has to have 1")
    import torch

    from splitserve_bench.speculation.measure import measure_speculation
    from splitserve_bench.speculation.peer import LlamaCpp, measure_peer
    from splitserve_bench.speculation.texts import KINDS

    folder = resolve(model, report).folder
    sizes = (num_speculative_tokens, max_tokens, repeats, threads or torch.get_num_threads())
    peers = {}
    if weights is not None:
        peer = LlamaCpp(python, weights)
        peers = {kind: measure_peer(peer, folder, kind, *sizes, report) for kind in KINDS}
    with _draft_folder(folder, speculative_model, draft_layers) as draft_folder:
        draft = None
        if draft_folder is not None:
            draft = EngineSettings(model=str(draft_folder), quantization=speculative_quantization)
        figures = measure_speculation(folder, KINDS, sorted(set(batches)), *sizes, report, draft, are_free=free_drafts)
    if as_json:
        click.echo(json.dumps([_row(each, peers) for each in figures]))
        return
    stdout.print(speculation_table(figures, "lookup" if draft is None else "draft"))
    if peers:
        stdout.print(peer_table([each for each in figures if each.batch == 1], peers))


@contextmanager
def _draft_folder(folder: Path, model: str, num_layers: int | None) -> Iterator[Path | None]:
    """Of the draft model; None where there is none."""
    if num_layers is None:
        yield folder if model == ITSELF else resolve(model, report).folder if model else None
        return
    from splitserve_bench.speculation.first_layers import write_first_layers

    with TemporaryDirectory(prefix="first-layers-") as written:
        write_first_layers(folder, num_layers, Path(written))
        yield Path(written)


def _row(figures: "SpeculationFigures", peers: Mapping[str, "PeerFigures"]) -> dict[str, Any]:
    row = dataclasses.asdict(figures)
    if peers and figures.batch == 1:
        row["llama_cpp"] = dataclasses.asdict(peers[figures.kind])
    return row


def speculation_table(rows: Sequence["SpeculationFigures"], source: str) -> Table:
    """Rates without and with candidates of this source, and what came of these."""
    numbers = ("batch", "tokens/s off", source, "ratio", "candidates a token", "of them came", "tokens a step")
    table = plain_table("text", numbers=numbers)
    for row in rows:
        table.add_row(
            row.kind,
            str(row.batch),
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.speedup:.2f}",
            f"{row.proposed:.2f}",
            f"{row.accepted:.0%}",
            f"{row.tokens_per_step:.2f}",
        )
    return table


def peer_table(rows: Sequence["SpeculationFigures"], peers: Mapping[str, "PeerFigures"]) -> Table:
    """One answer at a time: llama.cpp's rates, and ours as multiples of them."""
    numbers = ("llama.cpp off", "its lookup", "ratio", "ours, off", "ours, on")
    table = plain_table("text", numbers=numbers)
    for row in rows:
        peer = peers[row.kind]
        table.add_row(
            row.kind,
            f"{peer.plain_tokens_per_s:.1f}",
            f"{peer.tokens_per_s:.1f}",
            f"{peer.speedup:.2f}",
            f"{row.plain_tokens_per_s / peer.plain_tokens_per_s:.2f} x",
            f"{row.tokens_per_s / peer.tokens_per_s:.2f} x",
        )
    return table
