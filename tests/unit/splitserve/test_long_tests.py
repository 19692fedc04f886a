"""`.ci/long_tests.py`: which tests CI runs beside the gate for which commits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / ".ci" / "long_tests.py"
spec = importlib.util.spec_from_file_location("long_tests", SCRIPT)
long_tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(long_tests)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(long_tests, "MINUTES", {"a": 2.0, "b": 3.0, "c": 1.0, "d": 4.0})
    monkeypatch.setattr(long_tests, "TESTS", {"one": ["a", "b", "c"], "other": ["d", "a"]})


@pytest.mark.parametrize(
    ("files", "budget_minutes", "chosen", "left"),
    [
        (["README.md", "oneself/file.py"], 9.0, [], []),
        (["one/deep/file.py"], 6.0, ["a", "b", "c"], []),
        (["tests/unit/one/file.py"], 5.5, ["a", "b"], ["c"]),
        (["tests/one/file.py"], 4.0, ["a", "c"], ["b"]),
        (["other/file.py", "one/file.py", "one/file2.py"], 8.0, ["a", "d", "c"], ["b"]),  # the first of each at first
    ],
)
def test_those_of_the_touched_packages_as_far_as_they_fit(files, budget_minutes, chosen, left, table):
    assert long_tests.choose(files, budget_minutes) == (chosen, left)


def test_every_package_has_tests_that_there_are_and_that_fit():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"} | {"deploy"}
    assert set(long_tests.TESTS) >= packages
    assert {test for tests in long_tests.TESTS.values() for test in tests} == set(long_tests.MINUTES)
    assert all((ROOT / test).exists() for test in long_tests.MINUTES)
    assert max(long_tests.MINUTES.values()) <= long_tests.BUDGET_MINUTES


def git(folder, *arguments, date=None):
    who = {f"GIT_{role}_{what}": "who@where" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    dates = {f"GIT_{role}_DATE": f"{date} +0000" for role in ("AUTHOR", "COMMITTER")} if date else {}
    return subprocess.check_output(
        ["git", *arguments], cwd=folder, env={**os.environ, **who, **own, **dates}, text=True
    )


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    for date in ("2026-01-01T10:00:00", "2026-01-03T09:00:00", "2026-01-04T08:00:00"):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", date, date=date)
    return tmp_path


def listed(repository, *arguments):
    command = [sys.executable, str(SCRIPT), "--list", *arguments]
    return subprocess.check_output(command, cwd=repository, text=True).splitlines()


def commit(repository, name):
    return git(repository, "log", "--format=%H", f"--grep={name}").strip()


def test_commits_are_new_after_the_last_that_is_a_day_older(repository):
    assert listed(repository)[0] == f"since {commit(repository, '2026-01-01')}: no more tests"


def test_commits_are_new_after_the_remotes_main(repository, tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", str(repository), ".")
    (clone / "kv_transfer").mkdir()
    (clone / "kv_transfer" / "new.py").touch()
    git(clone, "add", ".")
    git(clone, "commit", "-q", "-m", "new")
    first, _ = listed(clone)
    assert first.startswith(f"since {commit(repository, '2026-01-04')}: tests/")


def test_a_commit_can_be_named(repository):
    assert listed(repository, "HEAD~1") == [
        "since HEAD~1: no more tests",
        "left to the nightly: none of these packages",
    ]


def test_a_commit_that_is_not_there_is_an_error(repository):
    with pytest.raises(subprocess.CalledProcessError):
        listed(repository, "nowhere")
