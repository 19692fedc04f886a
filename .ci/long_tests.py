"""Run the nightly tests of the folders that a range of commits touches: `python .ci/long_tests.py [--list] [BASE]`.

BASE is the last commit that has passed; without it the remote's main, or, where that is HEAD itself, the last commit that is
older than a day. Of the tests that TESTS names for the touched folders it takes as many, in the table's order, as fit into
BUDGET_MINUTES by the minutes that the table says, and prints which it leaves to `make test-nightly`. No clock decides.
"""

import subprocess
import sys

BUDGET_MINUTES = 6.0

# Folder: its nightly tests, the most telling ones first, and the minutes that they take on two cores of a fast EPYC.
TESTS = {
    "kv_transfer": [("tests/unit/kv_transfer", 2.0)],
}


def touched(base: str) -> list[str]:
    """Return the files that differ between `base` and HEAD."""
    return _git("diff", "--name-only", base, "HEAD")


def base_of_head() -> str:
    """Return the commit from which on HEAD is new."""
    head, *remote = [*_git("rev-parse", "HEAD"), *_git("rev-parse", "--verify", "--quiet", "origin/main")]
    if remote and remote != [head] and _git("merge-base", head, *remote) == remote:
        return remote[0]
    (committed_at,) = _git("show", "--no-patch", "--format=%ct", head)
    older = _git("rev-list", "--max-count=1", f"--before={int(committed_at) - 24 * 3600}", head)
    return older[0] if older else _git("rev-list", "--max-parents=0", head)[-1]


def chosen(files: list[str]) -> tuple[list[str], list[str]]:
    """Return the tests to run and those that are left, by what the files touch."""
    wanted: dict[str, float] = {}
    for folder, tests in TESTS.items():
        if any(file.startswith(f"{folder}/") for file in files):
            wanted |= dict(tests)
    taken, left, minutes = [], [], 0.0
    for test, its_minutes in wanted.items():
        fits = minutes + its_minutes <= BUDGET_MINUTES
        (taken if fits else left).append(test)
        minutes += its_minutes if fits else 0.0
    return taken, left


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.split("\n")[:-1]
