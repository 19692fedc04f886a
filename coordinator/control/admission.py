"""Control admission: admit, defer or refuse new requests, and estimate the retry-after of refused ones. Pure.

Margin. The first token of a request with an SLO on TTFT is planned some time before its limit. The margin is learned
from how much later than predicted, and than planned, first tokens come, as a share of the limit (serving_core/slo.py),
so a long queue and a single step have the same planned deadline. An SLO on TPOT is planned with the share of it that
was recently enough.

Refusals. With `--admission timely` a request whose prompt cannot be prefilled in time is refused at once. A request
that would make others late is deferred if a place is expected in time, and refused at once otherwise, unless the one
late request is a prompt that takes longer: as many are in time then, and the node has more time for those to come.
Whatever its SLO, a request is refused whose first token would come more than `max_queue_wait_s` after its arrival.
The limits of requests in flight, in all and for an API key, are in control/scheduler.py (`check_room`).

Retry-after. A place becomes free whenever a running request ends. Each refused request gets the next place that no
other refused request has, at the rate of the latest ends, so that clients which obey come back one by one. A request
that comes back at its time is recognized by its prompt; a request that comes earlier has lost its place. The time
reserved for those yet to come is the share of the latest places that were taken.

Deferred admission. Prefilling a prompt early gains nothing while its node decodes as many sequences as attain their
TPOT: the new sequence only makes each step longer. So a request that would be late, or make others late, waits. Higher
priority goes first, then the earliest deadline. A request begins as soon as it makes no other late. It also begins when
DEFERRAL_SHARE of its time has passed, or when the prefill of its prompt and of those before it, PREFILL_SAFETY_FACTOR
times over, leaves no more time to wait and its prefill node has nothing else to do. A request without an SLO on TTFT
can always wait longer.

A request that can wait no longer and would make others late counts as late. Late requests go after all others, by
priority and age, where they delay none. The share LATE_FLOOR of the requests that begin is theirs, so that none waits
forever.
"""

from bisect import bisect_right, insort
from collections import deque
from math import ceil, inf
from typing import Final, NamedTuple

from coordinator.control.instructions import with_expectation
from coordinator.control.load import Ledger, RateEstimator
from coordinator.control.placement.policy import Placed
from coordinator.control.placement.slo_forecast import step_s
from coordinator.control.request import Request, State
from coordinator.control.slo import Expectation
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.slo import Due, Margin

MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 60.0
RETRY_GRACE_S: Final = 3.0  # by which a request may come before or after its retry-after time
MAX_RETRIES_REMEMBERED: Final = 4096  # retry-after times kept; further refused requests have no place kept
NUM_RETRIES_MEASURED: Final = 32  # latest retry-after times from which the share of requests that return is measured


