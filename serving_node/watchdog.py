"""Detect faults of this node: a stuck step, and starvation of CPU time.

A step is stuck when it takes far longer than steps like it. A step unlike any before has only the coordinator's limit
(`--step-timeout-s`). A node with a stuck step stays detached until the step ends; if that takes too long, only a new
process helps.

Starvation is what Linux counts as the time in which threads of this process waited for a CPU; on other systems it is 0.
"""

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from serving_core.errors import SplitServeError

LEAST_S: Final = 3.0  # allowed for any step
MARGIN: Final = 5.0  # plus this multiple of the expected time
# Time that a node stays detached after a stuck step has ended; it starts over after CALM_S without a stuck step.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
UNKNOWN_S: Final = 600.0  # after which a step without an expected time counts as stuck
CALM_S: Final = 600.0


class StuckForGood(SplitServeError):
    """The running step is not waited for any longer."""


def why_stuck(step_age_s: float, expected_s: float) -> str | None:
    """Return in words why a step that has run for step_age_s seconds is stuck; None if it is not.

    `expected_s` is the expected time of the step; inf if unknown.
    """
    if step_age_s <= _most_s(expected_s):
        return None
    return f"one step has taken {step_age_s:.1f} s so far, and about {expected_s:.2g} s were expected"


def check_hope(step_age_s: float, expected_s: float, stuck_exit_s: float) -> None:
    """Raise StuckForGood if a step has been stuck for `stuck_exit_s` seconds.

    It has run for step_age_s seconds, and `expected_s` were expected; inf if unknown.
    """
    stuck_from_s = UNKNOWN_S if math.isinf(expected_s) else _most_s(expected_s)
    if step_age_s > stuck_from_s + stuck_exit_s:
        message = f"one step has not ended in {step_age_s:.0f} s, --stuck-exit-s ({stuck_exit_s:g}) after it was stuck"
        raise StuckForGood(message)


def _most_s(expected_s: float) -> float:
    """Return the longest time that a step with this expected time may take."""
    return LEAST_S + MARGIN * expected_s


TASKS: Final = Path("/proc/self/task")
NS: Final = 1e-9


class _Wait(NamedTuple):
    """Hold the time in which a thread was ready to run and had no core."""

    seconds: float
    is_ours: bool  # computing threads have the process's name; gRPC and ZeroMQ name theirs


class Starvation:
    """Measures how long the threads of this process wait for a CPU core, from its creation on."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._waits = _waits({})
        self.seconds = 0.0
        """Time in which a computing thread waited, as of the last look. The threads work together, so that any
        waiting thread delays all of them."""

    def look(self) -> float:
        """Return the largest share of the time since the last look that any single thread waited for a core.

        Also adds the wait of computing threads to `seconds`.
        """
        now, waits = time.monotonic(), _waits(self._waits)
        elapsed_s, self._looked_s = now - self._looked_s, now
        added_s = {
            each: wait.seconds - self._waits[each].seconds for each, wait in waits.items() if each in self._waits
        }
        self.seconds += min(elapsed_s, sum(added_s[each] for each in added_s if waits[each].is_ours))
        self._waits = waits
        return min(1.0, max(added_s.values(), default=0.0) / elapsed_s) if elapsed_s else 0.0


def _waits(before: Mapping[str, _Wait]) -> dict[str, _Wait]:
    """Return the waiting time of each thread.

    Ownership of known threads is kept: this runs on the event loop for hundreds of threads.
    """
    found = {}
    with suppress(OSError):
        name = _read(str(os.getpid()), "comm")
        for thread in os.listdir(TASKS):
            with suppress(OSError):  # the thread has ended
                _, wait_ns, _ = _read(thread, "schedstat").split()
                is_ours = before[thread].is_ours if thread in before else _read(thread, "comm") == name
                found[thread] = _Wait(int(wait_ns) * NS, is_ours)
    return found


def _read(thread: str, name: str) -> bytes:
    with open(f"{TASKS}/{thread}/{name}", "rb", buffering=0) as file:
        return file.readall()
