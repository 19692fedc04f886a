"""Write and read the reports of `python -m splitserve_bench.device`, and say what has run on a card.

The report of the last run on a card is kept here as KEPT, a copy of its report.json. What doctor and the pages say of
CUDA is made of that file.
"""

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from serving_core.version import VERSION
from splitserve_bench.code_version import SERVING, code_digest

DONE, FAILED, OUT_OF_TIME = "done", "failed", "out of time"
KEPT: Final = Path(__file__).with_name("device_report.json")
NEVER: Final = "never run on a card"
NO_DEVICE: Final = "CPU"


def about_here() -> dict[str, str]:
    """Return today's date, the name of this machine's device (NO_DEVICE without one), and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else NO_DEVICE,
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "SplitServe": f"{VERSION}, code {code_digest(SERVING)}",
    }


def write_report(out: Path, title: str, steps: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace report.json and report.md in the folder `out` by the title and the results of these steps so far."""
    parts = [f"# {title}"]
    for name, step in steps.items():
        parts += [f"## {name}: {step['state']}, {step['seconds']} s", f"`{' '.join(step['command'])}`"]
        parts += ["```\n" + "\n".join([*step["output"].splitlines(), *step["log"]]) + "\n```"]
    (out / "report.md").write_text("\n\n".join(parts) + "\n")
    report = {"title": title, "about": about_here(), "steps": steps}
    (out / ".report.json").write_text(json.dumps(report, indent=1) + "\n")
    os.replace(out / ".report.json", out / "report.json")  # which the next run reads


def kept_report(path: Path = KEPT) -> dict[str, Any] | None:
    """Return the report of the last run on a card; None if there was none."""
    return json.loads(path.read_text()) if path.exists() else None


def verdict(report: Mapping[str, Any] | None) -> str:
    """Return in one line what has run on a card: when, on which, and the steps that were not done."""
    if report is None or report["about"]["device"] == NO_DEVICE:
        return NEVER
    about, steps = report["about"], report["steps"]
    others = [f"{name} ({step['state']})" for name, step in steps.items() if step["state"] != DONE]
    where = f"{about['device']}, {about['date']}, torch {about['torch']}, CUDA {about['CUDA']}"
    told = f"{where}: {len(steps) - len(others)} of {len(steps)} steps done"
    return told + (f"; not {', '.join(others)}" if others else "")
