"""Track the requests on one node and their states. Pure; prefill and decode of a node work on them.

`TRANSITIONS` is the state machine of a request; docs/design/architecture.md draws it. A request leaves a node in any
state: when its output is complete or its KV is sent, when it fails, and when the coordinator cancels it.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from heapq import merge
from typing import Any, Final, Protocol

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


class RequestEvent(Enum):
    """What takes a request from one state to another."""

    STARTED = auto()  # a prompt has its blocks
    SAMPLED = auto()  # a token was sampled, and this node decodes the next one
    PREFILL_ENDED = auto()  # every token is computed of a prompt that another node decodes
    PREEMPTED = auto()  # its blocks were taken
    TRIMMED = auto()  # its last blocks were taken (distributed KV)
    CREDITED = auto()  # blocks are reserved for KV of another node
    REVOKED = auto()  # the reserved blocks were taken before any KV came
    RECEIVED = auto()  # all KV of another node is here
    TAKEN_OVER = auto()  # this node decodes what it prefilled for another node
    FROZE = auto()  # only the last part of a migration is left to send
    RESUMED = auto()  # the coordinator has given the migration up


class DecodePlace(Enum):
    """The node that decodes a request."""

    HERE = auto()
    ELSEWHERE = auto()  # this node prefills the request for another node
    HERE_AFTER_ALL = auto()  # as ELSEWHERE, until this node has a running slot for the request


@dataclass(frozen=True, slots=True)
class Offer:
    """Leading blocks of a prompt in another node's prefix cache, available for a remote prefix fetch."""

    epoch: int  # of the transfer that would send them
    num_tokens: int
    source_tp: int  # ranks of each stage of that node
    source_pp: int  # stages of that node
    patience_s: float  # seconds after which missing blocks are computed instead


@dataclass(slots=True)
class Waiting:
    """Data of a request in WAITING: the search for blocks of its prompt outside the pool."""

    offer: Offer | None = None  # until it is accepted or declined
    is_loading: bool = False  # blocks are being loaded from KV offload or fetched from another node
    has_looked: bool = False  # KV offload has been searched


@dataclass(slots=True)
class IncomingTransfer:
    """A transfer that may write to the reserved blocks of a request."""

    has_begun: bool = False  # some of the KV has arrived
    is_revoked: bool = False  # the credit is being revoked


@dataclass(slots=True)
class Incoming:
    """Data of a request in WAITING_FOR_BLOCKS or RECEIVING_KV: its KV comes from another node."""

    waiting_since_s: float  # for credit
    source_tp: int = 1  # ranks of each stage of the node that has the KV
    source_pp: int = 1  # stages of that node
    num_ahead: int = 0  # tokens by which a migrating request may grow until it is here; 0: it is a prompt
    is_whole: bool = False  # all blocks are transferred, whatever this node holds of the migrating request
    shares_with: "NodeRequest | None" = None  # a request with the same prefix, whose KV comes before the credit
    is_alone: bool = False  # it no longer waits for another request
    transfer: IncomingTransfer | None = None


@dataclass(slots=True)
class Migration:
    """The migration of a running request to another node."""

    num_blocks: int  # that the other node has reserved
    num_tokens: int  # that the other node knows
    has_caught_up: bool = False  # all blocks that were full have been sent


@dataclass(slots=True)
class Outgoing:
    """Data of a request whose KV goes to another node: a prompt that it decodes, or a migrating request."""

    waiting_since_s: float = 0.0  # for a transfer descriptor, or for a command to resume or end
    is_sending: bool = False  # a rank may read the blocks
    next_descriptor: bytes = b""  # a descriptor that came while the transfer of a revoked one was ending
    tail: Sequence[int] = ()  # tokens that the other node does not know; they follow the last block
    num_evictions: int = 0
    migration: Migration | None = None


@dataclass(frozen=True, slots=True)
class HolderEndpoint:
    """A KV holder: a node that may hold blocks of a request which exceeds its own node's pool."""

    address: str
    key: bytes


