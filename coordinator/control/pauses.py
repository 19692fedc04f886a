"""When this process stood still: stopped, held up, or suspended with its machine. Pure.

What it has not heard meanwhile says nothing of nodes, and that they have given it up is no fault of theirs.
"""

import math
from typing import Final

RECOVERY_S: Final = 5.0  # after a pause, in which its traces show: streams that nodes have ended, nodes that come back


class Pauses:
    """Is told the time several times per longest_gap_s. After a longer gap the process has stood still."""

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._noted_s = math.inf  # when it was told last
        self._paused_s = 0.0  # in all
        self.over_s = -math.inf  # when the last pause ended

    def note(self, now: float) -> None:
        """The process runs now."""
        gap_s = now - self._noted_s
        if gap_s > self._longest_gap_s:
            self._paused_s += gap_s
            self.over_s = now
        self._noted_s = now

    def awake_s(self, now: float) -> float:
        """The time by a clock that stands still during pauses, which is what our waits for others count by."""
        return now - self._paused_s

    def is_recent(self, now: float) -> bool:
        """Whether what goes wrong now may come from a pause."""
        return now - self.over_s < RECOVERY_S
