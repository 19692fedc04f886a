"""Preempt requests: pick the request that loses its blocks, and take them. No I/O, no clock.

A running or prefilling request becomes a queued prompt again. A prefilled prompt that is not being sent is evicted
except for its cached blocks. A credit of which no KV has arrived is revoked. A request with distributed KV, which may
fill the pool, loses only the lacking blocks, from its end.

The victim is the youngest request that can be preempted. The oldest request is never preempted, and admission refuses
requests that could not fit into the pool alone, so the oldest request always finishes. A migrating sequence keeps its
blocks; it needs none of this pool to finish its migration. Prefix sharing does not weaken the guarantee: without other
requests, all blocks but the oldest request's own are free.

By age give way elsewhere too: prefilled prompts beyond their share of the pool and credits without KV
(serving_node/admission.py), and blocks held for other nodes (serving_node/distributed_kv/holder.py).
"""

from collections.abc import Callable
from typing import Final

from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestEvent, RequestState

MAX_EVICTIONS: Final = 2  # of one prefilled prompt
HOLDING: Final = (RequestState.RUNNING, RequestState.RECEIVING_KV, RequestState.PREFILLING)


class Preemption:
    """Takes the blocks of requests of one node for older ones."""

    def __init__(self, node_requests: NodeRequests, leases: Leases, revoke: Callable[[NodeRequest], None]) -> None:
        """Create the counts. `revoke` begins to revoke a credit, whose blocks come free later."""
        self._node_requests = node_requests
        self._leases = leases
        self._revoke = revoke
        self.num_preemptions = 0
        self.num_evictions = 0

    def victim_for_block(self, node_request: NodeRequest, taken: set[NodeRequest]) -> NodeRequest | None:
        """Return the youngest request that can be preempted for a block of `node_request`, perhaps that request itself.

        Only requests that are not older than `node_request` and not in `taken` count. None if there is none, or if only
        the oldest request of all is left.
        """
        oldest = next((each for each in self._node_requests if _may_finish(each)), None)
        for each in reversed(list(self._node_requests)):
            if each is oldest:
                return None
            if each not in taken and can_preempt(each):
                return each
            if each is node_request:
                return None
        return None

    def preempt(self, node_request: NodeRequest) -> None:
        """Take all blocks of a request for which `can_preempt` is true; the request is computed again later.

        The blocks of a credit come free later, when it is revoked.
        """
        if node_request.incoming is not None and node_request.incoming.transfer is not None:
            node_request.incoming.transfer.is_revoked = True
            self._revoke(node_request)
            return
        if node_request.state is RequestState.PREFILLED:
            assert node_request.outgoing is not None
            node_request.outgoing.num_evictions += 1
            self.num_evictions += 1
        else:
            self.num_preemptions += 1
        self._leases.give_back(node_request)
        self._node_requests.apply(node_request, RequestEvent.PREEMPTED)

    def take_from(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Take at least `num_blocks` blocks from a request.

        A request with distributed KV loses only `num_blocks` blocks, from its end: it fills the pool, and would
        otherwise begin again for each block by which an older request grows. Other requests are preempted as a whole,
        and so are pooled ones, since a sum over the prompt cannot be undone.
        """
        lease, request = node_request.lease, node_request.request
        assert lease is not None
        if node_request.distributed is None or request.pooling is not None or num_blocks > len(lease.block_ids):
            self.preempt(node_request)
            return
        self._leases.trim(node_request, num_blocks)
        self._node_requests.apply(node_request, RequestEvent.TRIMMED)

    def victim_for(self, older: NodeRequest, *, needs_slot: bool) -> NodeRequest | None:
        """Return the youngest request that is younger than `older` and holds what `older` lacks; None if there is none.

        That is blocks, or with `needs_slot` a running slot. For a node that has nothing to compute: no request is busy.
        """
        for each in reversed(list(self._node_requests)):
            if each is older:
                return None
            if each.state in HOLDING or (each.state is RequestState.PREFILLED and not needs_slot):
                return each
        return None


def _may_finish(node_request: NodeRequest) -> bool:
    """Return whether a request needs nothing but steps of this node to finish."""
    return (
        node_request.state in (RequestState.RUNNING, RequestState.PREFILLING, RequestState.WAITING)
        and not node_request.only_prefills
    )


def can_preempt(node_request: NodeRequest) -> bool:
    """Return whether the blocks of a request can be taken now or, for a credit, soon.

    Not while a step or a transfer uses them, and not from a prompt that was evicted MAX_EVICTIONS times.
    """
    match node_request.state:
        case RequestState.RUNNING | RequestState.PREFILLING:
            return not node_request.is_busy
        case RequestState.PREFILLED:
            return not node_request.is_busy and node_request.num_evictions < MAX_EVICTIONS
        case RequestState.RECEIVING_KV:  # a credit whose sender aborted is cancelled soon
            return node_request.is_receiving and not node_request.is_revoked
    return False
