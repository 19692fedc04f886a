"""Show the figures of `splitserve doctor` as tables, and say in words what they mean."""

from collections.abc import Callable
from functools import partial
from typing import Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serving_core.units import size_of
from splitserve_bench.doctor.measure import TRANSPORT, DoctorFigures, Measured
from splitserve_bench.doctor.topologies import (
    COLOCATED,
    MARGIN,
    NUM_REQUESTS,
    ONE_NODE,
    RATE_SHARE,
    SPLIT,
    TPOT_SCALE,
    TTFT_SCALE,
    Topologies,
    best_of,
    mean_kept,
)
from splitserve_bench.report import engine_line, table_of

COMMANDS: Final = {
    SPLIT: "splitserve up --prefill 1 --decode 1",
    COLOCATED: "splitserve up --mixed 2",
    ONE_NODE: "splitserve up --mixed 1",
}


def doctor_view(figures: DoctorFigures) -> Group:
    """Return the whole report: all tables and lines, one below the other."""
    parts: list[object] = [
        Text(engine_line(figures.model, figures.engine)),
        Text(_nodes_line(figures)),
        "",
        "a prefill node, one prompt after the other:",
        prefill_table(figures),
        Text(_fit_line(figures)),
        "",
        "a decode node, steps with 128 tokens in each cache:",
        decode_table(figures),
        Text(_cache_line(figures)),
        "",
        Text(_transfer_line(figures)),
        "",
        "two nodes, split or colocated (each does both), and one node in their place:",
        topologies_table(figures),
        *map(Text, load_lines(figures)),
        "",
        *(f"[bold]{escape(line)}[/]" for line in conclusions(figures)),
    ]
    return Group(*parts)  # type: ignore[arg-type]


def prefill_table(figures: DoctorFigures) -> Table:
    """Return a table of measured prefill times beside those of the fitted costs."""
    columns: dict[str, Callable[[Measured], str]] = {
        "": lambda row: "",
        "prompt tokens": lambda row: str(row.amount),
        "ms": lambda row: f"{row.seconds * 1e3:.1f}",
        "tokens/s": lambda row: f"{row.amount / row.seconds:.0f}",
        "ms, fitted": lambda row: f"{figures.costs.prefill.prefill_s(row.amount) * 1e3:.1f}",
    }
    return table_of(figures.prompts, columns)


def decode_table(figures: DoctorFigures) -> Table:
    """Return a table of decode step times by the number of requests in the step."""
    columns: dict[str, Callable[[Measured], str]] = {
        "": lambda row: "",
        "answers": lambda row: str(row.amount),
        "ms a step": lambda row: f"{row.seconds * 1e3:.2f}",
        "tokens/s": lambda row: f"{row.amount / row.seconds:.0f}",
    }
    return table_of(figures.steps, columns)


def topologies_table(figures: DoctorFigures) -> Table:
    """Return a table of the mixes of lengths: the rate, what each fleet keeps of it, and which keeps the most."""
    columns: dict[str, Callable[[Topologies], str]] = {
        "": lambda row: "",
        "prompt": lambda row: str(row.prompt_tokens),
        "output": lambda row: str(row.output_tokens),
        "requests/s": lambda row: f"{row.requests_per_s:.3g}",
        **{f"{name}, % good": partial(_percent, name) for name in figures.topologies[0].kept},
        "best": lambda row: row.best,
    }
    return table_of(figures.topologies, columns)


def _percent(name: str, row: Topologies) -> str:
    return f"{row.kept[name] * 100:.0f}"


def load_lines(figures: DoctorFigures) -> list[str]:
    """Return what was simulated, a line each."""
    return [
        f"Simulated: {NUM_REQUESTS} requests of about each length as a Poisson process, at {RATE_SHARE:g} of what two "
        f"mixed nodes serve while {2 * figures.running} always run; good:",
        f"within {TTFT_SCALE:g} times the TTFT and {TPOT_SCALE:g} times the TPOT that a request has alone on the "
        f"largest node; best: by {MARGIN:.0%} of the requests, else even.",
    ]


def conclusions(figures: DoctorFigures) -> list[str]:
    """Return sentences: where the split keeps the most requests, and what keeps the most of all these lengths."""
    found = figures.topologies
    names = {SPLIT: "a prefill and a decode node", COLOCATED: "two mixed nodes"}
    names[ONE_NODE] = f"one node of {2 * figures.cores} cores"
    lengths = [f"{each.prompt_tokens} + {each.output_tokens}" for each in found if each.best == SPLIT]
    where = f"at prompts + outputs of {', '.join(lengths)} tokens" if lengths else "at none of these lengths"
    kept = mean_kept(found)
    shares = ", ".join(f"{names[name]} {share:.0%}" for name, share in kept.items())
    best = best_of(kept)
    last = f"On average {shares} of the requests are good"
    return [
        f"The split keeps more requests within their limits than any other way {where}",
        f"{last}: {COMMANDS[best]}" if best in COMMANDS else f"{last}: about even",
    ]


def _nodes_line(figures: DoctorFigures) -> str:
    cores = f"{figures.cores} core{'s'[: figures.cores - 1]} a node"
    if figures.at_once:
        return f"{cores}; a prefill and a decode node were measured at the same time"
    return f"{cores}; there are not enough for two nodes at once: the figures are those of two such machines"


def _fit_line(figures: DoctorFigures) -> str:
    cost = figures.costs.prefill
    return (
        f"fitted: {cost.base_s * 1e3:.2f} ms + {cost.token_s * 1e6:.1f} µs a token + "
        f"{cost.pair_s * 1e9:.2f} ns a token squared"
    )


def _cache_line(figures: DoctorFigures) -> str:
    steps = figures.costs.decode
    (few, many), (short_s, long_s) = steps.columns, steps.seconds[-1]
    added_s = max(0.0, long_s - short_s) / (steps.rows[-1] * (many - few))
    return f"each further token in one sequence's cache adds {added_s * 1e9:.0f} ns to a step"


def _transfer_line(figures: DoctorFigures) -> str:
    kv_transfer, last = figures.costs.kv_transfer, figures.prompts[-1].amount
    taken_s = figures.costs.transfer_s(last)
    share = taken_s / figures.costs.prefill.prefill_s(last)
    return (
        f"KV transfer ({TRANSPORT}): {kv_transfer.latency_s * 1e3:.2f} ms and "
        f"{kv_transfer.bytes_per_s / 1e9:.2f} GB/s; a token has "
        f"{size_of(figures.costs.token_bytes)} of KV, so that a prompt of {last} tokens is transferred in "
        f"{taken_s * 1e3:.1f} ms, {share:.1%} of its computation"
    )
