"""Admit, defer or refuse new requests, and tell a refused one when to come back. Pure.

Margin. The first token of a request with an SLO on TTFT is planned some time before its limit. The margin is learned
from the errors of the predicted first tokens, as a share of the limit (serving_core/slo.py), so a long queue and a
single step have the same planned deadline. An SLO on TPOT is planned with the share of it that was recently enough.

Refusals. With `--admission timely` a request whose prompt cannot be prefilled in time is refused at once. A request
that would make others late is deferred if a place is expected in time, and refused at once otherwise. Whatever its SLO,
a request is refused whose first token would come more than `max_queue_wait_s` after its arrival.

Retry-after. A place becomes free whenever a running request ends. Each refused request gets the next place that no
other refused request has, at the rate of the latest ends, so that clients which obey come back one by one. A request
that comes back at its time is recognized by its prompt; a request that comes earlier has lost its place. The time
reserved for those yet to come is the share of the latest places that were taken.

Deferred admission. Prefilling a prompt early gains nothing while its node decodes as many sequences as attain their
TPOT: the new sequence only makes each step longer. So a request that would be late, or make others late, waits. Higher
priority goes first, then the earliest deadline. A request begins as soon as it makes no other late. It also begins when
SHARE of its time has passed, or when the prefill of its prompt and of those before it, MARGIN times over, leaves no
more time to wait and its prefill node has nothing else to do. A request without an SLO on TTFT can always wait longer.

A request that can wait no longer and would make others late counts as late. Late requests go after all others, by
priority and age, where they delay none. The share FLOOR of the requests that begin is theirs, so that none waits
forever.
"""

from bisect import bisect_right, insort
from collections import deque
from math import ceil, inf
from typing import Final, NamedTuple

from coordinator.control.placement.policy import Placed
from coordinator.control.request import TrackedRequest
from coordinator.control.slo import Expectation
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.slo import Due, Margin

MAX_TIMES: Final = 32


