"""Build the ends of requests: the Complete message, and the errors that replace it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from coordinator.control.nodes import Node
from coordinator.control.request import Death, TrackedRequest
from coordinator.control.slo import MS
from coordinator.control.timeline import Timeline
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError

MAX_MESSAGE_CHARS: Final = 200
MAX_BYTES: Final = 2**64 - 1  # largest uint64
# As OpenAI's API and the labels of metrics spell them.
FINISH_REASONS: Final = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}
# A node's message with one of these reasons is passed to the client unchanged.
CLIENT_REASONS: Final = (reasons.QUEUE_FULL, reasons.PROMPT_TOO_LONG, reasons.BAD_PARAM, reasons.MODEL_NOT_FOUND)


def completion(
    request: TrackedRequest, finish_reason: inference_pb2.FinishReason, now: float
) -> inference_pb2.Complete:
    """Return the Complete message of a request that ends now."""
    attempt = None if request.is_waiting else request.attempt
    timeline = request.timeline.to_wire(
        now,
        prefill_node=attempt.prefill.name if attempt else "",
        decode_node=attempt.decode.name if attempt and request.pooling is None else "",
        num_restarts=request.num_restarts,
        num_moves=request.num_moves,
        move_pause_s=request.move_pause_s,
        loan_s=request.loan_s,
        is_late=request.is_late,
        **(asdict(request.expectation) if request.expectation else {}),
    )
    return inference_pb2.Complete(
        finish_reason=finish_reason,
        prompt_tokens=len(request.prompt),
        completion_tokens=len(request.output),
        cached_tokens=request.num_cached_tokens,
        timeline=timeline,
        kv_bytes=min(request.num_kv_bytes, MAX_BYTES),
        kv_bytes_saved=min(request.num_kv_bytes_saved, MAX_BYTES),
        moved_kv_bytes=min(request.num_migrated_kv_bytes, MAX_BYTES),
        lent_kv_bytes=min(request.lent_kv_bytes, MAX_BYTES),
        attainment=attainment(request),
        resumed_tokens=request.num_resumed,
        proposed_tokens=request.num_proposed,
        accepted_tokens=request.num_accepted,
    )


def ended_before(
    request: TrackedRequest, finish_reason: inference_pb2.FinishReason, now: float
) -> inference_pb2.Complete:
    """Return the Complete message of a request whose tokens an earlier call has all returned, but not its end."""
    request.waits_until_s = now  # no node has it
    complete = completion(request, finish_reason, now)
    if finish_reason == inference_pb2.FINISH_REASON_STOP:
        complete.matched_token_id = request.output[-1]
    return complete


def cut_short(error: RequestError, timeline: Timeline, now: float) -> inference_pb2.Complete:
    """Return the Complete message of a sequence that has failed while others of its call go on."""
    return inference_pb2.Complete(
        finish_reason=inference_pb2.FINISH_REASON_ABORT,
        completion_tokens=int(error.metadata.get("tokens_emitted", "0")),
        timeline=timeline.to_wire(now),
        error=str(error)[:MAX_MESSAGE_CHARS],
    )


def attainment(request: TrackedRequest) -> inference_pb2.Attainment | None:
    """Return the SLO of a request and which limits it attains; None without limits and without an SLO class.

    An embedding counts as a first token.
    """
    slo, timeline = request.slo, request.timeline
    if slo is None or not (slo.has_limits or slo.slo_class):
        return None
    first_s = timeline.ttft_s if timeline.first_token_s is not None else math.inf
    if request.embedded_s is not None:
        first_s = request.embedded_s - timeline.start_s
    told = inference_pb2.Attainment(slo_class=slo.slo_class)
    if slo.ttft_s is not None:
        told.ttft_ms = slo.ttft_s * MS
        told.ttft_met = first_s <= slo.ttft_s
    if slo.tpot_s is not None:
        told.tpot_ms = slo.tpot_s * MS
        told.tpot_met = first_s < math.inf and timeline.tpot_s(len(request.output)) <= slo.tpot_s
    return told


def end_error(node: Node, event: fleet_pb2.Failed) -> RequestError:
    """Return the client's error for a failure that ends the request at once."""
    if event.reason in CLIENT_REASONS:
        return RequestError(event.reason, event.message[:MAX_MESSAGE_CHARS])
    if event.reason == reasons.PAIRING_MISMATCH:
        differ = f"node {node.name} and the coordinator differ: {event.message[:MAX_MESSAGE_CHARS]}"
        return RequestError(event.reason, differ)
    failed = f"the engine of the {node.kind} failed"
    if event.reason in (reasons.STEP_FAILED, reasons.ENGINE_ERROR):  # the node words the cause of these for clients
        failed += f": {event.message[:MAX_MESSAGE_CHARS]}"
    return RequestError(reasons.ENGINE_ERROR, failed)


def quarantine_error(deaths: Sequence[Death]) -> RequestError:
    """Return the client's error for a poison request, which these deaths may be due to and which is not tried again."""
    causes = "; ".join(dict.fromkeys(death.cause for death in deaths))
    return RequestError(
        reasons.ENGINE_ERROR,
        f"nodes were lost or failed {len(deaths)} times in a row while they computed the request, "
        f"and it is not tried again: {causes}",
    )


def restart_error(node: Node, event: fleet_pb2.Failed) -> RequestError:
    """Return the client's error for a failure after which no restart is left."""
    if event.reason == reasons.KV_CHECKSUM_MISMATCH:
        return RequestError(
            reasons.KV_CHECKSUM_MISMATCH, "the KV cache arrived damaged, and recomputing it was given up"
        )
    return RequestError(reasons.WORKER_LOST, f"the {node.kind} gave the request up: its KV could not be transferred")


def too_late(request: TrackedRequest) -> RequestError:
    """Return the client's error for a request that has reached its deadline."""
    timeout_s = request.deadline_s - request.timeline.start_s
    error = RequestError(reasons.DEADLINE_EXCEEDED, f"the answer was not finished within {timeout_s:g} s")
    return with_progress(error, request)


def with_progress(error: RequestError, request: TrackedRequest) -> RequestError:
    """Return the error with the phase of the request and the number of its emitted tokens."""
    progress = {"phase": request.timeline.phase.value, "tokens_emitted": str(len(request.output))}
    return RequestError(error.reason, str(error), **error.metadata | progress)


def with_expectation(error: RequestError, request: TrackedRequest, **seconds: float) -> RequestError:
    """Return the refusal with the predictions for the request and with `seconds`, named as in the timeline."""
    told = {**(asdict(request.expectation) if request.expectation else {}), **seconds}
    return RequestError(error.reason, str(error), **error.metadata, **{name: f"{told[name]:.6f}" for name in told})
