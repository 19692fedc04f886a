"""The threads that processes need, with those of libraries: some abort the process where they cannot start one, without
a word of why. Limits on processes count them, those of a user and those of a container."""

import threading
from contextlib import suppress
from typing import Final

from serving_core.errors import SettingsError

FEWEST: Final = 12  # of a process of a cluster, on two CPUs


def check_threads(num_processes: int = 1) -> None:
    """Raises SettingsError where the system does not let so many processes of a cluster have their threads."""
    needed = FEWEST * num_processes
    if (num := num_startable(needed)) < needed:
        those = "a process needs" if num_processes == 1 else f"{num_processes} processes need"
        raise SettingsError(
            f"{those} {needed} threads at least, and the system allows {num} more: its limit on processes is too low "
            "(ulimit -u, docker run --pids-limit)"
        )


def num_startable(most: int) -> int:
    """How many threads, up to so many, can be had now beside all that there are: found out by starting them."""
    done = threading.Event()
    threads = []
    with suppress(RuntimeError):
        for _ in range(most):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            threads.append(thread)
    done.set()
    for thread in threads:
        thread.join()
    return len(threads)
