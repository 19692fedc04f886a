"""The life of every answer, from submit to its one end. Pure: events and the time come in, instructions go out.

    submit       Reserve to a decode node and Prefill to a prefill node, at the same time
    Reserved     Deliver, with the ticket, to the prefill node
    FirstToken   to the client at once
    Revoked      the decode node has taken its blocks back; another Reserved will come
    Committed    the decode node has all KV (Transferred is the prefill node's word for the same)
    StepTokens   to the client, strictly by index: they may come before FirstToken, over the other stream
    Failed       a new attempt on other nodes, or the end; so does a lost node

Where the node that writes is to read the prompt itself, Reserve alone goes out, FirstToken comes from that node, and
nothing is delivered or committed.

A new attempt sends prompt and emitted tokens as one prompt, so the stream goes on at the next index. Epochs grow over
all requests: what a node still says of an older attempt, even one of the same request id, cannot be mistaken.
"""

from typing import Any, Final

from coordinator.control.attempts import Attempt, TrackedRequest
from coordinator.control.handover import Handover
from coordinator.control.instructions import Emit, End, Instruction, Send
from coordinator.control.ledger import Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.outcomes import completion, end_error, restart_error, with_progress
from coordinator.control.placement import place
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Node, Registry
from coordinator.control.releases import Releases
from coordinator.control.timeline import Phase, Timeline
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams

# Far more than one stream can be ahead of the other: each attempt's first token is on its way before its transfer.
MAX_EARLY_TOKENS: Final = 1024
NUM_EPOCHS: Final = 2**32
RESTART_REASONS: Final = (reasons.TRANSFER_FAILED, reasons.KV_CHECKSUM_MISMATCH)