class RetryAfterEstimator:
    """Estimate when each refused request finds a place, and expect it back then."""

    def __init__(self) -> None:
        self._ends = RateEstimator()
        self._last_s = 0.0  # the latest retry-after time given
        self._expected: list[tuple[float, int]] = []  # time and Prompt.key, sorted
        self._times_s: dict[int, float] = {}  # the same, by key
        self._have_returned: deque[bool] = deque([False] * NUM_RETRIES_MEASURED, maxlen=NUM_RETRIES_MEASURED)

    def __len__(self) -> int:
        """Return how many refused requests have yet to come back."""
        return len(self._expected)

    def ended(self, now: float) -> None:
        """Record that a request has ended at `now`, so that a running slot is free."""
        self._ends.add(now)

    def retry_after_s(self, now: float, least_s: float = 0.0, key: int | None = None) -> float:
        """Return after how many seconds one more refused request should try again, `least_s` at least.

        With a `key` (Prompt.key), the request is expected back at that time, rounded up to a whole second, and counts
        as such in `num_expected`.
        """
        per_s = self._ends.per_s(now)
        free_s = max(self._last_s, now) + (1 / per_s if per_s else 0.0)
        self._last_s = min(free_s, now + MAX_RETRY_AFTER_S)
        retry_after_s = max(MIN_RETRY_AFTER_S, least_s, self._last_s - now)
        self._forget(now)
        if key is not None and key not in self._times_s and len(self._times_s) < MAX_RETRIES_REMEMBERED:
            self._times_s[key] = now + ceil(retry_after_s)
            insort(self._expected, (self._times_s[key], key))
        return retry_after_s

    def returned(self, key: int, now: float) -> bool:
        """Return whether a request that arrives was refused earlier and comes back at or after its retry-after time.

        It may come RETRY_GRACE_S early. The request of this `key` is no longer expected back. False for an unknown key.
        """
        self._forget(now)
        if (at_s := self._times_s.pop(key, None)) is None:
            return False
        self._expected.remove((at_s, key))
        is_its_time = at_s <= now + RETRY_GRACE_S
        self._have_returned.append(is_its_time)
        return is_its_time

    def num_expected(self, now: float, within_s: float) -> float:
        """Return how many refused requests will probably come back within `within_s` seconds.

        This is the number due by then, times the share of the latest retry-after times at which a request did come
        back.
        """
        if not self._expected:
            return 0.0
        self._forget(now)
        num_due = bisect_right(self._expected, (now + within_s, inf))
        return num_due * sum(self._have_returned) / NUM_RETRIES_MEASURED

    def reserved_s(self, now: float, within_s: float) -> float:
        """Return the seconds that the fleet needs for the requests expected back within `within_s` seconds.

        0 while the rate at which requests end is unknown.
        """
        per_s = self._ends.per_s(now)
        return self.num_expected(now, within_s) / per_s if per_s else 0.0

    def _forget(self, now: float) -> None:
        """Drop the requests that have not returned at their time."""
        while self._expected and self._expected[0][0] < now - RETRY_GRACE_S:
            del self._times_s[self._expected.pop(0)[1]]
            self._have_returned.append(False)


DEFERRAL_SHARE: Final = 0.6  # of the time until the first token is due; tuned in simulation
PREFILL_SAFETY_FACTOR: Final = (
    1.5  # prefill takes longer than predicted where sequences start beside it; tuned in simulation
)
TICK_S: Final = 0.25  # longest interval between two looks: a request that cannot wait for the next one begins
LATE_FLOOR: Final = 0.05  # share of late requests among those that begin while late ones wait
MAX_LATE_QUEUE_S: Final = 0.5  # of work before a late request on its prefill node: with more it would only wait there


class _Deferred(NamedTuple):
    """Keep a deferred request; the fields are in the order that sorts the queue."""

    priority: int
    until_s: float  # when DEFERRAL_SHARE of the time until its first token is due has passed
    age: int
    request: Request
    prefill_s: float  # seconds that its prefill takes
    first_s: float  # when its first token is due
    begins_s: float  # when it was expected to begin


