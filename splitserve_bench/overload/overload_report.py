"""What an overload did, as tables for people."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from splitserve.commands.terminal import plain_table
from splitserve_bench.overload.findings import Findings
from splitserve_bench.overload.windows import Window
from splitserve_bench.serve.serve_report import lag_warnings

COUNTS = ("offered", "good", "good/s", "share", "late", "refused until", "refused", "failed")
MEANING = (
    "requests count where they were due; late ones are complete; refused until: turned away, and told when to come back"
)


def overload_view(findings: Findings) -> Group:
    """By stage and by window, and whether goodput came back."""
    stages = plain_table("stage", numbers=("req/s", *COUNTS))
    for stage, window in zip(findings.stages, findings.by_stage, strict=True):
        stages.add_row(_seconds(window), f"{stage.rate:.3g}", *_cells(window))
    lines = [f"[bold]{back_sentence(findings)}[/]"]
    lines += [f"[yellow]{line}[/]" for line in lag_warnings(findings.send_lag_s, findings.limits)]
    return Group(stages, "", _window_table(findings.windows), MEANING, "", *lines)


def back_sentence(findings: Findings) -> str:
    """How long after the overload goodput was back."""
    if not findings.is_sent_after:
        return "Nothing was sent after the overload: whether goodput comes back is not known."
    wanted = f"{findings.attainment:.0%} of the requests good"
    if findings.back_s is None:
        return f"Goodput was not back within the {findings.seconds_after:g} s after the overload: {wanted}."
    if findings.back_s == 0:
        return f"Goodput was back at once after the overload: {wanted}."
    return f"Goodput was back for what came {findings.back_s:g} s after the overload and later: {wanted}."


def _window_table(windows: Sequence[Window]) -> Table:
    table = plain_table("window", numbers=COUNTS)
    for window in windows:
        table.add_row(_seconds(window), *_cells(window))
    return table


def _seconds(window: Window) -> str:
    return f"{window.start_s:g} to {window.end_s:g} s"


def _cells(window: Window) -> list[str]:
    share = "-" if window.attainment is None else f"{window.attainment:.0%}"
    others = (window.num_late, window.num_refused_until, window.num_refused, window.num_failed)
    return [str(window.num_offered), str(window.num_good), f"{window.goodput_per_s:.2f}", share, *map(str, others)]
