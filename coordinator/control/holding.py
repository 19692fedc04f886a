"""Deferred admission: requests that are held before they are placed. Pure.

A prompt that is read while its node writes as many answers as keep their limits on TPOT gains nothing by being early:
its answer only makes each step longer. So a new request that would be late, or make others late, is held. The more
important go first, then those that can wait the least: the first one as soon as it makes nobody late, and all the same
when one of its priority can wait no longer. That is when SHARE of its time has passed, or when its prompt and those
before it take so long to be read, MARGIN times over; but not while their reader has others to read, which they would
wait for anyway. Of those that are less important one may be that can wait no longer sooner: it does not wait for the
others. A request without a limit on its first token can always wait longer.

One that can wait no longer, and would make other answers late, is late itself: late requests go behind all others, by
priority and age, where they harm nobody. So that none waits for ever, they are owed FLOOR of what begins before them.
"""

from bisect import insort
from math import inf
from typing import Final, NamedTuple

from coordinator.control.attempts import TrackedRequest
from coordinator.control.placement.policy import Placed
from serving_core.margin import Margin

SHARE: Final = 0.6  # of the time until the first token is due; found in simulation
MARGIN: Final = 1.5  # prompts take longer than is expected where answers come beside them; found in simulation
LOOKS_EVERY_S: Final = 0.25  # at least: who could wait until shortly before the next look goes now
FLOOR: Final = 0.05  # of the requests that begin while late ones wait
MAX_LATE_QUEUE_S: Final = 0.5  # of work before a late request on its reader: more would only wait there


class _Held(NamedTuple):
    """In the order in which they go."""

    priority: int
    until_s: float  # when SHARE of the time until its first token is due has passed
    age: int
    request: TrackedRequest
    reads_s: float  # that its prompt takes
    first_s: float  # when its first token is due
    begins_s: float  # when it was expected to begin


class Holding:
    """Those that are held."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._late: list[tuple[int, int, TrackedRequest]] = []  # by priority and age
        self._num_owed = 0.0  # to late ones
        self._margin = Margin()  # of when they begin, as a share of the time that they could be held for

    def __len__(self) -> int:
        return len(self._held) + len(self._late)

    @property
    def first(self) -> TrackedRequest | None:
        """Which goes next, of those that are not late."""
        return self._held[0].request if self._held else None

    @property
    def first_late(self) -> TrackedRequest | None:
        """Which goes next, of those that are."""
        return self._late[0][2] if self._late else None

    def num_ahead(self, request: TrackedRequest) -> int:
        """Return how many go before a request."""
        if not request.is_held:
            return len(self._held)
        return next((place for place, held in enumerate(self._held) if held.request is request), 0)

    def takes(self, request: TrackedRequest, placed: Placed, now: float, *, in_time: bool = False) -> bool:
        """Holds a request that no node has had and that could be placed like this, where that is good for something:
        tells whether it does. `in_time`: not if it is expected to wait for too long."""
        due = request.due
        if placed.is_timely or due is None or request.output or request.avoid:
            return False
        until_s = request.timeline.start_s + SHARE * (due.first_s - request.timeline.start_s)
        begins_s = now + placed.wait_s
        held = _Held(request.priority, until_s, request.age, request, placed.reads_s, due.first_s, begins_s)
        if _is_over(held, placed.begins_s, now) or placed.begins_s == inf:
            return False
        spare_s = (self._margin.factor - 1) * (until_s - now) if until_s < inf else 0.0
        if in_time and begins_s > until_s - spare_s:
            return False
        insort(self._held, held)
        request.note_held(now)
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

    def take_late(self, request: TrackedRequest, now: float) -> None:
        """Holds one that is late, whether it was held before or not."""
        self.let_go(request)
        insort(self._late, (request.priority, request.age, request))
        request.is_late = True
        request.note_held(now)

    def may_late_begin(self, placed: Placed) -> bool:
        """Whether the first late one may begin that could be placed like this."""
        return (placed.is_timely and placed.queue_s <= MAX_LATE_QUEUE_S) or self._num_owed >= 1

    def begins(self, request: TrackedRequest) -> None:
        """A request begins, whether it was held or not."""
        if request.is_late:
            self._num_owed = max(0.0, self._num_owed - 1)
        elif self._late:
            self._num_owed = min(1.0, self._num_owed + FLOOR)
        self.let_go(request)

    def waited(self, request: TrackedRequest, now: float) -> None:
        """One that was held is to begin now, or has waited in vain."""
        held = next((each for each in self._held if each.request is request), None)
        if held is not None and held.until_s < inf:
            most_s = held.until_s - request.timeline.start_s
            self._margin.note(most_s, most_s + now - held.begins_s)

    def let_go(self, request: TrackedRequest) -> None:
        """It begins, or ends; one that is not held is left alone."""
        if request.is_held:
            request.is_held = False
            self._held = [held for held in self._held if held.request is not request]
            self._late = [late for late in self._late if late[2] is not request]


def _is_over(held: _Held, begins_s: float, now: float) -> bool:
    """Whether it can wait no longer, were its prompt read in so many seconds from now on."""
    looks_s = now + LOOKS_EVERY_S
    return looks_s >= held.until_s or looks_s + MARGIN * begins_s >= held.first_s
