"""What the tracker wants done."""

from dataclasses import dataclass

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


Instruction = Send | Emit | End
