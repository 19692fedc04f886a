"""Show the figures of `splitserve doctor` as tables, and say in words what they mean."""

from collections.abc import Callable
from statistics import median
from typing import Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serving_core.units import size_of
from splitserve.commands.terminal import plain_table
from splitserve_bench.doctor.measure import TRANSPORT, DoctorFigures, Measured, PaysBetween
from splitserve_bench.plan.topologies import NUM_REQUESTS, TPOT_SCALE, TTFT_SCALE
from splitserve_bench.report import engine_line, table_of

STYLES: Final = {"split": "green", "even": "", "colocated": "yellow"}


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
        Text(f"two nodes and {2 * figures.running} running sequences, split or colocated (each node does both):"),
        comparison_table(figures),
        *map(Text, assumption_lines(figures)),
        "",
        *(f"[bold]{escape(line)}[/]" for line in pays_lines(figures)),
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


def comparison_table(figures: DoctorFigures) -> Table:
    """Return a table of the mixes of lengths: rates and times of split, colocated and one node, and which pays."""
    per_second = "requests/s, split", "colocated", "one node"
    between = "ms between tokens, split", "colocated", "one node"
    table = plain_table("", numbers=("prompt", "output", *per_second, *between, "balanced at"))
    table.add_column("pays")
    table.add_column("because")
    for each in figures.comparisons:
        style = STYLES[each.verdict]
        table.add_row(
            "",
            str(each.prompt_tokens),
            str(each.output_tokens),
            f"{each.split_requests_per_s:.2f}",
            f"{each.colocated_requests_per_s:.2f}",
            "" if each.whole is None else f"{each.whole.requests_per_s:.2f}",
            f"{each.split_tpot_s * 1e3:.1f}",
            f"{each.colocated_tpot_s * 1e3:.1f}",
            "" if each.whole is None else f"{each.whole.tpot_s * 1e3:.1f}",
            f"{each.prefill_nodes:.2f} : 1",
            Text(each.verdict, style=style),
            each.why,
        )
    return table


def assumption_lines(figures: DoctorFigures) -> list[str]:
    """Return the assumptions of the comparison, a line each."""
    return [
        f"Assumed: {figures.running} sequences always run for each of two nodes, all of one length, nothing cached;",
        "colocated, a prompt stalls every sequence beside it by its whole computation;",
        "split, both nodes are busy with the KV transfer for its time; waits in queues are left out.",
        "Split pays: as many requests/s, to a tenth, and a tenth ahead in them or in the time between tokens. "
        "Balanced at: prefill nodes for each decode node.",
    ]


def pays_lines(figures: DoctorFigures) -> list[str]:
    """Return sentences: from which lengths on a prefill and a decode node beat two mixed ones."""
    lines = [f"With {2 * figures.running} running sequences the split pays on this machine"]
    lines += [f"  {_range(each, figures.most_prompt_tokens)}" for each in figures.pays]
    lines.append("For longer prompts have more prefill nodes, for longer outputs more decode nodes.")
    return lines + _whole_lines(figures)


def _whole_lines(figures: DoctorFigures) -> list[str]:
    """Return in words what one node on the cores of both would serve, with its command where it would keep more."""
    ratios = [each.whole_ratio for each in figures.comparisons if each.whole_ratio is not None]
    if not ratios:
        return []
    lines = [
        f"One node of {2 * figures.cores} cores would serve {median(ratios):.2f} times as many requests/s as the "
        f"better of both, in the median of these lengths ({min(ratios):.2f} to {max(ratios):.2f})"
    ]
    kept = figures.topologies
    if kept is None:
        return lines
    others = ", ".join(f"{name} {share:.0%}" for name, share in kept.others.items())
    line = (
        f"Simulated, {NUM_REQUESTS} requests of some {kept.prompt_tokens} + {kept.output_tokens} tokens at "
        f"{kept.requests_per_s:.3g} a second, within {TTFT_SCALE:g} times the TTFT and {TPOT_SCALE:g} times the TPOT "
        f"of one alone: one node keeps {kept.whole:.0%}, {others}"
    )
    is_better = kept.whole > max(kept.others.values())
    return [*lines, f"{line}: splitserve up --mixed 1" if is_better else line]


def _range(each: PaysBetween, most_prompt_tokens: int) -> str:
    answers = f"for outputs of {each.output_tokens} tokens"
    if each.least_prompt_tokens is None:
        return f"{answers} at no prompt length up to {most_prompt_tokens}"
    if each.most_prompt_tokens == most_prompt_tokens:
        return f"{answers} from prompts of {each.least_prompt_tokens} tokens on"
    return f"{answers} with prompts of {each.least_prompt_tokens} to {each.most_prompt_tokens} tokens"


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
