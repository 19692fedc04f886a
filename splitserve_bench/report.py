"""Figures as tables for people."""

import dataclasses
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from serving_core.units import MIB, size_of
from splitserve.commands.terminal import plain_table
from splitserve_bench.accuracy.kv_cache import KVAccuracy
from splitserve_bench.accuracy.weights_accuracy import WeightsAccuracy
from splitserve_bench.clusters.cluster import ClusterBench, ClusterFigures
from splitserve_bench.clusters.overlap import OverlapFigures, pays_from
from splitserve_bench.clusters.ranks import RanksFigures
from splitserve_bench.clusters.reuse import ReuseFigures
from splitserve_bench.clusters.tiers import TierFigures
from splitserve_bench.corridor.transfer import TransferFigures, TransferReport
from splitserve_bench.corridor.yardsticks import YARDSTICKS, Spread


def cluster_table(figures: ClusterFigures, sizes: ClusterBench) -> Table:
    """Each figure with what we want it to be, where we want something."""
    table = plain_table("figure")
    table.add_column("measured", justify="right")
    table.add_column("wanted")
    table.add_row("process start to first token", f"{figures.first_token_s:.1f} s", "≤ 10 s")
    for name, num_bytes in figures.rss_bytes.items():
        table.add_row(f"resident memory, {name}", f"{num_bytes / MIB:.0f} MiB", "")
    table.add_row(
        f"prefill to first decode step, {sizes.prompt_tokens} tokens, beyond the copy",
        f"{figures.handoff_beyond_copy_s * 1e3:.1f} ms",
        "≤ 5 ms",
    )
    table.add_row(f"  with the copy of its {figures.kv_bytes / MIB:.1f} MiB", f"{figures.handoff_s * 1e3:.1f} ms", "")
    table.add_row(
        f"TPOT at the client / decode step, {sizes.num_streams} streams",
        f"{figures.tpot_ratio:.2f}",
        "≤ 1.15",
    )
    table.add_row("  TPOT at the client", f"{figures.client_tpot_s * 1e3:.1f} ms", "")
    table.add_row("  decode step", f"{figures.step_s * 1e3:.1f} ms", "")
    table.add_row(
        "coordinator's CPU time per streamed token", f"{figures.coordinator_cpu_s_per_token * 1e6:.0f} µs", ""
    )
    return table


def transfer_views(reports: Sequence[TransferReport]) -> Group:
    """One below the other."""
    return Group(*(part for each in reports for part in (transfer_view(each), "")))


def transfer_view(measured: TransferReport) -> Group:
    """The transfers, and the yardsticks beside them."""
    layout = measured.layout
    line = (
        f"{layout.num_layers} layers, {layout.heads_text}, blocks of {layout.block_size} tokens; "
        f"{measured.num_cpus} CPUs for both ends"
    )
    times = ("ms", "median", "quartiles")
    shares = ("sender CPU ms", "checksums", "receiver CPU ms", "checksums")
    numbers = ("prompt tokens", "KV", *times, "GB/s", "of plain", "of Unix socket", "of memory copy", *shares)
    transfers = plain_table("transport", numbers=numbers)
    for figures in measured.transfers:
        transfers.add_row(*_transfer_row(figures))
    plain = plain_table("prompt tokens", numbers=tuple(f"{name}, GB/s" for name in YARDSTICKS))
    for prompt_tokens in dict.fromkeys(figures.prompt_tokens for figures in measured.yardsticks):
        rates = {each.name: each.bytes_per_s for each in measured.yardsticks if each.prompt_tokens == prompt_tokens}
        plain.add_row(str(prompt_tokens), *(f"{rates[name] / 1e9:.2f}" for name in YARDSTICKS))
    note = "ms: from finish to commit, the fastest; checksums: their share in the CPU time of that process"
    return Group(line, transfers, note, "", "yardsticks, for the same bytes:", plain)


def tiers_table(all_figures: Sequence[TierFigures]) -> Table:
    """What each kind of second tier saved."""
    times = ("TTFT ms, later turns", "TTFT s, sum")
    tier = ("hit rate", "read", "in s", "written", "in s", "saved s")
    table = plain_table("blocks beyond the pool", numbers=("not computed", *times, *tier, "equal answers"))
    for figures in all_figures:
        done = figures.tier
        table.add_row(
            figures.name,
            f"{figures.cached_share:.0%}",
            f"{figures.later_ttft_s * 1e3:.0f}",
            f"{figures.all_ttft_s:.2f}",
            f"{figures.hit_rate:.0%}" if done else "-",
            size_of(done.read_bytes) if done else "-",
            f"{done.read_s:.2f}" if done else "-",
            size_of(done.written_bytes) if done else "-",
            f"{done.write_s:.2f}" if done else "-",
            f"{done.saved_s:.2f}" if done else "-",
            f"{figures.num_equal}/{figures.num_requests}",
        )
    return table


