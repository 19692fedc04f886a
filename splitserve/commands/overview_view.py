"""Format the overview of a server as tables for a terminal of at least 80 columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from splitserve.client.overview import NodeOverview, Overview, Percentiles, TimesOverview
from splitserve.commands.terminal import PHASES, duration_of, plain_table

MS: Final = 1e3
BARS: Final = "▁▂▃▄▅▆▇█"
NUM_BARS: Final = 20  # seconds in the chart of the rate
FULL, BUSY = 0.9, 0.7  # KV cache usage shown in red and yellow
NO_NODE: Final = "no_node"
_TITLES: Final = {field.removesuffix("_s"): name for name, field, _, _ in PHASES} | {
    "kv_alloc": "alloc",
    "kv_transfer": "transfer",
    NO_NODE: "node wait",
}


@dataclass(slots=True)
class Scroll:
    """Index of the first node shown when the screen is too low for all nodes."""

    first: int = 0


@dataclass(frozen=True, slots=True)
class OverviewView:
    """Show the cluster, live requests by phase, rates, times with SLO attainment, and nodes.

    With `scroll`, as many nodes are shown as fit, and a line says which.
    """

    overview: Overview
    scroll: Scroll | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        nodes, scroll = self.overview.nodes, self.scroll
        above = _above(self.overview)
        yield above
        room = options.max_height - len(console.render_lines(above, options)) - 1  # the table header
        if not nodes:
            yield "no node is attached"
        elif scroll is None or len(nodes) <= room:
            yield _node_table(nodes)
        else:
            room = max(1, room - 1)
            scroll.first = max(0, min(scroll.first, len(nodes) - room))
            end = scroll.first + room
            yield _node_table(nodes[scroll.first : end])
            yield f"[dim]{scroll.first + 1} to {end} of {len(nodes)} nodes; ↓ and ↑ show others[/]"


def _above(overview: Overview) -> Group:
    num_nodes = len(overview.nodes)
    nodes = f"{num_nodes} node{'' if num_nodes == 1 else 's'}"
    line = f"[bold]{escape(overview.served_model_name)}[/] · {nodes} · up {duration_of(overview.uptime_s)}"
    return Group(
        Text.from_markup(line),
        "",
        _phase_table(overview),
        "",
        _rates(overview),
        "",
        _times_table(overview),
        "",
    )


def _phase_table(overview: Overview) -> Table:
    titles = [_TITLES.get(each.phase, each.phase) for each in overview.phases]
    table = plain_table(numbers=("live", *titles))
    numbers = [each.num_sequences for each in overview.phases]
    table.add_row(*(f"[bold]{number}[/]" if number else "0" for number in (sum(numbers), *numbers)))
    return table


def _rates(overview: Overview) -> Text:
    rates = overview.rates
    generation, prompt = short(rates.tokens_per_s), short(rates.prompt_tokens_per_s)
    line = f"tokens/s: {generation} generation, {prompt} prompt · {rates.requests_per_s:.1f} requests/s  "
    text = Text(line)
    return text.append(bars(overview.recent_tokens_per_s[-NUM_BARS:]), style="green")


def _times_table(overview: Overview) -> Table:
    numbers = ("reqs", "TTFT ms p50/90/99", "TPOT ms p50/90/99", "attained")
    table = plain_table(f"last {overview.window_s:.0f} s", numbers=numbers, gap=1)
    table.add_column("SLO", overflow="ellipsis", no_wrap=True)
    for each in overview.times:
        name = escape(each.slo_class) or "all"
        times = _percentiles(each.ttft_s), _percentiles(each.tpot_s)
        table.add_row(name, str(each.num_sequences), *times, _attainment(each), escape(each.limits))
    if not overview.times:
        table.add_row("-", "0", "-", "-", "-", "")
    return table


def _percentiles(told: Percentiles | None) -> str:
    return "-" if told is None else "/".join(milliseconds(each) for each in (told.p50, told.p90, told.p99))


def _attainment(each: TimesOverview) -> str:
    return f"{each.num_met / each.num_limited:.0%}" if each.num_limited else "-"


def _node_table(nodes: Sequence[NodeOverview]) -> Table:
    """Return the table of nodes.

    chunk is the limit of prompt tokens a step, queue the prompt tokens that wait, slots the used and available running
    slots, incoming the sequences that other nodes still prefill, KV the KV cache usage, hits the prefix cache hit rate,
    prompt/s and gen/s prompt tokens/s and generation tokens/s.
    """
    numbers = ("chunk", "queue", "slots", "incoming", "KV", "hits", "prompt/s", "gen/s", "step ms")
    table = plain_table("node", "role", numbers=numbers, gap=1)
    for column in table.columns[1:]:  # so that the name column shrinks
        column.no_wrap, column.overflow = True, "ellipsis"
    for node in nodes:
        table.add_row(*_node_row(node))
    return table


def _node_row(node: NodeOverview) -> "tuple[_Name | str, ...]":
    load = node.load
    shape, used = load.shape, 1 - load.num_blocks_free / load.num_blocks if load.num_blocks else 0.0
    style = "red" if used >= FULL else "yellow" if used >= BUSY else "green"
    return (
        _Name(load.name),
        load.role if load.state == "ready" else f"[yellow]{escape(load.state)}[/]",
        short(shape.prompt_tokens) if shape.prefills else "-",
        short(node.num_tokens_to_compute),
        f"{node.num_sequences}/{shape.slots}" if shape.decodes else "-",
        str(node.num_incoming),
        f"[{style}]{used:.0%}[/]",
        f"{load.num_cached_tokens / load.num_prompt_tokens:.0%}" if load.num_prompt_tokens else "-",
        short(node.prompt_tokens_per_s),
        short(node.tokens_per_s),
        milliseconds(load.step_s) if load.step_s else "-",
    )


@dataclass(frozen=True, slots=True)
class _Name:
    """Name of a node, shortened in the middle to the available width, since names often differ at their ends."""

    name: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, len(self.name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(elided(self.name, options.max_width), no_wrap=True)


def elided(name: str, most: int) -> str:
    """Return the name in at most `most` characters: longer ones lose their middle, and keep more of their end."""
    if len(name) <= most:
        return name
    num_first = (most - 1) // 3
    return f"{name[:num_first]}…{name[len(name) - (most - 1 - num_first) :]}"


def bars(values: Sequence[float]) -> str:
    """Return a bar for each value, scaled to the largest; empty when all are 0."""
    most = max(values, default=0.0)
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in values) if most > 0 else ""


def short(number: float) -> str:
    """Return a number below 10^12 in at most five characters, such as 1.23k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def milliseconds(seconds: float) -> str:
    """Return seconds as a text in milliseconds, with one decimal below 10."""
    return f"{seconds * MS:.1f}" if seconds * MS < 9.95 else f"{seconds * MS:.0f}"