@dataclass(slots=True)
class Distributed:
    """Data of a request that may exceed the pool: its oldest blocks go to KV holders."""

    holders: tuple[HolderEndpoint, ...]
    num_remote_blocks: int = 0  # blocks that KV holders hold; the lease has the blocks behind them
    is_moving: bool = False  # some blocks are on their way to a KV holder
    waited_s: float = 0.0  # seconds it has waited for a KV holder to have free blocks
    longest_step_s: float = 0.0  # of the steps that have computed some of it


@dataclass(slots=True, eq=False, weakref_slot=True)
class NodeRequest:
    """One request on this node, from the command that brings it until nothing is held for it."""

    request: Request
    age: int  # the coordinator's number of the request: the lower number goes first on every node
    names: BlockNames  # block hashes of the full blocks of the lease, once there is one
    state: RequestState  # only `NodeRequests.apply` changes it
    decode_place: DecodePlace = DecodePlace.HERE
    due: Due | None = None  # deadlines of its tokens; None without an SLO
    priority: int = 0  # among prompts: lower values are prefilled earlier
    waiting: Waiting | None = None
    incoming: Incoming | None = None
    outgoing: Outgoing | None = None
    distributed: Distributed | None = None
    lease: BlockLease | None = None
    state_source: BlockLease | None = None  # of the checkpoint from which the next step reads the fixed state
    checkpoint_ends: tuple[int, ...] = ()  # tokens behind which a checkpoint of the fixed state is to be taken
    num_computed: int = 0  # tokens whose KV is in the pool
    num_found_blocks: int | None = None  # leading blocks that were cached when it first got blocks
    is_counted: bool = False  # its prompt has been counted, here or where the request began
    has_first_token: bool = False  # sampled here, or, as the coordinator reports, on the prefill node
    prefill_began_s: float | None = None  # start of the first step that computed some of the prompt
    has_reported_progress: bool = False  # whether the coordinator knows that the prefill has begun
    num_in_step: int = 0  # tokens that the running step, or the one planned behind it, may add; 0: in no step
    ending: dict[str, Any] | None = None  # the report to the coordinator when nothing is held any more; {}: none
    num_given: int = field(init=False)  # tokens that came with the command

    def __post_init__(self) -> None:
        self.num_given = len(self.request.token_ids)
        self.is_counted = self.is_arriving
        if self.state is RequestState.WAITING and self.waiting is None:
            self.waiting = Waiting()
        if self.decode_place is not DecodePlace.HERE and self.outgoing is None:
            self.outgoing = Outgoing()

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.epoch

    def note_first_token(self, now: float) -> None:
        """Record the time of the first output token, if the request has an SLO.

        Only the first call counts, as several events may report the token.
        """
        if self.due is not None and self.due.began_s is None:
            self.due.began_s = now

    @property
    def is_ending(self) -> bool:
        return self.ending is not None

    @property
    def only_prefills(self) -> bool:
        """Return whether this node prefills the request without decoding it, at least until a running slot is free."""
        return self.decode_place is not DecodePlace.HERE

    @property
    def is_outgoing(self) -> bool:
        """Return whether another node is to decode the request from the prompt that this node prefills."""
        return self.decode_place is DecodePlace.ELSEWHERE

    @property
    def is_kept(self) -> bool:
        """Return whether the request was prefilled for another node, and now waits for a running slot of this one."""
        return self.decode_place is DecodePlace.HERE_AFTER_ALL

    @property
    def in_step(self) -> bool:
        return self.num_in_step > 0

    @property
    def is_loading(self) -> bool:
        """Return whether the request waits for blocks from KV offload or from another node."""
        return self.waiting is not None and self.waiting.is_loading

    @property
    def is_compiling(self) -> bool:
        """Return whether the request waits for its grammar to be compiled."""
        return bool(self.request.sampling.grammar) and self.request.guide is None

    @property
    def is_sending(self) -> bool:
        """Return whether a rank may read the blocks for another node."""
        return self.outgoing is not None and self.outgoing.is_sending

    @property
    def num_evictions(self) -> int:
        """Return how often the prefilled prompt has lost its blocks before they were sent."""
        return 0 if self.outgoing is None else self.outgoing.num_evictions

    @property
    def is_receiving(self) -> bool:
        """Return whether a rank may write KV of another node to the blocks."""
        return self.incoming is not None and self.incoming.transfer is not None

    @property
    def has_arrived(self) -> bool:
        """Return whether some KV of another node has arrived in the reserved blocks."""
        return self.incoming is not None and self.incoming.transfer is not None and self.incoming.transfer.has_begun

    @property
    def is_revoked(self) -> bool:
        """Return whether the request's credit is being revoked."""
        return self.incoming is not None and self.incoming.transfer is not None and self.incoming.transfer.is_revoked

    @property
    def migration(self) -> Migration | None:
        """Return the migration of the request to another node, if any."""
        return None if self.outgoing is None else self.outgoing.migration

    @property
    def is_moving(self) -> bool:
        """Return whether blocks of the request are on their way to a KV holder."""
        return self.distributed is not None and self.distributed.is_moving

    @property
    def num_remote_blocks(self) -> int:
        """Return the blocks that KV holders hold for the request; the lease has the blocks behind them."""
        return 0 if self.distributed is None else self.distributed.num_remote_blocks

    @property
    def is_busy(self) -> bool:
        """Return whether a step or a transfer still uses the blocks."""
        return self.num_in_step > 0 or self.is_sending or self.is_receiving or self.is_moving

    @property
    def num_cached_blocks(self) -> int:
        """Return how many leading blocks were cached when the request got its blocks; 0 without blocks."""
        return 0 if self.lease is None else self.lease.num_cached

    @property
    def num_to_compute(self) -> int:
        """Return the number of known tokens whose KV is missing here: 1 for a request that decodes.

        Tokens behind a prompt that another node decodes do not count.
        """
        is_decoded = self.decode_place is DecodePlace.HERE
        return (len(self.request.token_ids) if is_decoded else self.num_given) - self.num_computed

    @property
    def num_to_checkpoint(self) -> int:
        """Return the tokens to compute until the next checkpoint of the fixed state, or all without one."""
        ends = [end - self.num_computed for end in self.checkpoint_ends if end > self.num_computed]
        return min([*ends, self.num_to_compute])

    @property
    def num_ahead(self) -> int:
        """Return the tokens by which a request that migrates here may grow until it is here; 0 for others."""
        return 0 if self.incoming is None else self.incoming.num_ahead

    @property
    def is_ready(self) -> bool:
        """Return whether all KV of a request that waits for credit, or has credit, is or was on another node."""
        return self.has_first_token or self.num_ahead > 0

    @property
    def is_arriving(self) -> bool:
        """Return whether the request is migrating to this node."""
        return self.num_ahead > 0

    @property
    def behind(self) -> bytes:
        """Return the hash of the last block that a request migrating here finds in this pool; empty for none."""
        names = self.names.names
        return names[-1] if self.is_arriving and names else b""

    @property
    def is_to_share(self) -> bool:
        """Return whether the request waits only for the KV of another request, whose blocks it will share."""
        if self.incoming is None or self.incoming.shares_with is None:
            return False
        return self.may_wait_for(self.incoming.shares_with)

    def may_wait_for(self, other: "NodeRequest") -> bool:
        """Return whether the KV of `other` is on its way here, so that this request may wait to share it.

        A prefilled prompt waits only for KV that is prefilled too and arriving. Of two migrating requests, which
        continue meanwhile, one also waits for KV that is about to arrive.
        """
        if other.is_ending or other.incoming is None:
            return False
        transfer = other.incoming.transfer
        if transfer is None or transfer.is_revoked:
            return False
        is_near = transfer.has_begun or (self.is_arriving and other.is_arriving)
        return not self.is_ready or (other.is_ready and is_near)

    def continues_after(self, work: Work) -> bool:
        """Return whether the request gets exactly one token in a running step, needs one more, and has all blocks here.

        `work` is its part of the running step.
        """
        if self.state is not RequestState.RUNNING or self.distributed is not None or not self.num_in_step:
            return False
        request, (_, _, num_tokens, _, draft_tokens, _) = self.request, work
        has_more = len(request.token_ids) - request.num_prompt_tokens + 1 < request.sampling.max_tokens
        return has_more and num_tokens == 1 and not draft_tokens

    def work(self, num_tokens: int) -> Work:
        """Return the request's part of a step that computes its next `num_tokens` tokens. It must have blocks."""
        assert self.lease is not None
        block_ids = self.lease.block_ids
        if self.distributed is not None:  # the entries in place of remote blocks are not read
            block_ids = [0] * self.num_remote_blocks + block_ids
        state_ids = self.state_source.block_ids if self.state_source is not None else ()
        return Work(self.request, self.num_computed, num_tokens, block_ids, state_ids=state_ids)


