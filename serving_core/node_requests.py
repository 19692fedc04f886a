"""The requests on one node, and where each of them stands. Pure; both halves of a node work on them.

A prompt that this node reads, for its own answer or for another node's:

    QUEUED ──blocks──> READING ──the last chunk──> WRITING
       ▲                  │ │
       └────preempted─────┘ └──its KV goes to another node──> READ ──sent──> gone

A prompt that another node reads, or an answer that another node has begun to write:

    AWAITING ──credit──> GRANTED ──all of its KV is here──> WRITING ──the last token──> gone
        ▲                   │
        └──────revoked──────┘

An answer that moves to another node goes on while its full blocks leave, and stops for the rest:

    WRITING ──all but the rest has left──> STOPPED ──cancelled: the other node goes on──> gone
        ▲                                     │
        └────────────────kept─────────────────┘

What writes and gives up its blocks becomes a prompt again: QUEUED. So does what is READ and not yet sent. What is READ
and kept is written here as soon as there is a running slot for it.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from heapq import merge
from typing import Any, Protocol

from serving_core.blocks import BlockLease
from serving_core.due import Due
from serving_core.prefix import BlockNames
from serving_core.requests import Request, Work

Key = tuple[str, int]
"""The id of a request and the epoch of the attempt at it."""


class Attempt(Protocol):
    """What names one: a Request, or fleet_pb2.Attempt."""

    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...


class Stage(IntEnum):
    """Where a request stands on its node. A number, since lists are indexed by it."""

    QUEUED = auto()  # to be read here; it has no blocks
    READING = auto()  # is computed, in chunks
    READ = auto()  # everything is computed that another node waits for
    AWAITING = auto()  # another node reads it, and this one has no blocks for it yet
    GRANTED = auto()  # blocks are leased, the KV is on its way
    WRITING = auto()  # one token a step
    STOPPED = auto()  # written here so far; only the coordinator's word lets it go on, or go


@dataclass(slots=True)
class Move:
    """A running answer's way to the node that is to go on with it."""

    num_blocks: int  # that the other node has granted
    num_tokens: int  # that it knows
    has_caught_up: bool = False  # what was full has left


@dataclass(frozen=True, slots=True)
class Offer:
    """Another node's leading blocks of a prompt, which may be had."""

    epoch: int  # of the transfer that they would come by
    num_tokens: int
    source_tp: int  # ranks of each stage of that node
    source_pp: int  # its stages
    patience_s: float  # after which what has not come is computed


@dataclass(frozen=True, slots=True)
class Host:
    """A node that may hold blocks of a request which is longer than its own node's pool."""

    address: str
    key: bytes


