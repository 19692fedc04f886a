"""What came of each step, in a file that is whole at any moment: a second run goes on where the first one ended."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from serving_core.errors import SettingsError
from splitserve_bench.device.device_report import markdown
from splitserve_bench.device.rows import rows_of
from splitserve_bench.device.running import DONE, Outcome
from splitserve_bench.device.steps import Step

JSON_FILE: Final = "report.json"
MARKDOWN_FILE: Final = "report.md"
VERSION: Final = 1


class Record:
    """The report of one folder."""

    def __init__(self, out: Path, what: str) -> None:
        """Reads what is there. `what` says what the figures are of. Raises SettingsError when the folder has a report
        of something else."""
        self._out = out
        self._what = what
        self._steps: dict[str, dict[str, Any]] = {}
        path = out / JSON_FILE
        if not path.is_file():
            return
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            before, self._steps = (report["version"], report["of"]), report["steps"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"--out: {path.name} there is no report of this command: {error!r}") from error
        if before != (VERSION, what):
            raise SettingsError(f"--out: the report there is of {before[1]}, and this is {what}")

    def is_done(self, name: str) -> bool:
        """Whether the step need not be done again."""
        return name in self._steps and self._steps[name]["state"] == DONE

    def state(self, name: str) -> str:
        """What is known of the step; empty: nothing."""
        return str(self._steps[name]["state"]) if name in self._steps else ""

    def take(self, step: Step, outcome: Outcome, order: Sequence[Step]) -> None:
        """Notes it, and writes the whole report anew."""
        self._steps[step.name] = {**dataclasses.asdict(outcome), "kind": step.kind, "command": step.shown}
        self._steps = {each.name: self._steps[each.name] for each in order if each.name in self._steps}
        rows = rows_of(self._steps)
        listed = [dataclasses.asdict(row) for row in rows]
        report = {"version": VERSION, "of": self._what, "steps": self._steps, "rows": listed}
        self._write(JSON_FILE, json.dumps(report, indent=1) + "\n")
        self._write(MARKDOWN_FILE, markdown(self._what, self._steps, rows))

    def _write(self, name: str, text: str) -> None:
        draft = self._out / f".{name}"
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, self._out / name)
