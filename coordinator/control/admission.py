"""Admit, defer or refuse new requests, and tell a refused one when to come back. Pure.

Margin. A request with a limit on TTFT is planned to have its first token some time before the limit. The margin is
learned from how late first tokens were beside what was predicted, as a share of the limit (serving_core/margin.py), so
a long queue and a single step have the same planned deadline. A limit on TPOT is planned with the part of it that
lately was enough.

Refusals. With `--admission timely` a request whose prompt cannot be prefilled in time is refused at once. A request
that would make others late is deferred if a place is expected in time, and refused at once otherwise. Whatever its
limits, a request is refused whose first token would come more than `max_queue_wait_s` after its arrival.

Retry-after. A place becomes free whenever a running request ends. Each refused request is told the next place that no
other one was told, at the rate of the latest ends, so that a crowd which obeys comes back one by one. A request that
comes back at its time is recognized by its prompt; one that comes earlier has lost its place. The time kept for those
yet to come is the share of the latest places that were taken.

Deferred admission. Prefilling a prompt early gains nothing while its node decodes as many sequences as attain their
TPOT: the new sequence only makes each step longer. So a request that would be late, or make others late, waits. Higher
priority goes first, then the earliest deadline. A request begins as soon as it makes nobody late; otherwise when SHARE
of its time has passed, or when its prompt and those before it take so long to prefill that it can wait no longer,
MARGIN times over, and its prefill node has nothing else to do. A request without a limit on TTFT can always wait
longer.

A request that can wait no longer and would make others late counts as late: late requests go behind all others, by
priority and age, where they harm nobody. FLOOR of what begins is theirs, so that none waits for ever.
"""

from bisect import bisect_right, insort
from collections import deque
from math import ceil, inf
from typing import Final, NamedTuple

from coordinator.control.placement.policy import Placed
from coordinator.control.request import TrackedRequest
from coordinator.control.slo import Expectation
from serving_core import reasons
from serving_core.due import Due
from serving_core.errors import RequestError
from serving_core.margin import Margin

MAX_TIMES: Final = 32


