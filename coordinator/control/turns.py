"""When a request that finds the fleet full is to come back, and what is kept for it until then. Pure.

A place becomes free with each answer that ends. Whoever is turned away is given the next one that nobody was told of,
at the pace of the last endings; so a crowd that does as it is told comes back one by one. One that comes at its turn is
known by its prompt; one that comes earlier has lost it. Time is kept for those that are to come by the share of the
last turns that were taken: where nobody comes back none is.
"""

from bisect import bisect_right, insort
from collections import deque
from math import ceil, inf
from typing import Final

from coordinator.control.pace import Pace

LEAST_S: Final = 1.0
MOST_S: Final = 60.0
GRACE_S: Final = 3.0  # that a request may come before its turn or after it
MOST_TURNS: Final = 4096  # that are to come; of more the last ones are not kept
NUM_TAKEN: Final = 32  # turns, the last ones, that tell how many are taken


class Turns:
    """Of those that were turned away."""

    def __init__(self) -> None:
        self._ends = Pace()
        self._last_s = 0.0  # the turn of who was turned away last
        self._to_come: list[tuple[float, int]] = []  # when, and who by the hash of the prompt; sorted
        self._turns_s: dict[int, float] = {}  # the same by who
        self._are_taken: deque[bool] = deque([False] * NUM_TAKEN, maxlen=NUM_TAKEN)

    def __len__(self) -> int:
        """How many are to come."""
        return len(self._to_come)

    def ended(self, now: float) -> None:
        """An answer has, and its place is free."""
        self._ends.happened(now)

    def wait_s(self, now: float, least_s: float = 0.0, key: int | None = None) -> float:
        """How long one more is to wait, at least so long. Its turn is kept where it has a key; it is told whole
        seconds."""
        per_s = self._ends.per_s(now)
        turn_s = max(self._last_s, now) + (1 / per_s if per_s else 0.0)
        self._last_s = min(turn_s, now + MOST_S)
        wait_s = max(LEAST_S, least_s, self._last_s - now)
        self._forget(now)
        if key is not None and key not in self._turns_s and len(self._turns_s) < MOST_TURNS:
            self._turns_s[key] = now + ceil(wait_s)
            insort(self._to_come, (self._turns_s[key], key))
        return wait_s

    def take(self, key: int, now: float) -> bool:
        """Whether one that comes has a turn about now; it has none any more."""
        self._forget(now)
        if (turn_s := self._turns_s.pop(key, None)) is None:
            return False
        self._to_come.remove((turn_s, key))
        is_its_turn = turn_s <= now + GRACE_S
        self._are_taken.append(is_its_turn)
        return is_its_turn

    def num_kept(self, now: float, within_s: float) -> float:
        """How many are expected whose turn is by then."""
        if not self._to_come:
            return 0.0
        self._forget(now)
        return bisect_right(self._to_come, (now + within_s, inf)) * sum(self._are_taken) / NUM_TAKEN

    def kept_s(self, now: float, within_s: float) -> float:
        """Seconds of the fleet's work that are kept for them."""
        per_s = self._ends.per_s(now)
        return self.num_kept(now, within_s) / per_s if per_s else 0.0

    def _forget(self, now: float) -> None:
        """Those that did not come."""
        while self._to_come and self._to_come[0][0] < now - GRACE_S:
            del self._turns_s[self._to_come.pop(0)[1]]
            self._are_taken.append(False)
