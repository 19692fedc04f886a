"""Admission control: which new requests are taken, deferred or refused, and when a refused one is to come back. Pure.

A request with a limit on TTFT is planned to have its first token some time before the limit. How long before is learnt
from how far the first tokens of requests that were expected in time came after what was expected, as a share of their
limits (serving_core/margin.py). So the planned deadline is the same whether a long queue or a single step was to be
predicted. A limit on TPOT is planned for as the part of it with which those that were planned to keep it did so.

Where late requests are refused, one whose prompt cannot be read in time is refused at once: to wait for the same
deadline never helps. One that would make others late is deferred if it is expected to find a place in time, and refused
at once if not.

Whatever its limits, a request is refused that would wait longer than max_queue_wait_s for the first token.
"""

from collections import deque
from math import inf
from typing import Final

from coordinator.control.attempts import TrackedRequest
from coordinator.control.expectation import Expectation
from coordinator.control.placement.policy import Placed
from coordinator.control.turns import Turns
from serving_core import reasons
from serving_core.due import Due
from serving_core.errors import RequestError
from serving_core.margin import Margin

QUANTILE: Final = 0.95  # of those that are admitted keep their limits
LATE_SHARE: Final = 0.05  # of its limit that a request which is refused late would have been late by, at least
MOST_SPARE: Final = 0.5  # of a limit: with more, hardly anybody would be admitted from whom to learn
FEWEST_TOKENS: Final = 8  # of an output whose TPOT tells something
SPARE_SEATS: Final = 1  # that late requests leave on a node
TURN_COMES_S: Final = 1.0  # within which a seat is left for whose turn it is
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
        """Return how many seats a request leaves for those that come and can be in time."""
        if request.is_late:
            return SPARE_SEATS
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