class Pace:
    """Of one kind of event."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)  # when, and how much of it

    def happened(self, now: float, part: float = 1.0) -> None:
        """Once more, or a part of once."""
        self._times.append((now, part))

    def per_s(self, now: float) -> float:
        """Times a second, over the last MAX_TIMES; 0 before there are two."""
        if len(self._times) < 2:
            return 0.0
        first_s, first = self._times[0]
        number, seconds = sum(part for _, part in self._times) - first, now - first_s
        return number / seconds if seconds > 0 else 0.0


MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 60.0
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
        self._last_s = min(turn_s, now + MAX_RETRY_AFTER_S)
        wait_s = max(MIN_RETRY_AFTER_S, least_s, self._last_s - now)
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


QUANTILE: Final = 0.85  # of those that are admitted keep their limits
LATE_SHARE: Final = 0.05  # of its limit that a request which is refused late would have been late by, at least
MOST_SPARE: Final = 0.5  # of a limit: with more, hardly anybody would be admitted from whom to learn
FEWEST_TOKENS: Final = 8  # of an output whose TPOT tells something
SPARE_SLOTS: Final = 1  # that late requests leave on a node
TURN_COMES_S: Final = 1.0  # within which a running slot is left for whose turn it is
NUM_FIRST_TOKENS: Final = 32
FEWEST_FIRST_TOKENS: Final = 8  # that tell how fast a queue moves


class Admission:
    """Decides on new requests, and learns from those that it has admitted."""

    def __init__(self, *, admits_late: bool, max_queue_wait_s: float) -> None:
        """`admits_late`: whether requests are taken whose limits, or those of others, would be missed.
        `max_queue_wait_s`: the longest wait before the first token; 0 for any."""
        self.admits_late: Final = admits_late
        self._max_queue_wait_s = max_queue_wait_s
        self._ttft_margin = Margin(quantile=QUANTILE)  # of first tokens, as a share of their limits
        self._tpot_margin = Margin(1.0, QUANTILE)  # of TPOT, by the limits that it was planned to keep
        self._turns = Turns()
        self._queue = _Queue()

    def planned_due(self, request: TrackedRequest) -> Due | None:
        """Return the deadlines of a request as decisions plan for them: the first token before its limit, and none for
        that of one that is late."""
        due, slo = request.due, request.slo
        if due is None or slo is None or request.output:
            return due
        if request.is_late or slo.ttft_s is None:
            return Due(inf, due.tpot_s)
        return Due(due.first_s - slo.ttft_s * min(MOST_SPARE, self._ttft_margin.factor - 1), due.tpot_s)

    @property
    def tpot_margin(self) -> float:
        """Return what the TPOT of answers rarely exceeded, by the limits that they were planned to keep."""
        return min(1 + MOST_SPARE, self._tpot_margin.factor)

    def is_hopeless(self, request: TrackedRequest, placed: Placed, now: float) -> bool:
        """Return whether a new request that could be placed like this cannot have its first token in time as planned,
        whatever it waits for."""
        due = self.planned_due(request)
        if due is None or request.output or due.first_s == inf:
            return False
        return now + placed.least_read_s + self._kept_s(request, placed.least_read_s, now) > due.first_s

    def arrives(self, request: TrackedRequest, now: float) -> None:
        """Note whether a new request comes back when it was told to."""
        if len(self._turns):  # or nobody needs the key, a hash of the whole prompt
            request.has_turn = self._turns.take(request.prompt.key, now)

    def num_spare(self, request: TrackedRequest, now: float) -> int:
        """Return how many running slots a request leaves for those that come and can be in time."""
        if request.is_late:
            return SPARE_SLOTS
        can_wait = self.admits_late or not request.limits_first
        if can_wait or request.output or request.has_turn:
            return 0
        return round(self._turns.num_kept(now, TURN_COMES_S))

    def _kept_s(self, request: TrackedRequest, within_s: float, now: float) -> float:
        """Return the seconds of work that a request leaves for those whose turn is by then."""
        return 0.0 if request.has_turn else self._turns.kept_s(now, within_s)

    def predict(self, request: TrackedRequest, placed: Placed, now: float) -> None:
        """Note when the first token of a request is expected that begins now, if that is known and in time."""
        is_timely = placed.is_timely and not request.num_restarts and not self.is_hopeless(request, placed, now)
        is_new = placed.least_read_s > 0 and not request.output
        request.predicted_first_s = now + placed.begins_s if is_timely and is_new else None

    def expectation(self, request: TrackedRequest, placed: Placed, step_s: float, now: float) -> Expectation:
        """Return what is expected of a new request that begins now, after which a step on its decode node takes so
        long."""
        due, planned = request.due, self.planned_due(request)
        is_known = placed.least_read_s > 0 and placed.begins_s < inf
        margin_s = 0.0
        if due is not None and planned is not None and planned.first_s < inf:
            margin_s = due.first_s - planned.first_s
        return Expectation(
            expected_ttft_s=now + placed.begins_s - request.timeline.start_s if is_known else 0.0,
            expected_prefill_s=placed.reads_s if is_known else 0.0,
            ttft_margin_s=margin_s,
            expected_tpot_s=step_s,
            deferred_s=0.0 if request.held_since_s is None else now - request.held_since_s,
        )

    def first_token(self, request: TrackedRequest, num_waiting: int, now: float) -> None:
        """The first token of a request came, and so many others wait for theirs."""
        self._queue.moved(num_waiting, now)
        self._learn(request, now)

    def refused_late(self, request: TrackedRequest, now: float) -> None:
        """A node has refused a request, whose first token would have come after its limit."""
        if request.slo is not None and (limit_s := request.slo.ttft_s) is not None:
            self._learn(request, max(now, request.timeline.start_s + limit_s * (1 + LATE_SHARE)))

    def _learn(self, request: TrackedRequest, first_s: float) -> None:
        predicted_s, slo = request.predicted_first_s, request.slo
        if predicted_s is not None and slo is not None and slo.ttft_s is not None:
            self._ttft_margin.note(slo.ttft_s, slo.ttft_s + first_s - predicted_s)

    def ended(self, request: TrackedRequest, now: float) -> None:
        """A request that was admitted has ended."""
        self._turns.ended(now)
        slo, num_tokens = request.slo, len(request.output)
        if request.predicted_first_s is None or slo is None or slo.tpot_s is None or num_tokens < FEWEST_TOKENS:
            return
        self._tpot_margin.note(slo.tpot_s, request.timeline.tpot_s(num_tokens))

    def check_wait(self, request: TrackedRequest, queue_s: float, num_waiting: int, now: float) -> None:
        """Raise RequestError where a request would wait too long behind prompts that take queue_s, and num_waiting
        requests without a first token."""
        most_s, wait_s = self._max_queue_wait_s, max(queue_s, self._queue.wait_s(num_waiting, now))
        wait_s += self._kept_s(request, wait_s, now)
        if most_s and wait_s > most_s:
            message = f"the first token would come after {wait_s:.1f} s, the limit is {most_s:g} s"
            raise self.refusal(reasons.QUEUE_FULL, message, now, wait_s - most_s, request)

    def may_begin(self, request: TrackedRequest, placed: Placed, now: float) -> bool:
        """Return whether a request may begin where it could be placed like this, as far as limits are concerned."""
        is_new = request.due is not None and not request.num_restarts and not request.output
        return self.admits_late or not is_new or (placed.is_timely and not self.is_hopeless(request, placed, now))

    def refusal(
        self, reason: str, message: str, now: float, least_s: float = 0.0, request: TrackedRequest | None = None
    ) -> RequestError:
        """Return the error of a request that is refused, with when it is its turn, least_s from now or later."""
        wait_s = self._turns.wait_s(now, least_s, None if request is None else request.prompt.key)
        return RequestError(reason, f"{message}: try again in {wait_s:.1f} s", retry_after_s=f"{wait_s:.3f}")


class _Queue:
    """How fast requests get their first tokens while others wait for theirs."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=NUM_FIRST_TOKENS)

    def moved(self, num_waiting: int, now: float) -> None:
        """A first token came, and so many others wait; without any, requests come more slowly than they could."""
        if num_waiting:
            self._times_s.append(now)
        else:
            self._times_s.clear()

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Return the seconds until the first token of a request behind so many; 0 while it is not known."""
        if len(self._times_s) < FEWEST_FIRST_TOKENS:
            return 0.0
        return num_ahead * (now - self._times_s[0]) / (len(self._times_s) - 1)
