"""Requests that are held before they are placed. Pure.

A prompt that is read while its node writes as many answers as keep their limits on TPOT gains nothing by being early:
its answer only makes each step longer. So a new request that would be late, or make others late, is held while there is
time until its first token is due. The more important go first, then those that can wait the least: the first one as
soon as it makes nobody late, and all the same when one of its priority can wait no longer. That is when SHARE of its
time has passed, or when its prompt and those before it take so long to be read, MARGIN times over; but not while their
reader has others to read, which they would wait for anyway. Of those that are less important one may be that can wait
no longer sooner: it does not wait for the others.
"""

from bisect import insort
from math import inf
from typing import Final, NamedTuple

from coordinator.control.attempts import TrackedRequest
from coordinator.control.placement.policy import Placed

SHARE: Final = 0.6  # of the time until the first token is due; found in simulation
MARGIN: Final = 1.5  # prompts take longer than is expected where answers come beside them; found in simulation
LOOKS_EVERY_S: Final = 0.25  # at least: who could wait until shortly before the next look goes now


class _Held(NamedTuple):
    """In the order in which they go."""

    priority: int
    until_s: float  # when SHARE of the time until its first token is due has passed
    age: int
    request: TrackedRequest
    reads_s: float  # that its prompt takes
    first_s: float  # when its first token is due


class Holding:
    """Those that are held."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    @property
    def first(self) -> TrackedRequest | None:
        """Which goes next."""
        return self._held[0].request if self._held else None

    def takes(self, request: TrackedRequest, placed: Placed, now: float) -> bool:
        """Holds a request that no node has had and that could be placed like this, where that is good for something:
        tells whether it does."""
        due = request.due
        if placed.is_easy or due is None or due.first_s == inf or request.output or request.avoid:
            return False
        until_s = request.timeline.start_s + SHARE * (due.first_s - request.timeline.start_s)
        held = _Held(request.priority, until_s, request.age, request, placed.reads_s, due.first_s)
        if _is_over(held, placed.begins_s, now):
            return False
        insort(self._held, held)
        request.is_held = True
        return True

    def urgent(self, placed: Placed, num_readers: int, now: float) -> TrackedRequest | None:
        """Which goes all the same, where the first one could be placed like this and so many nodes read: of the first
        one that can wait no longer, and those before it of its priority, the first."""
        has_work = placed.begins_s - placed.reads_s > LOOKS_EVERY_S
        begins_s, first = 0.0, None
        for held in self._held:
            if first is None or first.priority < held.priority:
                first = held
            begins_s += held.reads_s / num_readers
            if _is_over(held, 0.0 if has_work else begins_s, now):
                return first.request
        return None

    def let_go(self, request: TrackedRequest) -> None:
        """It begins, or ends; one that is not held is left alone."""
        request.is_held = False
        self._held = [held for held in self._held if held.request is not request]


def _is_over(held: _Held, begins_s: float, now: float) -> bool:
    """Whether it can wait no longer, were its prompt read in so many seconds from now on."""
    looks_s = now + LOOKS_EVERY_S
    return looks_s >= held.until_s or looks_s + MARGIN * begins_s >= held.first_s
