"""Log and count the end of every request, and keep the history of the latest ones.

The log has one line for each end. Log and history have figures and names, and never a word of a prompt or an output.
The history is bounded.
"""

import logging
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from coordinator.control.instructions import (
    FINISH_REASONS,
    MAX_BYTES,
    MAX_MESSAGE_CHARS,
    End,
    MigrationEnded,
    MigrationOutcome,
    attainment,
)
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import LossCause, Node
from coordinator.control.request import Phase, Request, Timeline
from coordinator.control.slo import UNNAMED
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams

MAX_MIGRATIONS: Final = 64  # kept for one call, whose end has their number


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """The end of one sequence of a call."""

    index: int
    outcome: inference_pb2.Complete | RequestError
    timeline: Timeline
    ended_s: float


@dataclass(slots=True)
class CallRecord:
    """Collect the course of one call, for logs and traces."""

    request_id: str
    asker: str = ""  # name of the API key, if it has one
    trace_id: str = ""  # set if the call is traced
    operation: str = ""  # by the conventions of OpenTelemetry
    model: str = ""
    arrived_s: float = 0.0
    begun_s: float | None = None  # when the call was admitted, after validation and tokenization
    num_prompt_tokens: int = 0
    num_sequences: int = 1
    sampling: SamplingParams | None = None  # of the first sequence; the others differ in the seed alone
    answers: list[SequenceRecord] = field(default_factory=list)  # sequences that have ended
    migrations: list[MigrationEnded] = field(default_factory=list)
    failure: str = ""  # reason of the refusal or of the error; empty for a good end
    number: int = 0  # number of the call at its API server process

    def migrated(self, migration: MigrationEnded) -> None:
        """Add a migration of one of the sequences, whatever its outcome; beyond MAX_MIGRATIONS they are dropped."""
        if len(self.migrations) < MAX_MIGRATIONS:
            self.migrations.append(migration)


def sequence_index(sequence_id: str) -> tuple[str, int]:
    """Split the id of a sequence, REQUEST_ID/INDEX, into the request id and the index."""
    request_id, _, index = sequence_id.rpartition("/")
    return request_id, int(index)


logger = logging.getLogger(__name__)

SECONDS: Final = ("ttft_s", *(f"{phase.value}_s" for phase in Phase), "e2e_s")
# The messages of these errors quote the client's input.
QUOTING: Final = (reasons.BAD_PARAM, reasons.MALFORMED_REQUEST, reasons.MODEL_NOT_FOUND)


