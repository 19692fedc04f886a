"""The figures of `splitserve bench serve` as tables for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from splitserve.commands.terminal import PHASE_NAMES, plain_table
from splitserve_bench.serve.metrics import Distribution, Limits, Returned, Summary
from splitserve_bench.serve.misses import frequent_errors
from splitserve_bench.serve.records import TierUse
from splitserve_bench.serve.results import DEFAULT_METRICS, DEFAULT_PERCENTILES, Run, read_share

MAX_SEND_LAG_S: Final = 0.010
MAX_SEND_LAG_OF_TTFT: Final = 0.05
MEANING: Final = (
    "latencies are those of complete answers and count from the moment of sending; an answer of one token has no TPOT "
    "and meets every limit on it"
)
NAMES: Final = {
    "ttft": "TTFT, sent to first token",
    "tpot": "TPOT, a token after the first",
    "itl": "ITL, between two arrivals",
    "e2el": "E2EL, sent to end",
    "ttst": "TTST, first to second token",
    "client_queue_time": "wait in the generator",
    "e2el_including_client_queue": "E2EL with that wait",
}


def serve_view(
    summary: Summary,
    run: Run,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> Group:
    """Everything, one below the other; warnings last."""
    parts: list[object] = [load_line(run), "", counts_table(summary, run), ""]
    parts += [*map(escape, errors_lines(summary)), latency_table(summary, metrics, percentiles), MEANING]
    if summary.limits.by_name():
        parts += ["", attainment_line(summary), *misses_lines(summary)]
    if summary.returned.num:
        parts += [returned_line(summary.returned)]
    if summary.phases_s:
        parts += ["", phases_line(summary.phases_s)]
    if run.tier is not None:
        parts += [tier_line(run.tier)]
    parts += [f"[yellow]{escape(line)}[/]" for line in warnings(summary, run)]
    return Group(*parts)  # type: ignore[arg-type]


def load_line(run: Run) -> str:
    """What was sent where, and how."""
    rate, ramp = run.request_rate_per_s, run.ramp
    if run.stages:
        parts = ", ".join(f"{stage.times:g} times for {stage.seconds:g} s" for stage in run.stages)
        how = [f"stages of {rate:.4g} requests/s: {parts}, burstiness {run.burstiness:g}"]
    elif ramp is not None:
        how = [f"{ramp.start_per_s:g} to {ramp.end_per_s:g} requests/s, {ramp.strategy}, burstiness {run.burstiness:g}"]
    else:
        how = ["no fixed rate" if math.isinf(rate) else f"{rate:g} requests/s, burstiness {run.burstiness:g}"]
    if run.max_concurrency is not None:
        how.append(f"at most {run.max_concurrency} at a time")
    return f"[bold]{escape(run.model_id)}[/] by {escape(run.backend)}: {', '.join(how)}"


def counts_table(summary: Summary, run: Run) -> Table:
    """Requests, tokens and rates."""
    table = plain_table("figure", numbers=("measured",))
    rows = [
        ("requests offered", f"{summary.num_offered}"),
        ("  complete", f"{summary.num_completed}"),
        ("  failed", f"{summary.misses.failed}"),
        ("  refused", f"{summary.misses.refused}"),
        ("  at once, at most", f"{summary.max_concurrent_requests}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("prompt tokens of complete answers", f"{summary.total_input_tokens}"),
        ("output tokens of complete answers", f"{summary.total_output_tokens}"),
        ("request throughput", f"{summary.per_s(summary.num_completed):.2f} requests/s"),
        ("output throughput", f"{summary.per_s(summary.total_output_tokens):.1f} tokens/s"),
        ("  in the best second", f"{summary.max_output_tokens_per_s:.0f} tokens/s"),
    ]
    total_tokens = summary.total_input_tokens + summary.total_output_tokens
    rows.append(("prompt and output throughput", f"{summary.per_s(total_tokens):.1f} tokens/s"))
    if summary.limits.by_name():
        rows.append(("request goodput", f"{summary.request_goodput_per_s:.2f} requests/s"))
    if summary.cached_share is not None:
        rows.append(("prompt tokens not computed", f"{summary.cached_share:.1%}"))
    if run.tier is not None:
        rows.append(("  read back from the second tier", f"{read_share(run.tier, summary):.1%}"))
    if run.num_clipped:
        rows.append(("requests clipped to what the model takes", f"{run.num_clipped}"))
    for row in rows:
        table.add_row(*row)
    return table


def errors_lines(summary: Summary) -> list[str]:
    """Why requests failed or were refused, the most frequent words first; nothing when all were complete."""
    frequent = frequent_errors(summary.outcomes)
    if not frequent:
        return []
    num_others = summary.num_offered - summary.num_completed - sum(count for _, count in frequent)
    lines = [f"  {count} x {error}" for error, count in frequent]
    return ["failed or refused:", *lines, *([f"  and {num_others} others"] if num_others else []), ""]


def latency_table(summary: Summary, metrics: Sequence[str], percentiles: Sequence[float]) -> Table:
    """Milliseconds of each metric and of the send lag."""
    table = plain_table(
        "milliseconds", numbers=("mean", "median", "std", *(f"p{each:g}" for each in percentiles), "max")
    )
    rows = {NAMES[name]: summary.latencies_s[name] for name in metrics}
    for title, latency_s in {**rows, "send lag of all requests": summary.send_lag_s}.items():
        values = [latency_s.mean, latency_s.median, latency_s.std]
        values += [latency_s.percentile(each) for each in percentiles]
        table.add_row(title, *map(_ms, [*values, latency_s.max]))
    return table


def attainment_line(summary: Summary) -> str:
    """The share of all offered requests that were good, and its parts."""
    low, high = summary.attainment_interval
    limits = ", ".join(f"{name.upper()} ≤ {limit * 1e3:g} ms" for name, limit in summary.limits.by_name().items())
    alone = [
        f"{name} alone {share:.1%}"
        for name, share in (("TTFT", summary.attainment_ttft), ("TPOT", summary.attainment_tpot))
        if share is not None
    ]
    return (
        f"[bold]attainment {summary.attainment:.1%}[/] (95 % interval {low:.1%} to {high:.1%}): {summary.num_good} of "
        f"{summary.num_offered} offered requests with {limits}" + "".join(f"; {part}" for part in alone)
    )


def misses_lines(summary: Summary) -> list[str]:
    """What the requests missed, and by which phases; nothing when all were good."""
    misses = summary.misses
    counts = {"TTFT": misses.ttft, "TPOT": misses.tpot, "E2EL": misses.e2el, "failed": misses.failed}
    told = [f"{name} {count}" for name, count in {**counts, "refused": misses.refused}.items() if count]
    lines = [f"missed, a request perhaps by several: {', '.join(told)}"] if told else []
    for name, phases in (("TTFT", misses.ttft_phases), ("TPOT", misses.tpot_phases)):
        if phases:
            each = ", ".join(f"{PHASE_NAMES[field]} {count}" for field, count in phases.items())
            lines.append(f"  {name} misses by the phase furthest beyond the median of the good requests: {each}")
    return lines


def returned_line(returned: Returned) -> str:
    """What became of the requests that were sent again."""
    return (
        f"sent again when they had been told to: {returned.num}, of which {returned.num_admitted} were admitted, and "
        f"{returned.num_good} of these were good"
    )


def phases_line(phases_s: Mapping[str, float]) -> str:
    """Mean time of each phase."""
    return "mean of each phase: " + ", ".join(
        f"{PHASE_NAMES[field]} {seconds * 1e3:.1f} ms" for field, seconds in phases_s.items()
    )


def tier_line(tier: TierUse) -> str:
    """What the second tier has found, and saved."""
    return (
        f"second tier: {tier.num_hits} blocks read back, {tier.hit_rate:.1%} of those that the pools did not hold, in "
        f"{tier.read_s:.1f} s that prompts waited; computing them would have taken {tier.saved_s:.1f} s more"
    )


def warnings(summary: Summary, run: Run) -> list[str]:
    """Reasons to doubt the figures."""
    return lag_warnings(summary.send_lag_s, summary.limits, run.max_concurrency)


def lag_warnings(send_lag_s: Distribution, limits: Limits, max_concurrency: int | None = None) -> list[str]:
    """That requests were sent too late for such limits."""
    most_s = MAX_SEND_LAG_S if limits.ttft_s is None else min(MAX_SEND_LAG_S, MAX_SEND_LAG_OF_TTFT * limits.ttft_s)
    lag_s = send_lag_s.percentile(99)
    if lag_s is None or lag_s <= most_s:
        return []
    lag = f"warning: the send lag's p99 is {lag_s * 1e3:.1f} ms, more than {most_s * 1e3:g} ms: "
    if max_concurrency is None:
        return [f"{lag}the generator did not keep up, so the server saw another load than the one asked for"]
    return [
        f"{lag}requests waited in the generator for one of {max_concurrency} places, which TTFT and attainment "
        "do not count"
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
