"""Folders for sockets: those of processes that live stay, those of processes that were killed go."""

import os
import socket
import subprocess
import sys
import tempfile

import pytest

from serving_core.net.ports import LONGEST_PATH, PREFIX, SocketFolder, fits

DEADLINE_S = 240.0
OWNER = """
import sys
from serving_core.net.ports import SocketFolder
folder = SocketFolder()
folder.make()
(folder.path / "prefill-0").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def owners(root):
    """Two processes with a folder each."""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], **ends) for _ in range(2)]
    yield owners
    for owner in owners:
        owner.kill()
        owner.communicate(timeout=DEADLINE_S)


def test_what_was_left_goes_and_what_is_in_use_stays(root, owners):
    left, used = (root / owner.stdout.readline().strip() for owner in owners)
    owners[0].kill()
    owners[0].wait(DEADLINE_S)
    assert set(root.iterdir()) == {left, used}
    with SocketFolder() as own:
        assert set(root.iterdir()) == {own.path, used}
        assert list(used.iterdir()) == [used / "prefill-0"]
        assert own.path.stat().st_mode & 0o777 == 0o700
    assert set(root.iterdir()) == {used}
    own.remove()  # which does no harm
    assert set(root.iterdir()) == {used}


def test_nothing_else_is_touched(root):
    """Of another user, where this one is root, or in a place that a link points to."""
    others = root / f"{PREFIX}others"
    others.mkdir()
    (root / "elsewhere").mkdir()
    (root / f"{PREFIX}link").symlink_to(root / "elsewhere")
    (root / f"{PREFIX}file").touch()
    before = set(root.iterdir())
    if os.getuid() == 0:
        os.chown(others, 65534, 65534)
    else:
        before.remove(others)
    with SocketFolder():
        pass
    assert set(root.iterdir()) == before


def test_where_nothing_can_be_written_is_a_sentence():
    """As in a container whose files are read-only; here no file may have a byte."""
    code = (
        "import resource; from serving_core.errors import SettingsError; from serving_core.net.ports import "
        "SocketFolder; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try: SocketFolder()\nexcept SettingsError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout.startswith("No usable temporary directory found in [")
    assert "set TMPDIR to one that can be written to, or give a container --tmpfs /tmp" in done.stdout


def test_how_long_a_path_may_be_is_what_the_system_says(tmp_path_factory):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as end:
        longest = os.path.join(folder, "x" * (LONGEST_PATH - len(folder) - 1))
        assert (len(longest), fits(longest), fits(longest + "x")) == (LONGEST_PATH, True, False)
        with pytest.raises(OSError, match="too long"):
            end.bind(longest + "x")
        end.bind(longest)