class RequestLog:
    """Log and count each end of a request once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._records: dict[str, CallRecord] = {}  # of calls in flight

    def begun(self, record: CallRecord) -> None:
        """Keep the record of a call that has begun, by its request id, until `over`.

        Log lines of the call have the name of its API key, and ends and migrations are added to the record.
        """
        self._records[record.request_id] = record

    def sized(self, num_sequences: int, max_tokens: int) -> None:
        """Count a call in the metrics, with `num_sequences` outputs of at most `max_tokens` tokens each."""
        self._metrics.call_begun(num_sequences, max_tokens)

    def over(self, request_id: str) -> None:
        """Forget the record of a call, all of whose sequences have ended. Ignored for an unknown id."""
        self._records.pop(request_id, None)

    def ended(self, end: End) -> None:
        """Log and count the end of a sequence, and add it to the record of its call."""
        request_id, index = sequence_index(end.request_id)
        outcome = end.outcome
        if (record := self._records.get(request_id)) is not None:
            record.answers.append(SequenceRecord(index, outcome, end.timeline, end.ended_s))
        if isinstance(outcome, RequestError):
            self._metrics.failed[outcome.reason] += 1
            fields = {"index": index, **_cause(outcome)}
            self._write(logging.WARNING, "request failed", request_id, fields)
        else:
            finish_reason = FINISH_REASONS.get(outcome.finish_reason, "unknown")
            self._metrics.ended(finish_reason, outcome)
            fields = {"index": index, "finish_reason": finish_reason, **_figures(outcome)}
            self._write(logging.INFO, "request finished", request_id, fields)

    def migrated(self, migration: MigrationEnded) -> None:
        """Log and count a migration, whatever its outcome, and add it to the record of its call."""
        self._metrics.migrations[migration.outcome.value] += 1
        self._metrics.num_migrated_kv_bytes += migration.num_kv_bytes
        request_id, index = sequence_index(migration.request_id)
        if (record := self._records.get(request_id)) is not None:
            record.migrated(migration)
        fields = {
            "index": index,
            "outcome": migration.outcome.value,
            "from_node": migration.source.name,
            "to_node": migration.target.name,
            "seconds": round(migration.seconds, 6),
            "kv_bytes": migration.num_kv_bytes,
        }
        level = logging.WARNING if migration.outcome is MigrationOutcome.FAILED else logging.INFO
        event = "request migrated" if migration.outcome is MigrationOutcome.MIGRATED else "request not migrated"
        self._write(level, event, request_id, fields)

    def refused(self, record: CallRecord, error: RequestError) -> None:
        """Log and count a request that could not begin."""
        self._metrics.refused[error.reason] += 1
        _write(logging.INFO, "request refused", record, _cause(error))

    def attempt_failed(self, node: Node, event: fleet_pb2.Failed) -> None:
        """Log that a node has failed its part of a request, with the node's reason.

        The request may continue on others.
        """
        is_transfer = event.reason in (reasons.TRANSFER_FAILED, reasons.KV_CHECKSUM_MISMATCH)
        fields = {"failed_node": node.name, "reason": event.reason, "message": event.message[:MAX_MESSAGE_CHARS]}
        request_id = event.attempt.request_id.rpartition("/")[0]
        self._write(logging.WARNING, "transfer failed" if is_transfer else "attempt failed", request_id, fields)

    def node_lost(self, node: Node, cause: LossCause, why: str) -> None:
        """Log and count the loss of a node; `why` is the sentence for the log."""
        self._metrics.node_losses[cause] += 1
        fields = {"lost_node": node.name, "cause": cause.value, "message": why}
        logger.warning("%s %s lost: %s", node.kind, node.name, why, extra={"fields": fields})

    def _write(self, level: int, event: str, request_id: str, fields: dict[str, Any]) -> None:
        _write(level, event, self._records.get(request_id) or CallRecord(request_id), fields)


def _cause(error: RequestError) -> dict[str, Any]:
    message = {} if error.reason in QUOTING else {"message": str(error)}
    return {"reason": error.reason, **message, **error.metadata}


def _figures(complete: inference_pb2.Complete) -> dict[str, Any]:
    timeline = complete.timeline
    return {
        "prompt_tokens": complete.prompt_tokens,
        "cached_tokens": complete.cached_tokens,
        "completion_tokens": complete.completion_tokens,
        "prefill_node": timeline.prefill_node,
        "decode_node": timeline.decode_node,
        "restarts": timeline.num_restarts,
        "kv_bytes": complete.kv_bytes,
        **(_migrations(complete) if timeline.num_migrations else {}),
        **({"resumed_tokens": complete.resumed_tokens} if complete.resumed_tokens else {}),
        **(_draft_tokens(complete) if complete.proposed_tokens else {}),
        **{name: round(getattr(timeline, name), 6) for name in SECONDS},
    }


def _draft_tokens(complete: inference_pb2.Complete) -> dict[str, Any]:
    return {"proposed_tokens": complete.proposed_tokens, "accepted_tokens": complete.accepted_tokens}


def _migrations(complete: inference_pb2.Complete) -> dict[str, Any]:
    timeline = complete.timeline
    pause_s = round(timeline.migration_pause_s, 6)
    return {
        "migrations": timeline.num_migrations,
        "migration_pause_s": pause_s,
        "migrated_kv_bytes": complete.migrated_kv_bytes,
    }


def _write(level: int, event: str, record: CallRecord, fields: dict[str, Any]) -> None:
    about = {name: value for name in ("trace_id", "asker") if (value := getattr(record, name))}
    logger.log(level, event, extra={"request_id": record.request_id, "fields": {**about, **fields}})


# ---- the history of the latest requests ----

MAX_ENDED: Final = 100
MAX_TIMES: Final = 1024
WINDOW_S: Final = 60.0


class Times(NamedTuple):
    """Keep the times of one ended request; None where a time is missing, or there is no SLO."""

    ended_s: float
    slo_class: str
    ttft_s: float | None
    tpot_s: float | None
    is_met: bool | None


class History:
    """Record the end of every request, each once."""

    def __init__(self) -> None:
        self._number = 0  # of the last request that has ended
        self._ended: deque[inference_pb2.SequenceHistory] = deque(maxlen=MAX_ENDED)
        self._times: deque[Times] = deque(maxlen=MAX_TIMES)

    def ended(self, request: Request, outcome: inference_pb2.Complete | RequestError, now: float) -> None:
        """Record the end of a request at `now`, and its times unless it was aborted."""
        self._number += 1
        self._ended.append(history_of(request, now, _end_of(outcome), self._number))
        if isinstance(outcome, RequestError) or outcome.finish_reason != inference_pb2.FINISH_REASON_ABORT:
            self._times.append(_times(request, now, has_failed=isinstance(outcome, RequestError)))

    def after(self, number: int) -> list[inference_pb2.SequenceHistory]:
        """Return the history of the requests that ended after the one with `number`, oldest first, at most MAX_ENDED.

        Returns all that is kept if `number` is higher than the last one, as after a restart of the server.
        """
        num_new = self._number - number if number <= self._number else len(self._ended)
        return list(islice(self._ended, max(0, len(self._ended) - num_new), None))

    def times(self, now: float) -> list[Times]:
        """Return the times of the requests that ended within the last WINDOW_S, oldest first, at most MAX_TIMES."""
        return [each for each in self._times if now - each.ended_s <= WINDOW_S]


def history_of(request: Request, now: float, end: str = "", number: int = 0) -> inference_pb2.SequenceHistory:
    """Return the history message of a request until `now`; `end` names how it ended, empty while it has not.

    `number` counts ended requests.
    """
    timeline = request.timeline
    spans = [
        inference_pb2.Span(
            phase=mark.phase.value,
            begin_s=mark.at_s - timeline.start_s,
            end_s=end_s - timeline.start_s,
            prefill_node=mark.prefill_node,
            decode_node=mark.decode_node,
        )
        for mark, end_s in timeline.spans(now)
    ]
    return inference_pb2.SequenceHistory(
        number=number,
        sequence_id=request.request_id,
        start_s=timeline.start_s,
        spans=spans,
        end=end,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.num_cached_tokens,
        completion_tokens=len(request.output),
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s(len(request.output)),
        num_restarts=request.num_restarts,
        num_migrations=request.num_migrations,
        migration_pause_s=request.migration_pause_s,
        kv_bytes=min(request.num_kv_bytes, MAX_BYTES),
        attainment=attainment(request),
    )


def _end_of(outcome: inference_pb2.Complete | RequestError) -> str:
    return outcome.reason if isinstance(outcome, RequestError) else FINISH_REASONS.get(outcome.finish_reason, "unknown")


def _times(request: Request, now: float, *, has_failed: bool) -> Times:
    """Return the times of an ended request. A resumed output has no TTFT: an earlier call gave its first token."""
    attained, timeline, num_tokens = attainment(request), request.timeline, len(request.output)
    is_met = None
    if attained is not None and request.slo is not None and request.slo.has_limits:
        ttft_met = attained.ttft_met or not attained.HasField("ttft_met")
        tpot_met = attained.tpot_met or not attained.HasField("tpot_met")
        is_met = ttft_met and tpot_met and not has_failed
    is_whole = not has_failed and not request.num_resumed
    return Times(
        now,
        request.slo.slo_class or UNNAMED if request.slo is not None else UNNAMED,
        timeline.ttft_s if is_whole and timeline.first_token_s is not None else None,
        timeline.tpot_s(num_tokens) if is_whole and num_tokens > 1 else None,
        is_met,
    )
