"""Run a process of a cluster, from its first log line to its exit code."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import click
import uvloop

from serving_core.errors import ModelError, SettingsError
from serving_core.net.descriptors import raise_limit
from serving_core.process import failpoints
from serving_core.process.interrupts import end_at_once
from serving_core.process.telemetry import LogSettings, configure_logging

PR_SET_NAME: Final = 15  # <linux/prctl.h>


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a process: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as with nohup."""
    can_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if can_hang_up else [])]


def check_folder() -> None:
    """Raise SettingsError if this process's working folder was removed: some libraries do not load there."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise SettingsError("the folder that this was started in is gone: start it in one that is there") from error


def run_process(role: str, name: str, log: LogSettings, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Configure logging, raise the limit of open files, arm failpoints, and run `main` on an event loop until it ends.

    `role` and `name` are those of the log lines. At a SettingsError or ModelError, one sentence goes to stderr and the
    process exits with code 2; other errors pass.
    """
    configure_logging(role, name, log)
    _name_process(name)
    raise_limit()
    end_at_once()  # as SIGTERM does, until main handles both: loading awaits nothing, so it could not be cancelled
    try:
        check_folder()
        check_threads()
        failpoints.arm()
        uvloop.run(main())
    except (SettingsError, ModelError) as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(2)


def _name_process(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, of which Linux keeps 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


# Threads that a process needs, including libraries' threads: some libraries abort the process without an explanation if
# they cannot start a thread. Limits of a user's and a container's processes count threads.

FEWEST: Final = 12  # of a process of a cluster, on two CPUs


def check_threads(num_processes: int = 1) -> None:
    """Raise SettingsError if the system does not allow the threads of `num_processes` processes of a cluster.

    Tries it, by starting that many threads.
    """
    needed = FEWEST * num_processes
    if (num := num_startable(needed)) < needed:
        those = "a process needs" if num_processes == 1 else f"{num_processes} processes need"
        raise SettingsError(
            f"{those} {needed} threads at least, and the system allows {num} more: its limit on processes is too low "
            "(ulimit -u, docker run --pids-limit)"
        )


def num_startable(most: int) -> int:
    """Return how many threads, at most `most`, can be started now, by starting them."""
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
