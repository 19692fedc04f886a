"""Decide which requests get blocks and running slots next, across prefill and decode (admission control). Pure.

With deadlines or priorities, nodes prefill in another order than by age. So credit goes first to prefilled requests
that wait, oldest first, and credits of which no KV has arrived are revoked for them. Prefill itself needs no credit.

Everything else goes by age. Nodes that prefill for each other could each be full of requests that wait for the other
node. So a stalled node takes blocks and running slots from its youngest requests for the oldest request that lacks
some. The oldest request of the fleet is the oldest on both of its nodes, so it is prefilled, gets its credit, and
finishes.

Normally `PrefilledCap` prevents this. Prompts that are prefilled for other nodes hold together at most half of the pool
if the node has requests of its own, or as much as one prompt needs. Shared blocks count once. An older prompt never
waits for younger prefilled prompts: those are evicted, and the few that were evicted often enough do not count against
it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from decode_node.preallocation import Preallocation
from decode_node.preemption import HOLDING, Preemption, can_preempt
from decode_node.scheduler import slots_in_time
from prefill_node.chunk_budget import due_s
from prefill_node.scheduler import PrefillScheduler, num_cacheable
from protos import convert, fleet_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.model_files.adapter_names import adapter_key
from serving_core.node.costs import StepCosts
from serving_core.node.leases import Leases
from serving_core.node.prefix import BlockNames, root_name
from serving_core.node.requests import (
    DecodePlace,
    Distributed,
    HolderEndpoint,
    Incoming,
    NodeRequest,
    NodeRequests,
    Offer,
    RequestEvent,
    RequestState,
    Waiting,
)

SLOTED: Final = (RequestState.RUNNING, RequestState.RECEIVING_KV, RequestState.FROZEN)
WITHOUT: Final = (RequestState.WAITING, RequestState.WAITING_FOR_BLOCKS)
LACKING: Final = (*WITHOUT, RequestState.PREFILLING, RequestState.PREFILLED, RequestState.RUNNING)


def credit_order(node_request: NodeRequest) -> tuple[int, int, int]:
    """Return the sort key by which requests get credit, lowest first.

    Prefilled requests come first, by age: their clients have a token and wait. Then come requests still to be
    prefilled, in the expected order of prefill: with a TTFT deadline, by priority, by age.
    """
    if node_request.is_ready:
        return 0, 0, node_request.age
    return 1 if due_s(node_request) < math.inf else 2, node_request.priority, node_request.age


class Reserve:
    """Blocks that are kept free beside those which requests of this node get. This class keeps none."""

    def reserve_rule(self, num_blocks: Callable[[NodeRequest], int]) -> Callable[[NodeRequest], bool]:
        """Return a function that tells, for one request after another, whether it leaves the reserved blocks free.

        `num_blocks` returns the blocks that a request would take.
        """
        return lambda node_request: True

    def held_back_from(self) -> float:
        """Return the age number above which requests must leave the reserved blocks free; inf if none are."""
        return math.inf


class Admission:
    """Allocates the blocks and running slots of one node to prefill and decode."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        prefill: PrefillScheduler,
        preallocation: Preallocation,
        preemption: Preemption,
        costs: StepCosts,
        num_slots: int,
    ) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._prefill = prefill
        self._preallocation = preallocation
        self._preemption = preemption
        self._costs = costs
        self._cap = PrefilledCap(node_requests, leases, prefill, preemption)
        self.num_slots = num_slots  # may change; a request keeps its slot
        self._next_without: NodeRequest | None = None  # the next request to get credit, which lacks blocks
        self._sharers: list[NodeRequest] = []  # get credit after requests that bring the same leading blocks
        self._preferred: NodeRequest | None = None  # others were preempted for it
        self.reserve = Reserve()  # of blocks for other nodes

    def admit(self) -> Iterator[NodeRequest]:
        """Start prefilled requests that are kept here; then reserve blocks for others, and yield these.

        They are in `credit_order`. Blocks stay reserved for earlier prompts (the oldest, and preempted ones) and for
        requests that wait to share blocks.
        """
        self._next_without, self._sharers = None, []
        if not self._node_requests.count(RequestState.WAITING_FOR_BLOCKS, RequestState.PREFILLED):
            return
        self.start_kept()
        if not self._node_requests.count(RequestState.WAITING_FOR_BLOCKS):
            return
        if self.num_running() >= self.num_slots and not self._unready():  # however many requests wait
            return
        leaves_enough = self.reserve.reserve_rule(self._preallocation.num_to_hold)
        for node_request in sorted(self._node_requests.in_state(RequestState.WAITING_FOR_BLOCKS), key=credit_order):
            if node_request.is_ending or node_request.is_compiling:
                continue
            if self.is_behind(node_request.age) or not leaves_enough(node_request):
                continue
            num_promised, num_promised_slots = self._promised_before(node_request)
            has_slot = self.num_running() + num_promised_slots + len(self._sharers) < self.num_slots
            if has_slot and self._preallocation.waits(node_request):
                self._sharers.append(node_request)
                continue
            num_promised += self._num_kept(self._sharers)
            if not has_slot or not self._preallocation.reserve(
                node_request, num_spare=num_promised + self.num_running()
            ):
                self._next_without = node_request if has_slot else None
                if node_request.is_ready:
                    self._revoke_unready()
                return
            yield node_request

    def _promised_before(self, node_request: NodeRequest) -> tuple[int, int]:
        """Return the blocks and running slots that older prompts of this node need."""
        num_blocks, num_slots, is_head = 0, 0, True
        for each in self._node_requests.in_state(RequestState.WAITING, RequestState.PREFILLING):
            if each.age > node_request.age:
                break
            if each.state is RequestState.PREFILLING:
                if self._lacks_growth(each):
                    num_blocks += self._leases.num_missing(each, each.num_computed + each.num_to_compute)
            elif not each.is_ending and (is_head or each.has_first_token) and not self._cap.holds_back(each):
                num_blocks += self._prefill.num_needed(each)
                num_slots += not each.only_prefills
                is_head = False
        return num_blocks, num_slots

    def _num_kept(self, sharers: Iterable[NodeRequest]) -> int:
        """Return the blocks of requests that get credit after others, plus one growth block each."""
        return sum(self._preallocation.num_blocks(each) + 1 for each in sharers)

    def _revoke_unready(self) -> None:
        """Revoke the last credit without KV for a prefilled request; one at a time.

        The revoked request may be prefilled much later.
        """
        unready = self._unready()
        if unready and not any(each.is_revoked for each in self._node_requests.in_state(RequestState.RECEIVING_KV)):
            self._preemption.preempt(max(unready, key=credit_order))

    def _unready(self) -> list[NodeRequest]:
        """Return the requests with credit whose KV has not begun to arrive and that are not known to be prefilled."""
        credited = self._node_requests.in_state(RequestState.RECEIVING_KV)
        return [each for each in credited if can_preempt(each) and not each.is_ready and not each.has_arrived]

    def num_running(self) -> int:
        """Return how many sequences have a running slot: they decode here, or will as soon as their KV is complete."""
        prefilling = self._node_requests.in_state(RequestState.PREFILLING)
        return self._node_requests.count(*SLOTED) + sum([not each.only_prefills for each in prefilling])

    def num_blocks_wanted(self) -> int:
        """Return how many blocks other nodes cannot have.

        These are the needs of requests without blocks, plus one block for each running sequence.
        """
        without = self._node_requests.in_state(*WITHOUT)
        needed = [
            self._prefill.num_needed(each)
            if each.state is RequestState.WAITING
            else self._preallocation.num_to_hold(each)
            for each in without
        ]
        return sum(needed) + self.num_running()

    def start_kept(self) -> bool:
        """Let prefilled requests that are kept on this node decode, as slots are free; return whether any started.

        Slots that older requests need are left to them.
        """
        num_older, has_running = 0, False
        if not any(each.is_kept for each in self._node_requests.in_state(RequestState.PREFILLED)):
            return False
        for node_request in self._node_requests.in_state(*WITHOUT, RequestState.PREFILLED):
            if node_request.is_ending or node_request.is_outgoing:
                continue
            if self.num_running() + num_older >= self.num_slots:
                break
            if node_request.state is RequestState.PREFILLED:
                self._node_requests.apply(node_request, RequestEvent.TAKEN_OVER)
                has_running = True
            else:
                num_older += 1
        return has_running

    def start_rule(self, must_wait: Callable[[NodeRequest, int], bool]) -> Callable[[NodeRequest], bool]:
        """Return a function that tells, for one waiting prompt after another, whether it may start in this step.

        All prompts wait for older requests that lack blocks. Prompts for other nodes wait under the cap. Prompts that
        decode here wait if sequences beside them would miss their TPOT. `must_wait` tells whether a prompt waits for
        cached blocks, given the blocks to be left free.
        """
        leaves_enough = self.reserve.reserve_rule(self._prefill.num_needed)
        is_full, capped = False, math.inf  # prompts for other nodes wait from this age on

        def may_start(node_request: NodeRequest) -> bool:
            nonlocal is_full, capped
            if self._waits_for_older(node_request) or not leaves_enough(node_request):
                return False
            if not node_request.is_outgoing:
                is_full = is_full or not self._has_slot_in_time  # no slot comes free while a step is planned
                return not (is_full and _needs_slot(node_request)) and not must_wait(
                    node_request, self._num_spare(node_request)
                )
            if node_request.age < capped and self._cap.holds_back(node_request):
                capped = node_request.age
            return node_request.age < capped and not must_wait(node_request, self._num_spare(node_request))

        return may_start

    @property
    def _has_free_slot(self) -> bool:
        return self.num_running() < self.num_slots

    @property
    def _has_slot_in_time(self) -> bool:
        return self._has_free_slot and self.num_running() < slots_in_time(self._running(), self._costs)

    def start(self, node_request: NodeRequest) -> bool:
        """Allocate the blocks of a prompt that may start; return whether there were enough.

        May evict younger prefilled prompts for a prompt of another node.
        """
        if node_request.is_outgoing:
            self._cap.make_room(node_request)
        return self._prefill.start(node_request, num_spare=self._num_spare(node_request))

    def _num_spare(self, node_request: NodeRequest) -> int:
        """Return the blocks that the start of a prompt must leave free."""
        return self.num_running() + self._num_kept(each for each in self._sharers if each.age < node_request.age)

    def preempt_for_older(self) -> bool:
        """Preempt the youngest request for an older one that lacks blocks or a slot.

        For a node that has nothing to compute. Returns whether blocks came free at once; those of a revoked credit come
        free later.
        """
        if self.comes_any_free_soon:
            return False
        held_back_from = self.reserve.held_back_from()
        for node_request in self._node_requests.in_state(*LACKING):
            if node_request.age > held_back_from:
                break
            if not self._lacks_room(node_request) or (
                node_request.state is RequestState.WAITING_FOR_BLOCKS and not node_request.is_ready
            ):
                continue
            needs_slot = node_request.state not in HOLDING and _needs_slot(node_request) and not self._has_free_slot
            if victim := self._preemption.victim_for(node_request, needs_slot=needs_slot):
                self._preferred = node_request
                self._preemption.preempt(victim)
                return not victim.is_revoked
        return False

    @property
    def comes_any_free_soon(self) -> bool:
        """Return whether blocks of any request come free without another request or a step of this node."""
        return any(map(_lets_go_soon, self._node_requests))

    def lacking(self) -> Iterator[NodeRequest]:
        """Yield the requests that could continue if others were preempted, oldest first.

        For a node that has nothing to compute: requests that decode or prefill are yielded without a check that they
        lack blocks.
        """
        return (each for each in self._node_requests.in_state(*LACKING) if self._lacks_room(each))

    def prefer(self, node_request: NodeRequest) -> None:
        """Keep the blocks that come free from now on for this request, until it has enough."""
        self._preferred = node_request

    def num_blocks_for(self, node_request: NodeRequest) -> int:
        """Return how many blocks a request needs to continue, including the blocks that it has."""
        if node_request.state is RequestState.WAITING:
            return self._prefill.num_needed(node_request)
        if node_request.state is RequestState.WAITING_FOR_BLOCKS:
            return self._preallocation.num_to_hold(node_request)
        return num_blocks_of(node_request) + 1

    def _lacks_room(self, node_request: NodeRequest) -> bool:
        """Return whether a request could continue if others were preempted."""
        if node_request.state is RequestState.PREFILLED:
            return node_request.is_kept
        if node_request.state is RequestState.WAITING_FOR_BLOCKS:
            return not node_request.is_to_share
        return not (node_request.state is RequestState.WAITING and self._cap.holds_back(node_request))

    def _waits(self, node_request: NodeRequest) -> bool:
        """Return whether a request has no blocks to begin or to continue."""
        return node_request.state in WITHOUT or self._lacks_growth(node_request)

    def _lacks_growth(self, node_request: NodeRequest) -> bool:
        """Return whether a sequence, or a prompt with distributed KV, has no block for its next token.

        Other prompts have all of their blocks from the start.
        """
        is_growing = node_request.state in (RequestState.RUNNING, RequestState.PREFILLING)
        return is_growing and self._leases.num_missing(node_request, node_request.num_computed + 1) > 0

    def _waits_for_older(self, node_request: NodeRequest) -> bool:
        """Return whether an older request waits for blocks that this request would take."""
        older = self._next_without
        return (older is not None and older.age < node_request.age) or self.is_behind(node_request.age)

    def is_behind(self, age: int) -> bool:
        """Return whether an older request than `age`, for which others were preempted, still has no blocks."""
        preferred = self._preferred
        if preferred is None or preferred not in self._node_requests or not self._waits(preferred):
            self._preferred = None
            return False
        return not preferred.is_ending and preferred.age < age

    def _running(self) -> list[NodeRequest]:
        prefilling = [each for each in self._node_requests.in_state(RequestState.PREFILLING) if not each.only_prefills]
        return [*self._node_requests.in_state(*SLOTED), *prefilling]


