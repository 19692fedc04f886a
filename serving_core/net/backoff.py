"""Compute pauses that grow while the same failure recurs. Pure: times come in."""

import math
from typing import Final


class Backoff:
    """Compute pauses that double up to `longest_s`. After `calm_s` without a failure they start over at `first_s`."""

    def __init__(self, *, first_s: float, longest_s: float, calm_s: float) -> None:
        self._first_s, self._longest_s, self._calm_s = first_s, longest_s, calm_s
        self._pause_s = 0.0
        self._last_s = -math.inf

    def next_s(self, now: float) -> float:
        """Record a failure at time `now`, and return the seconds to pause after it."""
        is_first = now - self._last_s > self._calm_s
        self._pause_s = self._first_s if is_first else min(2 * self._pause_s, self._longest_s)
        self._last_s = now
        return self._pause_s


# ---- How often to repeat a persistent condition. Pure: times come in ----

FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0
MAX_SENTENCES: Final = 16  # remembered


class Reminder:
    """Decide when to repeat a statement that stays true: at once, then after pauses that double."""

    def __init__(self, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._first_pause_s = first_pause_s
        self._said: dict[str, tuple[float, float]] = {}  # when a sentence is due again, and the pause after that

    def is_due(self, sentence: str, now: float) -> bool:
        """Return whether to state the sentence at `now`, in seconds; if so, the next pause begins.

        Each sentence has its own pauses, so that alternating sentences are not always new.
        """
        due_s, pause_s = self._said.pop(sentence, (now, self._first_pause_s))
        is_due = now >= due_s
        self._said[sentence] = (now + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)) if is_due else (due_s, pause_s)
        if len(self._said) > MAX_SENTENCES:
            del self._said[next(iter(self._said))]
        return is_due

    def forget(self) -> None:
        """Start over with all sentences, since none is true any more."""
        self._said.clear()
