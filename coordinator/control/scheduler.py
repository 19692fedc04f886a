"""Schedule every request from submit to its one end. Pure: events and the time come in, instructions go out.

    submit       Reserve to a decode node and Prefill to a prefill node, at the same time
    Reserved     Deliver, with the transfer descriptor, to the prefill node
    FirstToken   to the client at once; Begun to the decode node while it lacks KV
    Embedded     the end of a request that only prefills, for which Prefill alone was sent
    Revoked      the decode node has revoked its credit; another Reserved follows. Begun, if the prompt is prefilled
    Committed    the decode node has all KV (Transferred is the prefill node's report of the same)
    StepTokens   to the client, strictly by index: they may come before FirstToken, over the other stream
    Failed       a new attempt on other nodes, or the end; a lost node has the same effect. A request that a full node
                 rejects goes to another node; once tokens were emitted it is never refused for want of room

TRANSITIONS, at the end of this file, is the state machine of a request: which method handles an event in which state,
and which states follow; migration.py and prefix_fetch.py have parts of it. Any other event in a state is late, repeated
or not the node's to send, and changes nothing.

Where the decode node prefills the prompt itself, Reserve alone is sent, FirstToken comes from that node, and there is
no Deliver and no Committed. Where a prefilled prompt gets no blocks within keep_after_s, its prefill node decodes it
(Keep). A running request may migrate to another node (migration.py), and a prompt may get blocks from another node's
prefix cache (prefix_fetch.py).

A request for which no node is found waits for nodes up to node_wait_s (waiting.py), be it new or one whose node was
lost. Every tick tries to place the waiting requests, the oldest first. A new attempt sends the prompt and the emitted
tokens as one prompt, so the stream continues at the next index. Epochs grow over all requests: a report about an older
attempt, even of the same request id, cannot be mistaken for a new one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any, Final, NamedTuple

from coordinator.control.admission import Admission
from coordinator.control.instructions import (
    MAX_MESSAGE_CHARS,
    Chunk,
    Emit,
    End,
    Instruction,
    Releases,
    Send,
    begun,
    chunk_of,
    completion,
    end_error,
    ended_before,
    keep,
    quarantine_error,
    restart_error,
    start_commands,
    too_late,
    with_progress,
)
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.migration import TRANSITIONS as MIGRATION_TRANSITIONS
from coordinator.control.migration import (
    Migrations,
    leaving_drained,
    leaving_full,
    leaving_late,
    num_left,
    prompts_to_restart,
)
from coordinator.control.nodes import DRAINED, Node, Registry
from coordinator.control.placement.costs import FETCH_NEVER, TransferEstimator
from coordinator.control.placement.policy import AUTO, POLICIES, Placed, Policy
from coordinator.control.prefix_fetch import TRANSITIONS as PREFIX_FETCH_TRANSITIONS
from coordinator.control.prefix_fetch import PrefixFetches
from coordinator.control.request import (
    IN_MIGRATION,
    MAX_DEATHS,
    NOTHING,
    ON_NODES,
    Attempt,
    Phase,
    Request,
    SoFar,
    State,
    Timeline,
    Transition,
    at_work,
)
from coordinator.control.request_log import History
from coordinator.control.roles import Demand, EndedRequest, NodesNeeded
from coordinator.control.slo import Slo
from coordinator.control.waiting import Decision, Waiting
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.net.numbering import MessageLost
from serving_core.requests import Pooling, SamplingParams

RETRY_S: Final = 1.0  # pause after every node has turned a request away
REFUSALS: Final = (reasons.QUEUE_FULL, reasons.WOULD_BE_LATE)
RESTART_REASONS: Final = (reasons.TRANSFER_FAILED, reasons.KV_CHECKSUM_MISMATCH)
# Far more than one stream can be ahead of the other: each attempt's first token is on its way before its transfer.
MAX_EARLY_TOKENS: Final = 1024


class _StepToken(NamedTuple):
    """One token of a step of a decode node, and the seconds of the step."""

    token: fleet_pb2.SampledToken
    step_s: float


class Scheduler:
    """Schedule all requests that have not ended, and follow the attempts that nodes have yet to release."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        metrics: Metrics,
        *,
        first_epoch: int,
        max_live: int,
        max_restarts: int,
        keep_after_s: float,
        node_wait_s: float = 0.0,
        fetches: str = FETCH_NEVER,
        policy: Policy = POLICIES[AUTO],
        admits_late: bool = True,
        max_queue_wait_s: float = 0.0,
        max_live_per_asker: int = 0,
    ) -> None:
        """Create a scheduler without requests.

        `first_epoch` must be random: nodes may still have attempts of a coordinator that ran before this one.
        `max_live` and `max_live_per_asker` limit the requests that have not ended, of all and of one API key; 0 sets no
        limit per key. `admits_late` and `max_queue_wait_s` as in Admission.
        """
        self._registry, self._ledger, self._metrics = registry, ledger, metrics
        self._max_requests, self._max_requests_per_key = max_live, max_live_per_asker
        self._max_restarts, self._keep_after_s = max_restarts, keep_after_s
        self._admission = Admission(ledger, admits_late=admits_late, max_queue_wait_s=max_queue_wait_s)
        self._demand, self._transfers = Demand(), TransferEstimator(fetches)
        self._waiting = Waiting(
            registry, ledger, self._admission, self._transfers, policy=policy, node_wait_s=node_wait_s
        )
        self._releases = Releases(first_epoch)
        self._migrations = Migrations(ledger, metrics, self._releases)
        fetch_estimator = self._transfers.prefix_fetches
        self._prefix_fetches = PrefixFetches(registry, metrics, self._releases, fetch_estimator)
        self._handlers = _handlers_of(self, self._prefix_fetches, self._migrations)
        self.history = History()
        self._requests: dict[str, Request] = {}  # by id, in the order of admission
        self._age = 0  # requests admitted since the start

    # ---- what others report ----

    @property
    def num_open(self) -> int:
        """Return the number of requests and unreleased attempts: at 0 the fleet holds nothing."""
        return len(self._requests) + len(self._releases)

    def num_using(self, adapter: str) -> int:
        """Return the number of live requests that run with an adapter."""
        return sum(request.prompt.adapter == adapter for request in self._requests.values())

    @property
    def num_running(self) -> int:
        """Return the number of requests whose prefill has begun, as far as nodes have reported."""
        return sum(request.timeline.phase is not Phase.PREFILL_QUEUE for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Return the number of requests without a first token in the current attempt."""
        return sum(request.state <= State.PREFILLING for request in self._requests.values())

    @property
    def num_waiting_for_nodes(self) -> int:
        """Return the number of requests that no attached node can take, so that they wait for one to attach."""
        return sum(request.state is State.WAITING_FOR_NODES for request in self._requests.values())

    @property
    def num_deferred(self) -> int:
        """Return the number of requests that are deferred because they would make others late."""
        return sum(request.state is State.QUEUED for request in self._requests.values())

    def newest(self, number: int) -> list[Request]:
        """Return the `number` newest requests, the newest first."""
        return list(islice(reversed(self._requests.values()), number))

    def phases(self) -> Counter[Phase | None]:
        """Return the number of requests by phase; None stands for those that wait for nodes to attach."""
        requests = self._requests.values()
        return Counter(None if each.state is State.WAITING_FOR_NODES else each.timeline.phase for each in requests)

    @property
    def num_queued(self) -> int:
        """Return the number of requests whose prefill has not begun, as far as nodes have reported."""
        return len(self._requests) - self.num_running

    @property
    def nodes_needed(self) -> NodesNeeded:
        """Return the numbers of nodes that the present load needs (coordinator/control/roles.py)."""
        return self._demand.nodes_needed(self._registry.nodes, self.num_waiting)

    def num_left(self, node: Node) -> int:
        """Return the number of requests that the node still computes, or holds blocks for."""
        return num_left(node, self._on_nodes(), self._releases)

    def load_of(self, node: Node) -> inference_pb2.NodeLoad:
        """Return the load of a node as clients see it: its state becomes DRAINED when a drain has finished."""
        if node.is_ready or self.num_left(node):
            return node.load
        load = inference_pb2.NodeLoad()
        load.CopyFrom(node.load)
        load.state = DRAINED
        return load

    # ---- clients ----

    def check_room(self, num_sequences: int, now: float, asker: str = "") -> None:
        """Raise RequestError, with a retry-after, where `num_sequences` more requests would exceed a limit in flight.

        The limits are that of all requests and that of one API key, whose name is `asker`.
        """
        what = f"{num_sequences} do not fit: " if num_sequences > 1 else ""
        self._check_share(num_sequences, asker, what)
        if self.num_open + num_sequences <= self._max_requests:
            return
        for _ in range(num_sequences):
            self._demand.arrived(now)
        message = f"{what}{self.num_open} sequences are in flight, the limit is {self._max_requests}"
        raise self._admission.refusal(reasons.QUEUE_FULL, message, now)

    def _check_share(self, num_sequences: int, asker: str, what: str) -> None:
        """Raise RequestError where one API key would have more requests than the limit per key."""
        most = self._max_requests_per_key
        if most and (number := sum(each.asker == asker for each in self._requests.values())) + num_sequences > most:
            whose = f"the API key of {asker}" if asker else "API keys without a name"
            message = f"{what}{number} sequences of {whose} are in flight, the limit for one is {most}"
            raise RequestError(reasons.QUEUE_FULL, message)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        arrived_s: float,
        deadline_s: float,
        now: float,
        slo: Slo | None = None,
        so_far: SoFar = NOTHING,
        pooling: Pooling | None = None,
        asker: str = "",
    ) -> list[Instruction]:
        """Start a request, or resume one that an earlier call has begun; with `pooling` it only prefills.

        Returns the commands that start it: none while it is deferred or waits for nodes. The time from `arrived_s`, in
        which the request was preprocessed, counts in its timeline and against its SLO. Raises RequestError, in which
        case nothing has begun: where no node can take the request and it may not wait, where a limit in flight is
        reached, for an id in use, and where admission control refuses it.
        """
        if request_id in self._requests:
            raise RequestError(reasons.DUPLICATE_REQUEST_ID, f"request {request_id} is live already")
        self.check_room(1, now, asker)
        self._demand.arrived(arrived_s)
        self._age += 1
        first_token_s = arrived_s - so_far.since_first_s if so_far.token_ids else None
        timeline = Timeline(arrived_s, first_token_s)
        request = Request(request_id, self._age, prompt, sampling, deadline_s, timeline, slo, pooling, asker)
        request.refuses_late = not self._admission.admits_late
        request.resume(so_far.token_ids)
        if so_far.finish_reason:
            return [End(request_id, ended_before(request, so_far.finish_reason, now), timeline, now)]
        placed = self._waiting.begin(request, now)
        self._requests[request_id] = request
        return [] if placed is None else self._start(request, placed, now, since_s=request.timeline.start_s)

    def finish(self, request_id: str, finish_reason: inference_pb2.FinishReason, now: float) -> list[Instruction]:
        """End a request early with a finish reason, and return the instructions: Cancels, its End, starts of others.

        An unknown request is ignored.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        if finish_reason == inference_pb2.FINISH_REASON_STOP:
            self._learn_length(request)
        return self._end(request, completion(request, finish_reason, now), now)

    def fail(self, request_id: str, error: RequestError, now: float) -> list[Instruction]:
        """End a request early with an error, and return the instructions: Cancels, its End, starts of others.

        An unknown request is ignored.
        """
        request = self._requests.get(request_id)
        return self._end(request, with_progress(error, request), now) if request else []

    # ---- nodes ----

    def handle(self, node: Node, event: fleet_pb2.NodeEvent, now: float) -> list[Instruction]:
        """Update a request by an event of a node, and return the instructions that follow.

        Events that are late, repeated or not the node's to send do nothing.
        """
        kind = event.WhichOneof("event")
        body: Any = getattr(event, kind)
        if kind == "step_tokens":
            return self.step_tokens(node, body, now)
        is_release = kind in ("failed", "cancelled") and self._releases.settle(node, body.attempt.epoch)
        request = self._requests.get(body.attempt.request_id)
        if request is None or not request.is_on_nodes:
            return []
        what = self._event_of(request, node, body.attempt.epoch, kind)
        if is_release and what == kind:
            return []
        instructions = self._handle(request, what, node, body, now)
        return [*instructions, *self._relocate(now)] if what.startswith("peer_") else instructions

    def _event_of(self, request: Request, node: Node, epoch: int, kind: str) -> str:
        """Return the event of the table that a node's report is; empty for a report about another attempt.

        The peer of a migration is its node that does not have the current attempt: the target, and after the commit the
        source.
        """
        attempt, migration, fetch = request.attempt, request.migration, request.attempt.prefix_fetch
        if kind == "failed" and fetch is not None and fetch.epoch == epoch and fetch.source is node:
            return "prefix_source_failed"
        if migration is not None:
            peer = migration.target, migration.epoch
            if request.state is State.MIGRATED:
                peer = migration.source, migration.source_epoch
            if peer == (node, epoch):
                return f"peer_{kind}"
        return kind if attempt.epoch == epoch and node in (attempt.prefill, attempt.decode) else ""

    def _handle(self, request: Request, event: str, node: Node, body: Any, now: float) -> list[Instruction]:
        handler = self._handlers.get((request.state, event))
        return [] if handler is None else handler(request, node, body, now)

    def step_tokens(self, node: Node, event: fleet_pb2.StepTokens, now: float) -> list[Instruction]:
        """Add the tokens of one decode step to their requests; return the instructions that emit them and end requests.

        Tokens of another attempt, or out of order, are dropped or kept until their turn. Nearly all events are of this
        kind.
        """
        instructions, usual = list[Instruction](), list[str]()
        observe, requests = self._metrics.itl.observe, self._releases.requests
        last_s, num_since = now, 0  # of the outputs before this one whose last tokens came together
        num_plain = len(event.epochs)
        if not num_plain == len(event.indexes) == len(event.token_ids):
            raise MessageLost("the plain tokens of a step are cut short")
        node.num_generated_tokens += num_plain + len(event.tokens)
        for epoch, index, token_id in zip(event.epochs, event.indexes, event.token_ids, strict=True):
            if (request := requests.get(epoch)) is None:
                continue
            if request.state is _DECODING:
                # The usual case, as `_decoded` would handle it, without a call for each of its parts.
                attempt, output, timeline = request.attempt, request.output, request.timeline
                is_current = attempt.epoch == epoch and attempt.decode is node
                if is_current and index == len(output) and not attempt.early:
                    output.append(token_id)
                    if timeline.last_token_s != last_s:
                        if num_since:
                            observe(now - last_s, num_since)
                        last_s, num_since = timeline.last_token_s, 0
                    num_since += 1
                    timeline.last_token_s = now
                    usual.append(request.request_id)
                    instructions.append(Emit(request.request_id, Chunk(index, [token_id])))
                    continue
            about = fleet_pb2.Attempt(request_id=request.request_id, epoch=epoch)
            token = fleet_pb2.SampledToken(attempt=about, index=index, token_id=token_id)
            instructions += self._token_came(request, node, token, event.step_s, now)
        observe(now - last_s, num_since)
        self._usual_came(usual, node)
        for token in event.tokens:
            if (request := self._requests.get(token.attempt.request_id)) is not None:
                instructions += self._token_came(request, node, token, event.step_s, now)
        return instructions

    def _token_came(
        self, request: Request, node: Node, token: fleet_pb2.SampledToken, step_s: float, now: float
    ) -> list[Instruction]:
        if not self._may_sample(request, node, token) or token.index < len(request.output):
            return []
        return self._handle(request, "token", node, _StepToken(token, step_s), now)

    def _usual_came(self, request_ids: Sequence[str], node: Node) -> None:
        """Count one token of each of these requests."""
        self._metrics.num_generated_tokens += len(request_ids)
        self._ledger.tokens_came(request_ids, node)

    def _may_sample(self, request: Request, node: Node, token: fleet_pb2.SampledToken) -> bool:
        """Return whether a token is of the current attempt, or one that the source sampled before a migration."""
        if not request.is_on_nodes:
            return False
        attempt, migration, epoch = request.attempt, request.migration, token.attempt.epoch
        if (attempt.decode, attempt.epoch) == (node, epoch):
            return True
        if migration is None or request.state is not State.MIGRATED or token.index >= migration.next_index:
            return False
        return (migration.source, migration.source_epoch) == (node, epoch)

    def lose(self, node: Node, now: float, *, has_died: bool = False) -> list[Instruction]:
        """Restart or end the requests of a node that has left the registry, and return the instructions.

        `has_died`: the node was lost in the middle of its work, which counts against the requests that it may have
        computed.
        """
        pauses = self._registry.pauses
        pauses.note(now)
        if has_died and not pauses.is_recent(now):
            for request in at_work(node, self._on_nodes()):
                request.note_death(node.session, f"the {node.kind} was lost")
        self._releases.lose(node)
        instructions: list[Instruction] = []
        for request in self._on_nodes():
            for event in ("peer_lost", "prefix_source_lost", "lost"):
                if request.is_on_nodes and self._has_role(request, node, event):
                    instructions += self._handle(request, event, node, None, now)
        return instructions

    def _has_role(self, request: Request, node: Node, event: str) -> bool:
        """Return whether the loss of a node is this event for a request."""
        attempt, migration = request.attempt, request.migration
        if event == "peer_lost":
            is_over = request.state is State.MIGRATED
            return migration is not None and node is (migration.source if is_over else migration.target)
        if event == "prefix_source_lost":
            return attempt.prefix_fetch is not None and attempt.prefix_fetch.source is node
        return node in (attempt.prefill, attempt.decode)

    def attached_again(self, session: int) -> None:
        """Take back the death of the node of this session for all requests: its process lives, its stream had ended."""
        for request in self._requests.values():
            request.take_back_death(session)

    def tick(self, now: float) -> list[Instruction]:
        """Expire, place and migrate requests as time passes, and return the instructions.

        Cancels that nodes have not confirmed are repeated.
        """
        self._demand.tick(now)
        instructions: list[Instruction] = [*self._releases.overdue(now)]
        waiting: list[Request] = []
        for request in list(self._requests.values()):
            if now >= request.deadline_s:
                instructions += self._finish(request, too_late(request), now)
            elif request.state is State.WAITING_FOR_NODES:
                waiting.append(request)
            elif request.state in ON_NODES:
                instructions += self._handle(request, "tick", request.attempt.prefill, None, now)
        instructions += self._apply(self._waiting.place_waiting(waiting, now), now)
        return instructions + self._start_deferred(now) + self._relocate(now)

    def _on_nodes(self) -> list[Request]:
        return [request for request in self._requests.values() if request.state in ON_NODES]

    # ---- placement ----

    def _apply(self, decisions: Iterable[Decision], now: float) -> list[Instruction]:
        """Start or end each request as decided, before the next decision is made."""
        instructions: list[Instruction] = []
        for request, decision in decisions:
            if isinstance(decision, RequestError):
                instructions += self._finish(request, decision, now)
            else:
                instructions += self._start(request, decision, now)
        return instructions

    def _start_deferred(self, now: float) -> list[Instruction]:
        """Start deferred requests that may begin: several times a second and at each end."""
        return self._apply(self._waiting.start_deferred(now), now)

    def _start(
        self, request: Request, placed: Placed, now: float, *, since_s: float | None = None
    ) -> list[Instruction]:
        """Start an attempt on these nodes. The timeline records the placement at `since_s`, or at `now` without it."""
        self._admission.deferred.started(request)
        prefill, decode, prompt = placed.prefill_node, placed.decode_node, request.known
        epoch, fetch = self._releases.next_epoch(request), placed.prefix_fetch
        if fetch is not None:
            fetch = replace(fetch, epoch=self._releases.next_epoch(request))
        kv_holders = self._registry.kv_holders_of(decode) if request.max_tokens > decode.pool_tokens else ()
        request.attempt = Attempt(epoch, prefill, decode, len(request.output), now, fetch, kv_holders)
        request.enter(State.PREFILLING, now)
        request.timeline.placed(now if since_s is None else since_s, prefill.name, decode.name, begins=True)
        self._admission.predict(request, placed, now)
        self._admission.expect(request, placed, now)
        if (due := self._admission.planned_due(request)) is not None:
            self._ledger.set_due(request.request_id, due, len(request.output), request.num_tokens_left)
        num_to_compute = self._waiting.num_to_compute(prompt, placed)
        self._ledger.prefill(request.request_id, prefill, num_to_compute, prompt.block_hashes(prefill.block_size))
        if request.pooling is None:
            hashes = () if kv_holders else prompt.hashes_shared(decode.block_size)
            self._ledger.decode(request.request_id, decode, len(prompt), hashes)
        return [*start_commands(request, prompt, now)]

    # ---- prefill, and the blocks for its KV ----

    def _taken(self, request: Request, node: Node, event: fleet_pb2.Taken, now: float) -> list[Instruction]:
        request.attempt.is_taken = node is request.attempt.prefill
        return []

    def _progress(self, request: Request, node: Node, event: fleet_pb2.Progress, now: float) -> list[Instruction]:
        if node is request.attempt.prefill:
            if request.timeline.phase is Phase.PREFILL_QUEUE:
                request.timeline.enter(Phase.PREFILL, now, ago_s=event.prefill_s)
            self._ledger.progressed(request.request_id, node, event.num_left)
        return []

    def _reserved(self, request: Request, node: Node, event: fleet_pb2.Reserved, now: float) -> list[Instruction]:
        """Pass the transfer descriptor to the prefill node: the decode node has reserved blocks."""
        attempt = request.attempt
        if node is not attempt.decode or attempt.reserved_s is not None:
            return []
        attempt.reserved_s = now
        self._transfers.reserved(attempt, now)
        if request.state is State.WAITING_FOR_BLOCKS:
            request.enter(State.TRANSFERRING, now)
        deliver = fleet_pb2.Deliver(attempt=event.attempt, descriptor=event.descriptor)
        return [Send(attempt.prefill, fleet_pb2.NodeCommand(deliver=deliver, attempt=event.attempt))]

    def _revoked(self, request: Request, node: Node, event: fleet_pb2.Revoked, now: float) -> list[Instruction]:
        """Note that the decode node has revoked its credit; it informs the prefill node, and will give credit again."""
        if node is not request.attempt.decode or request.attempt.has_kv:
            return []
        request.attempt.reserved_s = None
        if request.state is State.PREFILLING:
            return []
        request.enter(State.WAITING_FOR_BLOCKS, now)
        return [begun(request)]

    def _first_token(self, request: Request, node: Node, event: fleet_pb2.FirstToken, now: float) -> list[Instruction]:
        attempt = request.attempt
        if node is not attempt.prefill:
            return []
        attempt.first_token_s = now
        if attempt.first_index == request.num_resumed:
            self._note_cached(request, event.num_cached_tokens)
        self._ledger.first_token(request.request_id, now)
        request.timeline.enter(Phase.PREFILL, now, ago_s=event.prefill_s)
        request.enter(attempt.state_after_prefill, now)
        instructions = self._emit(request, event.token, now)
        return [*instructions, begun(request)] if request.waits_for_kv else instructions

    def _embedded(self, request: Request, node: Node, event: fleet_pb2.Embedded, now: float) -> list[Instruction]:
        if request.pooling is None:
            return []
        request.attempt.released(request.attempt.prefill)
        request.embedded_s = now
        self._note_cached(request, event.num_cached_tokens)
        request.timeline.enter(Phase.PREFILL, now, ago_s=event.prefill_s)
        complete = completion(request, inference_pb2.FINISH_REASON_STOP, now)
        complete.embedding = event.embedding
        self._learn_length(request)
        return self._end(request, complete, now)

    def _note_cached(self, request: Request, num_cached_tokens: int) -> None:
        request.num_cached_tokens = min(num_cached_tokens, len(request.prompt))
        self._metrics.prompt_prefilled(len(request.prompt), request.num_cached_tokens)

    def _kv_arrived(
        self, request: Request, node: Node, event: fleet_pb2.Committed | fleet_pb2.Transferred, now: float
    ) -> list[Instruction]:
        """Note that the decode node has all KV. Both nodes of the attempt report so, in any order."""
        attempt = request.attempt
        if attempt.is_local:
            return []
        if node is attempt.prefill:
            attempt.released(node)
            self._ledger.release(request.request_id, node)
        elif isinstance(event, fleet_pb2.Committed) and not attempt.has_counted_kv:
            attempt.has_counted_kv = True
            request.num_kv_bytes += event.num_bytes
            request.num_kv_bytes_saved += event.num_bytes_saved
            self._metrics.kv_transferred(event.num_bytes, event.num_bytes_saved)
        attempt.has_kv = True
        if request.waits_for_kv:
            request.enter(State.DECODE_QUEUED, now)
        return []

    def _keep(self, request: Request, node: Node, event: None, now: float) -> list[Instruction]:
        """Let the prefill node decode a prompt whose decode node has had no room for too long, if the prefill node has
        room."""
        attempt = request.attempt
        most_tokens = min(node.max_request_tokens, node.pool_tokens)
        if now - request.entered_s < self._keep_after_s or not node.is_ready or request.max_tokens > most_tokens:
            return []
        if self._ledger.of(node).num_sequences >= node.hello.max_num_seqs:  # the request would wait there as well
            return []
        cancel = self._releases.cancel(request, attempt.decode, attempt.epoch, now)
        self._ledger.release(request.request_id, attempt.decode)
        hashes = request.prompt.hashes_shared(node.block_size)
        self._ledger.decode(request.request_id, node, len(request.known), hashes)
        attempt.decode, attempt.holders, attempt.has_kv = node, [node], True
        request.timeline.placed(now, node.name, node.name)
        request.enter(State.DECODE_QUEUED, now)
        self._metrics.num_kept += 1
        return [cancel, keep(request)]

    # ---- decode ----

    def _early_token(self, request: Request, node: Node, event: _StepToken, now: float) -> list[Instruction]:
        """Keep a token that cannot be emitted yet."""
        attempt, token = request.attempt, event.token
        attempt.early[token.index] = token
        if len(attempt.early) <= MAX_EARLY_TOKENS:
            return []
        error = RequestError(reasons.WORKER_LOST, f"{MAX_EARLY_TOKENS} tokens came out of order")
        return self._restart(request, attempt.prefill, error, now)

    def _first_decoded(self, request: Request, node: Node, event: _StepToken, now: float) -> list[Instruction]:
        request.enter(State.DECODING, now, ago_s=event.step_s)
        self._transfers.decoding(request.attempt, now - event.step_s, now)
        return self._decoded(request, node, event, now)

    def _decoded(self, request: Request, node: Node, event: _StepToken, now: float) -> list[Instruction]:
        if event.token.index > len(request.output):
            return self._early_token(request, node, event, now)
        return self._emit(request, event.token, now)

    def _emit(self, request: Request, token: fleet_pb2.SampledToken, now: float) -> list[Instruction]:
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
        self._metrics.tokens_came(len(tokens), gap_s, is_first=is_first)
        if is_first:
            self._waiting.num_without_token -= 1
            self._admission.first_token(request, self._waiting.num_without_token, now)
        if request.state is State.MIGRATED:
            self._migrations.tokens_came(request, tokens[0].index, tokens[-1].index, gap_s, now)
        self._ledger.tokens_came([request.request_id], attempt.decode, len(tokens))
        emit = Emit(request.request_id, chunk_of(tokens, request.num_cached_tokens if is_first else None))
        if not finish_reason:
            return [emit]
        # The node that sampled the last token has released the attempt by itself, and so has the prefill node.
        is_of_prefill_node = tokens[-1].index == attempt.first_index and not attempt.is_local
        attempt.holders = [attempt.decode] if is_of_prefill_node else []
        self._learn_length(request)
        complete = completion(request, finish_reason, now)
        if complete.finish_reason == inference_pb2.FINISH_REASON_STOP:
            complete.matched_token_id = output[-1]
        return [emit, *self._end(request, complete, now)]

    def _learn_length(self, request: Request) -> None:
        """Record a request that has all its tokens, or its embedding, for the length estimator and the demand."""
        num_prompt, num_output = len(request.prompt), len(request.output)
        limit_s = request.slo.tpot_s if request.slo is not None else None
        if request.pooling is None:
            self._ledger.lengths.ended(num_output)
        num_computed = num_prompt - request.num_cached_tokens
        num_spared = min(num_prompt, self._ledger.tokens_spared(request.request_id))
        self._demand.ended(
            EndedRequest(num_prompt, num_computed, num_output, inf if limit_s is None else limit_s, num_spared)
        )

    # ---- migrations ----

    def _relocate(self, now: float) -> list[Instruction]:
        """Restart prompts of draining nodes, and migrate requests off nodes that drain, are full, or make them late."""
        nodes, instructions = self._registry.nodes, list[Instruction]()
        for request in prompts_to_restart(self._on_nodes(), nodes):
            instructions += self._restart_elsewhere(request, now)
        to_relieve = partial(leaving_late, arrivals=self._waiting.arrivals.expected(now))
        for departures in (leaving_drained, leaving_full, to_relieve):
            for request, target in departures(self._on_nodes(), nodes, self._ledger, now):
                instructions += self._migrations.begin(request, target, now)
        return instructions

    def _source_gone(self, request: Request, node: Node, event: object, now: float) -> list[Instruction]:
        """Handle that the source holds nothing more: the request goes on if all tokens before the target's came."""
        migration = request.migration
        assert migration is not None, "it is MIGRATED"
        if len(request.output) >= migration.next_index:
            self._migrations.source_released(request, now)
            return []
        error = RequestError(reasons.WORKER_LOST, f"the {migration.source.kind} was lost")
        return self._restart(request, migration.source, error, now)

    # ---- failures and restarts ----

    def _failed(self, request: Request, node: Node, event: fleet_pb2.Failed, now: float) -> list[Instruction]:
        attempt = request.attempt
        if event.reason in RESTART_REASONS:
            self._metrics.transfers_failed[event.reason] += 1
            # Either node may be at fault, whichever of the two has reported it.
            request.avoid += [attempt.prefill, attempt.decode]
            return self._part_gone(request, node, restart_error(node, event), now)
        error = end_error(node, event)
        if event.reason == reasons.STEP_FAILED:  # caused by the node, the request, or another request of the step
            request.note_death(None, event.message[:MAX_MESSAGE_CHARS])
            return self._quarantined(request, node, now) or self._part_gone(request, node, error, now)
        attempt.released(node)
        if event.reason == reasons.QUEUE_FULL:
            return self._turned_away(request, node, error, now)
        if event.reason == reasons.WOULD_BE_LATE:
            self._admission.refused_late(request, now)
            waited_s = now - request.timeline.start_s
            return self._end(request, self._admission.late_refusal(request, now, prefill_queue_s=waited_s), now)
        return self._end(request, with_progress(error, request), now)

    def _cancelled(self, request: Request, node: Node, event: object, now: float) -> list[Instruction]:
        error = RequestError(reasons.WORKER_LOST, f"the {node.kind} does not know the request")
        return self._part_gone(request, node, error, now)

    def _lost(self, request: Request, node: Node, event: None, now: float) -> list[Instruction]:
        error = RequestError(reasons.WORKER_LOST, f"the {node.kind} was lost")
        return self._quarantined(request, node, now) or self._part_gone(request, node, error, now, is_loss=True)

    def _quarantined(self, request: Request, node: Node, now: float) -> list[Instruction]:
        """End a request that may have killed MAX_DEATHS nodes in a row. Returns nothing for any other one."""
        if len(request.deaths) < MAX_DEATHS:
            return []
        request.attempt.released(node)
        return self._end(request, with_progress(quarantine_error(request.deaths), request), now)

    def _part_gone(
        self, request: Request, node: Node, error: RequestError, now: float, *, is_loss: bool = False
    ) -> list[Instruction]:
        """Handle that a node has dropped its part of the attempt: restart the request unless the part was over.

        `is_loss`: the node itself is lost. Losses within ONE_EVENT_S count as one restart.
        """
        attempt = request.attempt
        attempt.released(node)
        if node is attempt.prefill and not attempt.is_local and request.has_kv_on_decode_node:
            self._ledger.release(request.request_id, node)
            return []
        return self._restart(request, node, error, now, counts=not is_loss or request.note_loss(now))

    def _restart(
        self, request: Request, node: Node, error: RequestError, now: float, *, counts: bool = True
    ) -> list[Instruction]:
        """Start a new attempt away from a node, or end the request with the error once max_restarts restarts have
        counted.

        A restart does not count with `counts` False, or shortly after this process was suspended.
        """
        error = with_progress(error, request)
        request.timeline.failed(error.reason)
        is_excused = self._registry.pauses.is_recent(now) or not counts
        if not is_excused and request.num_restarts - request.num_excused >= self._max_restarts:
            return self._end(request, error, now)
        instructions = self._leave_nodes(request, now)
        request.num_restarts += 1
        request.num_excused += is_excused
        self._metrics.num_restarts += 1
        request.avoid.append(node)
        if self._waiting.may_wait and not self._waiting.may_place(now):  # the loss of one node restarts many requests
            self._waiting.wait_for_nodes(request, now)
            return instructions
        try:
            placed = self._waiting.place(request, now)
        except RequestError as no_node:
            if self._waiting.may_wait:
                self._waiting.wait_for_nodes(request, now)
                return instructions
            final = RequestError(no_node.reason, str(no_node), **error.metadata)
            return instructions + self._end(request, final, now)
        return instructions + self._start(request, placed, now)

    def _turned_away(self, request: Request, node: Node, error: RequestError, now: float) -> list[Instruction]:
        """Place a request elsewhere after a node had no room for it.

        Where no other node has room, the request waits for nodes and is placed again after RETRY_S. It never ends for
        want of room: the limit on requests bounds how many wait.
        """
        instructions = self._leave_nodes(request, now)
        request.timeline.failed(error.reason)
        request.full_nodes.add(node)
        if node not in request.avoid:
            request.avoid.append(node)
        try:
            placed = self._waiting.place(request, now)
        except RequestError:
            placed = None
        if placed is not None and not request.full_nodes & {placed.prefill_node, placed.decode_node}:
            return instructions + self._start(request, placed, now)
        request.full_nodes.clear()
        self._waiting.wait_for_nodes(request, now, retry_s=now + RETRY_S)
        return instructions

    def _restart_elsewhere(self, request: Request, now: float) -> list[Instruction]:
        """Restart a request on ready nodes without counting a restart; where there are none, it stays."""
        try:
            self._waiting.place(request, now)
        except RequestError:
            return []
        instructions = self._leave_nodes(request, now)
        placed = self._waiting.place(request, now)  # without the load of the attempt that was cancelled
        return instructions + self._start(request, placed, now)

    def _leave_nodes(self, request: Request, now: float) -> list[Instruction]:
        """Take a request from its nodes, to place it anew."""
        instructions = self._cancel(request, now)
        request.enter(State.QUEUED, now)
        return instructions

    def _cancel(self, request: Request, now: float) -> list[Instruction]:
        """Cancel the current attempt, and a migration that is under way."""
        instructions: list[Instruction] = [*self._releases.cancel_attempt(request, now)]
        if request.state in IN_MIGRATION:
            instructions += self._migrations.drop(request, now)
        self._ledger.end(request.request_id)
        del request.attempt
        return instructions

    # ---- ends ----

    def _end(self, request: Request, outcome: inference_pb2.Complete | RequestError, now: float) -> list[Instruction]:
        """End a request, cancel it on every node that may hold a part, and start deferred requests."""
        return [*self._finish(request, outcome, now), *self._start_deferred(now)]

    def _finish(
        self, request: Request, outcome: inference_pb2.Complete | RequestError, now: float
    ) -> list[Instruction]:
        """End a request as `_end` does. Call `_start_deferred` once after all such requests."""
        del self._requests[request.request_id]
        self._waiting.num_without_token -= not request.output
        self.history.ended(request, outcome, now)
        if request.slo is not None and request.slo.has_limits:
            self._metrics.attainment.ended(request.slo, outcome)
        if not (isinstance(outcome, RequestError) and outcome.reason in REFUSALS):
            self._admission.ended(request, now)
        instructions = self._cancel(request, now) if request.is_on_nodes else []
        self._releases.forget(request)
        self._admission.deferred.remove(request)
        request.enter(State.FINISHED, now)
        return [*instructions, End(request.request_id, outcome, request.timeline, now)]


_DECODING: Final = State.DECODING  # an attribute of an Enum is slow


# ---- the state machine ----


_BEFORE_KV: Final = (State.WAITING_FOR_BLOCKS, State.TRANSFERRING)
_AFTER_PREFILL: Final = (*_BEFORE_KV, State.DECODE_QUEUED, State.DECODING)

# The events of nodes, of their loss, and of time. The peer of a migration is its node that does not have the current
# attempt.
_TRANSITIONS: Final = (
    Transition((State.PREFILLING,), "taken", Scheduler._taken),
    Transition((State.PREFILLING,), "progress", Scheduler._progress),
    Transition((State.PREFILLING,), "first_token", Scheduler._first_token, _AFTER_PREFILL),
    Transition((State.PREFILLING,), "embedded", Scheduler._embedded),
    Transition((State.PREFILLING,), "reserved", Scheduler._reserved),
    Transition((State.WAITING_FOR_BLOCKS,), "reserved", Scheduler._reserved, (State.TRANSFERRING,)),
    Transition((State.WAITING_FOR_BLOCKS,), "tick", Scheduler._keep, (State.DECODE_QUEUED,)),
    Transition((State.PREFILLING,), "revoked", Scheduler._revoked),
    Transition((State.TRANSFERRING,), "revoked", Scheduler._revoked, (State.WAITING_FOR_BLOCKS,)),
    Transition(_BEFORE_KV, "committed", Scheduler._kv_arrived, (State.DECODE_QUEUED,)),
    Transition(_BEFORE_KV, "transferred", Scheduler._kv_arrived, (State.DECODE_QUEUED,)),
    Transition(ON_NODES.difference(_BEFORE_KV), "committed", Scheduler._kv_arrived),
    Transition(ON_NODES.difference(_BEFORE_KV), "transferred", Scheduler._kv_arrived),
    Transition((State.PREFILLING,), "token", Scheduler._early_token),
    Transition((*_BEFORE_KV, State.DECODE_QUEUED), "token", Scheduler._first_decoded, (State.DECODING,)),
    Transition({State.DECODING, *IN_MIGRATION} - {State.MIGRATED}, "token", Scheduler._decoded),
    Transition((State.MIGRATED,), "token", Scheduler._decoded, (State.DECODING,)),
    *(
        Transition((State.MIGRATED,), f"peer_{what}", Scheduler._source_gone, (State.DECODING,))
        for what in ("failed", "cancelled", "lost")
    ),
    Transition(ON_NODES, "failed", Scheduler._failed),
    Transition(ON_NODES, "cancelled", Scheduler._cancelled),
    Transition(ON_NODES, "lost", Scheduler._lost),
)

# What the scheduler decides itself, for clients, as time passes and in the handlers above.
DECISIONS: Final = (
    Transition((State.QUEUED, State.WAITING_FOR_NODES), "placed", Scheduler._start, (State.PREFILLING,)),
    Transition((State.QUEUED,), "no nodes", Waiting.wait_for_nodes, (State.WAITING_FOR_NODES,)),
    Transition((State.WAITING_FOR_NODES,), "deferred", Waiting.place_waiting, (State.QUEUED,)),
    Transition(ON_NODES, "restarted", Scheduler._leave_nodes, (State.QUEUED,)),
    Transition((State.DECODING,), "migration chosen", Scheduler._relocate, (State.RESERVING_TARGET,)),
    Transition(set(State) - {State.FINISHED}, "ended", Scheduler._finish, (State.FINISHED,)),
)

# Of Scheduler, PrefixFetches and Migrations.
_PARTS: Final = (_TRANSITIONS, PREFIX_FETCH_TRANSITIONS, MIGRATION_TRANSITIONS)
TRANSITIONS: Final = tuple(chain(*_PARTS))


def _handlers_of(*parts: Scheduler | PrefixFetches | Migrations) -> dict[tuple[State, str], Callable[..., Any]]:
    """Return the handler of each event in each state, among the methods of these parts."""
    handlers: dict[tuple[State, str], Callable[..., Any]] = {}
    for part, transitions in zip(parts, _PARTS, strict=True):
        for transition in transitions:
            for state in transition.states:
                assert (state, transition.event) not in handlers, "a state has two handlers of an event"
                handlers[state, transition.event] = getattr(part, transition.handler.__name__)
    return handlers