def _needs_slot(node_request: NodeRequest) -> bool:
    """Return whether a request needs a running slot, which it does not have, to start or to continue."""
    return not node_request.only_prefills or (node_request.is_kept and node_request.state is RequestState.PREFILLED)


def _lets_go_soon(node_request: NodeRequest) -> bool:
    """Return whether a request's blocks come free without another request or a step of this node."""
    if node_request.state is RequestState.RECEIVING_KV and not node_request.is_receiving:
        return True  # its sender aborted, and it is cancelled soon
    if node_request.state is RequestState.FROZEN:
        return True  # the coordinator decides soon whether it goes or stays
    if node_request.is_moving:
        return True
    if node_request.is_loading or node_request.is_compiling:
        return True  # its blocks or its grammar arrive, or it starts or ends without them
    return (
        node_request.is_revoked
        or node_request.is_ending
        or (node_request.is_sending and node_request.lease is not None)
    )


class PrefilledCap:
    """Limits the blocks that prompts prefilled for other nodes hold together."""

    def __init__(
        self, node_requests: NodeRequests, leases: Leases, prefill: PrefillScheduler, preemption: Preemption
    ) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._prefill = prefill
        self._preemption = preemption

    def holds_back(self, node_request: NodeRequest) -> bool:
        """Return whether a prompt for another node must wait until prefilled prompts that it cannot evict have left."""
        if not node_request.is_outgoing or all(each.is_outgoing for each in self._node_requests):
            return False
        firm = [each for each in self._outgoing() if not _yields(each, node_request)]
        return bool(firm) and self._exceed(firm, node_request)

    def make_room(self, node_request: NodeRequest) -> None:
        """Evict younger prefilled prompts until this prompt, for another node, fits under the cap."""
        if all(each.is_outgoing for each in self._node_requests):
            return
        for each in reversed(self._outgoing()):
            if _yields(each, node_request) and can_preempt(each):
                if not self._exceed(self._outgoing(), node_request):
                    return
                self._preemption.preempt(each)

    def _outgoing(self) -> list[NodeRequest]:
        """Return the requests that hold blocks for other nodes, oldest first."""
        return [each for each in self._node_requests if each.is_outgoing and each.lease is not None]

    def _exceed(self, outgoing: Collection[NodeRequest], node_request: NodeRequest) -> bool:
        """Return whether `outgoing` and one more prompt would exceed the cap."""
        leases = self._leases
        num_left = leases.num_blocks // 2 - leases.blocks_for(self._prefill.tokens_to_hold(node_request))
        if sum(map(num_blocks_of, outgoing)) <= num_left:
            return False
        found = leases.blocks_found(node_request, num_cacheable(node_request))
        held = {block for each in outgoing if each.lease is not None for block in each.lease.block_ids}
        return len(held.union(found)) > num_left + len(found)


