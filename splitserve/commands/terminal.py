"""Write to the terminal: generated text to stdout, everything else to stderr."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from coordinator.control.nodes import FLAP_WINDOW_S, MIN_FLAPS
from serving_core.shapes import Shape
from serving_core.units import MIB, size_of
from splitserve.client.answers import (
    Completion,
    Loads,
    ModelInfo,
    NodeInfo,
    NodeLoad,
    ServerInfo,
    SloClassLoad,
    Timeline,
)

BAR_WIDTH: Final = 60
FILE_WIDTH: Final = 160
SLOW_HEARTBEAT_S: Final = 2.0

# Phase, field of the timeline, and its mark in the bar without and with colors.
PHASES: Final = (
    ("prefill queue", "prefill_queue_s", "·", "magenta"),
    ("prefill", "prefill_s", "█", "blue"),
    ("KV alloc", "kv_alloc_s", "-", "red"),
    ("KV transfer", "kv_transfer_s", "▓", "yellow"),
    ("decode queue", "decode_queue_s", "·", "magenta"),
    ("decode", "decode_s", "▒", "green"),
)

PHASE_NAMES: Final = {field: name for name, field, _, _ in PHASES}

stdout: Final = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
stderr: Final = Console(stderr=True, highlight=False)


def report(line: str) -> None:
    """Print a line of progress or news on stderr."""
    stderr.print(escape(line), soft_wrap=True)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr with a text within the context; yield a function that changes the text.

    Without a terminal, each change of the text is a line.
    """
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


