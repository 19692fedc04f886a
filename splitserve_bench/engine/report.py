"""The figures of `splitserve bench engine` as tables for people."""

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from engine.stepper import BETWEEN
from serving_core.units import size_of
from splitserve.commands.terminal import plain_table
from splitserve_bench.engine.figures import (
    ChoosingFigures,
    DecodeFigures,
    EngineFigures,
    LoopFigures,
    MachineFigures,
    OffloadFigures,
    PrefillFigures,
    ProfileFigures,
    StructuredFigures,
)
from splitserve_bench.engine.peers import DECODE, LOAD, PREFILL, Ratio


def engine_view(
    figures: EngineFigures, compared: Sequence[Ratio], price: Sequence[Ratio] = (), gain: Sequence[Ratio] = ()
) -> Group:
    """Everything, one below the other."""
    described = ", ".join(f"{name} {value}" for name, value in figures.engine.items())
    start, how = figures.start, "together in steps" if figures.shares_steps else "one after the other in chunks"
    parts: list[object] = [
        f"{escape(figures.model)}: {escape(described)}, weights {size_of(figures.weight_bytes)}",
        f"start: {start.ready_s:.2f} s from the start of the process to the end of the first steps: imports "
        f"{start.imports_s:.2f} s, load {start.load_s:.2f} s, warm-up {start.warm_up_s:.2f} s",
        *map(escape, _machine_lines(figures.machine)),
        "",
        f"prefill, prompts {how} of {figures.step_tokens} tokens:",
        prefill_table(figures.prefill, figures.machine),
        "operations: 2 x parameters of the layers x tokens + 2 x tokens² x width of the heads x layers + the head once",
        "",
        "decode, greedy steps:",
        decode_table(figures.decode, figures.machine),
        "bytes: the weights once, and the KV of all contexts; shares are of the machine's rates, for the median",
    ]
    if not figures.profiles:
        parts += ["of what transformers' code computes, operations, bytes of weights and parts of a step are not known"]
    for profile in figures.profiles:
        parts += ["", profile_line(profile), profile_table(profile)]
    parts += ["", "a node between two decode steps, ms of CPU time:", loop_table(figures.loop)]
    first = figures.choosing[0]
    parts += ["", f"choosing tokens, of {first.batch} answers, a vocabulary of {first.vocab_size}, random logits:"]
    parts += [choosing_table(figures.choosing)]
    if figures.offload is not None:
        parts += ["", offload_line(figures.offload)]
    if figures.structured is not None:
        parts += ["", structured_line(figures.structured)]
    if compared:
        parts += ["", "against the best of the peers, whose figures are read from files:", ratio_table(compared)]
    if price:
        parts += ["", "the price of --batch-invariant, in this process:", ratio_table(price, "without it")]
    if gain:
        parts += ["", "against --model-impl transformers, in this process:", ratio_table(gain, "with it")]
    return Group(*parts)  # type: ignore[arg-type]


def offload_line(offload: OffloadFigures) -> str:
    """What is read of weights that are elsewhere, beside what can be read from there."""
    rate, alone = offload.bytes_per_s / 1e9, offload.alone_bytes_per_s / 1e9
    return (
        f"{offload.num_layers} layers, {size_of(offload.num_bytes)}, are {offload.where}: a decode step of one request "
        f"takes {offload.step_s:.2f} s and reads {size_of(round(offload.step_bytes))}, {rate:.2f} GB/s, "
        f"{rate / alone:.0%} of the {alone:.2f} GB/s that are read while nothing computes"
    )


def prefill_table(rows: Sequence[PrefillFigures], machine: MachineFigures) -> Table:
    """Rates, and the share of the GEMM rate that they are."""
    numbers = ("tokens/s, median", "best", "GFLOP", "GFLOP/s", "of the GEMM rate")
    table = plain_table("prompts", numbers=numbers)
    for row in rows:
        table.add_row(
            str(row.prompts),
            f"{row.tokens_per_s:.0f}",
            f"{row.best_tokens_per_s:.0f}",
            _known(row.flops, ".1f", 1e-9),
            _known(row.gemm_share, ".0f", machine.gemm_flops_per_s / 1e9),
            _known(row.gemm_share, ".0%"),
        )
    return table