class DeferredQueue:
    """Keep the deferred requests, which are QUEUED, and choose which of them begins next."""

    def __init__(self) -> None:
        self._deferred: list[_Deferred] = []
        self._late: list[tuple[int, int, Request]] = []  # by priority and age
        self._num_owed = 0.0  # late requests that are due to begin
        self._margin = Margin()  # error of the predicted begin, as a share of the longest deferral

    def __len__(self) -> int:
        return len(self._deferred) + len(self._late)

    @property
    def first(self) -> Request | None:
        """Return the deferred request that begins next, late ones aside; None if there is none."""
        return self._deferred[0].request if self._deferred else None

    @property
    def first_late(self) -> Request | None:
        """Return the late request that begins next; None if there is none."""
        return self._late[0][2] if self._late else None

    def num_ahead(self, request: Request) -> int:
        """Return how many deferred requests begin before this one; all of them, late ones aside, if it is not deferred.

        0 for a late request.
        """
        if request.state is not State.QUEUED:
            return len(self._deferred)
        if any(late is request for _, _, late in self._late):
            return 0
        places = (place for place, each in enumerate(self._deferred) if each.request is request)
        return next(places, len(self._deferred))

    def defer(self, request: Request, placed: Placed, now: float, *, in_time: bool = False) -> bool:
        """Queue a request if waiting helps it, and return whether it is queued; it enters state QUEUED.

        `placed` is how it could begin now. Waiting helps a request with an SLO that no node has had, and that would be
        late or make others late if it began now, as long as there is time to wait. With `in_time`, a request that is
        expected to wait longer than that time is not queued.
        """
        due = request.due
        if placed.is_timely or due is None or request.output or request.avoid:
            return False
        until_s = request.timeline.start_s + DEFERRAL_SHARE * (due.first_s - request.timeline.start_s)
        begins_s = now + placed.wait_s
        entry = _Deferred(request.priority, until_s, request.age, request, placed.prefill_s, due.first_s, begins_s)
        if _is_over(entry, placed.begins_s, now) or placed.begins_s == inf:
            return False
        spare_s = (self._margin.factor - 1) * (until_s - now) if until_s < inf else 0.0
        if in_time and begins_s > until_s - spare_s:
            return False
        insort(self._deferred, entry)
        self._enter_queue(request, now)
        return True

    def defer_late(self, request: Request, now: float) -> None:
        """Queue a request as late, behind all others, and remove it from the queue of those that are not late."""
        self.remove(request)
        insort(self._late, (request.priority, request.age, request))
        request.is_late = True
        self._enter_queue(request, now)

    def urgent(self, placed: Placed, num_prefill_nodes: int, now: float) -> Request | None:
        """Return the request that must begin although it makes others late; None where all deferred ones can wait.

        Late ones are left aside. `placed` is the placement of the first request, and `num_prefill_nodes` the number of
        prefill nodes. Where a request can wait no longer, the first one of its priority in the queue begins.
        """
        has_work = placed.begins_s - placed.prefill_s > TICK_S
        begins_s, first = 0.0, None
        for each in self._deferred:
            if first is None or first.priority < each.priority:
                first = each
            begins_s += each.prefill_s / num_prefill_nodes
            if _is_over(each, 0.0 if has_work else begins_s, now):
                return first.request
        return None

    def may_late_begin(self, placed: Placed) -> bool:
        """Return whether the first late request may begin, given how it could be placed.

        It may if it makes no other request late and its prefill node has hardly any queue, or if LATE_FLOOR owes it a
        turn.
        """
        return (placed.is_timely and placed.queue_s <= MAX_LATE_QUEUE_S) or self._num_owed >= 1

    def started(self, request: Request) -> None:
        """Record that a request begins, deferred or not: take it from the queue, and count a turn of late requests."""
        if request.is_late:
            self._num_owed = max(0.0, self._num_owed - 1)
        elif self._late:
            self._num_owed = min(1.0, self._num_owed + LATE_FLOOR)
        self.remove(request)

    def learn(self, request: Request, now: float) -> None:
        """Learn the error of the expected wait from a deferred request that begins now, or ends without having begun.

        A request that is not in the queue is ignored.
        """
        entry = next((each for each in self._deferred if each.request is request), None)
        if entry is not None and entry.until_s < inf:
            most_s = entry.until_s - request.timeline.start_s
            self._margin.note(most_s, most_s + now - entry.begins_s)

    def remove(self, request: Request) -> None:
        """Remove a request that begins or ends. A request that is not deferred is ignored."""
        if request.state is State.QUEUED and len(self):
            self._deferred = [each for each in self._deferred if each.request is not request]
            self._late = [late for late in self._late if late[2] is not request]

    def _enter_queue(self, request: Request, now: float) -> None:
        request.enter(State.QUEUED, now)
        if request.deferred_since_s is None:
            request.deferred_since_s = now


def _is_over(deferred: _Deferred, begins_s: float, now: float) -> bool:
    """Return whether a request can wait no longer if its prompt would be prefilled `begins_s` seconds from now."""
    looks_s = now + TICK_S
    return looks_s >= deferred.until_s or looks_s + PREFILL_SAFETY_FACTOR * begins_s >= deferred.first_s