@contextmanager
def counting(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar on stderr within the context; yield a function (done, total, text) that updates it.

    Without a terminal, each change of the text is a line.
    """
    if not stderr.is_terminal:
        with waiting(text) as show:
            yield lambda done, total, text: show(text)
        return
    with Progress(SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=stderr,
                  transient=True) as bar:  # fmt: skip
        task = bar.add_task(escape(text), total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=escape(text))


@contextmanager
def shown(*, is_live: bool, is_full: bool = False) -> Iterator[Callable[[RenderableType], None]]:
    """Return a context manager that yields a function which shows a view on stdout.

    With `is_live` on a terminal each view replaces the one before, on the full screen with `is_full`; otherwise views
    are printed one below the other.
    """
    if is_live and stdout.is_terminal:
        with Live(console=stdout, auto_refresh=False, screen=is_full) as live:
            yield lambda view: live.update(view, refresh=True)
    else:
        yield stdout.print


def timeline_view(completion: Completion, request_id: str) -> Group:
    """Return where a request's time went: a table of its phases, a proportional bar, and the request's id."""
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
    return Group(table, *_savings(completion), *_limits(completion), _bar(timeline), Text(f"  request {request_id}"))


def status_view(model: ModelInfo, server: ServerInfo, loads: Loads) -> Group:
    """Return a summary of the cluster, and tables of its nodes, their KV caches and SLO attainment."""
    requests = "request" if loads.num_live_requests == 1 else "requests"
    line = (
        f"[bold]{escape(model.served_model_name)}[/] ({escape(model.architecture)}, context of {model.max_model_len} "
        f"tokens), {loads.num_live_requests} live {requests}, up {duration_of(server.uptime_s)}"
    )
    lines = [line]
    if defaults := model.default_sampling_params:
        lines.append("defaults: " + ", ".join(f"{name} {value:g}" for name, value in defaults.items()))
    nodes = sorted(loads.nodes, key=lambda load: (load.role != "prefill", load.name))
    if not nodes:
        return Group(*lines, "no node is attached")
    classes: list[str | Table] = ["", _class_table(loads.slo_classes)] if loads.slo_classes else []
    warnings = (*_kinds(server), *_troubles(nodes))
    return Group(*lines, _node_table(nodes, server), *warnings, "", _cache_table(nodes), *classes)


def _kinds(server: ServerInfo) -> list[Text]:
    """Return the nodes by kind if outputs may differ in bits between them; else nothing."""
    kinds: dict[frozenset[tuple[str, str]], list[str]] = {}
    for node in server.nodes:
        if node.numerics:
            kinds.setdefault(frozenset(node.numerics.items()), []).append(node.name)
    if len(kinds) < 2:
        return []
    names = " | ".join(", ".join(names) for names in kinds.values())
    return [Text(f"nodes whose outputs may differ in bits: {names}", style="yellow")]


def _troubles(nodes: list[NodeLoad]) -> list[Text]:
    """Return a line for each node that was lost repeatedly, or whose heartbeats are late."""
    lines = []
    for load in nodes:
        if load.num_losses >= MIN_FLAPS:
            lines.append(f"{load.name} flaps: lost {load.num_losses} times in the last {FLAP_WINDOW_S / 60:g} minutes")
        if load.longest_heartbeat_gap_s >= SLOW_HEARTBEAT_S:
            gap_s = load.longest_heartbeat_gap_s
            lines.append(f"{load.name} is slow: up to {gap_s:.1f} s lately between two heartbeats")
    return [Text(line, style="yellow") for line in lines]


def _node_table(nodes: list[NodeLoad], server: ServerInfo) -> Table:
    """Return the table of nodes, with the memory of their ranks when there are several."""
    numbers = ("running", "waiting", "step ms", "prefill tok/s", "TP", "MiB")
    table = plain_table("node", "role", "state", numbers=numbers)
    table.add_column("shape")
    table.add_column("attention backend")
    infos = {node.name: node for node in server.nodes}
    for load in nodes:
        table.add_row(*_node_row(load, infos.get(load.name)))
        for rank in load.ranks if len(load.ranks) > 1 else ():
            memory = f"KV pool {size_of(rank.kv_pool_bytes)}, weights {size_of(rank.weight_bytes)}"
            table.add_row(f"  rank {rank.rank}", *[""] * 7, f"{rank.rss_bytes / MIB:.0f}", "", memory)
    return table


def _node_row(load: NodeLoad, info: NodeInfo | None) -> tuple[str, ...]:
    engine = info.engine if info is not None else {}
    return (
        escape(load.name),
        load.role,
        f"[{'green' if load.state == 'ready' else 'yellow'}]{load.state}[/]",
        str(load.num_running),
        str(load.num_waiting),
        f"{load.step_s * 1e3:.1f}" if load.step_s else "-",
        f"{load.prefill_tokens_per_s:.0f}" if load.shape.prefills and load.prefill_tokens_per_s else "-",
        _ranks_text(engine) or str(max(1, len(load.ranks))),
        f"{load.rss_bytes / MIB:.0f}",
        shape_text(load.shape),
        _kernels_text(engine),
    )


def _kernels_text(engine: Mapping[str, str]) -> str:
    """Return the attention backend, whether the node is batch-invariant, and whether a GPU does without CUDA graphs."""
    text = escape(engine.get("attention", ""))
    text += ", batch-invariant" if engine.get("batch_invariant") == "yes" else ""
    has_none = engine.get("device", "cpu") != "cpu" and engine.get("program") == "modules"
    return text + (", no CUDA graphs" if has_none else "")


def _ranks_text(engine: Mapping[str, str]) -> str:
    """Return the ranks of a stage, the number of stages if several, and SP for sequence parallelism; empty if
    unknown."""
    keys = ("tp_size", "pp_size", "sequence_parallel_min_tokens")
    tp_size, pp_size, min_tokens = (escape(engine.get(key, "")) for key in keys)
    parts = [tp_size] if tp_size else []
    if pp_size not in ("", "1"):
        parts.append(f"PP {pp_size}")
    if min_tokens not in ("", "0"):
        parts.append("SP")
    return ", ".join(parts)


def _cache_table(nodes: list[NodeLoad]) -> Table:
    """Return the table of KV caches.

    Cached blocks are free blocks that may be reused; the share is the prefix cache hit rate; failed counts KV
    transfers.
    """
    numbers = ("blocks used", "blocks cached", "tokens cached", "KV moved", "failed")
    table = plain_table("node", numbers=numbers)
    for load in nodes:
        share = f"{load.num_cached_tokens / load.num_prompt_tokens:.0%}" if load.num_prompt_tokens else "-"
        table.add_row(
            escape(load.name),
            f"{load.num_blocks - load.num_blocks_free}/{load.num_blocks}",
            str(load.num_blocks_cached),
            share,
            size_of(load.num_kv_bytes),
            str(load.num_transfers_failed),
        )
    return table


def _class_table(classes: Sequence[SloClassLoad]) -> Table:
    """Return the table of SLO attainment by class."""
    table = plain_table("class", "limits", numbers=("requests", "attained", "TTFT attained", "TPOT attained"))
    for each in classes:
        shares = [
            f"{number / each.num_sequences:.1%}" if each.num_sequences else "-"
            for number in (each.num_met, each.num_ttft_met, each.num_tpot_met)
        ]
        table.add_row(escape(each.slo_class), escape(each.limits), str(each.num_sequences), *shares)
    return table


def shape_text(shape: Shape) -> str:
    """Return the limits of a shape in words: prompt tokens in a step, running slots, and no KV transfers if so."""
    parts = [f"{shape.prompt_tokens} tokens"] if shape.prefills else []
    if shape.decodes:
        parts.append(f"{shape.slots} slots" + ("" if shape.accepts_transfers else ", no KV transfers"))
    return " + ".join(parts)


def plain_table(*words: str, numbers: tuple[str, ...] = (), gap: int = 2) -> Table:
    """Return an empty table: columns of words, then columns of numbers, `gap` characters apart."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
    for title in words:
        table.add_column(title)
    for title in numbers:
        table.add_column(title, justify="right")
    return table


def duration_of(seconds: float) -> str:
    """Return a time in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 4 d 1 h."""
    for unit, unit_s, part, part_s in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} {seconds % unit_s // part_s:.0f} {part}"
    return f"{seconds:.0f} s"


def _savings(completion: Completion) -> list[str]:
    """Return a line about cached tokens, KV transfers, draft tokens and migrations, or nothing without any."""
    parts, timeline = [], completion.timeline
    if completion.cached_tokens:
        parts.append(f"{completion.prompt_tokens} prompt tokens, {completion.cached_tokens} of them cached")
    if completion.kv_bytes or completion.kv_bytes_saved:
        saved = f", {size_of(completion.kv_bytes_saved)} saved" if completion.kv_bytes_saved else ""
        parts.append(f"{size_of(completion.kv_bytes)} of KV sent{saved}")
    if completion.proposed_tokens:
        parts.append(f"{completion.accepted_tokens} of {completion.proposed_tokens} draft tokens came")
    if timeline.num_migrations:
        times = "once" if timeline.num_migrations == 1 else f"{timeline.num_migrations} times"
        pause = f"paused for {timeline.migration_pause_s * 1e3:.1f} ms"
        parts.append(f"moved {times} ({size_of(completion.migrated_kv_bytes)} of it, {pause})")
    return [f"  {' · '.join(parts)}"] if parts else []


def _limits(completion: Completion) -> list[str]:
    """Return a line about the SLO, or nothing without one."""
    attainment = completion.attainment
    if attainment is None:
        return []
    parts = [
        f"{name} within {limit_ms:g} ms: {'attained' if is_met else 'missed'}"
        for name, limit_ms, is_met in (
            ("TTFT", attainment.ttft_ms, attainment.ttft_met),
            ("TPOT", attainment.tpot_ms, attainment.tpot_met),
        )
        if limit_ms is not None
    ]
    return [f"  {' · '.join(parts)}"] if parts else []


def _where(timeline: Timeline, field: str) -> str:
    if field.startswith("prefill"):
        return escape(timeline.prefill_node)
    if field.startswith("decode"):
        return escape(timeline.decode_node)
    if timeline.prefill_node == timeline.decode_node:  # a node that computed the prompt itself
        return escape(timeline.decode_node)
    return escape(f"{timeline.prefill_node} → {timeline.decode_node}")


def _summary(completion: Completion) -> str:
    timeline = completion.timeline
    tokens = f"{completion.prompt_tokens} + {completion.completion_tokens} tokens"
    restarts = f", {timeline.num_restarts} restarts" if timeline.num_restarts else ""
    if completion.num_resumes:
        return f"{tokens}, call {completion.num_resumes + 1} after {completion.resumed_tokens} tokens{restarts}"
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
