"""One simulation of the grid: what is asked, under what name its figures are kept, and the figures."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from serving_core.errors import SettingsError
from splitserve_bench.code_version import SIMULATED, code_digest
from splitserve_bench.compare.cells import write_whole
from splitserve_bench.errors import BenchError
from splitserve_bench.plan.asked import AskedLoad
from splitserve_bench.simulate.fleet import FleetSize

DIGEST_BYTES: Final = 10


@dataclass(frozen=True, slots=True)
class Run:
    """All that its figures depend on, beside the code; the digest is of that too."""

    profile: str
    load: AskedLoad
    num_prompts: int
    rate: float
    ttft_s: float
    tpot_s: float
    fleet: FleetSize
    seed: int
    request_timeout_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def digest(self) -> str:
        """Files count by what is in them, wherever they are. Raises SettingsError for one that cannot be read."""
        load = replace(self.load, dataset_path=_digest_of(self.load.dataset_path))
        asked = replace(self, load=load, profile=_digest_of(self.profile)).to_json()
        text = json.dumps({**asked, "code": code_digest(SIMULATED)}, sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def run_from_json(job: Mapping[str, Any]) -> Run:
    """What to_json has made."""
    values = {**job, "load": AskedLoad(**job["load"]), "fleet": FleetSize(**job["fleet"])}
    return Run(**values)


@dataclass(frozen=True, slots=True)
class Figures:
    """What became of the requests of a run: a complete one may be late in both ways. `phases` are those that took the
    late ones' time, by limit and phase."""

    num_total: int
    num_good: int
    num_late_ttft: int
    num_late_tpot: int
    num_refused: int
    num_failed: int
    phases: Mapping[str, int]

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_total


class Runs:
    """Figures in a folder, a file for each run that is there whole or not at all. A file's name ends with a digest of
    its run, so none is ever taken for the answer to another question."""

    def __init__(self, folder: Path) -> None:
        """Raises SettingsError when the folder cannot be used."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--save-dir {folder} cannot be used: {error.strerror}") from error

    def find(self, run: Run) -> Figures | None:
        """What was found before. Raises BenchError for a file that is none of ours."""
        path = self._path(run)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return Figures(**{field.name: saved["figures"][field.name] for field in fields(Figures)})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path.name} cannot be read: remove it, and it will be simulated again") from error

    def save(self, run: Run, figures: Figures) -> None:
        """Raises BenchError when it cannot be written."""
        write_whole(self._path(run), json.dumps({"run": run.to_json(), "figures": asdict(figures)}))

    def _path(self, run: Run) -> Path:
        return self._folder / f"{run.fleet}-{run.rate:g}-{run.seed}-{run.digest}.json"


@cache
def _digest_of(path: str) -> str:
    try:
        return hashlib.blake2s(Path(path).read_bytes(), digest_size=DIGEST_BYTES).hexdigest()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
