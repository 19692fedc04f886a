"""A request as the tracker sees it, and its current attempt. Pure state."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.prompts import Prompt
from coordinator.registry import Node
from coordinator.timeline import Phase, Timeline
from engine.requests import SamplingParams
from protos import fleet_pb2


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at a request on one pair of nodes."""

    epoch: int
    prefill: Node
    decode: Node
    first_index: int  # of the token that the prefill node samples
    prefill_holds: bool = True  # whether the node may hold something of the attempt
    decode_holds: bool = True
    is_reserved: bool = False
    has_first_token: bool = False
    is_committed: bool = False
    has_counted_kv: bool = False  # whether the decode node's own word for it, with the bytes, has come too
    # Tokens by index that cannot be emitted yet: the two nodes' streams may overtake each other.
    early: dict[int, fleet_pb2.SampledToken] = field(default_factory=dict)

    @property
    def is_handed_over(self) -> bool:
        """Whether the answer needs the prefill node no more."""
        return self.has_first_token and self.is_committed

    @property
    def phase_after_prefill(self) -> Phase:
        if self.early:
            return Phase.DECODE
        if self.is_committed:
            return Phase.DECODE_QUEUE
        return Phase.TRANSFER if self.is_reserved else Phase.CREDIT_WAIT

    def let_go(self, node: Node) -> None:
        """The node holds nothing of the attempt any more."""
        if node is self.prefill:
            self.prefill_holds = False
        else:
            self.decode_holds = False

    def holders(self) -> Iterator[Node]:
        """The nodes that may hold something of the attempt."""
        if self.prefill_holds:
            yield self.prefill
        if self.decode_holds:
            yield self.decode


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One live answer."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    deadline_s: float
    timeline: Timeline
    output: list[int] = field(default_factory=list)  # token ids emitted so far, over all attempts
    num_restarts: int = 0
    num_cached_tokens: int = 0  # of the prompt, on the node that gave the first token; later attempts read more
    num_kv_bytes: int = 0  # that travelled, over all attempts
    num_kv_bytes_saved: int = 0
    avoid: list[Node] = field(default_factory=list)  # that have failed it: others are taken while there are any
    attempt: Attempt = field(init=False)

    def count_kv(self, event: fleet_pb2.Committed) -> None:
        """Adds what the current attempt's transfer has moved and saved; a repeated report changes nothing."""
        if not self.attempt.has_counted_kv:
            self.attempt.has_counted_kv = True
            self.num_kv_bytes += event.num_bytes
            self.num_kv_bytes_saved += event.num_bytes_saved
