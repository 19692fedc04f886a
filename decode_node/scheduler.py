"""Schedule decode: one token a step for each running sequence. No I/O, no clock.

A sequence without a block for its next token takes blocks from a younger request (decode_node/preemption.py). A
sequence writes only behind its published blocks, so the block of the next token is its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from decode_node.preemption import Preemption
from serving_core.node.costs import StepCosts
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestState, fit_all
from serving_core.requests import Work

STRETCH: Final = 1.3  # times the tightest TPOT that a full step may take: some sequences are ahead, some soon end


def slots_in_time(running: Sequence[NodeRequest], costs: StepCosts) -> float:
    """Return how many sequences a step may hold before it takes STRETCH times the tightest TPOT of `running`.

    `costs` predicts the time. The contexts are assumed as long as the mean of `running`. At least 1; inf without
    limits. A limit that one sequence alone would miss is ignored.
    """
    tpots_s = [each.due.tpot_s for each in running if each.due is not None and each.due.tpot_s < math.inf]
    if not tpots_s:
        return math.inf
    weights = costs.weights
    num_cached = sum(each.num_computed for each in running if each.state is RequestState.RUNNING) / len(running)
    kept_s = [tpot_s for tpot_s in tpots_s if weights.num_sequences_within(tpot_s, num_cached)]
    return weights.num_sequences_within(STRETCH * min(kept_s), num_cached) if kept_s else math.inf


class DecodeScheduler:
    """Schedules the next token of the running sequences of one node."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        preemption: Preemption,
        fit: Callable[[NodeRequest, int], int] = fit_all,
    ) -> None:
        """Create the scheduler.

        `fit(request, num_tokens)` returns for a request with distributed KV how many of the tokens have blocks.
        """
        self._fit = fit
        self._node_requests = node_requests
        self._leases = leases
        self._preemption = preemption

    def plan(self) -> list[Work]:
        """Return the tokens to compute of each running sequence, usually one, oldest sequence first.

        A sequence that lacks blocks gets them, also from younger requests, which it preempts; else it is left out.
        """
        works, block_size, num_state_blocks = list[Work](), self._leases.block_size, self._leases.num_state_blocks
        for node_request in self._node_requests.in_state(RequestState.RUNNING):
            if node_request.state is not RequestState.RUNNING or node_request.ending is not None:
                continue
            request, lease, num_computed = node_request.request, node_request.lease, node_request.num_computed
            if lease is not None and node_request.distributed is None:
                num_tokens, block_ids = len(request.token_ids), lease.block_ids
                # The usual case, without a call for each of its parts.
                if num_tokens <= (len(block_ids) - num_state_blocks) * block_size:
                    works.append(Work(request, num_computed, num_tokens - num_computed, block_ids))
                    continue
            if self._hold(node_request, works):
                works.append(node_request.work(node_request.num_to_compute))
        return works

    def _hold(self, node_request: NodeRequest, works: Sequence[Work]) -> bool:
        """Return whether a sequence has blocks for its next token, preempting requests if needed.

        Requests in `works` are already in the step and are not preempted.
        """
        num_missing = self._leases.num_missing(node_request, node_request.num_computed + node_request.num_to_compute)
        if not num_missing and not node_request.is_moving:
            return True
        if node_request.distributed is not None:
            if self._fit(node_request, node_request.num_to_compute) >= node_request.num_to_compute:
                return True
            if node_request.is_moving or num_missing <= self._leases.num_free:
                return False
        while num_missing > self._leases.num_free:
            if any(each.is_revoked for each in self._node_requests):
                return False  # the blocks of the revoked credit come free soon
            taken = {self._node_requests.of(work.request) for work in works}
            victim = self._preemption.victim_for_block(node_request, taken)
            if victim is None or (victim is node_request and node_request.distributed is not None):
                return False  # a transfer that holds blocks will end, and then there is a victim
            if victim is node_request:
                self._preemption.preempt(victim)
                return False
            self._preemption.take_from(victim, num_missing - self._leases.num_free)
        self._leases.grow(node_request, num_missing)
        return True


def next_step(works: Sequence[Work], node_requests: NodeRequests, leases: Leases) -> list[Work]:
    """Return the decode step behind the running one, `works`, whose tokens are not known yet; perhaps an empty list.

    Async scheduling: the engine builds that step while the running one computes. `NodeScheduler.plan` would return the
    same step if the running one ends no sequence and no event comes. Otherwise the built step never begins, and nothing
    must be undone except a block that a sequence may have got one step early.

    The list is empty if the running step is not a decode step of all sequences, if another request could be part of the
    next one, if a sequence is at its last token, takes a checkpoint or may have blocks on other nodes, or if blocks are
    short.
    """
    if not (running := node_requests.steady(works)):
        return []
    block_size, num_state_blocks = leases.block_size, leases.num_state_blocks
    growing, num_missing = [], 0
    for node_request, work in zip(running, works, strict=True):
        if num_state_blocks and leases.is_checkpoint_due(node_request, work.start + 1):
            return []
        if node_request.num_computed + 2 > (len(work.block_ids) - num_state_blocks) * block_size:
            growing.append((node_request, leases.num_missing(node_request, node_request.num_computed + 2)))
            num_missing += growing[-1][1]
    if num_missing > leases.num_free:
        return []
    for node_request, num_blocks in growing:
        leases.grow(node_request, num_blocks)
    for node_request in running:
        node_request.num_in_step = 2
    return [Work(request, start + 1, 1, block_ids) for request, start, _, block_ids, _, _ in works]
