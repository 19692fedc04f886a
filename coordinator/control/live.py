"""Keep the live requests, and place, emit, restart and end them. Pure.

A request for which no node is found waits for nodes to attach, be it new or one whose node was lost. Every tick tries
to place the waiting requests, the oldest first. The limit on live requests also limits how many wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Final

from coordinator.control.admission import Admission, Holding, Pace
from coordinator.control.instructions import Emit, End, Instruction, MigrationEnded, MigrationOutcome, Send
from coordinator.control.lives import Lives
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Node, Registry, has_path
from coordinator.control.outcomes import completion, too_late, with_expectation, with_progress
from coordinator.control.placement.lateness import step_s
from coordinator.control.placement.no_choice import best_decode_node, best_prefill_node
from coordinator.control.placement.policy import Coming, Placed, Policy, Wanted
from coordinator.control.request import Attempt, Migration, MigrationStage, Releases, TrackedRequest
from coordinator.control.roles import Demand, Ended
from coordinator.control.timeline import Phase
from coordinator.control.transfer_costs import Handover
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.node import requests as node_requests

NUM_EPOCHS: Final = 2**32
ASK_AGAIN_S: Final = 1.0  # pause after every node has turned a request away
REFUSALS: Final = (reasons.QUEUE_FULL, reasons.WOULD_BE_LATE)
MOST_PLACED: Final = 16  # placements per event: beside hundreds of requests with an SLO each takes milliseconds


class LiveAnswers:
    """Keep every request that has not ended by its id, in the order of admission."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        metrics: Metrics,
        *,
        first_epoch: int,
        max_restarts: int,
        node_wait_s: float,
        fetches: str,
        policy: Policy,
        admission: Admission,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.metrics = metrics
        self.handover = Handover(fetches)
        self.lives = Lives()
        self._coming = Pace()  # of new requests that have a limit on their first token
        self._tokens_coming = Pace()  # prompt tokens that these have to compute
        self.admission = admission
        self.holding = Holding()
        self.demand = Demand()
        self.releases = Releases()
        self._epoch = first_epoch
        self._max_restarts, self._node_wait_s = max_restarts, node_wait_s
        self._policy = policy
        self._requests: dict[str, TrackedRequest] = {}
        self.num_without_token = 0  # live requests without a first token
        self._moment, self._num_placed = -inf, 0  # of the last event, and the placements made for it

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TrackedRequest]:
        """Iterate over a copy of the requests that nodes have."""
        return iter([request for request in self._requests.values() if not request.is_waiting])

    def __contains__(self, request: TrackedRequest) -> bool:
        """Return whether the request is live and nodes have it."""
        return self._requests.get(request.request_id) is request and not request.is_waiting

    def everyone(self) -> Iterator[TrackedRequest]:
        """Iterate over a copy of all live requests, those that wait for nodes included."""
        return iter(list(self._requests.values()))

    def newest(self, number: int) -> list[TrackedRequest]:
        """Return the `number` newest live requests, the newest first."""
        return list(islice(reversed(self._requests.values()), number))

    def find(self, request_id: str) -> TrackedRequest | None:
        return self._requests.get(request_id)

    def on(self, node: Node, attempt: node_requests.Attempt) -> TrackedRequest | None:
        """Return the request of which this is the current attempt, if the node has a part in it; else None."""
        request = self._requests.get(attempt.request_id)
        if request is None or request.is_waiting or request.attempt.epoch != attempt.epoch:
            return None
        return request if node is request.attempt.prefill or node is request.attempt.decode else None

    def next_epoch(self) -> int:
        """Return an epoch that no earlier attempt of any request has."""
        self._epoch = (self._epoch + 1) % NUM_EPOCHS
        return self._epoch

    # ---- attempts ----

    def begin(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Start the first attempt of a request, defer it, or let it wait for nodes.

        Raise RequestError, and then nothing has begun, where no node can take the request and it may not wait, or where
        it would be late and late requests are not admitted.
        """
        self.admission.arrives(request, now)
        try:
            placed = self._place(request, now)
        except RequestError:
            if not self._node_wait_s:
                raise
            instructions = self._wait(request, now)
        else:
            if request.limits_first:
                self._coming.happened(now)
                self._tokens_coming.happened(now, self._num_to_compute(request.known, placed))
            self._check_wait(request, placed, now)
            if self._holds(request, placed, now):
                instructions = []
            else:
                instructions = self._begin(request, placed, now, since_s=request.timeline.start_s)
        self._requests[request.request_id] = request
        self.num_without_token += not request.output
        return instructions

    def let_in(self, now: float) -> list[Instruction]:
        """Start deferred requests, as many as may begin, a few at a time. Call it several times a second and at each
        end."""
        instructions: list[Instruction] = []
        while self._may_place(now) and (request := self.holding.first) is not None:
            try:
                placed = self._place(request, now)
                if not (placed.is_timely or self._is_idle(placed)):
                    num_prefill_nodes = sum(node.prefills for node in self.registry.nodes if node.is_ready)
                    if (urgent := self.holding.urgent(placed, num_prefill_nodes, now)) is None:
                        break
                    if urgent is not request:
                        request = urgent
                        placed = self._place(request, now)
            except RequestError as no_node:
                instructions += self._without_node(request, no_node, now)
            else:
                instructions += self._begin_late(request, placed, now)
        return instructions + self._let_late_in(now)

    def _let_late_in(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._may_place(now) and (request := self.holding.first_late) is not None:
            try:
                placed = self._place(request, now)
            except RequestError as no_node:
                instructions += self._without_node(request, no_node, now)
                continue
            if not (self._is_idle(placed) or self.holding.may_late_begin(placed)):
                break
            instructions += self._try_on(request, placed, now)
        return instructions

    def _without_node(self, request: TrackedRequest, no_node: RequestError, now: float) -> list[Instruction]:
        """Let a deferred request wait for nodes, or end it where requests may not wait."""
        instructions = self._wait(request, now) if self._node_wait_s else self._end(request, no_node, now)
        self.holding.let_go(request)
        return instructions

    def retry(self, waiting: Sequence[TrackedRequest], now: float) -> list[Instruction]:
        """Place the requests that wait for nodes, the oldest first, and end those that have waited too long.

        Where any request has an SLO, one call places at most MOST_PLACED. Call `let_in` afterwards.
        """
        instructions: list[Instruction] = []
        awake_s = self.registry.pauses.awake_s(now)
        is_path = has_path(self.registry.nodes, embeds=self.registry.embeds)
        for request in waiting:
            assert request.waits_until_s is not None, "nodes have it"
            is_over = awake_s >= request.waits_until_s
            if now < request.asks_again_s or not (is_path or is_over):
                continue
            try:
                placed = self._place(request, now)
            except RequestError as no_node:
                if is_over:
                    instructions += self._end(request, with_progress(no_node, request), now)
                continue
            if self._holds(request, placed, now):
                request.waits_until_s = None
            else:
                instructions += self._begin_late(request, placed, now)
            if not self._may_place(now):
                break
        return instructions

    def _holds(self, request: TrackedRequest, placed: Placed, now: float) -> bool:
        """Defer a request that could be placed like this, if that helps. Return whether it is deferred.

        Idle nodes defer no request, and deferring does not help a prompt that cannot be prefilled by its deadline.
        """
        if self._is_idle(placed):
            return False
        is_hopeless = self._is_new(request) and self.admission.is_hopeless(request, placed, now)
        if is_hopeless and not self.admission.admits_late:
            return False
        return self.holding.takes(request, placed, now, in_time=not self.admission.admits_late)

    def _check_wait(self, request: TrackedRequest, placed: Placed, now: float) -> None:
        """Raise RequestError for a new request that would wait too long for its first token."""
        if request.output:
            return
        if request.limits_first and not self.admission.is_hopeless(request, placed, now):
            return  # the first token is in time, or the request goes after all others
        is_queue = placed.is_full or len(self.holding) > 0
        self.admission.check_wait(request, placed.queue_s, self.num_without_token if is_queue else 0, now)

    def _is_new(self, request: TrackedRequest) -> bool:
        """Return whether the request has an SLO and no node has had it."""
        return request.due is not None and not request.output and not request.avoid

    def _begin_late(self, request: TrackedRequest, placed: Placed, now: float) -> list[Instruction]:
        """Start the first attempt of a request that has waited, or end the request if it is not admitted."""
        self.holding.waited(request, now)
        try:
            instructions = self._begin(request, placed, now)
        except RequestError as late:
            return self._end(request, late, now)
        request.waits_until_s = None
        return instructions

    def _begin(
        self, request: TrackedRequest, placed: Placed, now: float, since_s: float | None = None
    ) -> list[Instruction]:
        """Start the first attempt, or defer the request as late where it would make others late.

        Raise RequestError for a request that is not admitted, or that would wait too long.
        """
        self._check_limits(request, placed, now)
        if self._is_new(request) and placed.num_late_beside > 1 and not self._is_idle(placed):
            self.admission.check_wait(request, placed.queue_s, self.num_without_token, now)
            self.holding.take_late(request, now)
            return []
        return self._try_on(request, placed, now, since_s=since_s)

    def _wait(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Let a request wait for nodes to attach; there are no instructions meanwhile."""
        request.waits_until_s = self.registry.pauses.awake_s(now) + self._node_wait_s
        request.timeline.placed(now)
        return []

    def refused(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """End a request that a node has refused because its first token would be late."""
        self.admission.refused_late(request, now)
        refusal = self._late_refusal(request, now, prefill_queue_s=now - request.timeline.start_s)
        return self.end(request, refusal, now)

    def _late_refusal(
        self, request: TrackedRequest, now: float, least_s: float = 0.0, **seconds: float
    ) -> RequestError:
        message = "the limits of the request cannot be kept beside those of others"
        refusal = self.admission.refusal(reasons.WOULD_BE_LATE, message, now, least_s, request)
        return with_expectation(refusal, request, **seconds)

    def _expect(self, request: TrackedRequest, placed: Placed, now: float) -> None:
        """Record the prediction for a request with an SLO that no node has had."""
        if self._is_new(request) and request.expectation is None and request.pooling is None:
            each_s = step_s(placed.decode_node, self.ledger, 1, len(request.prompt))
            request.expectation = self.admission.expectation(request, placed, each_s, now)

    def _check_limits(self, request: TrackedRequest, placed: Placed, now: float) -> None:
        """Raise RequestError for a new request that is not admitted.

        Idle nodes take every request: no later time would be better, and only running a request shows whether the
        estimates of these nodes are too slow.
        """
        if self.admission.may_begin(request, placed, now) or self._is_idle(placed):
            return
        self._expect(request, placed, now)
        raise self._late_refusal(request, now, placed.wait_s)

    def _is_idle(self, placed: Placed) -> bool:
        """Return whether the nodes of a placement have nothing to do."""
        return self.ledger.is_idle(placed.prefill_node) and self.ledger.is_idle(placed.decode_node)

    def elsewhere(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Restart a request on ready nodes without counting a restart; where there are none, it stays."""
        try:
            self._place(request, now)
        except RequestError:
            return []
        instructions = self._let_go(request, now)
        request.timeline.enter(Phase.PREFILL_QUEUE, now)
        placed = self._place(request, now)  # without the load of the attempt that was cancelled
        return instructions + self._try_on(request, placed, now)

    def carry_on(
        self, request: TrackedRequest, node: Node, error: RequestError, now: float, *, is_loss: bool = False
    ) -> list[Instruction]:
        """Handle that a node has dropped its part of the attempt: restart the request unless the part was over.

        `is_loss`: the node itself is lost. Losses within ONE_EVENT_S count as one restart.
        """
        request.attempt.let_go(node)
        if node is request.attempt.prefill and request.attempt.is_handed_over:
            self.ledger.let_go(request.request_id, node)
            return []
        return self.restart(request, node, error, now, counts=not is_loss or request.note_loss(now))

    def restart(
        self, request: TrackedRequest, node: Node, error: RequestError, now: float, *, counts: bool = True
    ) -> list[Instruction]:
        """Start a new attempt away from a node, or end the request with the error once max_restarts restarts have
        counted.

        A restart does not count with `counts` False, or shortly after this process was suspended.
        """
        error = with_progress(error, request)
        instructions = self._let_go(request, now)
        request.timeline.failed(error.reason)
        is_excused = self.registry.pauses.is_recent(now) or not counts
        if not is_excused and request.num_restarts - request.num_excused >= self._max_restarts:
            return instructions + self.end(request, error, now)
        request.num_restarts += 1
        request.num_excused += is_excused
        self.metrics.num_restarts += 1
        request.avoid.append(node)
        request.timeline.enter(Phase.PREFILL_QUEUE, now)
        if self._node_wait_s and not self._may_place(now):  # the loss of one node restarts many requests
            return instructions + self._wait(request, now)
        try:
            placed = self._place(request, now)
        except RequestError as no_node:
            if self._node_wait_s:
                return instructions + self._wait(request, now)
            final = RequestError(no_node.reason, str(no_node), **error.metadata)
            return instructions + self.end(request, final, now)
        return instructions + self._try_on(request, placed, now)

    def turned_away(self, request: TrackedRequest, node: Node, error: RequestError, now: float) -> list[Instruction]:
        """Place a request elsewhere after a node had no room for it.

        Where no other node has room, the request waits for nodes and tries again after ASK_AGAIN_S. It never ends for
        want of room: the limit on live requests bounds how many wait.
        """
        instructions = self._let_go(request, now)
        request.timeline.failed(error.reason)
        request.full_nodes.add(node)
        if node not in request.avoid:
            request.avoid.append(node)
        request.timeline.enter(Phase.PREFILL_QUEUE, now)
        try:
            placed = self._place(request, now)
        except RequestError:
            placed = None
        if placed is not None and not request.full_nodes & {placed.prefill_node, placed.decode_node}:
            return instructions + self._try_on(request, placed, now)
        request.full_nodes.clear()
        request.asks_again_s = now + ASK_AGAIN_S
        return instructions + self._wait(request, now)

    def _place(self, request: TrackedRequest, now: float) -> Placed:
        """Return the placement of the request. Raise RequestError where no nodes can take it."""
        num_ahead = self.holding.num_ahead(request)
        if num_ahead:
            num_ahead //= max(1, sum(node.decodes for node in self.registry.nodes))
        wanted = Wanted(
            request.known,
            request.max_tokens,
            request.avoid,
            self.admission.planned_due(request),
            len(request.output),
            self.ledger.lengths.left(len(request.output), request.num_tokens_left),
            self.coming(now),
            num_ahead,
            self.admission.num_spare(request, now),
            self.admission.tpot_margin,
        )
        there = self.registry.nodes, self.ledger, wanted, self.handover.costs(now)
        if request.pooling is not None:
            placed = best_prefill_node(*there)
        else:
            placed = best_decode_node(*there) or self._policy.place(*there, now)
        self._num_placed = 1 + (self._num_placed if now == self._moment else 0)
        self._moment = now
        return placed

    def _may_place(self, now: float) -> bool:
        """Return whether one more placement that can wait may be made at this moment (MOST_PLACED)."""
        return now != self._moment or self._num_placed < MOST_PLACED or not self.ledger.has_limits

    def coming(self, now: float) -> Coming:
        """Return the recent rate and prompt length of requests with an SLO on TTFT, as the prediction of those to
        come."""
        per_s = self._coming.per_s(now)
        return Coming(per_s, self._tokens_coming.per_s(now) / per_s if per_s else 0.0)

    def _num_to_compute(self, prompt: Prompt, placed: Placed) -> int:
        """Return the prompt tokens that the prefill node must compute: neither cached, being computed nor fetched."""
        num_fetched = 0 if placed.prefix_fetch is None else placed.prefix_fetch.num_fetched
        return prompt.tokens_to_compute(placed.prefill_node, self.ledger.marks_read(placed.prefill_node)) - num_fetched

    def _try_on(
        self, request: TrackedRequest, placed: Placed, now: float, *, since_s: float | None = None
    ) -> list[Instruction]:
        """Start an attempt on these nodes. The timeline records the placement at `since_s`, or at `now` without it."""
        self.holding.begins(request)
        prefill, decode, prompt = placed.prefill_node, placed.decode_node, request.known
        epoch, prefix_fetch = self.next_epoch(), placed.prefix_fetch
        if prefix_fetch is not None:
            prefix_fetch = replace(prefix_fetch, epoch=self.next_epoch())
        hosts = self.registry.hosts_of(decode) if request.max_tokens > decode.pool_tokens else ()
        request.attempt = Attempt(epoch, prefill, decode, len(request.output), now, prefix_fetch, hosts)
        request.timeline.placed(now if since_s is None else since_s, prefill.name, decode.name, begins=True)
        self.admission.predict(request, placed, now)
        self._expect(request, placed, now)
        if (due := self.admission.planned_due(request)) is not None:
            self.ledger.owe(request.request_id, due, len(request.output), request.num_tokens_left)
        num_to_compute = self._num_to_compute(prompt, placed)
        self.ledger.read(request.request_id, prefill, num_to_compute, prompt.marks(prefill.block_size))
        if request.pooling is None:
            marks = () if hosts else prompt.marks_shared(decode.block_size)
            self.ledger.write(request.request_id, decode, len(prompt), marks)
        return [Send(node, command) for node, command in request.commands(prompt, now)]

    # ---- tokens and ends ----

    def emit(self, request: TrackedRequest, token: fleet_pb2.SampledToken, now: float) -> list[Instruction]:
        """Emit the next token by index, with the early tokens that follow it. The last token of the output ends the
        request."""
        attempt, output, tokens = request.attempt, request.output, [token]
        output.append(token.token_id)
        finish_reason = token.finish_reason
        while attempt.early and not finish_reason and (early := attempt.early.pop(len(output), None)) is not None:
            tokens.append(early)
            output.append(early.token_id)
            finish_reason = early.finish_reason
        for each in tokens:
            if each.num_proposed:
                request.num_proposed += each.num_proposed
                request.num_accepted += min(each.num_accepted, each.num_proposed)
        gap_s, is_first = request.timeline.tokens(now), len(output) == len(tokens)
        self.metrics.tokens_came(len(tokens), gap_s, is_first=is_first)
        if is_first:
            self.num_without_token -= 1
            self.admission.first_token(request, self.num_without_token, now)
        if request.migration is not None:
            self._note_pause(request, request.migration, tokens, gap_s, now)
        self.ledger.tokens_came(request.request_id, attempt.decode, len(tokens))
        emit = Emit(request.request_id, tokens, request.num_cached_tokens if is_first else None)
        if not finish_reason:
            return [emit]
        # The node that sampled the last token has released the attempt by itself, and so has the prefill node.
        attempt.prefill_holds = False
        attempt.decode_holds = tokens[-1].index == attempt.first_index and not attempt.is_local
        self.note_ended(request)
        complete = completion(request, finish_reason, now)
        if complete.finish_reason == inference_pb2.FINISH_REASON_STOP:
            complete.matched_token_id = output[-1]
        return [emit, *self.end(request, complete, now)]

    def go_on(self, node: Node, token: fleet_pb2.SampledToken, now: float) -> Emit | None:
        """Emit a token that simply continues its sequence, which nearly all tokens do, at less cost than `emit`.

        Return None, with nothing changed, where the token needs the full path.
        """
        about = token.attempt
        request = self._requests.get(about.request_id)
        if request is None or request.is_waiting or request.migration is not None:
            return None
        if token.finish_reason or token.num_proposed:
            return None
        attempt, output, timeline = request.attempt, request.output, request.timeline
        is_current = attempt.epoch == about.epoch and attempt.decode is node and attempt.first_token_s is not None
        if not is_current or token.index != len(output) or attempt.early or timeline.phase is not Phase.DECODE:
            return None
        output.append(token.token_id)
        self.metrics.tokens_came(1, timeline.tokens(now), is_first=False)
        self.ledger.tokens_came(request.request_id, node, 1)
        return Emit(request.request_id, [token])

    def note_ended(self, request: TrackedRequest) -> None:
        """Record a request that has all its tokens, or its embedding, for the length estimator and the demand."""
        num_prompt, num_output = len(request.prompt), len(request.output)
        limit_s = request.slo.tpot_s if request.slo is not None else None
        if request.pooling is None:
            self.ledger.lengths.ended(num_output)
        num_computed = num_prompt - request.num_cached_tokens
        num_spared = min(num_prompt, self.ledger.tokens_spared(request.request_id))
        self.demand.ended(Ended(num_prompt, num_computed, num_output, inf if limit_s is None else limit_s, num_spared))

    def _note_pause(
        self,
        request: TrackedRequest,
        migration: Migration,
        tokens: list[fleet_pb2.SampledToken],
        gap_s: float,
        now: float,
    ) -> None:
        """Record the pause of a migration once: the gap before the first token of the target."""
        if migration.stage is not MigrationStage.MIGRATED or migration.has_resumed:
            return
        if tokens[-1].index >= migration.next_index:
            migration.has_resumed = True
            pause_s = gap_s if tokens[0].index == migration.next_index else 0.0
            request.move_pause_s += pause_s
            self.metrics.migration_pause.observe(pause_s)
            request.settle_migration(now)

    def end(
        self, request: TrackedRequest, outcome: inference_pb2.Complete | RequestError, now: float
    ) -> list[Instruction]:
        """End a request, cancel it on every node that may hold a part, and start deferred requests."""
        return [*self._end(request, outcome, now), *self.let_in(now)]

    def expire(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """End a request whose deadline has passed. Call `let_in` once after all such requests."""
        return self._end(request, too_late(request), now)

    def _end(
        self, request: TrackedRequest, outcome: inference_pb2.Complete | RequestError, now: float
    ) -> list[Instruction]:
        del self._requests[request.request_id]
        self.num_without_token -= not request.output
        self.lives.ended(request, outcome, now)
        if request.slo is not None and request.slo.has_limits:
            self.metrics.attainment.ended(request.slo, outcome)
        if not (isinstance(outcome, RequestError) and outcome.reason in REFUSALS):
            self.admission.ended(request, now)
        instructions = [] if request.is_waiting else self._let_go(request, now)
        self.holding.let_go(request)
        return [*instructions, End(request.request_id, outcome, request.timeline, now)]

    # ---- letting go ----

    def release(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Cancel the current attempt on every node that may hold something of it."""
        attempt = request.attempt
        holders, is_settled = list(attempt.holders()), attempt.is_lent or attempt.has_first_token
        instructions = [self.cancel(request, node, attempt.epoch, now) for node in holders]
        if (
            attempt.prefix_fetch is not None and not is_settled and attempt.prefill in holders
        ):  # else its blocks stay reserved
            instructions.append(self.cancel(request, attempt.prefill, attempt.prefix_fetch.epoch, now))
        attempt.prefill_holds = attempt.decode_holds = False
        return instructions

    def cancel(self, request: TrackedRequest, node: Node, epoch: int, now: float) -> Instruction:
        return Send(node, self.releases.ask(node, request.request_id, epoch, now))

    def _let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Cancel the current attempt, and a migration that is under way."""
        instructions = self.release(request, now)
        migration, request.migration = request.migration, None
        if migration is not None and migration.is_under_way:
            instructions.append(self.cancel(request, migration.target, migration.epoch, now))
            instructions.append(migration_ended(request, migration, MigrationOutcome.ENDED, now))
        self.ledger.end(request.request_id)
        return instructions


def migration_ended(
    request: TrackedRequest, migration: Migration, outcome: MigrationOutcome, now: float, num_kv_bytes: int = 0
) -> MigrationEnded:
    """Return the record of a migration for the request log."""
    return MigrationEnded(
        request.request_id, migration.source, migration.target, outcome, migration.started_s, now, num_kv_bytes
    )
