"""Define the instructions of the tracker. They are NamedTuples because there is one for each token of each output."""

from enum import Enum
from typing import NamedTuple

from coordinator.control.nodes import Node
from coordinator.control.timeline import Timeline
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError


class Send(NamedTuple):
    """Send a command to a node."""

    node: Node
    command: fleet_pb2.NodeCommand


class Emit(NamedTuple):
    """Emit the next tokens of an output, which follow those before without a gap."""

    request_id: str
    tokens: list[fleet_pb2.SampledToken]
    num_cached_tokens: int | None = None  # of the prompt, with the first token


class Embedded(NamedTuple):
    """Return the embedding of a request; its End follows."""

    request_id: str
    embedding: bytes


class End(NamedTuple):
    """End a request with a Complete message, or with an error. There is exactly one per request."""

    request_id: str
    outcome: inference_pb2.Complete | RequestError
    timeline: Timeline
    ended_s: float


class MigrationOutcome(Enum):
    """How a migration ended; the values are labels of a metric."""

    MIGRATED = "migrated"
    REFUSED = "refused"  # the target had no room or was lost; the source was not told
    FAILED = "failed"  # the KV did not arrive; the source decodes on
    ENDED = "ended"  # the request ended first, or was restarted on other nodes


class MigrationEnded(NamedTuple):
    """Record the end of a migration, once for each. Nothing is to be sent."""

    request_id: str
    source: Node
    target: Node
    outcome: MigrationOutcome
    started_s: float  # when the target was asked
    ended_s: float
    num_kv_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


Instruction = Send | Emit | Embedded | End | MigrationEnded