class Pace:
    """Measure the rate of one kind of event over its last MAX_TIMES occurrences."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)  # time and count of each event

    def happened(self, now: float, part: float = 1.0) -> None:
        """Record an event, or a fraction of one."""
        self._times.append((now, part))

    def per_s(self, now: float) -> float:
        """Return the events per second; 0 before there are two."""
        if len(self._times) < 2:
            return 0.0
        first_s, first = self._times[0]
        number, seconds = sum(part for _, part in self._times) - first, now - first_s
        return number / seconds if seconds > 0 else 0.0


MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 60.0
GRACE_S: Final = 3.0  # by which a request may come before or after its turn
MOST_TURNS: Final = 4096  # turns kept; further refused requests get none
NUM_TAKEN: Final = 32  # latest turns from which the share of taken ones is measured


class Turns:
    """Give each refused request its own time to come back."""

    def __init__(self) -> None:
        self._ends = Pace()
        self._last_s = 0.0  # the latest turn given
        self._to_come: list[tuple[float, int]] = []  # time and Prompt.key, sorted
        self._turns_s: dict[int, float] = {}  # the same, by key
        self._are_taken: deque[bool] = deque([False] * NUM_TAKEN, maxlen=NUM_TAKEN)

    def __len__(self) -> int:
        """Return how many refused requests have yet to come back."""
        return len(self._to_come)

    def ended(self, now: float) -> None:
        """Record that a request has ended and its place is free."""
        self._ends.happened(now)

    def wait_s(self, now: float, least_s: float = 0.0, key: int | None = None) -> float:
        """Return the retry-after of one more refused request, in seconds, `least_s` at least.

        Where the request has a key, its turn is kept until then, rounded up to a whole second.
        """
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
        """Return whether a request that arrives has a turn at about this time, and forget its turn."""
        self._forget(now)
        if (turn_s := self._turns_s.pop(key, None)) is None:
            return False
        self._to_come.remove((turn_s, key))
        is_its_turn = turn_s <= now + GRACE_S
        self._are_taken.append(is_its_turn)
        return is_its_turn

    def num_kept(self, now: float, within_s: float) -> float:
        """Return how many refused requests are expected back within `within_s` seconds."""
        if not self._to_come:
            return 0.0
        self._forget(now)
        return bisect_right(self._to_come, (now + within_s, inf)) * sum(self._are_taken) / NUM_TAKEN

    def kept_s(self, now: float, within_s: float) -> float:
        """Return the seconds of the fleet's work that are reserved for the requests expected back within `within_s`
        seconds."""
        per_s = self._ends.per_s(now)
        return self.num_kept(now, within_s) / per_s if per_s else 0.0

    def _forget(self, now: float) -> None:
        """Drop the turns that were not taken."""
        while self._to_come and self._to_come[0][0] < now - GRACE_S:
            del self._turns_s[self._to_come.pop(0)[1]]
            self._are_taken.append(False)


SHARE: Final = 0.6  # of the time until the first token is due; tuned in simulation
MARGIN: Final = 1.5  # prefill takes longer than predicted where sequences start beside it; tuned in simulation
LOOKS_EVERY_S: Final = 0.25  # longest interval between two looks: a request that cannot wait for the next one begins
FLOOR: Final = 0.05  # share of late requests among those that begin while late ones wait
MAX_LATE_QUEUE_S: Final = 0.5  # of work before a late request on its prefill node: with more it would only wait there


class _Held(NamedTuple):
    """Keep a deferred request; the fields are in the order that sorts the queue."""

    priority: int
    until_s: float  # when SHARE of the time until its first token is due has passed
    age: int
    request: TrackedRequest
    prefill_s: float  # seconds that its prefill takes
    first_s: float  # when its first token is due
    begins_s: float  # when it was expected to begin


class Holding:
    """Keep the deferred requests, and choose which of them begins next."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._late: list[tuple[int, int, TrackedRequest]] = []  # by priority and age
        self._num_owed = 0.0  # late requests that are due to begin
        self._margin = Margin()  # error of the predicted begin, as a share of the longest deferral

    def __len__(self) -> int:
        return len(self._held) + len(self._late)

    @property
    def first(self) -> TrackedRequest | None:
        """Return the next deferred request that is not late."""
        return self._held[0].request if self._held else None

    @property
    def first_late(self) -> TrackedRequest | None:
        """Return the next late request."""
        return self._late[0][2] if self._late else None

    def num_ahead(self, request: TrackedRequest) -> int:
        """Return how many deferred requests go before this one."""
        if not request.is_held:
            return len(self._held)
        return next((place for place, held in enumerate(self._held) if held.request is request), 0)

    def takes(self, request: TrackedRequest, placed: Placed, now: float, *, in_time: bool = False) -> bool:
        """Defer a request that no node has had and that could be placed like this, if that helps.

        Return whether the request is deferred. `in_time`: do not defer a request that is expected to wait too long.
        """
        due = request.due
        if placed.is_timely or due is None or request.output or request.avoid:
            return False
        until_s = request.timeline.start_s + SHARE * (due.first_s - request.timeline.start_s)
        begins_s = now + placed.wait_s
        held = _Held(request.priority, until_s, request.age, request, placed.prefill_s, due.first_s, begins_s)
        if _is_over(held, placed.begins_s, now) or placed.begins_s == inf:
            return False
        spare_s = (self._margin.factor - 1) * (until_s - now) if until_s < inf else 0.0
        if in_time and begins_s > until_s - spare_s:
            return False
        insort(self._held, held)
        request.note_held(now)
        return True

    def urgent(self, placed: Placed, num_prefill_nodes: int, now: float) -> TrackedRequest | None:
        """Return the request that must begin although it would make others late; None where all can wait longer.

        `placed` is the placement of the first request, and `num_prefill_nodes` the number of prefill nodes. Where a
        request can wait no longer, the first one of its priority in the queue begins."""
        has_work = placed.begins_s - placed.prefill_s > LOOKS_EVERY_S
        begins_s, first = 0.0, None
        for held in self._held:
            if first is None or first.priority < held.priority:
                first = held
            begins_s += held.prefill_s / num_prefill_nodes
            if _is_over(held, 0.0 if has_work else begins_s, now):
                return first.request
        return None

    def take_late(self, request: TrackedRequest, now: float) -> None:
        """Defer a request as late, whether it was deferred before or not."""
        self.let_go(request)
        insort(self._late, (request.priority, request.age, request))
        request.is_late = True
        request.note_held(now)

    def may_late_begin(self, placed: Placed) -> bool:
        """Return whether the first late request, which could be placed like this, may begin."""
        return (placed.is_timely and placed.queue_s <= MAX_LATE_QUEUE_S) or self._num_owed >= 1

    def begins(self, request: TrackedRequest) -> None:
        """Note that a request begins, whether it was deferred or not."""
        if request.is_late:
            self._num_owed = max(0.0, self._num_owed - 1)
        elif self._late:
            self._num_owed = min(1.0, self._num_owed + FLOOR)
        self.let_go(request)

    def waited(self, request: TrackedRequest, now: float) -> None:
        """Record how long a request was deferred that is to begin now, or to end in vain."""
        held = next((each for each in self._held if each.request is request), None)
        if held is not None and held.until_s < inf:
            most_s = held.until_s - request.timeline.start_s
            self._margin.note(most_s, most_s + now - held.begins_s)

    def let_go(self, request: TrackedRequest) -> None:
        """Remove a request that begins or ends. A request that is not deferred is ignored."""
        if request.is_held:
            request.is_held = False
            self._held = [held for held in self._held if held.request is not request]
            self._late = [late for late in self._late if late[2] is not request]


