"""Track the requests on one node and their states. Pure; prefill and decode of a node work on them.

A prompt that this node prefills, for itself or for a decode node:

    WAITING ──blocks──> PREFILLING ──the last chunk──> RUNNING
       ▲                  │ │
       └────preempted─────┘ └──another node decodes──> PREFILLED ──sent──> gone

A prompt that another node prefills, or a request that migrates to this node:

    WAITING_FOR_BLOCKS ──credit──> RECEIVING_KV ──all of its KV is here──> RUNNING ──the last token──> gone
        ▲                   │
        └──────revoked──────┘

A request that migrates to another node continues to decode while its full blocks are sent, and freezes for the rest:

    RUNNING ──only the rest is unsent──> FROZEN ──cancelled: the other node continues──> gone
        ▲                                     │
        └─────────migration given up──────────┘

A preempted request in RUNNING becomes a prompt again: WAITING. So does a request in PREFILLED that is not yet sent. A
request in PREFILLED that this node is to decode after all enters RUNNING as soon as a running slot is free."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from heapq import merge
from typing import Any, Protocol

from serving_core.node.blocks import BlockLease
from serving_core.node.prefix import BlockNames
from serving_core.requests import Request, Work
from serving_core.slo import Due

Key = tuple[str, int]
"""The id of a request and the epoch of the attempt at it."""


class Attempt(Protocol):
    """An object with a request id and an epoch: a Request, or fleet_pb2.Attempt."""

    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...


class RequestState(IntEnum):
    """State of a request on its node. An integer, since lists are indexed by it."""

    WAITING = auto()  # waits for prefill on this node; has no blocks
    PREFILLING = auto()  # is prefilled, in chunks
    PREFILLED = auto()  # prefill is complete; another node waits for its KV
    WAITING_FOR_BLOCKS = auto()  # another node prefills it; no blocks here yet
    RECEIVING_KV = auto()  # blocks are leased, the KV transfer is under way
    RUNNING = auto()  # decodes one token per step
    FROZEN = auto()  # frozen for the last part of a migration; only a command of the coordinator resumes or ends it


@dataclass(slots=True)
class Migration:
    """The migration of a running request to another node."""

    num_blocks: int  # that the other node has reserved
    num_tokens: int  # that the other node knows
    has_caught_up: bool = False  # all blocks that were full have been sent


@dataclass(frozen=True, slots=True)
class Offer:
    """Leading blocks of a prompt in another node's prefix cache, available for a remote prefix fetch."""

    epoch: int  # of the transfer that would send them
    num_tokens: int
    source_tp: int  # ranks of each stage of that node
    source_pp: int  # stages of that node
    patience_s: float  # seconds after which missing blocks are computed instead


@dataclass(frozen=True, slots=True)
class Host:
    """A KV holder: a node that may hold blocks of a request which exceeds its own node's pool."""

    address: str
    key: bytes


