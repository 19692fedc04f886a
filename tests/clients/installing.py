"""Clients of other people, each installed in a folder of its own: they neither grow the project's environment nor
change its versions, and stay installed until their pins change.

In Python a client sees the project's packages too, behind its own. A test of a client that cannot be installed skips
with the reason.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import pytest

HERE: Final = Path(__file__).parent
ROOT: Final = Path(sys.prefix) / "clients"
INSTALL_S: Final = 360.0  # for one client, the wait for another process that installs it too
NETWORK_S: Final = 15
PIP: Final = ("-m", "pip", "install", "--quiet", "--no-build-isolation", "--retries=1", f"--timeout={NETWORK_S}")
NPM: Final = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1")


def python_client(name: str) -> Path:
    """The interpreter that has the packages of pins/NAME.txt."""
    pins = HERE / "pins" / f"{name}.txt"
    folder = ROOT / name

    def install() -> None:
        venv.EnvBuilder(symlinks=True).create(folder)
        [site_packages] = folder.glob("lib/python*/site-packages")
        known = [path for path in sys.path if path.endswith("site-packages")]
        (site_packages / "project.pth").write_text("\n".join(known))
        _run([str(folder / "bin" / "python"), *PIP, "-r", str(pins)])

    _once(name, [pins], install)
    return folder / "bin" / "python"


def javascript_clients() -> tuple[Path, Path]:
    """Node, and the folder with the packages of package-lock.json: modules must lie in it to find them."""
    node = python_client("node").with_name("node")
    folder = ROOT / "javascript"
    files = [HERE / "package.json", HERE / "package-lock.json"]

    def install() -> None:
        for file in files:
            shutil.copy(file, folder)
        _run([str(node.with_name("npm")), *NPM, f"--fetch-timeout={NETWORK_S * 1000}"], cwd=folder)

    _once("javascript", files, install)
    return node, folder


def _once(name: str, pins: Sequence[Path], install: Callable[[], None]) -> None:
    """Installs where these pins are not installed yet; one process at a time."""
    folder, wanted = ROOT / name, "\n".join(pin.read_text() for pin in pins)
    done = folder / "installed"
    ROOT.mkdir(exist_ok=True)
    with (ROOT / f"{name}.lock").open("w") as lock, _locked(lock):
        if done.exists() and done.read_text() == wanted:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            install()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{name} cannot be installed: {_reason(error)}")
        done.write_text(wanted)


@contextmanager
def _locked(lock: IO[str]) -> Iterator[None]:
    end = time.monotonic() + INSTALL_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert time.monotonic() < end, "another process installs it, and does not end"
            time.sleep(0.2)
        else:
            break
    yield  # the end of the file is the end of the lock


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    subprocess.run(command, cwd=cwd, env=environment, timeout=INSTALL_S, check=True, **output)


def _reason(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it takes more than {INSTALL_S:g} s"
    lines = [line for line in error.stdout.splitlines() if line.lower().startswith(("error", "npm error"))]
    return lines[0] if lines else f"exit code {error.returncode}"
