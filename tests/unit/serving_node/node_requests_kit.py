"""Requests that stand where a test puts them, over one pool; for tests of one half of a node by itself."""

from itertools import count

from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator
from serving_core.node.leases import Leases
from serving_core.node.prefix import BlockNames
from serving_core.node.requests import (
    DecodePlace,
    Distributed,
    Incoming,
    IncomingTransfer,
    NodeRequest,
    NodeRequests,
    Outgoing,
    RequestState,
    Waiting,
)
from serving_core.requests import Request, SamplingParams

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


class House:
    """NodeRequests and their leases."""

    def __init__(self, num_blocks):
        self.allocator = BlockAllocator(num_blocks)
        self.leases = Leases(self.allocator, LAYOUT, b"-origin-", is_batch_invariant=False)
        self.node_requests = NodeRequests()
        self._epochs = count(1)

    def add(self, name, age, state, num_tokens, *, num_computed=0, holds=True, salt="", **facts):
        """A request with so many tokens, and blocks for them all where its state has some. It shares blocks with those
        of its salt alone, by default with nobody. `facts` are as in `data_of`, or fields of NodeRequest.
        """
        request = Request(name, next(self._epochs), list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=9))
        names = BlockNames((salt or name).encode().ljust(32), LAYOUT.block_size)
        node_request = NodeRequest(request, age, names, state, **data_of(state, **facts))
        if holds and state not in (RequestState.WAITING, RequestState.WAITING_FOR_BLOCKS):
            assert self.leases.take(node_request, num_tokens, num_cacheable=0, num_spare=0)
        node_request.num_computed = num_computed
        self.node_requests.add(node_request)
        return node_request


def data_of(
    state,
    *,
    only_prefills=False,
    is_kept=False,
    is_sending=False,
    num_evictions=0,
    is_receiving=False,
    is_coming=False,
    is_revoked=False,
    num_ahead=0,
    holders=(),
    is_moving=False,
    is_loading=False,
    **fields,
):
    """The data of a request's state, as NodeRequest takes it."""
    if only_prefills:
        fields["decode_place"] = DecodePlace.HERE_AFTER_ALL if is_kept else DecodePlace.ELSEWHERE
    if only_prefills or is_sending:
        fields["outgoing"] = Outgoing(is_sending=is_sending, num_evictions=num_evictions)
    if state in (RequestState.WAITING_FOR_BLOCKS, RequestState.RECEIVING_KV):
        transfer = IncomingTransfer(is_coming, is_revoked) if is_receiving else None
        fields["incoming"] = Incoming(0.0, num_ahead=num_ahead, transfer=transfer)
    if holders or is_moving:
        fields["distributed"] = Distributed(holders, is_moving=is_moving)
    if is_loading:
        fields["waiting"] = Waiting(is_loading=True)
    return fields
