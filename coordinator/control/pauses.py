"""When this process stood still: stopped, held up, or suspended with its machine. Pure.

What it has not heard meanwhile says nothing of nodes, and that they have given it up is no fault of theirs.
"""

import math
from typing import Final

from serving_core.failure_detector import AwakeClock

RECOVERY_S: Final = 5.0  # after a pause, in which its traces show: streams that nodes have ended, nodes that come back


class Pauses:
    """Is told the time often: each `max_lag_s` at least while the process runs as it should. A gap of more than
    `pause_s` is a pause."""

    def __init__(self, max_lag_s: float, pause_s: float) -> None:
        self._clock = AwakeClock(max_lag_s)
        self._pause_s = pause_s
        self._over_s = -math.inf  # when the last pause ended

    def note(self, now: float) -> None:
        """The process runs now."""
        if self._clock.note(now) > self._pause_s:
            self._over_s = now

    def awake_s(self, now: float) -> float:
        """The time by a clock that stands still during pauses, which is what our waits for others count by."""
        return self._clock.read(now)

    def is_recent(self, now: float) -> bool:
        """Whether what goes wrong now may come from a pause."""
        return now - self._over_s < RECOVERY_S
