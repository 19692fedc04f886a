"""Requests that stand where a test puts them, over one pool; for tests of one half of a node by itself."""

from itertools import count

from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator
from serving_core.node.leases import Leases
from serving_core.node.prefix import BlockNames
from serving_core.node.requests import NodeRequest, NodeRequests, RequestState
from serving_core.requests import Request, SamplingParams

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


class House:
    """NodeRequests and their leases."""

    def __init__(self, num_blocks):
        self.allocator = BlockAllocator(num_blocks)
        self.leases = Leases(self.allocator, LAYOUT, b"-origin-", is_history_free=False)
        self.node_requests = NodeRequests()
        self._epochs = count(1)

    def add(self, name, age, stage, num_tokens, *, num_computed=0, holds=True, salt="", **facts):
        """One with so many tokens, and blocks for them all where its stage has some. It shares blocks with those of its
        salt alone, by default with nobody."""
        request = Request(name, next(self._epochs), list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=9))
        names = BlockNames((salt or name).encode().ljust(32), LAYOUT.block_size)
        node_request = NodeRequest(request, age, names, stage, 0.0, **facts)
        if holds and stage not in (RequestState.WAITING, RequestState.WAITING_FOR_BLOCKS):
            assert self.leases.take(node_request, num_tokens, num_cacheable=0, num_spare=0)
        node_request.num_computed = num_computed
        self.node_requests.add(node_request)
        return node_request