QUANTILE: Final = 0.85  # of the admitted requests attain their SLO
LATE_SHARE: Final = 0.05  # of its limit by which a request that a node refuses counts as late
MOST_SPARE: Final = 0.5  # of a limit: a larger margin would admit hardly any request to learn from
FEWEST_TOKENS: Final = 8  # of an output from whose TPOT the margin learns
SPARE_SLOTS: Final = 1  # running slots that late requests leave free on a node
RETURN_COMES_S: Final = 1.0  # before its retry-after time a refused request gets a running slot reserved
NUM_FIRST_TOKENS: Final = 32
FEWEST_FIRST_TOKENS: Final = 8  # needed to measure how fast a queue moves


class Admission:
    """Admit, defer or refuse new requests, and learn margins from the requests that were admitted."""

    def __init__(self, ledger: Ledger, *, admits_late: bool, max_queue_wait_s: float) -> None:
        """Create an admission control without measurements and without deferred requests.

        `admits_late`: admit requests that would miss their SLO or make others miss theirs. `max_queue_wait_s`: the
        longest wait for the first token, in seconds; 0 sets no limit.
        """
        self.admits_late: Final = admits_late
        self.deferred = DeferredQueue()
        self._ledger = ledger
        self._max_queue_wait_s = max_queue_wait_s
        self._ttft_margin = Margin(quantile=QUANTILE)  # error of predicted first tokens, as a share of their limits
        self._tpot_margin = Margin(1.0, QUANTILE)  # TPOT, as a share of the planned limit
        self._retries = RetryAfterEstimator()
        self._first_tokens = _FirstTokenRate()

    def planned_due(self, request: Request) -> Due | None:
        """Return the deadlines that placement plans for: the request's own, with an earlier one for the first token.

        It is earlier by a learned margin. A late request, and one without an SLO on TTFT, has no deadline for the first
        token (infinity). None without an SLO.
        """
        due, slo = request.due, request.slo
        if due is None or slo is None or request.output:
            return due
        if request.is_late or slo.ttft_s is None:
            return Due(inf, due.tpot_s)
        return Due(due.first_s - slo.ttft_s * min(MOST_SPARE, self._ttft_margin.factor - 1), due.tpot_s)

    @property
    def tpot_margin(self) -> float:
        """Return the factor by which recent outputs rarely exceeded the planned limit of TPOT; at least 1."""
        return min(1 + MOST_SPARE, self._tpot_margin.factor)

    # ---- decisions ----

    def arrived(self, request: Request, now: float) -> None:
        """Set `request.came_back`: whether a new request was refused before and comes back at its retry-after time."""
        if len(self._retries):  # otherwise the key, a hash of the whole prompt, is not needed
            request.came_back = self._retries.returned(request.prompt.key, now)

    def check_wait(self, request: Request, placed: Placed, num_waiting: int, now: float) -> None:
        """Raise RequestError, with a retry-after, where a new request would wait too long for its first token.

        `placed` is how it could begin. `num_waiting` requests have no first token yet. A request that has output, or
        whose SLO on TTFT can be attained, is not checked.
        """
        if request.output or (request.limits_first and not self.is_hopeless(request, placed, now)):
            return  # the first token is in time, or the request goes after all others
        is_queue = placed.is_full or len(self.deferred) > 0
        self._check_wait(request, placed, num_waiting if is_queue else 0, now)

    def defer(self, request: Request, placed: Placed, now: float) -> bool:
        """Put a request into the queue `deferred` if waiting helps, and return whether it is there.

        `placed` is how the request could begin now. Idle nodes defer no request. Only a new request with an SLO can be
        deferred, if it would be late or make others late. Without `admits_late`, neither a prompt that cannot be
        prefilled by its deadline nor a request that would wait too long is deferred.
        """
        if self.is_idle(placed):
            return False
        is_hopeless = self._is_new(request) and self.is_hopeless(request, placed, now)
        if is_hopeless and not self.admits_late:
            return False
        return self.deferred.defer(request, placed, now, in_time=not self.admits_late)

    def admit(self, request: Request, placed: Placed, num_waiting: int, now: float) -> bool:
        """Return whether a request may begin as `placed`; if not, it has been deferred as late.

        Raises RequestError, with a retry-after, for a request that is refused. `num_waiting` requests have no first
        token yet. Idle nodes take every request: no later time would be better, and only running a request shows
        whether the estimates of these nodes are too slow.
        """
        if self.is_idle(placed):
            return True
        if not self.keeps_slos(request, placed, now):
            self.expect(request, placed, now)
            raise self.late_refusal(request, now, placed.wait_s)
        if not self._is_new(request) or placed.num_late_beside <= 1:
            return True
        self._check_wait(request, placed, num_waiting, now)
        self.deferred.defer_late(request, now)
        return False

    def keeps_slos(self, request: Request, placed: Placed, now: float) -> bool:
        """Return whether a request that begins as `placed` attains its SLO and makes no other request miss its own.

        Always True with `admits_late`, and for a request without an SLO, or one that nodes have had.
        """
        is_new = request.due is not None and not request.num_restarts and not request.output
        if self.admits_late or not is_new:
            return True
        num_late = placed.num_late - placed.displaces_prompt
        return not num_late and placed.tpot_ratio <= 1 and not self.is_hopeless(request, placed, now)

    def is_idle(self, placed: Placed) -> bool:
        """Return whether both nodes of a placement have finished all that they were given."""
        return self._ledger.is_idle(placed.prefill_node) and self._ledger.is_idle(placed.decode_node)

    def is_hopeless(self, request: Request, placed: Placed, now: float) -> bool:
        """Return whether a new request placed like this cannot have its first token by the planned deadline.

        It is hopeless if that is so even when prompts that take longer let its prompt go first. False without an SLO on
        TTFT.
        """
        due = self.planned_due(request)
        if due is None or request.output or due.first_s == inf:
            return False
        reserved_s = self._reserved_s(request, placed.least_prefill_s, now)
        if placed.is_prefill_timely and not reserved_s:
            return False
        return now + placed.least_prefill_s + reserved_s > due.first_s

    def num_spare(self, request: Request, now: float) -> int:
        """Return how many running slots a request must leave free for others.

        These are others that come back at their retry-after time; a late request leaves SPARE_SLOTS.
        """
        if request.is_late:
            return SPARE_SLOTS
        can_wait = self.admits_late or not request.limits_first
        if can_wait or request.output or request.came_back:
            return 0
        return round(self._retries.num_expected(now, RETURN_COMES_S))

    def refusal(
        self, reason: str, message: str, now: float, least_s: float = 0.0, request: Request | None = None
    ) -> RequestError:
        """Return the error for a refused request, with a retry-after in its message and metadata.

        The retry-after is at least `least_s` seconds. With `request`, the request is expected back at that time.
        """
        wait_s = self._retries.retry_after_s(now, least_s, None if request is None else request.prompt.key)
        return RequestError(reason, f"{message}: try again in {wait_s:.1f} s", retry_after_s=f"{wait_s:.3f}")

    def late_refusal(self, request: Request, now: float, least_s: float = 0.0, **seconds: float) -> RequestError:
        """Return the error for a request whose SLO cannot be attained, reason WOULD_BE_LATE, with a retry-after.

        Its metadata has the predictions for the request, and `seconds` under their names.
        """
        message = "the limits of the request cannot be kept beside those of others"
        refusal = self.refusal(reasons.WOULD_BE_LATE, message, now, least_s, request)
        return with_expectation(refusal, request, **seconds)

    def _check_wait(self, request: Request, placed: Placed, num_waiting: int, now: float) -> None:
        """Raise RequestError where a request would wait too long behind `num_waiting` requests without a first
        token."""
        most_s = self._max_queue_wait_s
        wait_s = max(placed.queue_s, self._first_tokens.wait_s(num_waiting, now))
        wait_s += self._reserved_s(request, wait_s, now)
        if most_s and wait_s > most_s:
            message = f"the first token would come after {wait_s:.1f} s, the limit is {most_s:g} s"
            raise self.refusal(reasons.QUEUE_FULL, message, now, wait_s - most_s, request)

    def _is_new(self, request: Request) -> bool:
        """Return whether the request has an SLO and no node has had it."""
        return request.due is not None and not request.output and not request.avoid

    def _reserved_s(self, request: Request, within_s: float, now: float) -> float:
        """Return the seconds of work that a request must leave for the requests that come back within `within_s`
        seconds."""
        return 0.0 if request.came_back else self._retries.reserved_s(now, within_s)

    # ---- predictions, and what is learned from them ----

    def predict(self, request: Request, placed: Placed, now: float) -> None:
        """Set `request.predicted_first_s`, when its first token is expected, for a request that begins now as `placed`.

        None if the prediction is unknown, or the request restarts or will be late: `first_token` then learns nothing
        from it.
        """
        is_timely = placed.is_timely and not request.num_restarts and not self.is_hopeless(request, placed, now)
        is_new = placed.least_prefill_s > 0 and not request.output
        due = self.planned_due(request)
        # What goes before a prompt that has time does not make its prediction wrong.
        planned_s = due.first_s if due is not None and due.first_s < inf else now
        request.predicted_first_s = max(now + placed.begins_s, planned_s) if is_timely and is_new else None

    def expect(self, request: Request, placed: Placed, now: float) -> None:
        """Set `request.expectation`, the predictions that clients see, for a request that begins now as `placed`.

        Has no effect without an SLO, for an embedding, and for a request that nodes have had or that has predictions.
        """
        if not self._is_new(request) or request.expectation is not None or request.pooling is not None:
            return
        due, planned = request.due, self.planned_due(request)
        is_known = placed.least_prefill_s > 0 and placed.begins_s < inf
        margin_s = 0.0
        if due is not None and planned is not None and planned.first_s < inf:
            margin_s = due.first_s - planned.first_s
        request.expectation = Expectation(
            expected_ttft_s=now + placed.begins_s - request.timeline.start_s if is_known else 0.0,
            expected_prefill_s=placed.prefill_s if is_known else 0.0,
            ttft_margin_s=margin_s,
            expected_tpot_s=step_s(placed.decode_node, self._ledger, 1, len(request.prompt)),
            deferred_s=0.0 if request.deferred_since_s is None else now - request.deferred_since_s,
        )

    def first_token(self, request: Request, num_waiting: int, now: float) -> None:
        """Learn from the first token of a request how wrong its prediction was, and how fast the queue moves.

        `num_waiting` other requests wait for their first token.
        """
        self._first_tokens.add(num_waiting, now)
        self._learn(request, now)

    def refused_late(self, request: Request, now: float) -> None:
        """Learn from a request that a node has refused because its first token would have come after its limit.

        It counts as a first token LATE_SHARE of the limit late, or at `now` if that is later.
        """
        if request.slo is not None and (limit_s := request.slo.ttft_s) is not None:
            self._learn(request, max(now, request.timeline.start_s + limit_s * (1 + LATE_SHARE)))

    def _learn(self, request: Request, first_s: float) -> None:
        predicted_s, slo = request.predicted_first_s, request.slo
        if predicted_s is not None and slo is not None and slo.ttft_s is not None:
            self._ttft_margin.note(slo.ttft_s, slo.ttft_s + first_s - predicted_s)

    def ended(self, request: Request, now: float) -> None:
        """Learn from the end of an admitted request: a running slot is free, and its TPOT is known."""
        self._retries.ended(now)
        slo, num_tokens = request.slo, len(request.output)
        if request.predicted_first_s is None or slo is None or slo.tpot_s is None or num_tokens < FEWEST_TOKENS:
            return
        self._tpot_margin.note(slo.tpot_s, request.timeline.tpot_s(num_tokens))


class _FirstTokenRate:
    """Measure how fast requests get their first tokens while others wait for theirs."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=NUM_FIRST_TOKENS)

    def add(self, num_waiting: int, now: float) -> None:
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