def _is_over(held: _Held, begins_s: float, now: float) -> bool:
    """Return whether a request can wait no longer if its prompt would be prefilled `begins_s` seconds from now."""
    looks_s = now + LOOKS_EVERY_S
    return looks_s >= held.until_s or looks_s + MARGIN * begins_s >= held.first_s


QUANTILE: Final = 0.85  # of the admitted requests attain their SLO
LATE_SHARE: Final = 0.05  # of its limit by which a request that a node refuses counts as late
MOST_SPARE: Final = 0.5  # of a limit: a larger margin would admit hardly any request to learn from
FEWEST_TOKENS: Final = 8  # of an output from whose TPOT the margin learns
SPARE_SLOTS: Final = 1  # running slots that late requests leave free on a node
TURN_COMES_S: Final = 1.0  # before its turn a refused request gets a running slot reserved
NUM_FIRST_TOKENS: Final = 32
FEWEST_FIRST_TOKENS: Final = 8  # needed to measure how fast a queue moves


class Admission:
    """Decide on new requests, and learn margins from the requests admitted."""

    def __init__(self, *, admits_late: bool, max_queue_wait_s: float) -> None:
        """Create an admission control without measurements.

        `admits_late`: admit requests that would miss their SLO or make others miss theirs. `max_queue_wait_s`: the
        longest wait for the first token; 0 sets no limit.
        """
        self.admits_late: Final = admits_late
        self._max_queue_wait_s = max_queue_wait_s
        self._ttft_margin = Margin(quantile=QUANTILE)  # error of predicted first tokens, as a share of their limits
        self._tpot_margin = Margin(1.0, QUANTILE)  # TPOT, as a share of the planned limit
        self._turns = Turns()
        self._queue = _Queue()

    def planned_due(self, request: TrackedRequest) -> Due | None:
        """Return the deadlines of a request that decisions plan for.

        The planned deadline of the first token is before the limit by the learned margin. A late request has none.
        """
        due, slo = request.due, request.slo
        if due is None or slo is None or request.output:
            return due
        if request.is_late or slo.ttft_s is None:
            return Due(inf, due.tpot_s)
        return Due(due.first_s - slo.ttft_s * min(MOST_SPARE, self._ttft_margin.factor - 1), due.tpot_s)

    @property
    def tpot_margin(self) -> float:
        """Return the factor by which the TPOT of outputs rarely exceeded the planned limit."""
        return min(1 + MOST_SPARE, self._tpot_margin.factor)

    def is_hopeless(self, request: TrackedRequest, placed: Placed, now: float) -> bool:
        """Return whether a new request that could be placed like this cannot have its first token by the planned
        deadline."""
        due = self.planned_due(request)
        if due is None or request.output or due.first_s == inf:
            return False
        return now + placed.least_prefill_s + self._kept_s(request, placed.least_prefill_s, now) > due.first_s

    def arrives(self, request: TrackedRequest, now: float) -> None:
        """Note whether a new request comes back at its retry-after time."""
        if len(self._turns):  # otherwise the key, a hash of the whole prompt, is not needed
            request.has_turn = self._turns.take(request.prompt.key, now)

    def num_spare(self, request: TrackedRequest, now: float) -> int:
        """Return how many running slots a request must leave free for requests that come back and can be in time."""
        if request.is_late:
            return SPARE_SLOTS
        can_wait = self.admits_late or not request.limits_first
        if can_wait or request.output or request.has_turn:
            return 0
        return round(self._turns.num_kept(now, TURN_COMES_S))

    def _kept_s(self, request: TrackedRequest, within_s: float, now: float) -> float:
        """Return the seconds of work that a request must leave for the requests that come back within `within_s`
        seconds."""
        return 0.0 if request.has_turn else self._turns.kept_s(now, within_s)

    def predict(self, request: TrackedRequest, placed: Placed, now: float) -> None:
        """Record when the first token of a request that begins now is expected, if that is known and in time."""
        is_timely = placed.is_timely and not request.num_restarts and not self.is_hopeless(request, placed, now)
        is_new = placed.least_prefill_s > 0 and not request.output
        request.predicted_first_s = now + placed.begins_s if is_timely and is_new else None

    def expectation(self, request: TrackedRequest, placed: Placed, step_s: float, now: float) -> Expectation:
        """Return the predictions for a new request that begins now. `step_s` is the decode step of its node with the
        request."""
        due, planned = request.due, self.planned_due(request)
        is_known = placed.least_prefill_s > 0 and placed.begins_s < inf
        margin_s = 0.0
        if due is not None and planned is not None and planned.first_s < inf:
            margin_s = due.first_s - planned.first_s
        return Expectation(
            expected_ttft_s=now + placed.begins_s - request.timeline.start_s if is_known else 0.0,
            expected_prefill_s=placed.prefill_s if is_known else 0.0,
            ttft_margin_s=margin_s,
            expected_tpot_s=step_s,
            deferred_s=0.0 if request.held_since_s is None else now - request.held_since_s,
        )

    def first_token(self, request: TrackedRequest, num_waiting: int, now: float) -> None:
        """Learn from the first token of a request, while `num_waiting` other requests wait for theirs."""
        self._queue.migrated(num_waiting, now)
        self._learn(request, now)

    def refused_late(self, request: TrackedRequest, now: float) -> None:
        """Learn from a request that a node has refused because its first token would have come after its limit."""
        if request.slo is not None and (limit_s := request.slo.ttft_s) is not None:
            self._learn(request, max(now, request.timeline.start_s + limit_s * (1 + LATE_SHARE)))

    def _learn(self, request: TrackedRequest, first_s: float) -> None:
        predicted_s, slo = request.predicted_first_s, request.slo
        if predicted_s is not None and slo is not None and slo.ttft_s is not None:
            self._ttft_margin.note(slo.ttft_s, slo.ttft_s + first_s - predicted_s)

    def ended(self, request: TrackedRequest, now: float) -> None:
        """Learn from the end of an admitted request."""
        self._turns.ended(now)
        slo, num_tokens = request.slo, len(request.output)
        if request.predicted_first_s is None or slo is None or slo.tpot_s is None or num_tokens < FEWEST_TOKENS:
            return
        self._tpot_margin.note(slo.tpot_s, request.timeline.tpot_s(num_tokens))

    def check_wait(self, request: TrackedRequest, queue_s: float, num_waiting: int, now: float) -> None:
        """Raise RequestError where a request would wait too long for its first token.

        Before it are prompts that take `queue_s` seconds, and `num_waiting` requests without a first token.
        """
        most_s, wait_s = self._max_queue_wait_s, max(queue_s, self._queue.wait_s(num_waiting, now))
        wait_s += self._kept_s(request, wait_s, now)
        if most_s and wait_s > most_s:
            message = f"the first token would come after {wait_s:.1f} s, the limit is {most_s:g} s"
            raise self.refusal(reasons.QUEUE_FULL, message, now, wait_s - most_s, request)

    def may_begin(self, request: TrackedRequest, placed: Placed, now: float) -> bool:
        """Return whether a request may begin where it could be placed like this, as far as SLOs are concerned."""
        is_new = request.due is not None and not request.num_restarts and not request.output
        return self.admits_late or not is_new or (placed.is_timely and not self.is_hopeless(request, placed, now))

    def refusal(
        self, reason: str, message: str, now: float, least_s: float = 0.0, request: TrackedRequest | None = None
    ) -> RequestError:
        """Return the error of a refused request with its retry-after, `least_s` seconds at least."""
        wait_s = self._turns.wait_s(now, least_s, None if request is None else request.prompt.key)
        return RequestError(reason, f"{message}: try again in {wait_s:.1f} s", retry_after_s=f"{wait_s:.3f}")


class _Queue:
    """Measure how fast requests get their first tokens while others wait for theirs."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=NUM_FIRST_TOKENS)

    def migrated(self, num_waiting: int, now: float) -> None:
        """Record a first token. While no other requests wait, the rate is that of arrivals, and the record is
        dropped."""
        if num_waiting:
            self._times_s.append(now)
        else:
            self._times_s.clear()

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Return the seconds until the first token of a request after `num_ahead` others; 0 while unknown."""
        if len(self._times_s) < FEWEST_FIRST_TOKENS:
            return 0.0
        return num_ahead * (now - self._times_s[0]) / (len(self._times_s) - 1)
