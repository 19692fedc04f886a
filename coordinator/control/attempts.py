"""A request as the tracker sees it, and its current attempt. Pure state."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.control.prompts import Prompt
from coordinator.control.registry import Node
from coordinator.control.timeline import Phase, Timeline
from protos import fleet_pb2
from protos.convert import job_to_wire
from serving_core.requests import Request, SamplingParams


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at a request on one pair of nodes; `prefill` is `decode` where one node does both."""

    epoch: int
    prefill: Node
    decode: Node
    first_index: int  # of the token that the prefill node samples
    started_s: float
    granted_s: float | None = None  # when the decode node gave blocks
    prefill_holds: bool = True  # whether the node may hold something of the attempt
    decode_holds: bool = True
    first_token_s: float | None = None
    is_committed: bool = False
    has_counted_kv: bool = False  # whether the decode node's own word for it, with the bytes, has come too
    # Tokens by index that cannot be emitted yet: the two nodes' streams may overtake each other.
    early: dict[int, fleet_pb2.SampledToken] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_local:  # the KV is where it belongs from the start
            self.granted_s, self.is_committed = self.started_s, True

    @property
    def is_local(self) -> bool:
        """Whether the node that writes reads the prompt itself."""
        return self.prefill is self.decode

    @property
    def is_reserved(self) -> bool:
        return self.granted_s is not None

    @property
    def has_first_token(self) -> bool:
        return self.first_token_s is not None

    @property
    def is_handed_over(self) -> bool:
        """Whether the answer needs the prefill node no more."""
        return self.has_first_token and self.is_committed and not self.is_local

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
        if node is self.decode:
            self.decode_holds = False

    def holders(self) -> Iterator[Node]:
        """The nodes that may hold something of the attempt, each once."""
        if self.prefill_holds and not self.is_local:
            yield self.prefill
        if self.decode_holds:
            yield self.decode


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One live answer."""

    request_id: str
    age: int  # its place in the order of admission, kept over attempts: nodes serve lower ones first
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

    def commands(self, prompt: Prompt) -> Iterator[tuple[Node, fleet_pb2.NodeCommand]]:
        """What the nodes of the current attempt, which reads this prompt, are to be told."""
        attempt = self.attempt
        job = job_to_wire(
            Request(
                request_id=self.request_id,
                epoch=attempt.epoch,
                token_ids=prompt.token_ids,
                num_prompt_tokens=len(self.prompt),
                sampling=self.sampling,
                cache_salt=prompt.cache_salt,
            ),
            self.age,
        )
        about = job.attempt
        if attempt.is_local:
            reserve = fleet_pb2.Reserve(job=job, local_prefill=True)
            yield attempt.decode, fleet_pb2.NodeCommand(reserve=reserve, attempt=about)
            return
        reserve = fleet_pb2.Reserve(job=job, prefill_tp_size=attempt.prefill.tp_size)
        yield attempt.decode, fleet_pb2.NodeCommand(reserve=reserve, attempt=about)
        yield attempt.prefill, fleet_pb2.NodeCommand(prefill=fleet_pb2.Prefill(job=job), attempt=about)

    def count_kv(self, event: fleet_pb2.Committed) -> bool:
        """Adds what the current attempt's transfer has moved and saved. False for a repeated report, which changes
        nothing."""
        if self.attempt.has_counted_kv:
            return False
        self.attempt.has_counted_kv = True
        self.num_kv_bytes += event.num_bytes
        self.num_kv_bytes_saved += event.num_bytes_saved
        return True
