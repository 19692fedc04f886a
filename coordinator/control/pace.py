"""How often something happens, lately. Pure."""

from collections import deque
from typing import Final

MAX_SAMPLES: Final = 32


class Pace:
    """Of one kind of event."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=MAX_SAMPLES)

    def happened(self, now: float) -> None:
        """Once more."""
        self._times_s.append(now)

    def per_s(self, now: float) -> float:
        """Times a second, over the last MAX_SAMPLES; 0 before there are two."""
        if len(self._times_s) < 2:
            return 0.0
        seconds = now - self._times_s[0]
        return (len(self._times_s) - 1) / seconds if seconds > 0 else 0.0
