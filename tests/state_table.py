"""The state machines of a request in docs/design/architecture.md: `python -m tests.state_table` draws them anew."""

from typing import Final

from coordinator.control.request import ON_NODES, State
from coordinator.control.scheduler import DECISIONS, TRANSITIONS
from serving_core.node import requests as node_requests
from serving_core.node.requests import RequestState
from tests.doc_table import DOCS, text_with

PAGE: Final = DOCS / "design" / "architecture.md"


def arcs() -> dict[tuple[State, State], list[str]]:
    """The words of each change of state at the coordinator, by the states before and after."""
    found: dict[tuple[State, State], list[str]] = {}
    for transition in (*TRANSITIONS, *DECISIONS):
        for before in sorted(transition.states):
            for after in transition.then:
                found.setdefault((before, after), []).append(transition.event.replace("_", " "))
    return found


def coordinator() -> str:
    """The figure of the coordinator. What all states on nodes have in common is drawn once."""
    shared = {after for after in (State.QUEUED, State.FINISHED) if all((each, after) in arcs() for each in ON_NODES)}
    inner, outer = [], [f"    [*] --> {State.QUEUED.name}: submit"]
    for (before, after), words in arcs().items():
        line = f"{before.name} --> {after.name}: {', '.join(words)}"
        if {before, after} <= ON_NODES:
            inner.append(f"        {line}")
        elif before not in ON_NODES or after not in shared:
            outer.append(f"    {line}")
    outer += [f"    ON_NODES --> {after.name}: {', '.join(arcs()[State.DECODING, after])}" for after in sorted(shared)]
    outer.append(f"    {State.FINISHED.name} --> [*]")
    return _figure(["    state ON_NODES {", *inner, "    }", *outer])


def node() -> str:
    """The figure of a node."""
    lines = [
        f"    [*] --> {RequestState.WAITING.name}: prefill is here",
        f"    [*] --> {RequestState.WAITING_FOR_BLOCKS.name}: prefill is on another node, or a migration comes",
    ]
    for (before, event), (after, _) in node_requests.TRANSITIONS.items():
        lines.append(f"    {before.name} --> {after.name}: {event.name.lower().replace('_', ' ')}")
    return _figure(lines)


def _figure(lines: list[str]) -> str:
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"]) + "\n"


def page() -> str:
    """The whole page, with the figures as they ought to be."""
    text = text_with(coordinator(), PAGE.read_text(), "tests.state_table")
    return text_with(node(), text, "tests.state_table node")


if __name__ == "__main__":
    PAGE.write_text(page())
