"""How often something happens, lately. Pure."""

from collections import deque
from typing import Final

MAX_SAMPLES: Final = 32


class Pace:
    """Of one kind of event."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # when, and how much of it

    def happened(self, now: float, part: float = 1.0) -> None:
        """Once more, or a part of once."""
        self._times.append((now, part))

    def per_s(self, now: float) -> float:
        """Times a second, over the last MAX_SAMPLES; 0 before there are two."""
        if len(self._times) < 2:
            return 0.0
        first_s, first = self._times[0]
        number, seconds = sum(part for _, part in self._times) - first, now - first_s
        return number / seconds if seconds > 0 else 0.0
