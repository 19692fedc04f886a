"""Decide when and on which nodes a request begins: at once, when deferred admission lets it, or when a node attaches.

Pure: decisions come out, and the scheduler carries each out before it asks for the next, since every start changes what
the next request finds.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from coordinator.control.admission import Admission
from coordinator.control.instructions import with_progress
from coordinator.control.load import ArrivalEstimator, Ledger, Prompt
from coordinator.control.nodes import Registry, has_path
from coordinator.control.placement.costs import TransferEstimator, Wanted
from coordinator.control.placement.policy import Placed, Policy, best_decode_node, best_prefill_node
from coordinator.control.request import Request, State, Wait
from serving_core.errors import RequestError

MAX_PLACEMENTS_PER_EVENT: Final = 16  # beside hundreds of requests with an SLO a placement takes milliseconds

Decision = tuple[Request, Placed | RequestError]
"""A waiting request, and the nodes on which it starts or the error with which it ends."""


class Waiting:
    """Place requests, and keep those that may not begin: deferred ones, and ones that no attached node can take.

    `num_without_token` is the number of requests without output; the scheduler updates it.
    """

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        admission: Admission,
        transfers: TransferEstimator,
        *,
        policy: Policy,
        node_wait_s: float,
    ) -> None:
        """Create it without requests. A request waits for nodes up to `node_wait_s`, not at all if that is 0."""
        self._registry, self._ledger, self._admission, self._transfers = registry, ledger, admission, transfers
        self._policy, self._node_wait_s = policy, node_wait_s
        self.arrivals = ArrivalEstimator()
        self.num_without_token = 0
        self._event_s, self._num_placed = -inf, 0  # the time of the last event, and the placements made for it

    # ---- a placement ----

    def place(self, request: Request, now: float) -> Placed:
        """Return the placement of the request. Raises RequestError where no nodes can take it."""
        num_ahead = self._admission.deferred.num_ahead(request)
        if num_ahead:
            num_ahead //= max(1, sum(node.decodes for node in self._registry.nodes))
        wanted = Wanted(
            request.known,
            request.max_tokens,
            request.avoid,
            self._admission.planned_due(request),
            len(request.output),
            self._ledger.lengths.left(len(request.output), request.num_tokens_left),
            self.arrivals.expected(now),
            num_ahead,
            self._admission.num_spare(request, now),
            self._admission.tpot_margin,
        )
        fleet = self._registry.nodes, self._ledger, wanted, self._transfers.estimates(now)
        if request.pooling is not None:
            placed = best_prefill_node(*fleet)
        else:
            placed = best_decode_node(*fleet) or self._policy.place(*fleet, now)
        self._num_placed = 1 + (self._num_placed if now == self._event_s else 0)
        self._event_s = now
        return placed

    def may_place(self, now: float) -> bool:
        """Return whether one more placement that can wait may be made for this event."""
        return now != self._event_s or self._num_placed < MAX_PLACEMENTS_PER_EVENT or not self._ledger.has_limits

    def num_to_compute(self, prompt: Prompt, placed: Placed) -> int:
        """Return the prompt tokens that the prefill node must compute: neither cached, being computed nor fetched."""
        num_fetched = 0 if placed.prefix_fetch is None else placed.prefix_fetch.num_fetched
        node = placed.prefill_node
        return prompt.tokens_to_compute(node, self._ledger.prefill_hashes(node)) - num_fetched

    # ---- a new request ----

    def begin(self, request: Request, now: float) -> Placed | None:
        """Return the nodes on which a new request starts now, or None: it has been deferred, or waits for nodes.

        Raises RequestError where no node can take a request that may not wait, and where admission control refuses it.
        """
        placed = self._first_placement(request, now)
        self.num_without_token += not request.output
        return placed

    def _first_placement(self, request: Request, now: float) -> Placed | None:
        self._admission.arrived(request, now)
        try:
            placed = self.place(request, now)
        except RequestError:
            if not self.may_wait:
                raise
            self.wait_for_nodes(request, now)
            return None
        if request.limits_first:
            num_output = self._ledger.lengths.left(0, request.num_tokens_left)
            self.arrivals.add(now, self.num_to_compute(request.known, placed), num_output)
        self._admission.check_wait(request, placed, self.num_without_token, now)
        return placed if self._may_begin(request, placed, now) else None

    def _may_begin(self, request: Request, placed: Placed, now: float) -> bool:
        """Return whether a request may begin; if not, it is deferred. Raises RequestError for one that is refused."""
        if self._admission.defer(request, placed, now):
            return False
        return self._admission.admit(request, placed, self.num_without_token, now)

    # ---- no node ----

    @property
    def may_wait(self) -> bool:
        """Return whether requests may wait for nodes to attach."""
        return self._node_wait_s > 0

    def wait_for_nodes(self, request: Request, now: float, retry_s: float = -inf) -> None:
        """Let a request wait for nodes to attach. It is placed again from `retry_s` on."""
        request.wait = Wait(self._registry.pauses.awake_s(now) + self._node_wait_s, retry_s)
        request.enter(State.WAITING_FOR_NODES, now)
        request.timeline.placed(now)

    def place_waiting(self, waiting: Sequence[Request], now: float) -> Iterator[Decision]:
        """Yield decisions about the requests that wait for nodes, the oldest first; some wait on, or are deferred.

        Those that have waited too long end. Where any request has an SLO, one call places at most
        MAX_PLACEMENTS_PER_EVENT.
        """
        awake_s = self._registry.pauses.awake_s(now)
        is_path = has_path(self._registry.nodes, embeds=self._registry.embeds)
        for request in waiting:
            is_over = awake_s >= request.wait.until_s
            if now < request.wait.retry_s or not (is_path or is_over):
                continue
            try:
                placed = self.place(request, now)
            except RequestError as no_node:
                if is_over:
                    yield request, with_progress(no_node, request)
                continue
            try:
                if self._may_begin(request, placed, now):
                    yield request, placed
            except RequestError as refusal:
                yield request, refusal
            if not self.may_place(now):
                break

    # ---- deferred requests ----

    def start_deferred(self, now: float) -> Iterator[Decision]:
        """Yield decisions about deferred requests, as many as may begin, a few at a time."""
        queue = self._admission.deferred
        while self.may_place(now) and (request := queue.first) is not None:
            try:
                placed = self.place(request, now)
                if not (placed.is_timely or self._admission.is_idle(placed)):
                    num_prefill_nodes = sum(node.prefills for node in self._registry.nodes if node.is_ready)
                    if (urgent := queue.urgent(placed, num_prefill_nodes, now)) is None:
                        break
                    if urgent is not request:
                        request = urgent
                        placed = self.place(request, now)
            except RequestError as no_node:
                yield from self._without_node(request, no_node, now)
                continue
            queue.learn(request, now)
            try:
                if self._admission.admit(request, placed, self.num_without_token, now):
                    yield request, placed
            except RequestError as refusal:
                yield request, refusal
        yield from self._start_late(now)

    def _start_late(self, now: float) -> Iterator[Decision]:
        queue = self._admission.deferred
        while self.may_place(now) and (request := queue.first_late) is not None:
            try:
                placed = self.place(request, now)
            except RequestError as no_node:
                yield from self._without_node(request, no_node, now)
                continue
            if not (self._admission.is_idle(placed) or queue.may_late_begin(placed)):
                break
            yield request, placed

    def _without_node(self, request: Request, no_node: RequestError, now: float) -> Iterator[Decision]:
        """Let a deferred request wait for nodes, or end it where requests may not wait."""
        if self.may_wait:
            self._admission.deferred.remove(request)
            self.wait_for_nodes(request, now)
        else:
            yield request, no_node
