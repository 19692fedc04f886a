"""What is written down of a call of a client, in log lines and in its trace. Pure.

Figures and names alone, never a word of a prompt or an answer.
"""

from dataclasses import dataclass, field
from typing import Final

from coordinator.control.instructions import MoveEnded
from coordinator.control.timeline import Timeline
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams

MAX_MOVES: Final = 64  # kept of one call, whose end tells how many there were


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One of the answers of a call, at its end."""

    index: int
    outcome: inference_pb2.Complete | RequestError
    timeline: Timeline
    ended_s: float


@dataclass(slots=True)
class CallRecord:
    """One call, as much as is known of it by now."""

    request_id: str
    asker: str = ""  # the name of the API key that it has brought, where that has one
    trace_id: str = ""  # where it is traced
    operation: str = ""  # as OpenTelemetry calls it
    model: str = ""
    arrived_s: float = 0.0
    begun_s: float | None = None  # when it was checked, tokenized and taken
    num_prompt_tokens: int = 0
    num_answers: int = 1
    sampling: SamplingParams | None = None  # of its first answer; the others differ in the seed alone
    answers: list[AnswerRecord] = field(default_factory=list)  # that have ended
    moves: list[MoveEnded] = field(default_factory=list)
    failure: str = ""  # the reason for which it was refused or ended; empty for a good end
    number: int = 0  # of the call at its door, where there are several

    def moved(self, move: MoveEnded) -> None:
        """One of its answers has moved, or has not."""
        if len(self.moves) < MAX_MOVES:
            self.moves.append(move)


def answer_index(answer_id: str) -> tuple[str, int]:
    """The call's id, and which of its answers this is."""
    request_id, _, index = answer_id.rpartition("/")
    return request_id, int(index)
