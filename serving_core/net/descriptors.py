"""Limit the file descriptors of this process: files and connections each need one.

A client that can connect could take all remaining descriptors, since a library accepts connections before anything can
be checked. So some are kept in reserve for files that the process must open: it releases them right before, and
`kept_spares` takes them again.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import time
from collections.abc import AsyncIterator
from typing import Final, Never

from serving_core.net.backoff import Reminder

logger = logging.getLogger(__name__)

NUM_SPARE: Final = 32
LOOK_S: Final = 0.5
NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)
SHORTAGE: Final = "all %d descriptors are in use (ulimit -n): new connections wait until others end"
CONNECTIONS_SHARE: Final = 4  # at most this fraction of descriptors goes into connections of one kind


def raise_limit() -> None:
    """Raise this process's limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # where the kernel has a lower limit, as on macOS
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_descriptors() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def connections_within(most: int, *, descriptors_each: int) -> int:
    """Return how many connections of `descriptors_each` descriptors each this process may hold: `most`, or fewer.

    They get at most 1/CONNECTIONS_SHARE of its descriptors.
    """
    return max(1, min(most, num_descriptors() // CONNECTIONS_SHARE // descriptors_each))


class Spares:
    """Descriptors kept in reserve until they are released."""

    def __init__(self, number: int = NUM_SPARE) -> None:
        self._number = number
        self._held: list[int] = []

    def hold(self) -> bool:
        """Open descriptors until the reserve is full, as far as the limit allows.

        Returns whether the reserve is full and one more descriptor could be opened.
        """
        try:
            while len(self._held) < self._number:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in NONE_LEFT:
                raise
            return False
        return True

    def release(self) -> None:
        """Close all descriptors of the reserve, right before opening what the process cannot do without."""
        while self._held:
            os.close(self._held.pop())


@contextlib.asynccontextmanager
async def kept_spares() -> AsyncIterator[Spares]:
    """Return a context manager that yields a reserve, which a task refills. While it cannot, a log line says so."""
    spares = Spares()
    watching = asyncio.create_task(_watch(spares))
    try:
        yield spares
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        spares.release()


async def _watch(spares: Spares) -> Never:
    reminder = Reminder()
    while True:
        if not spares.hold() and reminder.is_due(SHORTAGE, time.monotonic()):
            logger.warning(SHORTAGE, num_descriptors())
        await asyncio.sleep(LOOK_S)
