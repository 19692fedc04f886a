"""Gather the wheels of SplitServe's packages for a machine that reaches no package index.

    python -m tools.wheels --python 3.12 --glibc 2.39 --without torch --without transformers --out wheels

Then, on that machine: pip install --no-index --no-deps --target /tmp/site wheels/*.whl; PYTHONPATH=/tmp/site:CHECKOUT.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.tags import cpython_tags
from packaging.utils import canonicalize_name

PYPROJECT: Final = Path(__file__).parents[1] / "pyproject.toml"
OLDEST_GLIBC_MINOR: Final = 17  # manylinux2014: no package here has a wheel for an older one alone


def requirements(extras: Iterable[str], without: Iterable[str]) -> list[str]:
    """Return the requirements of the base installation and of `extras`, except the packages named in `without`. Raises
    KeyError for an unknown extra.
    """
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    declared = [
        *project["dependencies"],
        *(each for extra in extras for each in project["optional-dependencies"][extra]),
    ]
    left_out = {canonicalize_name(name) for name in without}
    return [each for each in declared if canonicalize_name(Requirement(each).name) not in left_out]


def platforms(machine: str, glibc: tuple[int, int]) -> list[str]:
    """Return the wheel platforms that a Linux machine with this glibc accepts, the newest first."""
    major, minor = glibc
    newest_first = range(minor, OLDEST_GLIBC_MINOR - 1, -1)
    return [*(f"manylinux_{major}_{each}_{machine}" for each in newest_first), f"manylinux2014_{machine}"]


def download(python: tuple[int, int], named: Iterable[str], wanted: Iterable[str], folder: Path) -> int:
    """Download the wheels of `wanted` and of what they require for CPython `python` on the platforms `named` into
    `folder`, and return pip's exit code.
    """
    abis = dict.fromkeys(tag.abi for tag in cpython_tags(python, platforms=["any"]))
    options = [*(f"--platform={each}" for each in named), *(f"--abi={each}" for each in abis)]
    version = ".".join(map(str, python))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--only-binary=:all:"]
    return subprocess.run([*command, "--python-version", version, *options, "-d", folder, *wanted]).returncode


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=_pair, required=True, help="Python of the machine, as 3.12")
    parser.add_argument("--glibc", type=_pair, required=True, help="glibc of the machine, as 2.39 (`ldd --version`)")
    parser.add_argument("--machine", default="x86_64", help="architecture of the machine (`uname -m`)")
    parser.add_argument("--extra", action="append", help="an extra of pyproject.toml; node if none is given")
    parser.add_argument("--without", action="append", default=[], help="a package that the machine has; repeatable")
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="the folder for the wheels")
    given = parser.parse_args()
    wanted = requirements(given.extra or ["node"], given.without)
    code = download(given.python, platforms(given.machine, given.glibc), wanted, given.out)
    wheels = list(given.out.glob("*.whl"))
    num_bytes = sum(path.stat().st_size for path in wheels)
    print(f"{given.out} has {len(wheels)} wheels, {num_bytes / 1e6:.1f} MB", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
