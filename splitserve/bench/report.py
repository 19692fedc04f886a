"""Figures as a table for people."""

from rich.table import Table

from splitserve.bench.engine import EngineBench, EngineFigures

MIB = 2**20


def figures_table(figures: EngineFigures, sizes: EngineBench) -> Table:
    """Each figure with what we want it to be, where we want something."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("figure")
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