@dataclass(slots=True, eq=False)
class NodeRequest:
    """One request on this node, from the command that brings it until nothing is held for it."""

    request: Request
    age: int  # the coordinator's number of the request: of two, the lower one goes first on every node
    names: BlockNames  # of the full blocks of the lease, once there is one
    stage: Stage  # `NodeRequests.enter` changes it
    waiting_since_s: float  # for credit, or for a descriptor
    hands_over: bool = False  # it is read for another node, which writes the answer
    is_kept: bool = False  # it was read so, and this node is to write the answer after all
    source_tp: int = 0  # ranks of each stage of the node that reads the prompt; 0: this one does
    source_pp: int = 1  # stages of that node
    due: Due | None = None  # when its tokens are; None without limits
    priority: int = 0  # among prompts: the lower, the earlier it is read
    num_ahead: int = 0  # tokens that a running answer may grow by until it is here; 0: it is a prompt that comes
    comes_whole: bool = False  # whatever is held here of a running answer
    move: Move | None = None
    lease: BlockLease | None = None
    num_computed: int = 0  # tokens whose KV is in the pool
    num_cached_blocks: int = 0  # leading ones that were there when it got its blocks
    num_found_blocks: int | None = None  # the same when it first got any: later ones may be of its own making
    has_begun: bool = False  # its prompt has been counted, here or where the answer began
    has_first_token: bool = False  # here, or as the coordinator says of a prompt that another node reads
    reading_since_s: float | None = None  # when the first step began that computed some of the prompt
    in_step: bool = False
    num_candidates: int = 0  # of the running step, or 1 of the one that may follow it at once: so many more tokens than
    # one may be known when it is done
    is_sending: bool = False  # a rank may read the blocks
    is_receiving: bool = False  # a rank may write to the blocks
    is_coming: bool = False  # some of what it is granted blocks for has come
    is_revoked: bool = False  # the grant is being taken back
    ahead: "NodeRequest | None" = None  # one that begins alike, behind which it gets credit as long as that comes
    is_alone: bool = False  # it waits for no other any more
    descriptor: bytes = b""  # to send by
    next_descriptor: bytes = b""  # that has come while the transfer of a revoked one was ending
    tail: Sequence[int] = ()  # tokens that the other node does not know; they follow the last block
    num_evictions: int = 0
    draft: Any = None  # what decode_node/speculation.py knows of its text
    is_loading: bool = False  # blocks of it are being read back from the second tier, or come from another node
    offer: Offer | None = None  # until it was taken or left
    has_looked: bool = False  # there, since it was queued
    hosts: tuple[Host, ...] = ()  # where it is longer than the pool: who may hold its oldest blocks
    num_annexed_blocks: int = 0  # that they hold; the lease has those behind them
    is_annexing: bool = False  # some are on their way there
    waited_s: float = 0.0  # for one of them to have room, since one last had
    has_recalled: bool = False  # tiles of younger requests were to leave this node for it
    longest_step_s: float = 0.0  # of those that have computed some of it
    ending: dict[str, Any] | None = None  # what the coordinator is told when nothing is held any more; {}: nothing
    num_given: int = field(init=False)  # tokens that came with the command

    def __post_init__(self) -> None:
        self.num_given = len(self.request.token_ids)
        self.has_begun = self.num_ahead > 0

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.epoch

    def note_begun(self, now: float) -> None:
        """The first token of its answer is there. Several ways tell so: whichever comes first."""
        if self.due is not None and self.due.began_s is None:
            self.due.began_s = now

    @property
    def is_ending(self) -> bool:
        return self.ending is not None

    @property
    def is_outgoing(self) -> bool:
        """Whether another node is to write its answer, from the prompt that is read here."""
        return self.hands_over and not self.is_kept

    @property
    def is_busy(self) -> bool:
        """Whether a step or a transfer still touches the blocks."""
        return self.in_step or self.is_sending or self.is_receiving or self.is_annexing

    @property
    def num_to_compute(self) -> int:
        """Known tokens whose KV is missing here: 1 for a request that writes. What follows a prompt that is handed over
        is not this node's to compute."""
        num_tokens = self.num_given if self.hands_over else len(self.request.token_ids)
        return num_tokens - self.num_computed

    @property
    def is_ready(self) -> bool:
        """Of one that waits for credit, or has some: whether another node has, or had, all of its KV."""
        return self.has_first_token or self.num_ahead > 0

    @property
    def is_arriving(self) -> bool:
        """Whether it is a running answer that another node still has."""
        return self.num_ahead > 0 and self.stage in (Stage.AWAITING, Stage.GRANTED)

    @property
    def behind(self) -> bytes:
        """The name of the last block that an answer which comes finds here; empty where it finds none."""
        names = self.names.names
        return names[-1] if self.is_arriving and names else b""

    @property
    def is_to_share(self) -> bool:
        """Whether it waits for nothing but what another one brings."""
        return self.ahead is not None and self.may_wait_for(self.ahead)

    def may_wait_for(self, other: "NodeRequest") -> bool:
        """Whether the KV of another one is on its way here; one that is read waits for what is read too, and comes. Of
        two answers that move, which go on meanwhile, one also waits for what is about to come."""
        if other.stage is not Stage.GRANTED or not other.is_receiving or other.is_revoked or other.is_ending:
            return False
        return not self.is_ready or (other.is_ready and (other.is_coming or (self.is_arriving and other.is_arriving)))

    @property
    def computes_prompt(self) -> bool:
        """Whether its first token is still to be sampled here."""
        return not self.has_first_token and not self.source_tp

    def work(self, num_tokens: int) -> Work:
        """Its share of a step that computes num_tokens more."""
        assert self.lease is not None
        block_ids = self.lease.block_ids
        if self.num_annexed_blocks:  # what stands in their place is not read
            block_ids = [0] * self.num_annexed_blocks + block_ids
        return Work(self.request, self.num_computed, num_tokens, block_ids)


class NodeRequests:
    """All requests on one node, oldest first."""

    def __init__(self) -> None:
        self._by_key: dict[Key, NodeRequest] = {}
        self._by_age: list[NodeRequest] = []
        self._by_stage: list[list[NodeRequest]] = [[] for _ in range(max(Stage) + 1)]  # by age too

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[NodeRequest]:
        return iter(self._by_age)

    def __contains__(self, node_request: NodeRequest) -> bool:
        return self._by_key.get(node_request.key) is node_request

    def add(self, node_request: NodeRequest) -> None:
        assert node_request.key not in self._by_key
        self._by_key[node_request.key] = node_request
        insort(self._by_age, node_request, key=_order)
        insort(self._by_stage[node_request.stage], node_request, key=_order)

    def remove(self, node_request: NodeRequest) -> None:
        del self._by_key[node_request.key]
        self._by_age.remove(node_request)
        self._by_stage[node_request.stage].remove(node_request)

    def enter(self, node_request: NodeRequest, stage: Stage) -> None:
        """It stands there from now on."""
        self._by_stage[node_request.stage].remove(node_request)
        node_request.stage = stage
        insort(self._by_stage[stage], node_request, key=_order)

    def find(self, attempt: Attempt) -> NodeRequest | None:
        return self._by_key.get((attempt.request_id, attempt.epoch))

    def of(self, request: Request) -> NodeRequest:
        return self._by_key[request.request_id, request.epoch]

    def in_stage(self, *stages: Stage) -> Iterator[NodeRequest]:
        """Those that stand there now, oldest first, wherever they go meanwhile."""
        there = list(filter(None, map(self._by_stage.__getitem__, stages)))
        if len(there) > 1:
            return merge(*map(list, there), key=_order)
        return iter(list(there[0]) if there else ())

    def count(self, *stages: Stage) -> int:
        return sum(map(len, map(self._by_stage.__getitem__, stages)))

    def check_integrity(self) -> None:
        """Everyone stands where it says."""
        for stage in Stage:
            assert self._by_stage[stage] == [each for each in self._by_age if each.stage is stage], stage


def _order(node_request: NodeRequest) -> tuple[int, int]:
    return node_request.age, node_request.request.epoch
