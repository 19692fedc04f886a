"""Handle what nodes report about the current attempt of a request. Pure.

Reports about migrations and remote prefix fetches are handled in coordinator/control/migration.py and
coordinator/control/prefix_fetch.py.
"""

from typing import Any, Final

from coordinator.control.instructions import Embedded, Instruction, Send
from coordinator.control.live import LiveAnswers
from coordinator.control.migration import Migrations
from coordinator.control.nodes import Node
from coordinator.control.outcomes import (
    MAX_MESSAGE_CHARS,
    completion,
    end_error,
    quarantine_error,
    restart_error,
    with_progress,
)
from coordinator.control.request import MAX_DEATHS, TrackedRequest
from coordinator.control.timeline import Phase
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError

# Far more than one stream can be ahead of the other: each attempt's first token is on its way before its transfer.
MAX_EARLY_TOKENS: Final = 1024
RESTART_REASONS: Final = (reasons.TRANSFER_FAILED, reasons.KV_CHECKSUM_MISMATCH)


class AttemptEvents:
    """Apply the events of current attempts, in any order of arrival."""

    def __init__(self, live: LiveAnswers, migrations: Migrations) -> None:
        self._live = live
        self._migrations = migrations

    def handle(self, request: TrackedRequest, node: Node, kind: str, body: Any, now: float) -> list[Instruction]:
        """Handle an event of a node that has a part in the current attempt."""
        match kind:
            case "taken" | "progress":
                return self._on_reading(request, node, body)
            case "reserved":
                return self._on_reserved(request, node, body, now)
            case "revoked":
                return self._on_revoked(request, node, now)
            case "first_token":
                return self._on_first_token(request, node, body, now)
            case "embedded":
                return self._on_embedded(request, body, now)
            case "transferred" | "committed":
                return self._on_committed(request, node, body, now)
            case "migration_failed":
                return self._migrations.on_source_failed(request, body, now)
            case "failed":
                return self._on_failed(request, node, body, now)
            case "cancelled":
                error = RequestError(reasons.WORKER_LOST, f"the {node.kind} does not know the request")
                return self._live.carry_on(request, node, error, now)
            case _:
                raise AssertionError(f"{kind} is nothing of an attempt")

    def _on_reading(
        self, request: TrackedRequest, node: Node, event: fleet_pb2.Taken | fleet_pb2.Progress
    ) -> list[Instruction]:
        """Note that the prefill node has the prompt, or has computed some of it."""
        if isinstance(event, fleet_pb2.Taken):
            request.attempt.is_taken = node is request.attempt.prefill
        elif node is request.attempt.prefill and not request.attempt.has_first_token:
            self._live.ledger.progressed(request.request_id, node, event.num_left)
        return []

    def step_token(
        self, request: TrackedRequest, token: fleet_pb2.SampledToken, step_s: float, now: float
    ) -> list[Instruction]:
        """Handle a token of the decode node, or of the source of a migration. Tokens may come out of order."""
        attempt, num_early = request.attempt, token.index - len(request.output)
        if num_early < 0:
            return []
        if num_early or attempt.first_token_s is None:
            attempt.early[token.index] = token
            if len(attempt.early) > MAX_EARLY_TOKENS:
                error = RequestError(reasons.WORKER_LOST, f"{MAX_EARLY_TOKENS} tokens came out of order")
                return self._live.restart(request, attempt.prefill, error, now)
            if attempt.first_token_s is None:
                return []
        if request.timeline.phase is not Phase.DECODE:
            request.timeline.enter(Phase.DECODE, now, ago_s=step_s)
            self._live.handover.migrated(attempt, now - step_s, now)
        return [] if num_early else self._live.emit(request, token, now)

    def lose_part(
        self, request: TrackedRequest, node: Node, error: RequestError, now: float, *, is_loss: bool = False
    ) -> list[Instruction]:
        """Handle that a node of the current attempt has lost its part, or is gone.

        A request that may have killed MAX_DEATHS nodes in a row ends as a poison request; any other one is restarted.
        """
        if len(request.deaths) >= MAX_DEATHS:
            request.attempt.let_go(node)
            return self._live.end(request, with_progress(quarantine_error(request.deaths), request), now)
        return self._live.carry_on(request, node, error, now, is_loss=is_loss)

    def _on_reserved(
        self, request: TrackedRequest, node: Node, event: fleet_pb2.Reserved, now: float
    ) -> list[Instruction]:
        if node is not request.attempt.decode or request.attempt.is_reserved:
            return []
        request.attempt.granted_s = now
        self._live.handover.granted(request.attempt, now)
        if request.timeline.phase is Phase.CREDIT_WAIT:
            request.timeline.enter(Phase.TRANSFER, now)
        deliver = fleet_pb2.Deliver(attempt=event.attempt, descriptor=event.descriptor)
        return [Send(request.attempt.prefill, fleet_pb2.NodeCommand(deliver=deliver, attempt=event.attempt))]

    def _on_revoked(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """Note that the decode node has revoked its credit; it will give credit again. It tells the prefill node
        itself."""
        if node is not request.attempt.decode or request.attempt.is_committed:
            return []
        request.attempt.granted_s, request.attempt.revoked_s = None, now
        if request.timeline.phase is Phase.TRANSFER:
            request.timeline.enter(Phase.CREDIT_WAIT, now)
        return self._tell_begun(request) if request.attempt.has_first_token else []

    def _on_first_token(
        self, request: TrackedRequest, node: Node, event: fleet_pb2.FirstToken, now: float
    ) -> list[Instruction]:
        if node is not request.attempt.prefill or request.attempt.has_first_token:
            return []
        attempt = request.attempt
        attempt.first_token_s = now
        if attempt.first_index == request.num_resumed:
            request.num_cached_tokens = min(event.num_cached_tokens, len(request.prompt))
            self._live.metrics.prompt_read(len(request.prompt), request.num_cached_tokens)
        self._live.ledger.first_token(request.request_id, now)
        request.timeline.enter(Phase.PREFILL, now, ago_s=event.prefill_s)
        request.timeline.enter(attempt.phase_after_prefill, now)
        return self._live.emit(request, event.token, now) + self._tell_begun(request)

    def _tell_begun(self, request: TrackedRequest) -> list[Instruction]:
        """Tell the decode node that the first token is sampled, while it lacks the KV."""
        attempt = request.attempt
        if attempt.is_local or attempt.is_committed or request not in self._live:
            return []
        about = fleet_pb2.Attempt(request_id=request.request_id, epoch=attempt.epoch)
        return [Send(attempt.decode, fleet_pb2.NodeCommand(begun=fleet_pb2.Begun(attempt=about), attempt=about))]

    def _on_embedded(self, request: TrackedRequest, event: fleet_pb2.Embedded, now: float) -> list[Instruction]:
        if request.pooling is None:
            return []
        request.attempt.let_go(request.attempt.prefill)
        request.embedded_s = now
        request.num_cached_tokens = min(event.num_cached_tokens, len(request.prompt))
        self._live.metrics.prompt_read(len(request.prompt), request.num_cached_tokens)
        request.timeline.enter(Phase.PREFILL, now, ago_s=event.prefill_s)
        complete = completion(request, inference_pb2.FINISH_REASON_STOP, now)
        self._live.note_ended(request)
        return [Embedded(request.request_id, event.embedding), *self._live.end(request, complete, now)]

    def _on_committed(
        self,
        request: TrackedRequest,
        node: Node,
        event: fleet_pb2.Committed | fleet_pb2.Transferred,
        now: float,
    ) -> list[Instruction]:
        if request.attempt.is_local:
            return []
        if node is request.attempt.prefill:
            request.attempt.let_go(node)
            self._live.ledger.let_go(request.request_id, node)
        elif isinstance(event, fleet_pb2.Committed) and request.count_kv(event):
            self._live.metrics.kv_migrated(event.num_bytes, event.num_bytes_saved)
        request.attempt.is_committed = True
        if request.timeline.phase in (Phase.CREDIT_WAIT, Phase.TRANSFER):
            request.timeline.enter(Phase.DECODE_QUEUE, now)
        return []

    def _on_failed(self, request: TrackedRequest, node: Node, event: fleet_pb2.Failed, now: float) -> list[Instruction]:
        attempt = request.attempt
        if event.reason in RESTART_REASONS:
            self._live.metrics.transfers_failed[event.reason] += 1
            # Either node may be at fault, whichever of the two has reported it.
            request.avoid += [attempt.prefill, attempt.decode]
            return self._live.carry_on(request, node, restart_error(node, event), now)
        error = end_error(node, event)
        if event.reason == reasons.STEP_FAILED:  # caused by the node, the request, or another request of the step
            request.note_death(None, event.message[:MAX_MESSAGE_CHARS])
            return self.lose_part(request, node, error, now)
        attempt.let_go(node)
        if event.reason == reasons.QUEUE_FULL:
            return self._live.turned_away(request, node, error, now)
        if event.reason == reasons.WOULD_BE_LATE:
            return self._live.refused(request, now)
        return self._live.end(request, with_progress(error, request), now)
