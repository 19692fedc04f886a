"""`.ci/setup` on a project that is small, with indexes of the test's own: it needs no network and downloads nothing."""

import contextlib
import ctypes
import functools
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 600.0
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "small"
version = "1"
dependencies = ["needed"]
[project.optional-dependencies]
node = []
dev = ["{dev}"]
"""
BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "small-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("small-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n")
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    return name
build_wheel = build_editable
"""


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/proc/driver/nvidia/version").exists()
    return True


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="torch's own index has builds without CUDA elsewhere"),
    pytest.mark.skipif(has_driver(), reason="with an NVIDIA driver set-up does not look for torch without CUDA"),
]


def write_wheel(folder, name, version):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", f"__version__ = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path):
    """Its packages are in a folder, which is pip's own index here; torch's build without CUDA is not among them."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / "engine" / "native").mkdir(parents=True)
    (folder / "constraints.txt").write_text("needed==1\n")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(dev="needed"))
    for name, version in [("torch", "2.13.0"), ("needed", "1"), ("needed", "2")]:
        write_wheel(tmp_path / "packages", name, version)
    return folder


def set_up(project, index, index_timeout_s=DEADLINE_S, **env):
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": str(project.parent / "packages")}
    own |= {"PIP_INDEX_URL": (project.parent / "packages").as_uri(), "PIP_EXTRA_INDEX_URL": ""}
    own |= {"PYTHON": sys.executable, "TORCH": "torch==2.13.0", "CPU_INDEX": index}
    own |= {"CPU_INDEX_TIMEOUT_S": str(index_timeout_s)}
    return subprocess.run(
        [str(project / ".ci" / "setup"), ".venv", "node", "dev"],
        env={**os.environ, **own, **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def version_of(project, module):
    code = f"import {module}; print({module}.__version__)"
    return subprocess.check_output([str(project / ".venv" / "bin" / "python"), "-c", code], text=True).strip()


@contextlib.contextmanager
def index_at(folder):
    """The address of an index that serves a folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


@pytest.mark.nightly
def test_an_index_that_does_not_answer_is_given_up(project):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the connection, and says nothing
        done = set_up(project, f"http://127.0.0.1:{server.getsockname()[1]}", index_timeout_s=2)
    assert done.returncode == 0, done.stdout + done.stderr
    first, given_up, torch, packages, package, no_kernels = done.stdout.splitlines()
    assert first == "== Setting up .venv (a minute or two the first time)"
    assert "does not answer (given up after" in given_up
    assert torch.startswith("== torch ...")
    assert packages.startswith("== packages (node dev) ...")
    assert package.startswith("== the rest of building SplitServe ")
    assert no_kernels.startswith("== WITHOUT CPU KERNELS, as ")
    assert (version_of(project, "torch"), version_of(project, "needed")) == ("2.13.0", "1")


@pytest.mark.nightly
def test_torch_comes_from_the_index_that_has_it_without_cuda(project, tmp_path):
    write_wheel(tmp_path / "index" / "torch", "torch", "2.13.0+cpu")
    (project / "engine" / "native" / "kernels.cpython-311-x86_64-linux-gnu.so").touch()
    with index_at(tmp_path / "index") as index:
        done = set_up(project, index)
    assert done.returncode == 0, done.stdout + done.stderr
    _, torch, *_, last = done.stdout.splitlines()
    assert torch.startswith("== torch, the build for CPUs, as there is no NVIDIA driver (200 MB) ...")
    assert last.startswith("== the rest of building SplitServe ")  # nothing to tell of the kernels
    assert version_of(project, "torch") == "2.13.0+cpu"


@pytest.mark.nightly
def test_an_environment_that_was_cut_off_before_pip_is_begun_again(project):
    venv.create(project / ".venv", with_pip=False)
    done = set_up(project, "http://127.0.0.1:1")  # nobody listens there
    assert done.returncode == 0, done.stdout + done.stderr
    assert version_of(project, "needed") == "1"


@pytest.mark.nightly
def test_what_fails_shows_the_end_of_the_log_and_names_it(project):
    (project / "pyproject.toml").write_text(PYPROJECT.format(dev="no-such-package"))
    with socket.socket() as taken:  # so that nobody listens there
        taken.bind(("127.0.0.1", 0))
        done = set_up(project, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert "No matching distribution found for no-such-package" in done.stdout
    assert done.stdout.splitlines()[-1] == "== Set-up failed; .venv/setup.log has all that was said"
    assert "no-such-package" in (project / ".venv" / "setup.log").read_text()


@pytest.mark.nightly
def test_what_is_built_is_built_once(project):
    def stages(**env):
        done = set_up(project, "http://127.0.0.1:1", **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split(" ...")[0] for line in done.stdout.splitlines() if " ... " in line]

    package = "== the rest of building SplitServe and its CPU kernels (log: .venv/build.log)"
    kernels = project / "engine" / "native" / "kernels.cpython-311-x86_64-linux-gnu.so"
    kernels.touch()
    assert stages() == ["== torch", "== packages (node dev)", package]
    assert stages() == ["== packages (node dev)"]
    assert stages(FORCE="1") == ["== packages (node dev)", package]
    kernels.unlink()  # such as where there was no C compiler
    assert stages() == ["== packages (node dev)", package]
    kernels.touch()
    later = (project / ".venv" / ".built").stat().st_mtime + 1
    os.utime(project / "pyproject.toml", (later, later))
    assert stages() == ["== packages (node dev)", package]


@pytest.mark.nightly
def test_a_build_that_fails_shows_the_end_of_its_own_log(project):
    (project / "backend.py").write_text("raise RuntimeError('no compiler to be had')")
    done = set_up(project, "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "RuntimeError: no compiler to be had" in done.stdout
