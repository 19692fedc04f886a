"""For how long this process could not run, as other work had the cores. Linux counts it for each thread (schedstat); of
other systems nothing is known, and it is 0."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

TASKS: Final = Path("/proc/self/task")
STARVED: Final = 0.5  # of the time, that one thread waits for a core
NS: Final = 1e-9


class Starvation:
    """How much one of the threads of this process waited for a core, and the time in which it mostly did."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._waits_s = _waits_s()
        self.seconds = 0.0

    def look(self) -> float:
        """Return the share of the time since the last look in which a thread waited for a core. Where that is STARVED
        or more, the time is added to `seconds`."""
        now, waits_s = time.monotonic(), _waits_s()
        elapsed_s, self._looked_s = now - self._looked_s, now
        longest_s = max((wait_s - self._waits_s.get(thread, 0.0) for thread, wait_s in waits_s.items()), default=0.0)
        self._waits_s = waits_s
        if longest_s >= STARVED * elapsed_s:
            self.seconds += elapsed_s
        return min(1.0, longest_s / elapsed_s) if elapsed_s else 0.0


def _waits_s() -> dict[str, float]:
    """By thread, the seconds that it was ready to run and had no core."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir(TASKS):
            with suppress(OSError):  # the thread has ended
                _, wait_ns, _ = (TASKS / thread / "schedstat").read_text().split()
                found[thread] = int(wait_ns) * NS
    return found
