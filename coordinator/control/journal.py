"""What became of every request: one log line and one count each. Never a word of a prompt or an answer."""

import logging
from typing import Any, Final

from coordinator.control.instructions import MoveEnded, MoveOutcome
from coordinator.control.metrics import Metrics
from coordinator.control.outcomes import FINISH_REASONS, MAX_MESSAGE_CHARS
from coordinator.control.registry import Node
from coordinator.control.timeline import Phase
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError

logger = logging.getLogger(__name__)

MAX_ID_CHARS: Final = 128  # of ids that were refused, too
SECONDS: Final = ("ttft_s", *(f"{phase.value}_s" for phase in Phase), "e2e_s")
# The texts of these quote what the client has sent.
QUOTING: Final = (reasons.BAD_PARAM, reasons.MALFORMED_REQUEST, reasons.MODEL_NOT_FOUND)


class Journal:
    """Is told of every end, once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._askers: dict[str, str] = {}  # of live calls, the names of their API keys that have one

    def begun(self, request_id: str, asker: str) -> None:
        """A call is live; until it is over, lines about it tell who asks."""
        if asker:
            self._askers[request_id] = asker

    def over(self, request_id: str) -> None:
        """The call and all its answers have ended."""
        self._askers.pop(request_id, None)

    def ended(self, answer_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        """An answer has its end."""
        request_id, _, index = answer_id.rpartition("/")
        if isinstance(outcome, RequestError):
            self._metrics.failed[outcome.reason] += 1
            fields = {"index": int(index), **_cause(outcome)}
            self._write(logging.WARNING, "request failed", request_id, fields)
        else:
            finish_reason = FINISH_REASONS.get(outcome.finish_reason, "unknown")
            self._metrics.answered(finish_reason, outcome)
            fields = {"index": int(index), "finish_reason": finish_reason, **_figures(outcome)}
            self._write(logging.INFO, "request finished", request_id, fields)

    def moved(self, move: MoveEnded) -> None:
        """A running answer has moved to another node, or has not."""
        self._metrics.moves[move.outcome.value] += 1
        self._metrics.num_moved_kv_bytes += move.num_kv_bytes
        request_id, _, index = move.request_id.rpartition("/")
        fields = {
            "index": int(index),
            "outcome": move.outcome.value,
            "from_node": move.source.name,
            "to_node": move.target.name,
            "seconds": round(move.seconds, 6),
            "kv_bytes": move.num_kv_bytes,
        }
        level = logging.WARNING if move.outcome is MoveOutcome.FAILED else logging.INFO
        event = "answer moved" if move.outcome is MoveOutcome.MOVED else "answer not moved"
        self._write(level, event, request_id, fields)

    def refused(self, request_id: str, error: RequestError, asker: str = "") -> None:
        """A request could not begin."""
        self._metrics.refused[error.reason] += 1
        _write(logging.INFO, "request refused", request_id, _cause(error), asker)

    def attempt_failed(self, node: Node, event: fleet_pb2.Failed) -> None:
        """A node has given up its part of a request, which may go on elsewhere: its words for why."""
        is_transfer = event.reason in (reasons.TRANSFER_FAILED, reasons.KV_CHECKSUM_MISMATCH)
        fields = {"failed_node": node.name, "reason": event.reason, "message": event.message[:MAX_MESSAGE_CHARS]}
        request_id = event.attempt.request_id.rpartition("/")[0]
        self._write(logging.WARNING, "transfer failed" if is_transfer else "attempt failed", request_id, fields)

    def _write(self, level: int, event: str, request_id: str, fields: dict[str, Any]) -> None:
        _write(level, event, request_id, fields, self._askers.get(request_id, ""))


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
        **(_moves(complete) if timeline.num_moves else {}),
        **({"resumed_tokens": complete.resumed_tokens} if complete.resumed_tokens else {}),
        **{name: round(getattr(timeline, name), 6) for name in SECONDS},
    }


def _moves(complete: inference_pb2.Complete) -> dict[str, Any]:
    timeline = complete.timeline
    pause_s = round(timeline.move_pause_s, 6)
    return {"moves": timeline.num_moves, "move_pause_s": pause_s, "moved_kv_bytes": complete.moved_kv_bytes}


def _write(level: int, event: str, request_id: str, fields: dict[str, Any], asker: str) -> None:
    told = {"asker": asker, **fields} if asker else fields
    logger.log(level, event, extra={"request_id": request_id[:MAX_ID_CHARS], "fields": told})
