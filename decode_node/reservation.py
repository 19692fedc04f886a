"""One request on a decode node, and where it stands."""

from dataclasses import dataclass
from enum import Enum, auto

from serving_core.blocks import BlockLease
from serving_core.prefix import BlockNames
from serving_core.requests import Request, Work


class State(Enum):
    """Where a request stands on this node."""

    WAITING = auto()  # for credit
    GRANTED = auto()  # blocks are leased, the KV is on its way
    RUNNING = auto()  # decodes, or computes a prompt of this node's own or what was lost by preemption
    PREEMPTED = auto()  # gave up its blocks, computes again what is lost of them when there is room


@dataclass(slots=True, eq=False)
class Reservation:
    """One request on this node."""

    request: Request
    names: BlockNames
    waiting_since: float
    local_prefill: bool  # no node sends the prompt's KV: it is computed here
    state: State = State.WAITING
    lease: BlockLease | None = None
    num_cached_blocks: int = 0  # leading ones that were there at credit, or when a local prompt began
    num_computed: int = 0
    has_begun: bool = False  # the prompt was committed, or its first chunk planned
    has_first_token: bool = False  # the prompt's KV is complete, and what follows it is known
    in_step: bool = False
    cancelled: bool = False  # no further step takes it

    @property
    def computes_prompt(self) -> bool:
        """Whether prompt tokens are still to be computed on this node."""
        return self.local_prefill and not self.has_first_token

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens whose KV is not in the pool: 1 for a request that decodes."""
        return len(self.request.token_ids) - self.num_computed

    def work(self, num_tokens: int) -> Work:
        """Its share of a step that computes num_tokens more."""
        assert self.lease is not None
        return Work(self.request, self.num_computed, num_tokens, self.lease.block_ids)