@dataclass(slots=True, eq=False)
class NodeRequest:
    """One request on this node, from the command that brings it until nothing is held for it."""

    request: Request
    age: int  # the coordinator's number of the request: the lower number goes first on every node
    names: BlockNames  # block hashes of the full blocks of the lease, once there is one
    stage: RequestState  # only `NodeRequests.enter` changes it
    waiting_since_s: float  # for credit, or for a transfer descriptor
    hands_over: bool = False  # this node prefills it, another node decodes it
    is_kept: bool = False  # it was prefilled for another node, but this node is to decode it after all
    source_tp: int = 0  # ranks of each stage of the node that prefills the prompt; 0: this node does
    source_pp: int = 1  # stages of that node
    due: Due | None = None  # deadlines of its tokens; None without an SLO
    priority: int = 0  # among prompts: lower values are prefilled earlier
    num_ahead: int = 0  # tokens by which a migrating request may grow until it is here; 0: it is a prompt
    comes_whole: bool = False  # transfers all blocks, whatever this node holds of the migrating request
    migration: Migration | None = None
    lease: BlockLease | None = None
    num_computed: int = 0  # tokens whose KV is in the pool
    num_cached_blocks: int = 0  # leading blocks that were cached when it got its blocks
    num_found_blocks: int | None = None  # the same when it first got blocks: later ones may be its own
    has_begun: bool = False  # its prompt has been counted, here or where the request began
    has_first_token: bool = False  # here, or, as the coordinator reports, on the prefill node
    reading_since_s: float | None = None  # start of the first step that computed some of the prompt
    in_step: bool = False
    # Draft tokens of the running step, or 1 for the step that may follow at once: when the step is done, the request
    # may
    num_candidates: int = 0
    # have this many more tokens than one
    is_sending: bool = False  # a rank may read the blocks
    is_receiving: bool = False  # a rank may write to the blocks
    is_coming: bool = False  # some of the KV for its reserved blocks has arrived
    is_revoked: bool = False  # its credit is being revoked
    ahead: "NodeRequest | None" = None  # a request with the same prefix, whose KV it waits for before it gets credit
    is_alone: bool = False  # it no longer waits for another request
    descriptor: bytes = b""  # transfer descriptor to send with
    next_descriptor: bytes = b""  # a descriptor that came while the transfer of a revoked one was ending
    tail: Sequence[int] = ()  # tokens that the other node does not know; they follow the last block
    num_evictions: int = 0
    draft: Any = None  # decode_node/speculation.py's state for its text
    is_loading: bool = False  # blocks of it are being loaded from KV offload or fetched from another node
    offer: Offer | None = None  # until it is accepted or declined
    has_looked: bool = False  # KV sources have been searched since it was queued
    hosts: tuple[Host, ...] = ()  # if it exceeds the pool: nodes that may hold its oldest blocks
    num_remote_blocks: int = 0  # blocks that KV holders hold; the lease has the blocks behind them
    is_distributed: bool = False  # some blocks are on their way to a KV holder
    waited_s: float = 0.0  # seconds it has waited for a KV holder to have free blocks
    has_recalled: bool = False  # distributed KV of younger requests was recalled from this node for it
    longest_step_s: float = 0.0  # of the steps that have computed some of it
    ending: dict[str, Any] | None = None  # the report to the coordinator when nothing is held any more; {}: none
    num_given: int = field(init=False)  # tokens that came with the command

    def __post_init__(self) -> None:
        self.num_given = len(self.request.token_ids)
        self.has_begun = self.num_ahead > 0

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.epoch

    def note_begun(self, now: float) -> None:
        """Record the time of the first output token, if the request has an SLO.

        Only the first call counts, as several events may report the token.
        """
        if self.due is not None and self.due.began_s is None:
            self.due.began_s = now

    @property
    def is_ending(self) -> bool:
        return self.ending is not None

    @property
    def is_outgoing(self) -> bool:
        """Return whether another node is to decode the request from the prompt that this node prefills."""
        return self.hands_over and not self.is_kept

    @property
    def is_busy(self) -> bool:
        """Return whether a step or a transfer still uses the blocks."""
        return self.in_step or self.is_sending or self.is_receiving or self.is_distributed

    @property
    def num_to_compute(self) -> int:
        """Return the known tokens whose KV is missing here: 1 for a request that decodes. Tokens behind a prompt that
        another node decodes do not count.
        """
        num_tokens = self.num_given if self.hands_over else len(self.request.token_ids)
        return num_tokens - self.num_computed

    @property
    def is_ready(self) -> bool:
        """Return, for a request that waits for credit or has some, whether another node has, or had, all of its KV."""
        return self.has_first_token or self.num_ahead > 0

    @property
    def is_arriving(self) -> bool:
        """Return whether the request is migrating to this node."""
        return self.num_ahead > 0 and self.stage in (RequestState.WAITING_FOR_BLOCKS, RequestState.RECEIVING_KV)

    @property
    def behind(self) -> bytes:
        """Return the hash of the last block that a migrating request finds here; empty if it finds none."""
        names = self.names.names
        return names[-1] if self.is_arriving and names else b""

    @property
    def is_to_share(self) -> bool:
        """Return whether the request waits only for the KV of another request."""
        return self.ahead is not None and self.may_wait_for(self.ahead)

    def may_wait_for(self, other: "NodeRequest") -> bool:
        """Return whether the KV of `other` is on its way here, so that this request may wait for it.

        A prefilled prompt waits only for KV that is prefilled too and arriving. Of two migrating requests, which
        continue meanwhile, one also waits for KV that is about to arrive.
        """
        if (
            other.stage is not RequestState.RECEIVING_KV
            or not other.is_receiving
            or other.is_revoked
            or other.is_ending
        ):
            return False
        return not self.is_ready or (other.is_ready and (other.is_coming or (self.is_arriving and other.is_arriving)))

    @property
    def computes_prompt(self) -> bool:
        """Return whether this node is still to sample the request's first token."""
        return not self.has_first_token and not self.source_tp

    def work(self, num_tokens: int) -> Work:
        """Return the request's part of a step that computes num_tokens more tokens."""
        assert self.lease is not None
        block_ids = self.lease.block_ids
        if self.num_remote_blocks:  # the entries in place of distributed blocks are not read
            block_ids = [0] * self.num_remote_blocks + block_ids
        return Work(self.request, self.num_computed, num_tokens, block_ids)


class NodeRequests:
    """All requests on one node, oldest first."""

    def __init__(self) -> None:
        self._by_key: dict[Key, NodeRequest] = {}
        self._by_age: list[NodeRequest] = []
        self._by_stage: list[list[NodeRequest]] = [[] for _ in range(max(RequestState) + 1)]  # by age too

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

    def enter(self, node_request: NodeRequest, stage: RequestState) -> None:
        """Set the state of a request."""
        self._by_stage[node_request.stage].remove(node_request)
        node_request.stage = stage
        insort(self._by_stage[stage], node_request, key=_order)

    def find(self, attempt: Attempt) -> NodeRequest | None:
        return self._by_key.get((attempt.request_id, attempt.epoch))

    def of(self, request: Request) -> NodeRequest:
        return self._by_key[request.request_id, request.epoch]

    def in_stage(self, *stages: RequestState) -> Iterator[NodeRequest]:
        """Iterate over the requests now in these states, oldest first, even if they change state meanwhile."""
        there = list(filter(None, map(self._by_stage.__getitem__, stages)))
        if len(there) > 1:
            return merge(*map(list, there), key=_order)
        return iter(list(there[0]) if there else ())

    def count(self, *stages: RequestState) -> int:
        return sum(map(len, map(self._by_stage.__getitem__, stages)))

    def check_integrity(self) -> None:
        """Check that every request is listed under its state."""
        for stage in RequestState:
            assert self._by_stage[stage] == [each for each in self._by_age if each.stage is stage], stage


def _order(node_request: NodeRequest) -> tuple[int, int]:
    return node_request.age, node_request.request.epoch
