"""What a process of a cluster needs and listens to: threads, signals that end it."""

import signal
import subprocess
import sys

import pytest

from serving_core.process.run import ending_signals

# Where the system lets nobody have more threads, a process of a cluster says so. Each test is a process of its own,
# which gives up a root's privilege to have as many as it likes.

DEADLINE_S = 240.0
NOBODY = 65534
UNDER_A_LIMIT = f"""
import os, resource, sys
from serving_core.errors import SettingsError
from serving_core.process.run import run_process
from serving_core.process.telemetry import LogSettings
from serving_core.process.run import check_threads
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.geteuid() == 0:
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""
LIMIT = "its limit on processes is too low (ulimit -u, docker run --pids-limit)"


def run(code):
    command = [sys.executable, "-c", UNDER_A_LIMIT + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        ("", f"a process needs 12 threads at least, and the system allows 0 more: {LIMIT}"),
        ("4", f"4 processes need 48 threads at least, and the system allows 0 more: {LIMIT}"),
    ],
)
def test_too_few_threads_are_a_sentence(number, sentence):
    done = run(f"try: check_threads({number})\nexcept SettingsError as error: print(error)")
    assert (done.stdout.strip(), done.stderr) == (sentence, "")


def test_a_process_of_a_cluster_does_not_start_with_too_few():
    done = run("run_process('decode', 'd0', LogSettings(), lambda: 1 / 0)")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("d0: a process needs 12 threads at least")


# ---- By what a process is to end ----


@pytest.mark.parametrize(("handler", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hangup_ends_a_process_unless_it_was_told_to_ignore_it(handler, ends):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in ending_signals()) == ends
        assert {signal.SIGTERM, signal.SIGINT} <= set(ending_signals())
    finally:
        signal.signal(signal.SIGHUP, before)
