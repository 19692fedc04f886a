"""What the tracker wants done. Tuples, which are made quickly: there is one for each token of each answer."""

from enum import Enum
from typing import NamedTuple

from coordinator.control.nodes import Node
from coordinator.control.timeline import Timeline
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError


class Send(NamedTuple):
    """A command for a node."""

    node: Node
    command: fleet_pb2.NodeCommand


class Emit(NamedTuple):
    """The next tokens of an answer, consecutive with those before."""

    request_id: str
    tokens: list[fleet_pb2.SampledToken]
    num_cached_tokens: int | None = None  # of the prompt, with the first token


class Embedded(NamedTuple):
    """The embedding that was wanted in place of tokens; its End follows."""

    request_id: str
    embedding: bytes


class End(NamedTuple):
    """The one end of an answer: a Complete message, or the error that takes its place."""

    request_id: str
    outcome: inference_pb2.Complete | RequestError
    timeline: Timeline
    ended_s: float


class MoveOutcome(Enum):
    """How a move ended; the values are labels of a metric."""

    MOVED = "moved"
    REFUSED = "refused"  # the target had no room for it, or was lost: the source never knew
    FAILED = "failed"  # the KV did not arrive: the source goes on
    ENDED = "ended"  # the answer ended first, or began again on other nodes


class MoveEnded(NamedTuple):
    """Of every move of a running answer once, for whoever writes it down. There is nothing to be done."""

    request_id: str
    source: Node
    target: Node
    outcome: MoveOutcome
    started_s: float  # when the target was asked
    ended_s: float
    num_kv_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


Instruction = Send | Emit | Embedded | End | MoveEnded
