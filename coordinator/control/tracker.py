"""Track every request from submit to its one end. Pure: events and the time come in, instructions go out.

    submit       Reserve to a decode node and Prefill to a prefill node, at the same time
    Reserved     Deliver, with the transfer descriptor, to the prefill node
    FirstToken   to the client at once; Begun to the decode node while it lacks KV
    Embedded     the end of a request for an embedding, for which Prefill alone was sent
    Revoked      the decode node has revoked its credit; another Reserved follows. Begun, if the prompt is prefilled
    Borrowing    Lend, with the descriptor, to a node that has more of the prompt cached (lending.py)
    Committed    the decode node has all KV (Transferred is the prefill node's report of the same)
    StepTokens   to the client, strictly by index: they may come before FirstToken, over the other stream
    Failed       a new attempt on other nodes, or the end; a lost node has the same effect. A request that a full node
                 rejects goes to another node; once tokens were emitted it is never refused for want of room

Where the decode node prefills the prompt itself, Reserve alone is sent, FirstToken comes from that node, and there is
no Deliver and no Committed. Where a prefilled prompt gets no credit within keep_after_s, its prefill node decodes it
(Keep). A running request may migrate to another node (migration.py).

A request for which there are no nodes waits for them up to node_wait_s, and so does a request whose nodes were lost.

A new attempt sends the prompt and the emitted tokens as one prompt, so the stream continues at the next index. Epochs
grow over all requests: a report about an older attempt, even of the same request id, cannot be mistaken for a new one.
"""

from collections import Counter
from functools import partial
from typing import Any

from coordinator.control.admission import Admission
from coordinator.control.attempt_events import AttemptEvents
from coordinator.control.instructions import End, Instruction, Send
from coordinator.control.live import LiveAnswers
from coordinator.control.lives import Lives
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.migration import (
    Migrations,
    keep,
    leaving_drained,
    leaving_full,
    leaving_late,
    num_left,
    prompts_to_restart,
)
from coordinator.control.nodes import DRAINED, Node, Registry
from coordinator.control.outcomes import completion, ended_before, with_progress
from coordinator.control.placement.policies import AUTO, POLICIES
from coordinator.control.placement.policy import Policy
from coordinator.control.prefix_fetch import EVENTS as PREFIX_FETCH_EVENTS
from coordinator.control.prefix_fetch import PrefixSends
from coordinator.control.request import NOTHING, SoFar, TrackedRequest, at_work
from coordinator.control.slo import Slo
from coordinator.control.timeline import Phase, Timeline
from coordinator.control.transfer_costs import NEVER
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.requests import Pooling, SamplingParams


