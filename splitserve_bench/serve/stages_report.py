"""What became of a load in stages, as tables and a picture for people. matplotlib is imported when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Group
from rich.table import Table

from splitserve.commands.terminal import plain_table
from splitserve_bench.serve.metrics import Distribution
from splitserve_bench.serve.plots import new_figure, save_figure
from splitserve_bench.serve.serve_options import CAPACITY_CONCURRENCY, CAPACITY_REQUESTS
from splitserve_bench.serve.windows import HighestStage, StageFindings, Window

COUNTS: Final = ("offered", "good", "good/s", "share", "late", "refused until", "refused", "failed")
MEANING: Final = (
    "requests count where they were due, and again where they came back; late ones are complete; refused until: turned "
    "away, and told when to come back"
)
# What becomes of requests, from the bottom of a bar to its top: name, field of Window, colour.
PARTS: Final = (
    ("good", "num_good", "#009e73"),
    ("late", "num_late", "#e69f00"),
    ("refused, told when to come back", "num_refused_until", "#56b4e9"),
    ("refused", "num_refused", "#0072b2"),
    ("failed", "num_failed", "#202020"),
)
EDGE: Final = "#606060"


def capacity_line(rate_per_s: float) -> str:
    """The capacity, and how it was measured."""
    return f"capacity: {rate_per_s:.4g} requests/s ({CAPACITY_REQUESTS} requests, {CAPACITY_CONCURRENCY} at a time)"


def stages_view(findings: StageFindings) -> Group:
    """By stage and by window, how the highest stage went, and whether goodput came back."""
    stages = plain_table("stage", numbers=("req/s", *COUNTS))
    for stage, window in zip(findings.stages, findings.by_stage, strict=True):
        stages.add_row(_seconds(window), f"{stage.rate_per_s:.3g}", *_cells(window))
    lines = [*highest_lines(findings.highest), f"[bold]{back_sentence(findings)}[/]"]
    return Group(stages, "", _window_table(findings.windows), MEANING, "", *lines)


def highest_lines(highest: HighestStage) -> list[str]:
    """Goodput of the highest stage beside that before it, and what its requests met with."""
    window = highest.window
    before = ""
    if highest.mean_before_per_s is not None and highest.best_before_per_s is not None:
        before = (
            f": {_percent(highest.of_mean_before)} of the {highest.mean_before_per_s:.2f} of the stage before, "
            f"{_percent(highest.of_best_before)} of the {highest.best_before_per_s:.2f} of its best window"
        )
    lines = [
        f"highest stage, {_seconds(window)}: {window.goodput_per_s:.2f} good requests/s{before}",
        f"  admitted: {window.num_admitted} of {window.num_offered}, {_percent(highest.admitted_good)} of them good; "
        f"TTFT {_milliseconds(highest.ttft_s, p90=True)}",
    ]
    if highest.refusal_s.values:
        lines.append(
            f"  refused: {len(highest.refusal_s.values)}; from sending to refusal {_milliseconds(highest.refusal_s)}"
        )
    return lines


def back_sentence(findings: StageFindings) -> str:
    """How long after the highest stage goodput was back."""
    if not findings.is_sent_after:
        return "Nothing was sent after the highest stage: whether goodput comes back is not known."
    wanted = f"{findings.attainment:.0%} of the requests good"
    if findings.back_s is None:
        return f"Goodput was not back within the {findings.seconds_after:g} s after the highest stage: {wanted}."
    if findings.back_s == 0:
        return f"Goodput was back at once after the highest stage: {wanted}."
    return f"Goodput was back for what came {findings.back_s:g} s after the highest stage and later: {wanted}."


def plot_stages(findings: StageFindings, path: Path) -> None:
    """A bar for each window, as high as the rate of what was offered in it, by what became of that; with the rates of
    the stages, and the moment from which on goodput was back."""
    figure = new_figure(10, 4.5)
    axes = figure.add_subplot()
    windows = findings.windows
    below = [0.0] * len(windows)
    for name, field, colour in PARTS:
        heights = [_per_s(window, field) for window in windows]
        axes.bar(
            [window.start_s for window in windows],
            heights,
            [window.end_s - window.start_s for window in windows],
            bottom=below,
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
        below = [low + height for low, height in zip(below, heights, strict=True)]
    edges_s, rates = [0.0, *(stage.end_s for stage in findings.stages)], [each.rate_per_s for each in findings.stages]
    axes.stairs(rates, edges_s, color=EDGE, linewidth=1.4, label="rate of the stage")
    if findings.back_s is not None:
        back_s = findings.highest.window.end_s + findings.back_s
        axes.axvline(back_s, color="#d55e00", linestyle="--", linewidth=1.4)
    axes.set(xlabel="seconds after the start of the load, when the request was due", ylabel="requests/s")
    axes.set_xlim(edges_s[0], edges_s[-1])
    axes.set_ylim(0, 1.05 * max(*below, *rates))
    axes.set_title(back_sentence(findings), loc="left", fontsize="medium")
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    save_figure(figure, path)


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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(times_s: Distribution, *, p90: bool = False) -> str:
    named = {"median": times_s.median, **({"p90": times_s.percentile(90)} if p90 else {}), "max": times_s.max}
    return ", ".join(f"{name} {'-' if each is None else f'{each * 1e3:.0f}'} ms" for name, each in named.items())


def _per_s(window: Window, field: str) -> float:
    count: int = getattr(window, field)
    return count / (window.end_s - window.start_s)
