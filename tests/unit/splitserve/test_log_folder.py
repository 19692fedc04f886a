"""Folders of logs: those of the latest runs stay, and those of runs that still live."""

import os
import tempfile
from pathlib import Path

import pytest

from splitserve.launch.log_folder import NUM_KEPT, PREFIX, keep_latest, log_folder


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run(number: int, *, has_ended: bool = True) -> Path:
    """A run that has begun at this time, and wrote a log."""
    folder = log_folder("")
    (folder / "decode-0.log").touch()
    os.utime(folder, (number, number))
    lock = keep_latest(folder)
    assert lock is not None
    if has_ended:
        os.close(lock)
    return folder


def test_the_latest_runs_stay(root):
    folders = [run(number) for number in range(NUM_KEPT + 2)]
    assert set(root.iterdir()) == set(folders[2:])
    assert all((folder / "decode-0.log").exists() for folder in folders[2:])
    assert {folder.stat().st_mode & 0o777 for folder in folders[2:]} == {0o700}


def test_a_run_that_lives_keeps_its_folder(root):
    oldest = run(0, has_ended=False)
    others = [run(number) for number in range(1, NUM_KEPT + 2)]
    assert set(root.iterdir()) == {oldest, *others[1:]}


def test_nothing_else_is_removed(root):
    """What a link points to, another user's folder where this one is root, and what is called otherwise."""
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    link = root / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    os.utime(link, (0, 0), follow_symlinks=False)
    others = [elsewhere, link]
    if os.getuid() == 0:
        others.append(root / f"{PREFIX}others")
        others[-1].mkdir()
        os.chown(others[-1], 1, 1)
        os.utime(others[-1], (0, 0))
    folders = [run(number) for number in range(1, NUM_KEPT + 2)]
    assert set(root.iterdir()) == {*others, *folders[1:]}


def test_a_given_folder_is_nobody_elses_business(root):
    folders = [run(number) for number in range(NUM_KEPT)]
    given = log_folder(str(root / "given" / "logs"))
    assert keep_latest(given) is None
    assert set(root.iterdir()) == {*folders, root / "given"}
