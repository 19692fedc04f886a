"""What was measured so far: a file for each load that a contender has had, so that what was stopped can go on.

A cell is known by who was asked what: its name ends with a digest of the contender and of all its requests as they go
over the wire. So no file is ever taken for the answer to another question. Files are there whole or not at all.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from serving_core.errors import SettingsError
from splitserve_bench.compare.contenders import Contender
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.results import request_lines
from splitserve_bench.serve.wire import pack_request, to_outcome

ARGUMENTS: Final = "arguments.json"
DIGEST_BYTES: Final = 8
OUTCOME_FIELDS: Final = frozenset(field.name for field in fields(Outcome))


@dataclass(frozen=True, slots=True)
class Cell:
    """A load for a contender; `label` is for people."""

    contender: Contender
    label: str
    planned: Sequence[PlannedRequest]

    @property
    def name(self) -> str:
        digest = hashlib.blake2s(repr(self.contender).encode(), digest_size=DIGEST_BYTES)
        for each in self.planned:
            digest.update(pack_request(each))
        return f"{self.contender.name}-{self.label}-{digest.hexdigest()}".replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of a load, in its order. is_repeated: a pass that was stopped had sent part of it to a server that
    may have kept its KV."""

    outcomes: tuple[Outcome, ...]
    is_repeated: bool = False


class Cells:
    """The cells of one comparison, in a folder of their own."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        """Takes up the comparison that is in `folder`. Raises SettingsError when it has other arguments, or the folder
        cannot be used."""
        self._probes = folder / "probes"
        try:
            self._probes.mkdir(parents=True, exist_ok=True)
            asked, path = json.loads(json.dumps(arguments)), folder / ARGUMENTS
            if path.exists():
                _check_same(json.loads(path.read_text(encoding="utf-8")), asked, folder)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--save-dir {folder} cannot be used: {error}") from error
        write_whole(path, json.dumps(asked, indent=2))

    def __len__(self) -> int:
        """How many are saved."""
        return sum(1 for _ in self._probes.glob("[!.]*.json"))

    def __contains__(self, cell: Cell) -> bool:
        return self._path(cell).exists()

    def find(self, cell: Cell) -> Measured | None:
        """What was measured before. Raises BenchError for a file that is none of ours."""
        if cell not in self:
            return None
        path = self._path(cell)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return Measured(tuple(map(_outcome, saved["requests"])), saved["is_repeated"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path.name} cannot be read: remove it, and it will be measured again") from error

    def begin(self, cell: Cell) -> bool:
        """Notes that it is being measured. Whether that had been begun before, and was not ended."""
        was_begun = self._mark(cell).exists()
        write_whole(self._mark(cell), "")
        return was_begun

    def save(self, cell: Cell, measured: Measured) -> None:
        """Raises BenchError when it cannot be written."""
        saved = {
            "contender": cell.contender.name,
            "load": cell.label,
            "is_repeated": measured.is_repeated,
            "requests": [
                line | {"told_ttft_ms": planned.ttft_ms, "told_tpot_ms": planned.tpot_ms}
                for planned, line in zip(cell.planned, request_lines(measured.outcomes), strict=True)
            ],
        }
        write_whole(self._path(cell), json.dumps(saved))
        self._mark(cell).unlink(missing_ok=True)

    def _path(self, cell: Cell) -> Path:
        return self._probes / f"{cell.name}.json"

    def _mark(self, cell: Cell) -> Path:
        return self._probes / f".{cell.name}.begun"


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all, whenever this process is killed. Raises BenchError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error


def _outcome(line: Mapping[str, Any]) -> Outcome:
    return to_outcome({name: value for name, value in line.items() if name in OUTCOME_FIELDS})


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    old, new = _flat(before, ""), _flat(now, "")
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            raise SettingsError(
                f"--save-dir {folder} holds a comparison of other arguments or code: its {name} is {old.get(name)}, "
                f"not {new.get(name)}; give another folder"
            )


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
