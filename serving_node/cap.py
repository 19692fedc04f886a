"""Bound the part of the pool that prompts prefilled for other nodes hold. Pure.

Together they hold at most half of the pool if the node has requests of its own, or as much as one prompt needs. Shared
blocks count once. An older prompt never waits for younger prefilled prompts: those are evicted, and the few that were
evicted often enough do not count against it.
"""

from collections.abc import Collection

from decode_node.batch import Writing, can_give_way
from prefill_node.reading import Reading, num_cacheable
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestState


class Cap:
    """Apply the cap of one node."""

    def __init__(self, node_requests: NodeRequests, leases: Leases, reading: Reading, writing: Writing) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._reading = reading
        self._writing = writing

    def holds_back(self, node_request: NodeRequest) -> bool:
        """Return whether a prompt for another node must wait until prompts that it cannot evict have left."""
        if not node_request.is_outgoing or all(each.is_outgoing for each in self._node_requests):
            return False
        firm = [each for each in self._outgoing() if not _yields(each, node_request)]
        return bool(firm) and self._exceed(firm, node_request)

    def make_room(self, node_request: NodeRequest) -> None:
        """Evict younger prefilled prompts with which a prompt for another node would exceed the cap."""
        if all(each.is_outgoing for each in self._node_requests):
            return
        for each in reversed(self._outgoing()):
            if _yields(each, node_request) and can_give_way(each):
                if not self._exceed(self._outgoing(), node_request):
                    return
                self._writing.give_way(each)

    def _outgoing(self) -> list[NodeRequest]:
        """Return the requests that hold blocks for other nodes, oldest first."""
        return [each for each in self._node_requests if each.is_outgoing and each.lease is not None]

    def _exceed(self, outgoing: Collection[NodeRequest], node_request: NodeRequest) -> bool:
        """Return whether `outgoing` and one more prompt would exceed the cap."""
        leases = self._leases
        num_left = leases.num_blocks // 2 - leases.blocks_for(self._reading.tokens_to_hold(node_request))
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