class Tracker:
    """Track all live requests, and the attempts that nodes have yet to release."""

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
        fetches: str = NEVER,
        policy: Policy = POLICIES[AUTO],
        admits_late: bool = True,
        max_queue_wait_s: float = 0.0,
        max_live_per_asker: int = 0,
    ) -> None:
        """Create a tracker without requests.

        `first_epoch` must be random: nodes may still have attempts of a coordinator that ran before this one.
        `max_live` and `max_live_per_asker` limit the live requests, of all and of one API key; 0 sets no limit per key.
        `admits_late` and `max_queue_wait_s` as in Admission.
        """
        self._registry = registry
        self._ledger = ledger
        self._metrics = metrics
        self._live = LiveAnswers(
            registry,
            ledger,
            metrics,
            first_epoch=first_epoch,
            max_restarts=max_restarts,
            node_wait_s=node_wait_s,
            fetches=fetches,
            policy=policy,
            admission=Admission(admits_late=admits_late, max_queue_wait_s=max_queue_wait_s),
        )
        self._migrations = Migrations(self._live)
        self._prefix_sends = PrefixSends(self._live)
        self._attempt_events = AttemptEvents(self._live, self._migrations)
        self._max_live, self._max_live_per_asker = max_live, max_live_per_asker
        self._keep_after_s = keep_after_s
        self._age = 0  # requests admitted since the start

    @property
    def num_open(self) -> int:
        """Return the number of live requests and unreleased attempts: at 0 the fleet holds nothing."""
        return len(self._live) + len(self._live.releases)

    @property
    def num_running(self) -> int:
        """Return the number of live requests that have their first token in the current attempt."""
        return sum(request.attempt.has_first_token for request in self._live)

    @property
    def num_waiting(self) -> int:
        """Return the number of live requests that are not running."""
        return len(self._live) - self.num_running

    @property
    def num_deferred(self) -> int:
        """Return the number of live requests that wait for nodes to attach."""
        return sum(request.waits_for_nodes for request in self._live.everyone())

    @property
    def num_held(self) -> int:
        """Return the number of live requests that are deferred because they would make others late."""
        return sum(request.is_held for request in self._live.everyone())

    @property
    def lives(self) -> Lives:
        """Return the history of the latest requests."""
        return self._live.lives

    def newest(self, number: int) -> list[TrackedRequest]:
        """Return the `number` newest live requests, the newest first."""
        return self._live.newest(number)

    def phases(self) -> Counter[Phase | None]:
        """Return the number of live requests by phase; None stands for those that wait for nodes to attach."""
        return Counter(None if each.waits_for_nodes else each.timeline.phase for each in self._live.everyone())

    @property
    def num_nodes_needed(self) -> int:
        """Return the number of nodes that the present load needs (coordinator/control/roles.py)."""
        return self._live.demand.nodes_needed(self._registry.nodes, self.num_waiting)

    def num_left(self, node: Node) -> int:
        """Return the number of requests that the node still has a part in."""
        return num_left(node, self._live, self._live.releases)

    def load_of(self, node: Node) -> inference_pb2.NodeLoad:
        """Return the load of a node as clients see it: its state becomes DRAINED when a drain has finished."""
        if node.is_ready or self.num_left(node):
            return node.load
        load = inference_pb2.NodeLoad()
        load.CopyFrom(node.load)
        load.state = DRAINED
        return load

    def check_room(self, num_answers: int, now: float, asker: str = "") -> None:
        """Raise RequestError where `num_answers` more requests would exceed a limit on live requests."""
        asked = f"{num_answers} do not fit: " if num_answers > 1 else ""
        self._check_share(num_answers, asker, asked)
        if self.num_open + num_answers <= self._max_live:
            return
        for _ in range(num_answers):
            self._live.demand.arrived(now)
        message = f"{asked}{self.num_open} answers are in flight, the limit is {self._max_live}"
        raise self._live.admission.refusal(reasons.QUEUE_FULL, message, now)

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
        """Start a request, or continue one that an earlier call has begun; with `pooling` it is for an embedding.

        The time from `arrived_s`, in which the request was preprocessed, counts in its timeline and against its SLO.
        Raise RequestError, and then nothing has begun.
        """
        if self._live.find(request_id) is not None:
            raise RequestError(reasons.DUPLICATE_REQUEST_ID, f"request {request_id} is live already")
        self.check_room(1, now, asker)
        self._live.demand.arrived(arrived_s)
        self._age += 1
        first_token_s = arrived_s - so_far.since_first_s if so_far.token_ids else None
        timeline = Timeline(arrived_s, first_token_s)
        request = TrackedRequest(request_id, self._age, prompt, sampling, deadline_s, timeline, slo, pooling, asker)
        request.refuses_late = not self._live.admission.admits_late
        request.resume(so_far.token_ids)
        if so_far.finish_reason:
            return [End(request_id, ended_before(request, so_far.finish_reason, now), timeline, now)]
        return self._live.begin(request, now)

    def _check_share(self, num_answers: int, asker: str, asked: str) -> None:
        """Raise RequestError where one API key would have more live requests than the limit per key."""
        most = self._max_live_per_asker
        if most and (number := sum(each.asker == asker for each in self._live.everyone())) + num_answers > most:
            whose = f"the API key of {asker}" if asker else "API keys without a name"
            message = f"{asked}{number} answers to {whose} are in flight, the limit for one is {most}"
            raise RequestError(reasons.QUEUE_FULL, message)

    def handle(self, node: Node, event: fleet_pb2.NodeEvent, now: float) -> list[Instruction]:
        """Handle an event of a node. Events that are late, repeated or not the node's to send do nothing."""
        kind = event.WhichOneof("event")
        body: Any = getattr(event, kind)
        if kind == "step_tokens":
            return self.step_tokens(node, body, now)
        was_asked = kind in ("failed", "cancelled") and self._live.releases.settle(node, body.attempt.epoch)
        if kind == "failed" and (borrower := self._prefix_sends.find(node, body.attempt)) is not None:
            return self._prefix_sends.lost(borrower, now)
        if (migrating := self._migrations.find(node, body.attempt)) is not None:
            return [*self._migrations.handle(migrating, kind, body, now), *self._relocate(now)]
        request = self._live.on(node, body.attempt)
        if request is None or was_asked:
            return []
        if kind in PREFIX_FETCH_EVENTS:
            return self._prefix_sends.handle(request, node, kind, body, now)
        return self._attempt_events.handle(request, node, kind, body, now)

    def step_tokens(self, node: Node, event: fleet_pb2.StepTokens, now: float) -> list[Instruction]:
        """Handle the tokens of one step of a decode node: nearly all events are of this kind."""
        live, step_s = self._live, event.step_s
        node.num_tokens_written += len(event.tokens)
        instructions: list[Instruction] = []
        for token in event.tokens:
            if (emit := live.go_on(node, token, now)) is not None:
                instructions.append(emit)
                continue
            request = live.on(node, token.attempt)
            if request is None or node is not request.attempt.decode:
                request = self._migrations.find_told_before(node, token)
            if request is not None:
                instructions += self._attempt_events.step_token(request, token, step_s, now)
        return instructions

    def lose(self, node: Node, now: float, *, has_died: bool = False) -> list[Instruction]:
        """Handle the loss of a node, which has left the registry. `has_died`: it was lost in the middle of its work."""
        pauses = self._registry.pauses
        pauses.note(now)
        error = RequestError(reasons.WORKER_LOST, f"the {node.kind} was lost")
        if has_died and not pauses.is_recent(now):
            for request in at_work(node, self._live):
                request.note_death(node.session, str(error))
        self._live.releases.lose(node)
        instructions: list[Instruction] = []
        for request in self._live:
            instructions += self._migrations.lose(request, node, now)
            instructions += self._prefix_sends.lose(request, node, now)
            if request in self._live and node in (request.attempt.prefill, request.attempt.decode):
                instructions += self._attempt_events.lose_part(request, node, error, now, is_loss=True)
        return instructions

    def attached_again(self, session: int) -> None:
        """Take back the death of the node of this session: its process lives and only its stream had ended."""
        for request in self._live.everyone():
            request.take_back_death(session)

    def finish(self, request_id: str, finish_reason: inference_pb2.FinishReason, now: float) -> list[Instruction]:
        """End a live request early, as complete. An unknown request is ignored."""
        request = self._live.find(request_id)
        if request is None:
            return []
        if finish_reason == inference_pb2.FINISH_REASON_STOP:
            self._live.note_ended(request)
        return self._live.end(request, completion(request, finish_reason, now), now)

    def fail(self, request_id: str, error: RequestError, now: float) -> list[Instruction]:
        """End a live request early, with an error. An unknown request is ignored."""
        request = self._live.find(request_id)
        return self._live.end(request, with_progress(error, request), now) if request else []

    def tick(self, now: float) -> list[Instruction]:
        """Expire, place and migrate requests as time passes, and repeat unconfirmed Cancels."""
        self._live.demand.tick(now)
        instructions: list[Instruction] = [Send(node, command) for node, command in self._live.releases.overdue(now)]
        waiting: list[TrackedRequest] = []
        for request in self._live.everyone():
            if now >= request.deadline_s:
                instructions += self._live.expire(request, now)
                continue
            if request.is_held:
                continue
            if request.is_waiting:
                waiting.append(request)
                continue
            if request.migration is not None:
                instructions += self._migrations.tick(request, request.migration, now)
            if (since_s := request.attempt.waits_since_s) is not None and now - since_s >= self._keep_after_s:
                instructions += self._keep(request, now)
        instructions += self._live.retry(waiting, now)
        return instructions + self._live.let_in(now) + self._relocate(now)

    # ---- what goes elsewhere ----

    def _keep(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Let the prefill node decode a prompt whose decode node has had no room for too long, if the prefill node has
        room."""
        attempt, prefill_node = request.attempt, request.attempt.prefill
        if (
            self._ledger.of(prefill_node).num_answers >= prefill_node.hello.max_num_seqs
        ):  # the request would wait there as well
            return []
        if not prefill_node.is_ready or request.max_tokens > min(
            prefill_node.max_request_tokens, prefill_node.pool_tokens
        ):
            return []
        cancel = self._live.cancel(request, attempt.decode, attempt.epoch, now)
        self._ledger.let_go(request.request_id, attempt.decode)
        marks = request.prompt.marks_shared(prefill_node.block_size)
        self._ledger.write(request.request_id, prefill_node, len(request.known), marks)
        attempt.decode = prefill_node
        attempt.decode_holds = attempt.is_committed = True
        request.timeline.placed(now, prefill_node.name, prefill_node.name)
        request.timeline.enter(Phase.DECODE_QUEUE, now)
        self._metrics.num_kept += 1
        return [cancel, keep(request)]

    def _relocate(self, now: float) -> list[Instruction]:
        """Restart prompts of draining nodes, and migrate requests off nodes that drain, are full, or make them late."""
        live, nodes, instructions = self._live, self._registry.nodes, list[Instruction]()
        for request in prompts_to_restart(live, nodes):
            instructions += live.elsewhere(request, now)
        to_relieve = partial(leaving_late, coming=live.coming(now))
        for departures in (leaving_drained, leaving_full, to_relieve):
            for request, target in departures(live, nodes, self._ledger, now):
                instructions += self._migrations.begin(request, target, now)
        return instructions
