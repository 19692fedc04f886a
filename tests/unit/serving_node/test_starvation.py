"""Whether a process lacks a core, as Linux counts it."""

import os
import subprocess
import sys
import time

import pytest

from serving_node.watchdog import TASKS, Starvation

NUM_RIVALS = 6  # on one core: who computes there has it for a seventh of the time
PINNED = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
BUSY = f"{PINNED}\nwhile True: pass"
COMPUTE = f"""
{PINNED}
import time
from serving_node.watchdog import Starvation

begun_s, starvation = time.monotonic(), Starvation()
for _ in range(10):
    until_s = time.monotonic() + 0.1
    while time.monotonic() < until_s:
        pass
    starvation.look()
print(starvation.seconds / (time.monotonic() - begun_s))
"""


@pytest.mark.skipif(not (TASKS / str(os.getpid()) / "schedstat").exists(), reason="this kernel keeps no schedstat")
def test_a_process_beside_others_on_its_core_is_starved():
    rivals = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(NUM_RIVALS)]
    try:
        told = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, check=True)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert float(told.stdout) > 0.5


def test_a_process_that_waits_for_something_else_is_not():
    """However busy the machine is: a thread that sleeps waits for a core for a moment alone."""
    starvation = Starvation()
    time.sleep(1.0)
    starvation.look()
    assert starvation.seconds < 0.5