def incoming_of(node_request: NodeRequest) -> Incoming:
    """Return the data of a request in WAITING_FOR_BLOCKS or RECEIVING_KV. It must be in one of them (asserted)."""
    assert node_request.incoming is not None
    return node_request.incoming


def outgoing_of(node_request: NodeRequest) -> Outgoing:
    """Return the data of a request whose KV goes to another node. It must have such data (asserted)."""
    assert node_request.outgoing is not None
    return node_request.outgoing


def fit_all(_: NodeRequest, num_tokens: int) -> int:
    """Return `num_tokens`: without distributed KV a started request has, or gets, blocks for all of its tokens."""
    return num_tokens


# ---- the state machine ----


def _start(node_request: NodeRequest) -> None:
    node_request.waiting = None


def _queue(node_request: NodeRequest) -> None:
    node_request.waiting = Waiting()


def _receive(node_request: NodeRequest) -> None:
    node_request.incoming, node_request.has_first_token = None, True


def _decode_here(node_request: NodeRequest) -> None:
    node_request.decode_place = DecodePlace.HERE
    drop_outgoing(node_request)


def drop_outgoing(node_request: NodeRequest) -> None:
    """Forget that KV of the request went to another node, unless a rank still reads the blocks."""
    if not node_request.is_sending:
        node_request.outgoing = None


