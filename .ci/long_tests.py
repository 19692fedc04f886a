"""Run the nightly tests of the folders that commits touch: `python .ci/long_tests.py [--list] [BASE]`.

BASE is the commit before the first of them: without it the remote's main, or where that is HEAD itself, the last commit
that is older than a day. Of the tests that TESTS names for these folders those run that fit into BUDGET_MINUTES by the
minutes that it says: the first of each folder, then the second of each, and so on. No clock decides. What is left to
`make test-nightly` is printed.
"""

import itertools
import os
import subprocess
import sys

BUDGET_MINUTES = 6.0

# Folder: its nightly tests, the most telling first, and their minutes with the profile `ci` on two cores of an EPYC.
TESTS = {
    "kv_transfer": [("tests/unit/kv_transfer", 2.0)],
}
SIMULATED = "tests/gpu"  # tests of this folder run on the simulated device


def base_of_head() -> str:
    """Return the commit after which HEAD's own begin."""
    head, *remote = [*_git("rev-parse", "HEAD"), *_git("rev-parse", "--verify", "--quiet", "origin/main")]
    if remote and remote != [head]:
        return _git("merge-base", head, *remote)[0]
    (committed_at,) = _git("show", "--no-patch", "--format=%ct", head)
    older = _git("rev-list", "--max-count=1", f"--before={int(committed_at) - 24 * 3600}", head)
    return older[0] if older else _git("rev-list", "--max-parents=0", head)[-1]


def choose(files: list[str], budget_minutes: float = BUDGET_MINUTES) -> tuple[list[str], list[str]]:
    """Return the tests to run for these files, and those that are left."""
    folders = [tests for folder, tests in TESTS.items() if any(file.startswith(f"{folder}/") for file in files)]
    turns = itertools.chain(*itertools.zip_longest(*folders))
    wanted = dict(filter(None, turns))
    chosen, left = [], []
    for test, minutes in wanted.items():
        fits = minutes <= budget_minutes
        budget_minutes -= minutes if fits else 0.0
        (chosen if fits else left).append(test)
    return chosen, left


def run(tests: list[str], *flags: str) -> bool:
    """Return whether the nightly tests among these passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["--durations=15", "--hypothesis-profile=ci", *flags, *tests]
    return not tests or subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()


def main(arguments: list[str]) -> int:
    only_lists, bases = "--list" in arguments, [each for each in arguments if each != "--list"]
    base = bases[0] if bases else base_of_head()
    chosen, left = choose(_git("diff", "--name-only", base, "HEAD"))
    print(f"since {base}: {' '.join(chosen) or 'no nightly tests'}")
    print(f"left to the nightly: {' '.join(left) or 'nothing that is of these folders'}", flush=True)
    if only_lists:
        return 0
    on_device = [test for test in chosen if test.startswith(SIMULATED)]
    passed = run([test for test in chosen if test not in on_device], "-m", "nightly")
    return 0 if run(on_device, "--simulate-cuda") and passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
