"""Keep the history of the latest requests: their phases, nodes, times and ends. Pure.

The history has figures and names and no word of a prompt or an output. Its size is bounded.
"""

from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from coordinator.control.outcomes import FINISH_REASONS, MAX_BYTES, attainment
from coordinator.control.request import TrackedRequest
from coordinator.control.slo import UNNAMED
from protos import inference_pb2
from serving_core.errors import RequestError

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


class Lives:
    """Record the end of every request, each once."""

    def __init__(self) -> None:
        self._number = 0  # of the last request ended
        self._ended: deque[inference_pb2.AnswerLife] = deque(maxlen=MAX_ENDED)
        self._times: deque[Times] = deque(maxlen=MAX_TIMES)

    def ended(self, request: TrackedRequest, outcome: inference_pb2.Complete | RequestError, now: float) -> None:
        """Record the end of a request."""
        self._number += 1
        self._ended.append(life_of(request, now, _end_of(outcome), self._number))
        if isinstance(outcome, RequestError) or outcome.finish_reason != inference_pb2.FINISH_REASON_ABORT:
            self._times.append(_times(request, now, has_failed=isinstance(outcome, RequestError)))

    def after(self, number: int) -> list[inference_pb2.AnswerLife]:
        """Return the history of the requests that ended after number `number`, oldest first, at most MAX_ENDED.

        Return all of it where there has been no such number, as after a restart of the server.
        """
        num_new = self._number - number if number <= self._number else len(self._ended)
        return list(islice(self._ended, max(0, len(self._ended) - num_new), None))

    def times(self, now: float) -> list[Times]:
        """Return the times of the requests that ended within WINDOW_S, the last MAX_TIMES at most."""
        return [each for each in self._times if now - each.ended_s <= WINDOW_S]


def life_of(request: TrackedRequest, now: float, end: str = "", number: int = 0) -> inference_pb2.AnswerLife:
    """Return the history of a request up to now; `end` names how it ended, if it has."""
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
    return inference_pb2.AnswerLife(
        number=number,
        answer_id=request.request_id,
        start_s=timeline.start_s,
        spans=spans,
        end=end,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.num_cached_tokens,
        completion_tokens=len(request.output),
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s(len(request.output)),
        num_restarts=request.num_restarts,
        num_moves=request.num_moves,
        move_pause_s=request.move_pause_s,
        kv_bytes=min(request.num_kv_bytes, MAX_BYTES),
        attainment=attainment(request),
    )


def _end_of(outcome: inference_pb2.Complete | RequestError) -> str:
    return outcome.reason if isinstance(outcome, RequestError) else FINISH_REASONS.get(outcome.finish_reason, "unknown")


def _times(request: TrackedRequest, now: float, *, has_failed: bool) -> Times:
    """Return the times of an ended request. A resumed output has no TTFT: an earlier call gave its first token."""
    told, timeline, num_tokens = attainment(request), request.timeline, len(request.output)
    is_met = None
    if told is not None and request.slo is not None and request.slo.has_limits:
        ttft_met = told.ttft_met or not told.HasField("ttft_met")
        tpot_met = told.tpot_met or not told.HasField("tpot_met")
        is_met = ttft_met and tpot_met and not has_failed
    is_whole = not has_failed and not request.num_resumed
    return Times(
        now,
        request.slo.slo_class or UNNAMED if request.slo is not None else UNNAMED,
        timeline.ttft_s if is_whole and timeline.first_token_s is not None else None,
        timeline.tpot_s(num_tokens) if is_whole and num_tokens > 1 else None,
        is_met,
    )
