"""For how long this process could not run, as other work had the cores. Linux counts it for each thread (schedstat); of
other systems nothing is known, and it is 0."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

TASKS: Final = Path("/proc/self/task")
NS: Final = 1e-9


class _Wait(NamedTuple):
    """A thread's time in which it was ready to run and had no core."""

    seconds: float
    is_ours: bool  # gRPC and ZeroMQ name their threads; those that compute bear the process's name


class Starvation:
    """How much the threads of this process have waited for a core since it was made."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._waits = _waits({})
        self.seconds = 0.0
        """Time in which a thread of ours waited, as of the last look: what these threads do together is held up by it
        whichever of them it is."""

    def look(self) -> float:
        """Return the share of the time since the last look in which one thread, of whomever, waited the longest."""
        now, waits = time.monotonic(), _waits(self._waits)
        elapsed_s, self._looked_s = now - self._looked_s, now
        added_s = {
            each: wait.seconds - self._waits[each].seconds for each, wait in waits.items() if each in self._waits
        }
        self.seconds += min(elapsed_s, sum(added_s[each] for each in added_s if waits[each].is_ours))
        self._waits = waits
        return min(1.0, max(added_s.values(), default=0.0) / elapsed_s) if elapsed_s else 0.0


def _waits(before: Mapping[str, _Wait]) -> dict[str, _Wait]:
    """By thread. Whose a thread is stays what it was before: this runs on the event loop, for hundreds of threads."""
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
