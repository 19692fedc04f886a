"""Draw pictures of loads as PNG files. matplotlib is imported when one is drawn; it needs no display."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from splitserve_bench.serve.metrics import Limits, tpot_s, ttft_s
from splitserve_bench.serve.records import Outcome, is_complete
from splitserve_bench.serve.stages import StageFindings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI: Final = 120
SKEWED: Final = 20  # the largest value over the median from which an axis is logarithmic
LINES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS: Final = "osD^vPX"
STYLES: Final = ("-", "--", ":")  # of each round through the colours
EDGE_COLOUR: Final = "#606060"
# What becomes of requests, from the bottom of a bar to its top: name, field of Window, colour.
PARTS: Final = (
    ("good", "num_good", "#009e73"),
    ("late", "num_late", "#e69f00"),
    ("refused, told when to come back", "num_refused_until", "#56b4e9"),
    ("refused", "num_refused", "#0072b2"),
    ("failed", "num_failed", "#202020"),
)


@dataclass(frozen=True, slots=True)
class AttainmentPoint:
    """The share of good requests of one contender at one rate, with its 95 % interval."""

    contender: str
    rate_per_s: float
    attainment: float
    interval: tuple[float, float]


def plot_attainment(
    points: Sequence[AttainmentPoint], goal: float, path: Path, *, rate: str = "request rate, requests/s"
) -> None:
    """Draw attainment by request rate to a file: a line with intervals for each contender, and the goal.

    `rate` labels the axis of rates.
    """
    figure = new_figure(7.5, 4.5)
    axes = figure.add_subplot()
    contenders = list(dict.fromkeys(point.contender for point in points))
    for number, contender in enumerate(contenders):
        turn, colour = divmod(number, len(LINES))
        own = sorted((point for point in points if point.contender == contender), key=lambda point: point.rate_per_s)
        shares = [point.attainment * 100 for point in own]
        below = [max(0.0, share - point.interval[0] * 100) for share, point in zip(shares, own, strict=True)]
        above = [max(0.0, point.interval[1] * 100 - share) for share, point in zip(shares, own, strict=True)]
        axes.errorbar(
            [point.rate_per_s for point in own],
            shares,
            yerr=(below, above),
            label=contender,
            color=LINES[colour],
            marker=MARKERS[colour],
            linestyle=STYLES[turn % len(STYLES)],
            markersize=5,
            linewidth=1.6,
            elinewidth=1,
            capsize=3,
        )
    axes.axhline(goal * 100, color=EDGE_COLOUR, linestyle="--", linewidth=1)
    axes.annotate(
        f"{goal * 100:g}%",
        (1, goal * 100),
        (4, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
    )
    axes.set(ylim=(0, 102), xlabel=rate, ylabel="attainment, % of offered requests")
    axes.set_xlim(left=0)
    axes.set_title("Requests within their limits, with 95 % intervals", loc="left")
    if contenders:
        axes.legend(frameon=False, loc="lower left")
    save_figure(figure, path)


def plot_latencies(outcomes: Sequence[Outcome], limits: Limits, path: Path) -> None:
    """Draw to a file which share of the offered requests had at most so much TTFT and TPOT, with the limits.

    Failed and refused requests never reach a value, so a curve ends below 100 %; an output of one token has no TPOT,
    and counts from the left edge on. So the curve's height at a limit is the attainment of that limit alone.
    """
    figure = new_figure(10, 4.2)
    ttft_axes, tpot_axes = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.06})
    complete = [outcome for outcome in outcomes if is_complete(outcome)]
    offered = len(outcomes)
    first_s = [value for value in map(ttft_s, complete) if value is not None]
    timed = [value for value in map(tpot_s, complete) if value is not None]
    num_below = len(complete) - len(timed)
    _cumulative(ttft_axes, first_s, 0, offered, limits.ttft_s)
    _cumulative(tpot_axes, timed, num_below, offered, limits.tpot_s)
    ttft_axes.set(ylim=(0, 102), xlabel="TTFT, ms", ylabel="share of offered requests, %")
    tpot_axes.set_xlabel("TPOT, ms")
    ttft_axes.set_title(f"Time to first token{_met(first_s, limits.ttft_s, 0, offered)}", loc="left")
    tpot_axes.set_title(f"Time per token after the first{_met(timed, limits.tpot_s, num_below, offered)}", loc="left")
    save_figure(figure, path)


def plot_stages(findings: StageFindings, path: Path) -> None:
    """Draw a bar for each window to a file, as high as the rate of requests due in it, divided by what became of them.

    The rates of the stages are lines, and so is the moment from which on goodput was back.
    """
    figure = new_figure(10, 4.5)
    axes = figure.add_subplot()
    windows = findings.windows
    widths_s = [window.end_s - window.start_s for window in windows]
    below = [0.0] * len(windows)
    for name, field, colour in PARTS:
        heights = [getattr(window, field) / width_s for window, width_s in zip(windows, widths_s, strict=True)]
        axes.bar(
            [window.start_s for window in windows],
            heights,
            widths_s,
            bottom=below,
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
        below = [low + height for low, height in zip(below, heights, strict=True)]
    edges_s, rates = [0.0, *(stage.end_s for stage in findings.stages)], [each.rate_per_s for each in findings.stages]
    axes.stairs(rates, edges_s, color=EDGE_COLOUR, linewidth=1.4, label="rate of the stage")
    if findings.back_s is not None:
        back_s = findings.highest["end_s"] + findings.back_s
        axes.axvline(back_s, color=LINES[1], linestyle="--", linewidth=1.4)
    axes.set(xlabel="seconds after the start of the load, when the request was due", ylabel="requests/s")
    axes.set_xlim(edges_s[0], edges_s[-1])
    axes.set_ylim(0, 1.05 * max(*below, *rates))
    axes.set_title(findings.back_sentence, loc="left", fontsize="medium")
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    save_figure(figure, path)


def _cumulative(axes: "Axes", values_s: Sequence[float], num_below: int, offered: int, limit_s: float | None) -> None:
    """Draw the curve of these values, which starts from `num_below` requests below all of them, and its limit."""
    values_ms = sorted(value * 1e3 for value in values_s)
    heights = [100 * (num_below + number) / offered for number in range(len(values_ms) + 1)] if offered else [0.0]
    is_skewed = bool(values_ms) and values_ms[0] > 0 and values_ms[-1] > SKEWED * values_ms[len(values_ms) // 2]
    if is_skewed:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    marks = values_ms + ([] if limit_s is None else [limit_s * 1e3])
    left, right = (min(marks) / 1.3, max(marks) * 1.3) if is_skewed else (0.0, 1.05 * max(marks, default=0.0) or 1.0)
    axes.plot([left, *values_ms, right], [*heights, heights[-1]], drawstyle="steps-post", color=LINES[0], linewidth=1.8)
    axes.set_xlim(left, right)
    if limit_s is not None:
        axes.axvline(limit_s * 1e3, color=LINES[1], linestyle="--", linewidth=1.4)


def _met(values_s: Sequence[float], limit_s: float | None, num_below: int, offered: int) -> str:
    """Return in words which share is within the limit; `num_below` requests have no value and meet any limit."""
    if limit_s is None or not offered:
        return ""
    met = (num_below + sum(value <= limit_s for value in values_s)) / offered
    return f": {met:.1%} within {limit_s * 1e3:g} ms"


def new_figure(width: float, height: float) -> "Figure":
    """Return a new figure, sizes in inches. It is not pyplot's, which keeps figures and may want a display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure to a PNG file, in the style of all figures."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, format="png")
