"""Suspect a peer by the length of its silence, relative to its earlier heartbeats. Pure.

A silence that is long for one machine is normal for another, so the limit is learned, as in accrual detectors
(Hayashibara et al., SRDS 2004). Load is bursty, which a normal distribution does not predict: the limit is a multiple
of the longest recent gap. Detectors read an `AwakeClock`, so that no process blames others for its own delay.
"""

import math
from collections import deque
from typing import Final

NUM_GAPS: Final = 64  # between heartbeats, of which the longest counts
MAX_GROWTH: Final = 4.0  # limit of the silence, in multiples of the longest recent gap
MAX_PATIENCE: Final = 5.0  # limit of the silence, in multiples of the configured one


class AwakeClock:
    """A clock that counts only the time during which this process ran.

    The owner notes the time often; the part of a gap beyond `max_lag_s` is left out: the process was stopped, starved
    or suspended with its machine.
    """

    def __init__(self, max_lag_s: float) -> None:
        self._max_lag_s = max_lag_s
        self._noted_s = math.inf
        self._left_out_s = 0.0

    def note(self, now: float) -> float:
        """Note that the process runs at `now`, and return the seconds since the last call; 0 at the first.

        The part of the gap beyond `max_lag_s` is left out of the clock, but is part of the result.
        """
        gap_s = max(0.0, now - self._noted_s)
        self._left_out_s += max(0.0, gap_s - self._max_lag_s)
        self._noted_s = now
        return gap_s

    def read(self, now: float) -> float:
        """Return the clock's time: `now` less the time left out."""
        return now - self._left_out_s


class FailureDetector:
    """Watch one peer that sends heartbeats. All times are those of one AwakeClock."""

    def __init__(self, timeout_s: float, now: float) -> None:
        """Start at `now`.

        The silence limit is `timeout_s` while heartbeats are regular, and at most MAX_PATIENCE times that.
        """
        self._timeout_s = timeout_s
        self._last_s = now
        self._gaps_s: deque[float] = deque(maxlen=NUM_GAPS)

    def heard(self, now: float, *, learns: bool = True) -> None:
        """Note a heartbeat; with `learns`, its gap changes the limit. A gap beyond the limit counts as the limit."""
        if learns:
            self._gaps_s.append(min(max(0.0, now - self._last_s), self.limit_s))
        self._last_s = now

    @property
    def longest_gap_s(self) -> float:
        """Return the longest of the recent gaps between two heartbeats; 0 before the first gap."""
        return max(self._gaps_s, default=0.0)

    @property
    def limit_s(self) -> float:
        """Return the seconds of silence after which the peer is suspected."""
        learnt_s = MAX_GROWTH * self.longest_gap_s
        return min(max(self._timeout_s, learnt_s), MAX_PATIENCE * self._timeout_s)

    def why_suspected(self, now: float) -> str | None:
        """Return, in words, why the peer counts as lost at `now`; None if it does not."""
        silent_s, limit_s = now - self._last_s, self.limit_s
        if silent_s <= limit_s:
            return None
        return f"no heartbeat for {silent_s:.1f} s (limit {limit_s:.1f} s)"