def _nothing(_: NodeRequest) -> None: ...


_S, _E = RequestState, RequestEvent
TRANSITIONS: Final[dict[tuple[RequestState, RequestEvent], tuple[RequestState, Callable[[NodeRequest], None]]]] = {
    (_S.WAITING, _E.STARTED): (_S.PREFILLING, _start),
    (_S.PREFILLING, _E.SAMPLED): (_S.RUNNING, _nothing),
    (_S.PREFILLING, _E.PREFILL_ENDED): (_S.PREFILLED, _nothing),
    (_S.PREFILLING, _E.PREEMPTED): (_S.WAITING, _queue),
    (_S.PREFILLING, _E.TRIMMED): (_S.PREFILLING, _nothing),
    (_S.PREFILLED, _E.PREEMPTED): (_S.WAITING, _queue),
    (_S.PREFILLED, _E.TAKEN_OVER): (_S.RUNNING, _decode_here),
    (_S.WAITING_FOR_BLOCKS, _E.CREDITED): (_S.RECEIVING_KV, _nothing),
    (_S.RECEIVING_KV, _E.REVOKED): (_S.WAITING_FOR_BLOCKS, _nothing),
    (_S.RECEIVING_KV, _E.RECEIVED): (_S.RUNNING, _receive),
    (_S.RUNNING, _E.PREEMPTED): (_S.WAITING, _queue),
    (_S.RUNNING, _E.TRIMMED): (_S.PREFILLING, _nothing),
    (_S.RUNNING, _E.FROZE): (_S.FROZEN, _nothing),
    (_S.FROZEN, _E.RESUMED): (_S.RUNNING, drop_outgoing),
}
"""The next state for each event in each state, and what changes the data of the request with it."""


