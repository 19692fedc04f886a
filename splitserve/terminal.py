"""What the commands show: answers on stdout, everything around them on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from splitserve.answers import Completion, Loads, ModelInfo, NodeInfo, NodeLoad, ServerInfo, Timeline

BAR_WIDTH: Final = 60
FILE_WIDTH: Final = 160
MIB: Final = 2**20

# Phase, the timeline's field, and its part of the bar with and without colours.
PHASES: Final = (
    ("prefill queue", "prefill_queue_s", "·", "magenta"),
    ("prefill", "prefill_s", "█", "blue"),
    ("wait for credit", "credit_wait_s", "-", "red"),
    ("transfer", "transfer_s", "▓", "yellow"),
    ("decode queue", "decode_queue_s", "·", "magenta"),
    ("decode", "decode_s", "▒", "green"),
)

stdout: Final = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
stderr: Final = Console(stderr=True, highlight=False)


def report(line: str) -> None:
    """One line of progress or news."""
    stderr.print(escape(line), soft_wrap=True)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner beside a text that may change; without a terminal, a line for each change."""
    if stderr.is_terminal:
        with stderr.status(escape(text)) as status:
            yield lambda text: status.update(escape(text))
        return
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        if text != shown:
            report(text)
        shown = text

    show(text)
    yield show


def timeline_view(completion: Completion) -> Group:
    """Where a request's time went: a table of its phases, and one bar in proportion."""
    timeline = completion.timeline
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    table.add_column("where")
    for name, field, mark, style in PHASES:
        seconds = getattr(timeline, field)
        share = seconds / timeline.e2e_s if timeline.e2e_s else 0.0
        table.add_row(f"[{style}]{mark}[/] {name}", f"{seconds * 1e3:.1f}", f"{share:.0%}", _where(timeline, field))
    table.add_row("  [bold]end to end[/]", f"[bold]{timeline.e2e_s * 1e3:.1f}[/]", "", _summary(completion))
    return Group(table, _bar(timeline))


def status_view(model: ModelInfo, server: ServerInfo, loads: Loads) -> Group:
    """A line about the cluster and a table of its nodes."""
    line = (
        f"[bold]{escape(model.served_model_name)}[/] ({escape(model.architecture)}, {model.max_model_len} tokens), "
        f"{loads.num_live_requests} live requests, up {server.uptime_s:.0f} s"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("node", "role", "state"):
        table.add_column(title)
    for title in ("running", "waiting", "free blocks", "step ms", "MiB"):
        table.add_column(title, justify="right")
    table.add_column("attention")
    infos = {node.name: node for node in server.nodes}
    for load in sorted(loads.nodes, key=lambda load: (load.role != "prefill", load.name)):
        table.add_row(*_node_row(load, infos.get(load.name)))
    return Group(line, table if loads.nodes else "no node is attached")


def _node_row(load: NodeLoad, info: NodeInfo | None) -> tuple[str, ...]:
    return (
        escape(load.name),
        load.role,
        f"[{'green' if load.state == 'ready' else 'yellow'}]{load.state}[/]",
        str(load.num_running),
        str(load.num_waiting),
        f"{load.num_blocks_free}/{load.num_blocks}",
        f"{load.step_s * 1e3:.1f}",
        f"{load.rss_bytes / MIB:.0f}",
        escape(info.engine.get("attention", "")) if info is not None else "",
    )


def _where(timeline: Timeline, field: str) -> str:
    if field.startswith("prefill"):
        return escape(timeline.prefill_node)
    if field.startswith("decode"):
        return escape(timeline.decode_node)
    return escape(f"{timeline.prefill_node} → {timeline.decode_node}")


def _summary(completion: Completion) -> str:
    timeline = completion.timeline
    tokens = f"{completion.prompt_tokens} + {completion.completion_tokens} tokens"
    restarts = f", {timeline.num_restarts} restarts" if timeline.num_restarts else ""
    return f"{tokens}, first after {timeline.ttft_s * 1e3:.1f} ms{restarts}"


def _bar(timeline: Timeline) -> Text:
    total_s = sum(getattr(timeline, field) for _, field, _, _ in PHASES)
    bar, passed_s = Text("  "), 0.0
    for _, field, mark, style in PHASES:
        start = round(BAR_WIDTH * passed_s / total_s) if total_s else 0
        passed_s += getattr(timeline, field)
        end = round(BAR_WIDTH * passed_s / total_s) if total_s else 0
        bar.append(mark * (end - start), style=style)
    return bar
