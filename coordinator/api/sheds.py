"""Counts the connections that ports have closed for others' sake, and logs that they do."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from serving_core.backoff import Reminder
from serving_core.figures import Figure, counter

logger = logging.getLogger(__name__)

REMIND_S: Final = 60.0  # between two lines of one reason at least
GRPC, HTTP, FLEET = "grpc", "http", "fleet"
PORTS: Final = (GRPC, HTTP, FLEET)
CROWDED: Final = "crowded"  # the port had all the connections that it may have
MALFORMED: Final = "malformed"  # no HTTP/2, or beyond the limits of a head
OVER_ALLOWANCE: Final = "over_allowance"  # without a key, and its address had sent all that it may
SLOW: Final = "slow"  # what it had begun to send did not come to its end in time
UNREAD: Final = "unread"  # it did not read what it was sent
REASONS: Final = (CROWDED, MALFORMED, OVER_ALLOWANCE, SLOW, UNREAD)


class Sheds:
    """By port and reason."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, str]]()

    def count(self, port: str, reason: str, number: int = 1) -> None:
        """So many more were closed."""
        self._counts[port, reason] += number

    def taken(self) -> Counter[tuple[str, str]]:
        """Return what was counted since the last call, for whoever adds it up."""
        counts, self._counts = self._counts, Counter()
        return counts

    def figures(self) -> Iterator[Figure]:
        """What /metrics says."""
        known = [(port, reason) for port in PORTS for reason in REASONS]
        values = [({"port": port, "reason": reason}, self._counts[port, reason]) for port, reason in known]
        help = "Connections that were closed before their end, so that they take nothing from others."
        yield counter("connections_shed", help, values)


class PortSheds:
    """Of one port. Logs each reason at once, and then ever more rarely."""

    def __init__(self, sheds: Sheds, port: str, sentence: str) -> None:
        """`sentence` has a place for the reason."""
        self._sheds = sheds
        self._port = port
        self._sentence = sentence
        self._reminder = Reminder(first_pause_s=REMIND_S)

    def count(self, reason: str, sentence: str = "") -> None:
        """One connection more is closed; `sentence` says so where the port's own does not fit."""
        self._sheds.count(self._port, reason)
        if self._reminder.is_due(reason, time.monotonic()):
            logger.warning(sentence or self._sentence % reason)