class NodeRequests:
    """All requests on one node, oldest first."""

    def __init__(self) -> None:
        self._by_key: dict[Key, NodeRequest] = {}
        self._by_request: dict[Request, NodeRequest] = {}
        self.of: Callable[[Request], NodeRequest] = self._by_request.__getitem__
        self._by_age: list[NodeRequest] = []
        self._by_state: list[list[NodeRequest]] = [[] for _ in range(max(RequestState) + 1)]  # by age too

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[NodeRequest]:
        return iter(self._by_age)

    def __contains__(self, node_request: NodeRequest) -> bool:
        return self._by_key.get(node_request.key) is node_request

    def add(self, node_request: NodeRequest) -> None:
        assert node_request.key not in self._by_key
        self._by_key[node_request.key] = node_request
        self._by_request[node_request.request] = node_request
        insort(self._by_age, node_request, key=_order)
        insort(self._by_state[node_request.state], node_request, key=_order)

    def remove(self, node_request: NodeRequest) -> None:
        del self._by_key[node_request.key]
        del self._by_request[node_request.request]
        self._by_age.remove(node_request)
        self._by_state[node_request.state].remove(node_request)

    def apply(self, node_request: NodeRequest, event: RequestEvent) -> None:
        """Take a request to the state that follows from an event, and change its data with it.

        Raises KeyError if the request's state does not have the event.
        """
        state, change = TRANSITIONS[node_request.state, event]
        self._by_state[node_request.state].remove(node_request)
        node_request.state = state
        insort(self._by_state[state], node_request, key=_order)
        change(node_request)

    def find(self, attempt: Attempt) -> NodeRequest | None:
        return self._by_key.get((attempt.request_id, attempt.epoch))

    def of_each(self, works: Sequence[Work]) -> list[NodeRequest]:
        """Return the request of each of these works, in the same order."""
        return list(map(self.of, [work.request for work in works]))

    def in_state(self, *states: RequestState) -> Iterator[NodeRequest]:
        """Iterate over the requests now in these states, oldest first, even if they change state meanwhile."""
        there = [list(requests) for state in states if (requests := self._by_state[state])]
        return merge(*there, key=_order) if len(there) > 1 else iter(there[0] if there else ())

    def count(self, *states: RequestState) -> int:
        return sum([len(self._by_state[state]) for state in states])

    def steady(self, works: Sequence[Work]) -> Sequence[NodeRequest]:
        """Return the sequences of a decode step whose next step has the same ones, unless one ends or an event comes.

        `works` is the decode step. Returns none if a request waits for prefill, blocks or a running slot, if one is
        ending or migrating, or if `works` is not one token of each running sequence.
        """
        running = self._by_state[RequestState.RUNNING]
        if len(works) != len(running) or self.count(RequestState.WAITING, RequestState.PREFILLING):
            return ()
        if any(not each.is_to_share for each in self._by_state[RequestState.WAITING_FOR_BLOCKS]):
            return ()
        for each in self._by_age:
            if each.ending is not None or each.is_kept or (each.outgoing is not None and each.outgoing.is_sending):
                return ()
        sequences = [self._by_request[work.request] for work in works]
        for each, work in zip(sequences, works, strict=True):
            if not each.continues_after(work):
                return ()
        return sequences

    def check_integrity(self) -> None:
        """Assert that every request is listed under its state, and has the data of its state alone."""
        for state in RequestState:
            assert self._by_state[state] == [each for each in self._by_age if each.state is state], state
        for each in self._by_age:
            is_coming = each.state in (RequestState.WAITING_FOR_BLOCKS, RequestState.RECEIVING_KV)
            assert (each.waiting is not None) == (each.state is RequestState.WAITING), each.key
            assert (each.incoming is not None) == is_coming, each.key


def _order(node_request: NodeRequest) -> tuple[int, int]:
    return node_request.age, node_request.request.epoch
