"""When a request that finds the fleet full is to come back. Pure.

A place becomes free with each answer that ends. Whoever is turned away is given the next one that nobody was told of,
at the pace of the last endings; so a crowd that does as it is told comes back one by one.
"""

from typing import Final

from coordinator.control.pace import Pace

LEAST_S: Final = 1.0
MOST_S: Final = 60.0


class Turns:
    """Of those that were turned away."""

    def __init__(self) -> None:
        self._ends = Pace()
        self._last_s = 0.0  # the turn of who was turned away last

    def ended(self, now: float) -> None:
        """An answer has, and its place is free."""
        self._ends.happened(now)

    def wait_s(self, now: float, least_s: float = 0.0) -> float:
        """How long one more is to wait, at least so long."""
        per_s = self._ends.per_s(now)
        turn_s = max(self._last_s, now) + (1 / per_s if per_s else 0.0)
        self._last_s = min(turn_s, now + MOST_S)
        return max(LEAST_S, least_s, self._last_s - now)
