"""The report for people, as Markdown. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from splitserve_bench.device.rows import Row
from splitserve_bench.device.running import DONE, SKIPPED

FACTS: Final = ("name", "num_devices", "memory", "driver", "cuda", "torch", "python", "vcpus")


def markdown(what: str, steps: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """Facts, figures, what was not done, and the commands."""
    parts = [f"# One device: {what}", *_facts(steps), *_figures(rows), *_troubles(steps), *_commands(steps)]
    return "\n".join(parts) + "\n"


def _facts(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    facts = steps.get("device", {}).get("result") or {}
    return ["", *(f"- {name.replace('_', ' ')}: {facts[name]}" for name in FACTS if facts.get(name))]


def _figures(rows: Sequence[Row]) -> list[str]:
    head = ["| step | figure | | of the rate measured | of the data sheet's | aim | |", "|---|---|---|---|---|---|---|"]
    lines = []
    for row in rows:
        cells = (row.step, row.figure, f"{_number(row.value)} {row.unit}", _share(row.of_measured))
        verdict = {None: "", True: "met", False: "**missed**"}[row.is_met]
        lines.append(f"| {' | '.join((*cells, _share(row.of_nominal), row.aim, verdict))} |")
    return ["", *head, *lines]


def _troubles(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What did not come to its end, with its last lines, and tests that failed."""
    lines: list[str] = []
    for name, step in steps.items():
        if failed := (step["result"] or {}).get("failed") if isinstance(step["result"], dict) else None:
            lines += ["", f"Tests that failed in `{name}`:", "", *(f"- {test}" for test in failed)]
        if step["state"] == DONE:
            continue
        lines += ["", f"`{name}` was {step['state']}: {step['why']}"]
        if step["state"] != SKIPPED and step["last_lines"]:
            lines += ["", "```", *step["last_lines"], "```"]
    return lines


def _commands(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["", "| step | | seconds | command |", "|---|---|---|---|"]
    return lines + [
        f"| {name} | {step['state']} | {step['wall_s']:.0f} | `{step['command']}` |" for name, step in steps.items()
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
