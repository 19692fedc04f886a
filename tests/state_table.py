"""The state machine of the coordinator's request in docs/architecture.md: `python -m tests.state_table` draws it."""

from typing import Final

from coordinator.control.request import ON_NODES, State
from coordinator.control.scheduler import DECISIONS, TRANSITIONS
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "architecture.md"


def arcs() -> dict[tuple[State, State], list[str]]:
    """The words of each change of state, by the states before and after."""
    found: dict[tuple[State, State], list[str]] = {}
    for transition in (*TRANSITIONS, *DECISIONS):
        for before in sorted(transition.states):
            for after in transition.then:
                found.setdefault((before, after), []).append(transition.event.replace("_", " "))
    return found


def table() -> str:
    """The part of the page between the marks. What all states on nodes have in common is drawn once."""
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
    lines = ["```mermaid", "stateDiagram-v2", "    state ON_NODES {", *inner, "    }", *outer, "```"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, with the figure as it ought to be."""
    return page_with(table(), PAGE, "tests.state_table")


if __name__ == "__main__":
    PAGE.write_text(page())
