"""What the client of an answer that goes on has of it from an earlier call. Pure."""

from dataclasses import dataclass
from typing import Final

from protos import inference_pb2


@dataclass(frozen=True, slots=True)
class SoFar:
    """For a new answer it is NOTHING."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0  # of the text
    finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED  # if the last token ends it
    since_first_s: float = 0.0
    has_ended: bool = False  # the client has its end too


NOTHING: Final = SoFar()