def decode_table(rows: Sequence[DecodeFigures], machine: MachineFigures) -> Table:
    """Step times, what is read in a step, and the shares of both of the machine's rates."""
    numbers = ("context tokens", "ms a step, median", "least", "tokens/s", "weights", "KV", "GB/s")
    table = plain_table("batch", numbers=(*numbers, "of the bandwidth", "of the GEMM rate"))
    for row in rows:
        table.add_row(
            str(row.batch),
            str(row.context_tokens),
            f"{row.step_s * 1e3:.2f}",
            f"{row.best_step_s * 1e3:.2f}",
            f"{row.batch / row.step_s:.0f}",
            "-" if row.weight_bytes is None else size_of(row.weight_bytes),
            size_of(round(row.kv_bytes)),
            _known(row.bandwidth_share, ".2f", machine.read_bytes_per_s / 1e9),
            _known(row.bandwidth_share, ".0%"),
            _known(row.gemm_share, ".0%"),
        )
    return table


def loop_table(rows: Sequence[LoopFigures]) -> Table:
    """CPU time by part, and the sum of all parts beside a step, by the clock too."""
    numbers = ("context tokens", *BETWEEN, "all", "by the clock", "a step's computation")
    table = plain_table("batch", numbers=numbers)
    for row in rows:
        seconds = [*row.cpu_s.values(), sum(row.cpu_s.values()), sum(row.clock_s.values())]
        texts = [f"{each * 1e3:.3f}" for each in seconds]
        table.add_row(str(row.batch), str(row.context_tokens), *texts, f"{row.step_s * 1e3:.2f}")
    return table


def choosing_table(rows: Sequence[ChoosingFigures]) -> Table:
    """What a step takes to choose its tokens, by what is asked for."""
    table = plain_table("asked for", numbers=("ms a step",))
    for row in rows:
        table.add_row(row.way, f"{row.step_s * 1e3:.2f}")
    return table


def structured_line(figures: StructuredFigures) -> str:
    """What grammars cost."""
    cost_s = figures.step_s - figures.plain_step_s
    return (
        f"structured output, {figures.batch} answers at once, a vocabulary of {figures.vocab_size}: a step takes "
        f"{figures.step_s * 1e3:.2f} ms with grammars and {figures.plain_step_s * 1e3:.2f} ms without, "
        f"{cost_s / figures.plain_step_s:+.1%}"
    )


def profile_line(profile: ProfileFigures) -> str:
    """What the profile is of."""
    watched_ms, plain_ms = profile.step_s * 1e3, profile.plain_s * 1e3
    return f"{profile.name}: {watched_ms:.2f} ms from module to module with stop-watches, {plain_ms:.2f} ms without:"


def profile_table(profile: ProfileFigures) -> Table:
    """Where the time goes, each part without the parts within it."""
    table = plain_table("part", numbers=("calls", "ms", "share"))
    for part in profile.parts:
        table.add_row(part.name, f"{part.num_calls:.0f}", f"{part.own_s * 1e3:.2f}", f"{part.share:.1%}")
    table.add_row("all", "", f"{profile.step_s * 1e3:.2f}", "100.0%")
    return table


def ratio_table(rows: Sequence[Ratio], others: str = "best peer") -> Table:
    """Ours, the others', and one divided by the other."""
    better = {LOAD: "less is better", PREFILL: "more is better", DECODE: "less is better"}
    table = plain_table("figure", numbers=("ours", others, "ratio"))
    for title in ("peer", "", ""):
        table.add_column(title)
    for row in rows:
        table.add_row(
            f"{row.kind} {row.key}".rstrip() + f", {row.unit}",
            f"{row.ours:.2f}" if row.kind != PREFILL else f"{row.ours:.0f}",
            f"{row.theirs:.2f}" if row.kind != PREFILL else f"{row.theirs:.0f}",
            f"{row.ratio:.2f}",
            escape(row.peer),
            better[row.kind],
            "ahead" if row.is_ahead else "behind",
        )
    return table


def _known(value: float | None, form: str, scale: float = 1) -> str:
    """What is None is not known."""
    return "-" if value is None else f"{value * scale:{form}}"


def _machine_lines(machine: MachineFigures) -> list[str]:
    gemm, read = machine.gemm_flops_per_s / 1e9, machine.read_bytes_per_s / 1e9
    return [
        f"machine, {machine.num_threads} threads, the best of several ways:",
        f"  products of {machine.gemm_dtype}: {gemm:.0f} GFLOP/s ({machine.gemm_with})",
        f"  reading memory: {read:.2f} GB/s ({machine.read_with})",
    ]
