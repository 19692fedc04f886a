"""A virtual environment with what an installation brings, out of what is installed here: no network needed."""

import os
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def make_environment(folder: Path, *extras: str, has_splitserve: bool = True) -> str:
    """The path of its interpreter. Without SplitServe it has what that requires, as beside a checkout."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    of_extras = [each for extra in extras for each in project["optional-dependencies"][extra]]
    ours = [distribution("splitserve")] if has_splitserve else []
    for installed in [*ours, *closure([*project["dependencies"], *of_extras])]:
        for name in {file.parts[0] for file in installed.files or ()} - {os.pardir, "__pycache__"}:
            if not (site / name).exists():  # as `google`, which is of several
                (site / name).symlink_to(str(installed.locate_file(name)))
    return str(folder / "bin" / "python")


def closure(requirements: Iterable[str]) -> list[Distribution]:
    """What is installed for these requirements, and for what that requires."""
    found: dict[tuple[str, frozenset[str]], Distribution] = {}
    waiting = _applying(requirements, ())
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key not in found:
            found[key] = distribution(wanted.name)
            waiting += _applying(found[key].requires or (), wanted.extras)
    return list(found.values())


def _applying(requirements: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """Those for this machine, with no extra or one of these."""
    parsed = [Requirement(each) for each in requirements]
    contexts = [{"extra": extra} for extra in ("", *extras)]
    return [each for each in parsed if each.marker is None or any(map(each.marker.evaluate, contexts))]