def num_blocks_of(node_request: NodeRequest) -> int:
    """Return the number of blocks in a request's lease, which must exist."""
    assert node_request.lease is not None
    return len(node_request.lease.block_ids)


def _yields(node_request: NodeRequest, older: NodeRequest) -> bool:
    """Return whether an outgoing prompt is idle and younger than `older`."""
    is_idle = node_request.state is RequestState.PREFILLED and not node_request.is_busy and not node_request.is_ending
    return is_idle and node_request.age > older.age


class Arrivals:
    """Checks the requests that the coordinator sends to one node, and adds them."""

    def __init__(
        self,
        node_requests: NodeRequests,
        prefill: PrefillScheduler,
        preallocation: Preallocation,
        fingerprint: Mapping[str, str],
        block_size: int,
        *,
        holds_remote_kv: bool,
    ) -> None:
        self._node_requests = node_requests
        self._prefill = prefill
        self._preallocation = preallocation
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._holds_remote_kv = holds_remote_kv

    def take_in(self, job: fleet_pb2.Job, now: float, reserve: fleet_pb2.Reserve | None = None) -> NodeRequest:
        """Add the request of a job, for prefill for another node or, with `reserve`, for decode here; return it.

        Raises RequestError, and then the request is not added.
        """
        request = convert.request_from_wire(job)
        is_prefilled_here = reserve is None or reserve.local_prefill
        if request.adapter and adapter_key(request.adapter) not in self._fingerprint:
            raise RequestError(reasons.MODEL_NOT_FOUND, f"no node has an adapter {request.adapter!r} any more")
        if self._node_requests.find(request) is not None:
            message = f"attempt {request.epoch} of the request was announced twice"
            raise RequestError(reasons.DUPLICATE_REQUEST_ID, message)
        holders = (
            tuple(HolderEndpoint(each.address, each.key) for each in job.kv_holders) if self._holds_remote_kv else ()
        )
        num_ahead = 0
        if reserve is not None:
            num_to_come = request.sampling.max_tokens - request.num_output_tokens
            self._preallocation.check(len(request.token_ids) + num_to_come, may_grow_out=bool(holders))
            num_ahead = min(reserve.num_tokens_ahead, num_to_come)
        if is_prefilled_here:
            self._prefill.check(len(request.token_ids), may_grow_out=bool(holders))
        node_request = NodeRequest(
            request,
            job.age,
            BlockNames(root_name(self._fingerprint, request.cache_salt, request.adapter), self._block_size),
            RequestState.WAITING if is_prefilled_here else RequestState.WAITING_FOR_BLOCKS,
            DecodePlace.ELSEWHERE if reserve is None else DecodePlace.HERE,
            due=convert.due_from_wire(job.due, now) if job.HasField("due") else None,
            priority=job.priority,
            waiting=Waiting(_offer(job)) if is_prefilled_here else None,
            incoming=None if is_prefilled_here or reserve is None else _incoming(reserve, num_ahead, now),
            distributed=Distributed(holders) if holders else None,
        )
        self._node_requests.add(node_request)
        return node_request


def _offer(job: fleet_pb2.Job) -> Offer | None:
    if not job.HasField("fetch_prefix"):
        return None
    fetch = job.fetch_prefix
    return Offer(fetch.epoch, fetch.num_tokens, max(1, fetch.tp_size), max(1, fetch.pp_size), fetch.patience_s)


def _incoming(reserve: fleet_pb2.Reserve, num_ahead: int, now: float) -> Incoming:
    source_tp, source_pp = max(1, reserve.prefill_tp_size), max(1, reserve.prefill_pp_size)
    return Incoming(now, source_tp, source_pp, num_ahead, reserve.is_whole)
