"""Count and log the connections that ports close to protect other clients."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from serving_core.figures import Figure, counter
from serving_core.net.backoff import Reminder

logger = logging.getLogger(__name__)

REMIND_S: Final = 60.0  # at least, between two log lines for one reason
GRPC, HTTP, FLEET = "grpc", "http", "fleet"
PORTS: Final = (GRPC, HTTP, FLEET)
CROWDED: Final = "crowded"  # the port had reached its limit of connections
MALFORMED: Final = "malformed"  # not HTTP/2, or beyond the limits of a head
OVER_ALLOWANCE: Final = "over_allowance"  # no key, and the allowance of the address was used up
SLOW: Final = "slow"  # a frame, head or request was not completed in time
UNREAD: Final = "unread"  # the client did not read what it was sent
REASONS: Final = (CROWDED, MALFORMED, OVER_ALLOWANCE, SLOW, UNREAD)


class Sheds:
    """Count closed connections by port and reason."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, str]]()

    def count(self, port: str, reason: str, number: int = 1) -> None:
        """Add `number` closed connections."""
        self._counts[port, reason] += number

    def taken(self) -> Counter[tuple[str, str]]:
        """Return the counts since the last call, and reset them."""
        counts, self._counts = self._counts, Counter()
        return counts

    def figures(self) -> Iterator[Figure]:
        """Yield the figures for /metrics."""
        known = [(port, reason) for port in PORTS for reason in REASONS]
        values = [({"port": port, "reason": reason}, self._counts[port, reason]) for port, reason in known]
        help = "Connections that were closed before their end, so that they take nothing from others."
        yield counter("connections_shed", help, values)


class PortSheds:
    """Count the closed connections of one port, and log each reason at once and then ever more rarely."""

    def __init__(self, sheds: Sheds, port: str, sentence: str) -> None:
        """Create the counter. `sentence` is the log message, with one `%s` for the reason."""
        self._sheds = sheds
        self._port = port
        self._sentence = sentence
        self._reminder = Reminder(first_pause_s=REMIND_S)

    def count(self, reason: str, sentence: str = "") -> None:
        """Count one closed connection; a given `sentence` replaces the port's log message."""
        self._sheds.count(self._port, reason)
        if self._reminder.is_due(reason, time.monotonic()):
            logger.warning(sentence or self._sentence % reason)
