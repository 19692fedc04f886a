"""Pauses that grow while the same trouble comes back. Pure: times come in."""

import math


class Backoff:
    """Each pause is twice the one before, up to the longest. After calm_s without trouble they begin anew."""

    def __init__(self, *, first_s: float, longest_s: float, calm_s: float) -> None:
        self._first_s, self._longest_s, self._calm_s = first_s, longest_s, calm_s
        self._pause_s = 0.0
        self._last_s = -math.inf

    def next_s(self, now: float) -> float:
        """The pause after trouble that has come now."""
        is_first = now - self._last_s > self._calm_s
        self._pause_s = self._first_s if is_first else min(2 * self._pause_s, self._longest_s)
        self._last_s = now
        return self._pause_s
