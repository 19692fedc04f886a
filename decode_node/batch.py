"""Decode: one token a step for each running sequence, and which one is preempted when blocks run out.

No I/O, no clock.

One that writes and finds no block for its next token takes it from the youngest request that can give way, itself
too: what writes or is being read here becomes a prompt again, what is read and not yet being sent is forgotten but for
what stays cached, and a grant whose KV is not there is taken back. One that is longer than the pool, and may fill it,
gives no more than is lacked, from its end. The oldest never gives way, and no request is admitted that could not fit
into the pool alone, so the oldest always finishes. An answer that moves to another node keeps its blocks; it needs none
of this pool to move, and then its blocks come free.

It only ever writes behind what is published: the block of the token to come is its own. Sharing takes nothing from the
promise: with every other request out of the way, all blocks but the oldest's own are free.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from serving_core.costs import StepCosts
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest, NodeRequests, Stage
from serving_core.requests import Work

STRETCH: Final = 1.3  # of the tightest limit, by a step with all of them: some are ahead of theirs, and some soon end


def slots_in_time(running: Sequence[NodeRequest], costs: StepCosts) -> float:
    """Of as many answers as this, with contexts such as these have, a step takes STRETCH times the tightest of their
    limits; at least 1, inf without limits. A limit that one answer alone would miss holds nobody up."""
    tpots_s = [each.due.tpot_s for each in running if each.due is not None and each.due.tpot_s < math.inf]
    if not tpots_s:
        return math.inf
    weights = costs.weights
    num_cached = sum(each.num_computed for each in running if each.stage is Stage.WRITING) / len(running)
    kept_s = [tpot_s for tpot_s in tpots_s if weights.num_answers_within(tpot_s, num_cached)]
    return weights.num_answers_within(STRETCH * min(kept_s), num_cached) if kept_s else math.inf


MAX_EVICTIONS: Final = 2  # of one finished prompt


class Writing:
    """The running answers of one node."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        revoke: Callable[[NodeRequest], None],
        fit: Callable[[NodeRequest, int], int] = lambda _, num_tokens: num_tokens,
    ) -> None:
        """`revoke` begins to take a grant back; its blocks come free later. `fit` tells of a request that has hosts how
        many of so many tokens it has blocks for."""
        self._fit = fit
        self._node_requests = node_requests
        self._leases = leases
        self._revoke = revoke
        self.num_preemptions = 0
        self.num_evictions = 0

    def plan(self) -> list[Work]:
        """One token of each that writes and has, or finds, a block for it; oldest first."""
        works: list[Work] = []
        taken: set[NodeRequest] = set()
        for node_request in self._node_requests.in_stage(Stage.WRITING):
            if node_request.stage is Stage.WRITING and not node_request.is_ending and self._hold(node_request, taken):
                taken.add(node_request)
                works.append(node_request.work(node_request.num_to_compute))
        return works

    def _hold(self, node_request: NodeRequest, taken: set[NodeRequest]) -> bool:
        """Whether it has blocks for its next token; others, or it itself, may have to give way. Those in `taken` have
        their place in the step already."""
        num_missing = self._leases.num_missing(node_request, node_request.num_computed + node_request.num_to_compute)
        if not num_missing and not node_request.is_annexing:
            return True
        if node_request.hosts:
            if self._fit(node_request, node_request.num_to_compute) >= node_request.num_to_compute:
                return True
            if node_request.is_annexing or num_missing <= self._leases.num_free:
                return False
        while num_missing > self._leases.num_free:
            if any(each.is_revoked for each in self._node_requests):
                return False  # its blocks come free in a moment
            victim = self._youngest(node_request, taken)
            if victim is None or (victim is node_request and node_request.hosts):
                return False  # what is being sent or received, itself perhaps, will end, and then there is another
            if victim is node_request:
                self.give_way(victim)
                return False
            self._take_from(victim, num_missing - self._leases.num_free)
        self._leases.grow(node_request, num_missing)
        return True

    def _youngest(self, node_request: NodeRequest, taken: set[NodeRequest]) -> NodeRequest | None:
        """The youngest that holds blocks and can give way, down to the request itself; never the oldest of all."""
        oldest = next((each for each in self._node_requests if _may_finish(each)), None)
        for each in reversed(list(self._node_requests)):
            if each is oldest:
                return None
            if each not in taken and can_give_way(each):
                return each
            if each is node_request:
                return None
        return None

    def give_way(self, node_request: NodeRequest) -> None:
        """Takes the blocks of one that can give way; those of a grant come free later."""
        if node_request.stage is Stage.GRANTED:
            node_request.is_revoked = True
            self._revoke(node_request)
            return
        if node_request.stage is Stage.READ:
            node_request.num_evictions += 1
            self.num_evictions += 1
        else:
            self.num_preemptions += 1
        self._leases.give_back(node_request)
        self._node_requests.enter(node_request, Stage.QUEUED)

    def _take_from(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Takes its blocks; of one that has hosts no more than so many, from its end: as it fills the pool, it would
        begin again for each block that an older one grows by. What is added up over a prompt cannot be taken back."""
        lease, request = node_request.lease, node_request.request
        assert lease is not None
        if not node_request.hosts or request.pooling is not None or num_blocks > len(lease.block_ids):
            self.give_way(node_request)
            return
        self._leases.trim(node_request, num_blocks)
        self._node_requests.enter(node_request, Stage.READING)

    def take_over(self, node_request: NodeRequest) -> None:
        """A prompt that was read for another node is answered here."""
        assert node_request.stage is Stage.READ
        node_request.hands_over = node_request.is_kept = False
        self._node_requests.enter(node_request, Stage.WRITING)


def _may_finish(node_request: NodeRequest) -> bool:
    """Whether it needs nothing but steps of this node to finish."""
    return node_request.stage in (Stage.WRITING, Stage.READING, Stage.QUEUED) and not node_request.hands_over


def can_give_way(node_request: NodeRequest) -> bool:
    """Whether its blocks can be taken, at once or, those of a grant, in a moment."""
    match node_request.stage:
        case Stage.WRITING | Stage.READING:
            return not node_request.is_busy
        case Stage.READ:
            return not node_request.is_busy and node_request.num_evictions < MAX_EVICTIONS
        case Stage.GRANTED:  # one whose sender gave it up is cancelled in a moment
            return node_request.is_receiving and not node_request.is_revoked
    return False
