"""What the package is made of: a wheel is built and looked into. Its top-level names are generic words: nobody else may
have installed one here, nor may Python bring one."""

import functools
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.metadata import distributions, files
from pathlib import Path, PurePath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from serving_core.process.extras import BASE_MODULES, MODULES

ROOT = Path(__file__).parents[3]
PYPROJECT = ROOT / "pyproject.toml"
ROOMS = set(tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["root_packages"])
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('wheels'))"
DEADLINE_S = 240.0
packages_distributions = functools.cache(metadata.packages_distributions)  # reads the lists of all that is installed


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What an installation of the wheel puts among the packages of others. It is built of a copy of the sources and
    without a C compiler, as nothing is computed here."""
    sources, packages = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("packages")
    for room in sorted(ROOMS):
        shutil.copytree(ROOT / room, sources / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    built = subprocess.run(
        command, cwd=sources, env={**os.environ, "CC": "false"}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(sources / "wheels" / built.stdout.split()[-1]) as wheel:
        wheel.extractall(packages)
    return packages


@pytest.mark.nightly
def test_the_wheel_installs_the_rooms_and_nothing_else(installed):
    [info] = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {*ROOMS, info.name}
    for room in ROOMS:
        written = {path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")}
        assert {path.relative_to(installed) for path in (installed / room).rglob("*.py")} == written


@pytest.mark.nightly
def test_the_page_of_the_coordinator_is_installed(installed):
    folder = Path("coordinator/api/http/ui")
    assert {path.name for path in (installed / folder).iterdir()} == {"page.html", "page.css", "page.js"}
    for path in (ROOT / folder).iterdir():
        assert (installed / folder / path.name).read_bytes() == path.read_bytes()


def test_every_folder_with_code_is_a_package_that_is_installed():
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    packages = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(".".join(folder.parts) for folder in folders)


def test_no_name_is_one_of_python_or_of_another_distribution():
    owners = packages_distributions()
    for name in ROOMS:
        assert name not in sys.stdlib_module_names
        assert set(owners.get(name, ())) <= {"splitserve"}


def test_no_other_distribution_has_our_command():
    commands = {(script.name, other.name) for other in distributions() for script in other.entry_points}
    assert {owner for name, owner in commands if name == "splitserve"} == {"splitserve"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["prefill_node", "decode_node", "coordinator", "splitserve"])
def test_what_is_installed_can_be_asked_for_help(installed, name):
    run = subprocess.run(
        [sys.executable, "-m", name, "--help"],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"Usage: python -m {name}" if name != "splitserve" else "Usage: ")


@pytest.mark.parametrize("extra", sorted(MODULES))
def test_what_is_looked_for_is_what_the_extra_brings(extra):
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    declared = {canonicalize_name(Requirement(each).name) for each in project["optional-dependencies"][extra]}
    assert {name for module in MODULES[extra] for name in _owners(module)} == declared


def test_what_the_base_installation_needs_is_what_it_brings():
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert {name for module in BASE_MODULES for name in _owners(module)} == {
        canonicalize_name(Requirement(each).name) for each in declared
    }


def _owners(module):
    """The distributions that bring it; a package may be of several."""
    names = packages_distributions()[module.partition(".")[0]]
    path = PurePath(*module.split("."))
    owners = [name for name in set(names) if any(file.is_relative_to(path) for file in files(name))]
    return map(canonicalize_name, owners if "." in module else names)


def test_every_extra_is_looked_for_but_the_developers():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert set(extras) == {*MODULES, "dev", "docs", "fuzz"}
