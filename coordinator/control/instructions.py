"""What the tracker wants done."""

from dataclasses import dataclass
from enum import Enum

from coordinator.control.registry import Node
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Send:
    """A command for a node."""

    node: Node
    command: fleet_pb2.NodeCommand


@dataclass(frozen=True, slots=True)
class Emit:
    """The next tokens of an answer, consecutive with those before."""

    request_id: str
    tokens: list[fleet_pb2.SampledToken]


@dataclass(frozen=True, slots=True)
class End:
    """The one end of an answer: a Complete message, or the error that takes its place."""

    request_id: str
    outcome: inference_pb2.Complete | RequestError


class MoveOutcome(Enum):
    """How a move ended; the values are labels of a metric."""

    MOVED = "moved"
    REFUSED = "refused"  # the target had no room for it, or was lost: the source never knew
    FAILED = "failed"  # the KV did not arrive: the source goes on
    ENDED = "ended"  # the answer ended first, or began again on other nodes


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """Of every move of a running answer once, for whoever writes it down. There is nothing to be done."""

    request_id: str
    source: Node
    target: Node
    outcome: MoveOutcome
    seconds: float  # since the target was asked
    num_kv_bytes: int = 0


Instruction = Send | Emit | End | MoveEnded
