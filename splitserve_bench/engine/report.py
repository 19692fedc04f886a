"""Show the figures of `splitserve bench engine` as tables."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from serving_core.units import size_of
from splitserve.commands.terminal import plain_table
from splitserve_bench.engine.machine import MachineFigures
from splitserve_bench.engine.measure import (
    DecodeFigures,
    EngineFigures,
    OffloadFigures,
    PrefillFigures,
)
from splitserve_bench.engine.peers import DECODE, LOAD, PREFILL, Ratio
from splitserve_bench.report import engine_line, known, table_of


def engine_view(figures: EngineFigures, ratios: Sequence[Ratio]) -> RenderableType:
    """Return all lines and tables of a measurement, and with `ratios` the comparison with other engines."""
    start, machine, sizes = figures.start, figures.machine, figures.sizes
    parts: list[RenderableType] = [
        f"{escape(engine_line(figures.model, figures.engine))}, weights {size_of(figures.weight_bytes)}",
        f"start: {start.ready_s:.2f} s from the start of the process to the end of the first steps: imports "
        f"{start.imports_s:.2f} s, load {start.load_s:.2f} s, warm-up {start.warm_up_s:.2f} s",
        f"machine, {machine.num_threads} threads: products of {machine.gemm_dtype} "
        f"{machine.gemm_flops_per_s / 1e9:.0f} GFLOP/s, reading memory {machine.read_bytes_per_s / 1e9:.2f} GB/s",
        "",
        f"prefill, prompts together in steps of {sizes.step_tokens} tokens:",
        prefill_table(figures.prefill, machine),
        "operations: 2 x parameters of the layers x tokens + 2 x tokens² x width of the heads x layers + the head once",
        "",
        "decode, greedy steps:",
        decode_table(figures.decode, machine),
        "bytes: the weights once, and the KV of all contexts; shares are of the machine's rates, for the median",
    ]
    if figures.prefill[0].flops is None:
        parts += ["of what transformers' code computes, operations and bytes of weights are not known"]
    first = figures.sampling[0]
    parts += ["", f"sampling, {first.batch} requests, a vocabulary of {first.vocab_size}, random logits:"]
    columns = {"parameters": lambda row: row.parameters, "ms a step": lambda row: f"{row.step_s * 1e3:.2f}"}
    parts += [table_of(figures.sampling, columns)]
    if figures.offload is not None:
        parts += ["", offload_line(figures.offload)]
    if ratios:
        parts += ["", "against the best of the peers, whose figures are read from files:", ratio_table(ratios)]
    return Group(*parts)


def offload_line(offload: OffloadFigures) -> str:
    """Return in one sentence how fast decode steps read weights that are elsewhere, and how fast they could be read."""
    rate, alone = offload.bytes_per_s / 1e9, offload.alone_bytes_per_s / 1e9
    return (
        f"{offload.num_layers} layers, {size_of(offload.num_bytes)}, are {offload.where}: a decode step of one request "
        f"takes {offload.step_s:.2f} s and reads {size_of(round(offload.step_bytes))}, {rate:.2f} GB/s, "
        f"{rate / alone:.0%} of the {alone:.2f} GB/s that are read while nothing computes"
    )


def prefill_table(rows: Sequence[PrefillFigures], machine: MachineFigures) -> Table:
    """Return a table of prefill rates, and of their shares of the machine's rate of matrix products."""
    return table_of(
        rows,
        {
            "prompts": lambda row: str(row.prompts),
            "tokens/s, median": lambda row: f"{row.tokens_per_s:.0f}",
            "best": lambda row: f"{row.best_tokens_per_s:.0f}",
            "GFLOP": lambda row: known(row.flops, ".1f", 1e-9),
            "GFLOP/s": lambda row: known(row.gemm_share, ".0f", machine.gemm_flops_per_s / 1e9),
            "of the GEMM rate": lambda row: known(row.gemm_share, ".0%"),
        },
    )


def decode_table(rows: Sequence[DecodeFigures], machine: MachineFigures) -> Table:
    """Return a table of decode step times, and of their shares of the machine's rates."""
    return table_of(
        rows,
        {
            "batch": lambda row: str(row.batch),
            "context tokens": lambda row: str(row.context_tokens),
            "ms a step, median": lambda row: f"{row.step_s * 1e3:.2f}",
            "least": lambda row: f"{row.best_step_s * 1e3:.2f}",
            "tokens/s": lambda row: f"{row.batch / row.step_s:.0f}",
            "weights": lambda row: "-" if row.weight_bytes is None else size_of(row.weight_bytes),
            "KV": lambda row: size_of(round(row.kv_bytes)),
            "GB/s": lambda row: known(row.bandwidth_share, ".2f", machine.read_bytes_per_s / 1e9),
            "of the bandwidth": lambda row: known(row.bandwidth_share, ".0%"),
            "of the GEMM rate": lambda row: known(row.gemm_share, ".0%"),
        },
    )


def ratio_table(rows: Sequence[Ratio]) -> Table:
    """Return a table of our figures, the best peer's, and the first divided by the second."""
    better = {LOAD: "less is better", PREFILL: "more is better", DECODE: "less is better"}
    table = plain_table("figure", numbers=("ours", "best peer", "ratio"))
    for title in ("peer", "", ""):
        table.add_column(title)
    for row in rows:
        digits = 0 if row.kind == PREFILL else 2
        table.add_row(
            f"{row.kind} {row.key}".rstrip() + f", {row.unit}",
            f"{row.ours:.{digits}f}",
            f"{row.theirs:.{digits}f}",
            f"{row.ratio:.2f}",
            escape(row.peer),
            better[row.kind],
            "ahead" if row.is_ahead else "behind",
        )
    return table