def ranks_table(all_figures: Sequence[RanksFigures]) -> Table:
    """What each way of dividing the model gave."""
    times = ("start s", "prompt ms", "token ms", "prompts at once, tokens/s", "token ms, at once")
    table = plain_table("the model in", numbers=(*times, "weights, by rank", "resident, by rank", "equal answers"))
    for figures in all_figures:
        table.add_row(
            str(figures.division),
            f"{figures.start_s:.1f}",
            f"{figures.lone_prompt_s * 1e3:.0f}",
            f"{figures.lone_tpot_s * 1e3:.1f}",
            f"{figures.prompt_tokens_per_s:.0f}",
            f"{figures.tpot_s * 1e3:.1f}",
            ", ".join(map(size_of, figures.weight_bytes)),
            ", ".join(map(size_of, figures.rss_bytes)),
            f"{figures.num_equal}/{figures.num_answers}",
        )
    return table


def reuse_table(all_figures: Sequence[ReuseFigures]) -> Table:
    """What each kind of requests saved."""
    numbers = ("requests", "prompt tokens", "not computed", "KV sent", "not sent", "TTFT ms without", "TTFT ms with")
    table = plain_table("kind of request", numbers=(*numbers, "equal answers"))
    for figures in all_figures:
        table.add_row(
            figures.name,
            str(figures.num_requests),
            str(figures.prompt_tokens),
            f"{figures.cached_share:.0%}",
            size_of(figures.kv_bytes),
            f"{figures.saved_share:.0%}",
            f"{figures.ttft_without_s * 1e3:.1f}",
            f"{figures.ttft_with_s * 1e3:.1f}",
            f"{figures.num_equal}/{figures.num_requests}",
        )
    return table


def overlap_view(all_figures: Sequence[OverlapFigures]) -> Group:
    """The times with overlap and without, in ms, and from which length on it pays."""
    columns = ("TTFT", "handoff", "fastest decode start")
    table = plain_table(
        "prompt tokens", numbers=tuple(f"{name}, {how}" for name in columns for how in ("never", "always"))
    )
    for figures in all_figures:
        pairs = zip(dataclasses.astuple(figures.never), dataclasses.astuple(figures.always), strict=True)
        table.add_row(str(figures.prompt_tokens), *(f"{each * 1e3:.1f}" for pair in pairs for each in pair))
    least = pays_from(all_figures)
    verdict = "overlap does not pay at these lengths" if least is None else f"overlap pays from {least} tokens on"
    return Group("milliseconds, overlap never or always:", table, verdict)


def accuracy_table(rows: Sequence[KVAccuracy]) -> Table:
    """What each dtype does to the answers."""
    numbers = ("context tokens", "answer tokens", "same likeliest token", "same answer", "mean error of logprobs")
    table = plain_table("KV dtype", numbers=(*numbers, "largest", "KV a token"))
    for row in rows:
        table.add_row(
            row.kv_cache_dtype,
            str(row.context_tokens),
            str(row.num_tokens),
            f"{row.same_choice:.1%}",
            f"{row.same_answer:.1%}",
            f"{row.mean_error:.4f}",
            f"{row.largest_error:.3f}",
            size_of(row.kv_bytes_per_token),
        )
    return table


def weights_table(rows: Sequence[WeightsAccuracy]) -> Table:
    """What quantized weights do to the answers; the first row is the model as it is."""
    numbers = ("tokens", "perplexity", "same likeliest token", "same answer", "mean error of logprobs", "largest")
    table = plain_table("weights", numbers=(*numbers, "memory"))
    for row in rows:
        table.add_row(
            row.quantization,
            str(row.num_tokens),
            f"{row.perplexity:.2f}",
            f"{row.same_choice:.1%}",
            f"{row.same_answer:.1%}",
            f"{row.mean_error:.4f}",
            f"{row.largest_error:.3f}",
            size_of(row.weight_bytes),
        )
    return table


def _transfer_row(figures: TransferFigures) -> list[str]:
    return [
        figures.transport,
        str(figures.prompt_tokens),
        size_of(figures.num_bytes),
        f"{figures.commit.fastest_s * 1e3:.2f}",
        f"{figures.commit.median_s * 1e3:.2f}",
        _quartiles(figures.commit),
        f"{figures.bytes_per_s / 1e9:.2f}",
        f"{figures.yardstick_ratio:.0%} {figures.yardstick}",
        f"{figures.unix_ratio:.0%}",
        f"{figures.copy_ratio:.0%}",
        f"{figures.sender_cpu_s * 1e3:.2f}",
        f"{figures.sender_checksum_share:.0%}",
        "" if figures.receiver_cpu_s is None else f"{figures.receiver_cpu_s * 1e3:.2f}",
        "" if figures.receiver_checksum_share is None else f"{figures.receiver_checksum_share:.0%}",
    ]


def _quartiles(spread: Spread) -> str:
    return f"{spread.low_s * 1e3:.2f}-{spread.high_s * 1e3:.2f}"