class Tracker:
    """All live answers, and what nodes have yet to let go of."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        metrics: Metrics,
        *,
        first_epoch: int,
        max_live: int,
        max_restarts: int,
    ) -> None:
        """`first_epoch` is to be random: nodes may still be at attempts of a coordinator that ran before this one."""
        self._registry = registry
        self._ledger = ledger
        self._metrics = metrics
        self._handover = Handover()
        self._max_live = max_live
        self._max_restarts = max_restarts
        self._requests: dict[str, TrackedRequest] = {}
        self._releases = Releases()
        self._epoch = first_epoch
        self._age = 0  # requests that were ever admitted

    @property
    def num_open(self) -> int:
        """Live answers, and attempts that nodes have yet to let go of: at 0 the fleet holds nothing."""
        return len(self._requests) + len(self._releases)

    @property
    def num_running(self) -> int:
        """Live answers that have a token."""
        return sum(bool(request.output) for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Live answers that have none yet."""
        return len(self._requests) - self.num_running

    def submit(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, arrived_s: float, deadline_s: float
    ) -> list[Instruction]:
        """Begins an answer. Raises RequestError, and then nothing has begun."""
        if request_id in self._requests:
            raise RequestError(reasons.DUPLICATE_REQUEST_ID, f"request {request_id} is live already")
        if self.num_open >= self._max_live:
            raise RequestError(
                reasons.QUEUE_FULL, f"{self.num_open} answers are in flight, the limit is {self._max_live}"
            )
        self._age += 1
        request = TrackedRequest(request_id, self._age, prompt, sampling, deadline_s, Timeline(arrived_s))
        instructions = self._attempt(request, arrived_s)
        self._requests[request_id] = request
        return instructions

    def handle(self, node: Node, event: fleet_pb2.NodeEvent, now: float) -> list[Instruction]:
        """What a node tells of its attempts. Events that are late, repeated or not the node's to send do nothing."""
        kind = event.WhichOneof("event")
        body: Any = getattr(event, kind)
        match kind:
            case "revoked":
                return self._on_revoked(node, body, now)
            case "first_token":
                return self._on_first_token(node, body, now)
            case "reserved":
                return self._on_reserved(node, body, now)
            case "transferred" | "committed":
                return self._on_committed(node, body, now)
            case "step_tokens":
                return self._on_step_tokens(node, body, now)
            case "failed" | "cancelled":
                return self._on_let_go(node, body, now)
            case _:
                raise AssertionError(f"{kind} is not the tracker's business")

    def lose(self, node: Node, now: float) -> list[Instruction]:
        """The node is gone, from the registry too, with all it held."""
        self._releases.lose(node)
        instructions: list[Instruction] = []
        for request in list(self._requests.values()):
            if node in (request.attempt.prefill, request.attempt.decode):
                error = RequestError(reasons.WORKER_LOST, f"the {node.kind} was lost")
                instructions += self._carry_on(request, node, error, now)
        return instructions

    def finish(self, request_id: str, finish_reason: inference_pb2.FinishReason, now: float) -> list[Instruction]:
        """Ends a live answer early, as complete; an unknown one is left alone."""
        request = self._requests.get(request_id)
        return self._end(request, completion(request, finish_reason, now), now) if request else []

    def fail(self, request_id: str, error: RequestError, now: float) -> list[Instruction]:
        """Ends a live answer early, with an error; an unknown one is left alone."""
        request = self._requests.get(request_id)
        return self._end(request, with_progress(error, request), now) if request else []

    def tick(self, now: float) -> list[Instruction]:
        """What the mere passing of time asks for."""
        instructions: list[Instruction] = [Send(node, command) for node, command in self._releases.overdue(now)]
        for request in list(self._requests.values()):
            if now >= request.deadline_s:
                error = with_progress(RequestError(reasons.DEADLINE_EXCEEDED, "the answer took too long"), request)
                instructions += self._end(request, error, now)
        return instructions

    # ---- events ----

    def _on_reserved(self, node: Node, event: fleet_pb2.Reserved, now: float) -> list[Instruction]:
        request = self._request_on(node, event.attempt)
        if request is None or node is not request.attempt.decode or request.attempt.is_reserved:
            return []
        request.attempt.granted_s = now
        self._handover.granted(request.attempt, now)
        if request.timeline.phase is Phase.CREDIT_WAIT:
            request.timeline.enter(Phase.TRANSFER, now)
        deliver = fleet_pb2.Deliver(attempt=event.attempt, ticket=event.ticket)
        return [Send(request.attempt.prefill, fleet_pb2.NodeCommand(deliver=deliver, attempt=event.attempt))]

    def _on_revoked(self, node: Node, event: fleet_pb2.Revoked, now: float) -> list[Instruction]:
        """The blocks are needed for older requests: others will be granted. The prefill node finds out by itself."""
        request = self._request_on(node, event.attempt)
        if request is None or node is not request.attempt.decode or request.attempt.is_committed:
            return []
        request.attempt.granted_s = None
        if request.timeline.phase is Phase.TRANSFER:
            request.timeline.enter(Phase.CREDIT_WAIT, now)
        return []

    def _on_first_token(self, node: Node, event: fleet_pb2.FirstToken, now: float) -> list[Instruction]:
        request = self._request_on(node, event.attempt)
        if request is None or node is not request.attempt.prefill or request.attempt.has_first_token:
            return []
        attempt = request.attempt
        attempt.first_token_s = now
        if attempt.first_index == 0:
            request.num_cached_tokens = min(event.num_cached_tokens, len(request.prompt))
            self._metrics.prompt_read(len(request.prompt), request.num_cached_tokens)
        self._ledger.first_token(request.request_id)
        request.timeline.enter(Phase.PREFILL, now, ago_s=event.prefill_s)
        request.timeline.enter(attempt.phase_after_prefill, now)
        attempt.early[attempt.first_index] = event.token
        return self._emit(request, now)

    def _on_committed(
        self, node: Node, event: fleet_pb2.Committed | fleet_pb2.Transferred, now: float
    ) -> list[Instruction]:
        request = self._request_on(node, event.attempt)
        if request is None or request.attempt.is_local:
            return []
        if node is request.attempt.prefill:
            request.attempt.let_go(node)
        elif isinstance(event, fleet_pb2.Committed) and request.count_kv(event):
            self._metrics.kv_moved(event.num_bytes, event.num_bytes_saved)
        request.attempt.is_committed = True
        if request.timeline.phase in (Phase.CREDIT_WAIT, Phase.TRANSFER):
            request.timeline.enter(Phase.DECODE_QUEUE, now)
        return []

    def _on_step_tokens(self, node: Node, event: fleet_pb2.StepTokens, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for token in event.tokens:
            request = self._request_on(node, token.attempt)
            if request is not None and node is request.attempt.decode:
                instructions += self._on_step_token(request, token, event.step_s, now)
        return instructions

    def _on_step_token(
        self, request: TrackedRequest, token: fleet_pb2.SampledToken, step_s: float, now: float
    ) -> list[Instruction]:
        attempt = request.attempt
        if token.index < len(request.output):
            return []
        attempt.early[token.index] = token
        if len(attempt.early) > MAX_EARLY_TOKENS:
            error = RequestError(reasons.WORKER_LOST, f"{MAX_EARLY_TOKENS} tokens came out of order")
            return self._restart(request, attempt.prefill, error, now)
        if not attempt.has_first_token:
            return []
        if request.timeline.phase is not Phase.DECODE:
            request.timeline.enter(Phase.DECODE, now, ago_s=step_s)
            self._handover.moved(attempt, now - step_s, now)
        return self._emit(request, now)

    def _on_let_go(self, node: Node, event: fleet_pb2.Failed | fleet_pb2.Cancelled, now: float) -> list[Instruction]:
        """Failed, or Cancelled: asked for, or from a node that does not know the attempt."""
        if self._releases.settle(node, event.attempt.epoch):
            return []
        request = self._request_on(node, event.attempt)
        if request is None:
            return []
        if isinstance(event, fleet_pb2.Cancelled):
            error = RequestError(reasons.WORKER_LOST, f"the {node.kind} does not know the request")
            return self._carry_on(request, node, error, now)
        if event.reason in RESTART_REASONS:
            self._metrics.transfers_failed[event.reason] += 1
            # Either end may be at fault, whichever of the two has noticed.
            request.avoid += [request.attempt.prefill, request.attempt.decode]
            return self._carry_on(request, node, restart_error(node, event), now)
        request.attempt.let_go(node)
        return self._end(request, with_progress(end_error(node, event), request), now)

    def _request_on(self, node: Node, attempt: fleet_pb2.Attempt) -> TrackedRequest | None:
        """The live request whose current attempt this is, if the node has a part in it."""
        request = self._requests.get(attempt.request_id)
        if request is None or request.attempt.epoch != attempt.epoch:
            return None
        return request if node is request.attempt.prefill or node is request.attempt.decode else None

    # ---- effects ----

    def _attempt(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Gives the request to a pair of nodes. Raises RequestError when there is none, and then changes nothing."""
        prompt = request.prompt.followed_by(request.output)
        max_tokens = len(request.prompt) + request.sampling.max_tokens
        costs = self._handover.costs(now)
        prefill, decode = place(self._registry.nodes, self._ledger, prompt, max_tokens, request.avoid, handover=costs)
        self._epoch = (self._epoch + 1) % NUM_EPOCHS
        request.attempt = Attempt(self._epoch, prefill, decode, first_index=len(request.output), started_s=now)
        self._ledger.read(request.request_id, prefill, prompt.tokens_to_compute(prefill))
        self._ledger.write(request.request_id, decode, len(prompt))
        return [Send(node, command) for node, command in request.commands(prompt)]

    def _carry_on(self, request: TrackedRequest, node: Node, error: RequestError, now: float) -> list[Instruction]:
        """The node has dropped its part: nothing to do if that was over, else a new attempt."""
        request.attempt.let_go(node)
        if node is request.attempt.prefill and request.attempt.is_handed_over:
            return []
        return self._restart(request, node, error, now)

    def _restart(self, request: TrackedRequest, node: Node, error: RequestError, now: float) -> list[Instruction]:
        """A new attempt, away from the node; the error becomes the end when there were enough."""
        error = with_progress(error, request)
        instructions = self._let_go(request, now)
        if request.num_restarts == self._max_restarts:
            return instructions + self._end(request, error, now)
        request.num_restarts += 1
        self._metrics.num_restarts += 1
        request.avoid.append(node)
        request.timeline.enter(Phase.PREFILL_QUEUE, now)
        try:
            return instructions + self._attempt(request, now)
        except RequestError as no_node:
            final = RequestError(no_node.reason, str(no_node), **error.metadata)
            return instructions + self._end(request, final, now)

    def _emit(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Whatever is next by index goes out; the last token of the answer ends it."""
        attempt, output = request.attempt, request.output
        tokens: list[fleet_pb2.SampledToken] = []
        while len(output) in attempt.early and not (tokens and tokens[-1].finish_reason):
            tokens.append(attempt.early.pop(len(output)))
            output.append(tokens[-1].token_id)
        if not tokens:
            return []
        self._metrics.tokens_came(len(tokens), request.timeline.tokens(now), is_first=len(output) == len(tokens))
        self._ledger.tokens_came(request.request_id, attempt.decode, len(tokens))
        emit = Emit(request.request_id, tokens)
        if not tokens[-1].finish_reason:
            return [emit]
        # The node of the last token has let go by itself; so has the prefill node, whichever of the two it was.
        attempt.prefill_holds = False
        attempt.decode_holds = tokens[-1].index == attempt.first_index and not attempt.is_local
        complete = completion(request, tokens[-1].finish_reason, now)
        if complete.finish_reason == inference_pb2.FINISH_REASON_STOP:
            complete.matched_token_id = output[-1]
        return [emit, *self._end(request, complete, now)]

    def _end(
        self, request: TrackedRequest, outcome: inference_pb2.Complete | RequestError, now: float
    ) -> list[Instruction]:
        del self._requests[request.request_id]
        return [*self._let_go(request, now), End(request.request_id, outcome)]

    def _let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Asks every node that may hold something of the attempt to drop it."""
        attempt = request.attempt
        instructions: list[Instruction] = [
            Send(node, self._releases.ask(node, request.request_id, attempt.epoch, now)) for node in attempt.holders()
        ]
        attempt.prefill_holds = attempt.decode_holds = False
        self._ledger.end(request.request_id)
        return instructions
