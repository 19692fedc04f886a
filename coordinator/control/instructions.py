"""What the tracker wants done. Tuples, which are made quickly: there is one for each token of each answer."""

from typing import NamedTuple

from coordinator.control.registry import Node
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


class End(NamedTuple):
    """The one end of an answer: a Complete message, or the error that takes its place."""

    request_id: str
    outcome: inference_pb2.Complete | RequestError


Instruction = Send | Emit | End
