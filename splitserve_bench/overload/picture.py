"""A picture of an overload, as a PNG file."""

from pathlib import Path
from typing import Final

from splitserve_bench.overload.findings import Findings
from splitserve_bench.overload.overload_report import back_sentence
from splitserve_bench.overload.windows import Window
from splitserve_bench.serve.plots import new_figure, save_figure

# What becomes of requests, from the bottom of a bar to its top: name, field of Window, colour.
PARTS: Final = (
    ("good", "num_good", "#009e73"),
    ("late", "num_late", "#e69f00"),
    ("refused, told when to come back", "num_refused_until", "#56b4e9"),
    ("refused", "num_refused", "#0072b2"),
    ("failed", "num_failed", "#202020"),
)
EDGE: Final = "#606060"


def plot_overload(findings: Findings, path: Path) -> None:
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
    edges = [findings.stages[0].start_s, *(stage.end_s for stage in findings.stages)]
    axes.stairs([stage.rate for stage in findings.stages], edges, color=EDGE, linewidth=1.4, label="rate of the stage")
    if findings.back_s is not None:
        axes.axvline(findings.overload_s[1] + findings.back_s, color="#d55e00", linestyle="--", linewidth=1.4)
    axes.set(xlabel="seconds after the start of the load, when the request was due", ylabel="requests/s")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.05 * max(*below, *(stage.rate for stage in findings.stages)))
    axes.set_title(back_sentence(findings), loc="left", fontsize="medium")
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    save_figure(figure, path)


def _per_s(window: Window, field: str) -> float:
    count: int = getattr(window, field)
    return count / (window.end_s - window.start_s)
