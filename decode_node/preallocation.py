"""Give credit: reserve blocks for prompts that other nodes prefill and for sequences that migrate here.

No I/O, no clock.

A credit covers the prompt and the first output token, or a migrating sequence and the tokens that it gains meanwhile.
It is given while there are running slots and blocks, and leaves one block for each request that grows. Leading blocks
of a prompt that are in the prefix cache need no transfer: they are leased with the rest, so no other tokens can take
them. If more of them are in transfer for another request with the same beginning, the prompt gets its credit after that
request, so that the blocks are sent and held once. A migrating sequence must continue with the same bits: only cached
blocks whose bits are the same on every node count, and the descriptor carries the hash of the last one for the source
node to compare.
"""

from collections.abc import Sequence
from typing import Final

from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestEvent, RequestState, incoming_of

SHARED_BLOCKS: Final = 4  # a request does not wait for fewer shared blocks in transfer


class Preallocation:
    """Reserves blocks of one node for requests whose KV comes from other nodes, and tracks which of them wait."""

    def __init__(self, node_requests: NodeRequests, leases: Leases, *, max_num_queued: int) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._max_num_queued = max_num_queued

    def check(self, num_tokens: int, *, may_grow_out: bool = False) -> None:
        """Raise RequestError if the queue is full or a sequence of `num_tokens` could never fit into the pool.

        With `may_grow_out` the sequence may exceed the pool, as with distributed KV.
        """
        num_blocks = self._leases.blocks_for(num_tokens)
        if num_blocks > self._leases.num_blocks and not may_grow_out:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"prompt and max_tokens need {num_blocks} KV blocks, the decode node has {self._leases.num_blocks}",
            )
        waiting = self._node_requests.in_state(RequestState.WAITING_FOR_BLOCKS)
        if sum(not each.is_to_share for each in waiting) >= self._max_num_queued:  # sharers have running slots
            raise RequestError(reasons.QUEUE_FULL, f"the decode queue holds its {self._max_num_queued} requests")

    def reserve(self, node_request: NodeRequest, *, num_spare: int) -> bool:
        """Reserve the blocks of a waiting request if that leaves `num_spare` blocks free; return whether it did.

        On success the request has credit.
        """
        num_to_hold, num_cacheable = _tokens_to_hold(node_request), _num_cacheable(node_request)
        if not self._leases.take(node_request, num_to_hold, num_cacheable=num_cacheable, num_spare=num_spare):
            return False
        self._node_requests.apply(node_request, RequestEvent.CREDITED)
        return True

    def num_to_hold(self, node_request: NodeRequest) -> int:
        """Return how many blocks a request's credit takes, including blocks that are already in the prefix cache."""
        return self._leases.blocks_for(_tokens_to_hold(node_request))

    def waits(self, node_request: NodeRequest) -> bool:
        """Return whether a waiting request should get its blocks after another that brings more of its beginning.

        Stores that other request in the waiting one.
        """
        if not node_request.is_to_share:
            incoming = incoming_of(node_request)
            incoming.shares_with = None if incoming.is_alone else self._find_ahead(node_request)
        return node_request.is_to_share

    def wait_no_more(self, node_request: NodeRequest, now: float) -> None:
        """Let a request wait for free blocks from `now` on, and not again for blocks that another request brings."""
        incoming = incoming_of(node_request)
        incoming.shares_with, incoming.is_alone, incoming.waiting_since_s = None, True, now

    def _find_ahead(self, node_request: NodeRequest) -> NodeRequest | None:
        token_ids, num_cacheable = node_request.request.token_ids, _num_cacheable(node_request)
        num_held = self._leases.num_held_tokens(node_request, num_cacheable)
        end = num_held + SHARED_BLOCKS * self._leases.block_size
        for other in self._node_requests.in_state(RequestState.RECEIVING_KV) if end <= num_cacheable else ():
            others = other.request.token_ids
            if (
                token_ids[num_held:end] == others[num_held:end]  # most prompts already differ at the first token
                and token_ids[:num_held] == others[:num_held]
                and self._leases.may_share(node_request, other)
                and node_request.may_wait_for(other)
            ):
                return other
        return None

    def num_blocks(self, node_request: NodeRequest) -> int:
        """Return the most blocks, cached ones included, that a request may have when its KV has arrived."""
        return self._leases.blocks_for(len(node_request.request.token_ids) + node_request.num_ahead)

    def check_tail(self, node_request: NodeRequest, num_tokens: int, num_arrived: int) -> None:
        """Raise ValueError if received KV does not fit the request.

        `num_arrived` blocks arrived beside the cached blocks, with `num_tokens` tokens behind those that the node knew.
        """
        request = node_request.request
        num_needed = self._leases.blocks_for(len(request.token_ids) + num_tokens - 1)
        if not node_request.num_ahead and num_tokens != 1:
            raise ValueError(f"{num_tokens} tokens came with a prompt's KV; it must be 1")
        if num_needed > self.num_blocks(node_request):
            raise ValueError(f"{num_tokens} tokens came with the KV; {node_request.num_ahead} were granted")
        if num_arrived < num_needed - node_request.num_cached_blocks:
            raise ValueError(f"{num_arrived} blocks came; it must be {num_needed - node_request.num_cached_blocks}")
        if request.num_output_tokens + num_tokens >= request.sampling.max_tokens:
            raise ValueError(f"{num_tokens} tokens came with the KV; max_tokens is {request.sampling.max_tokens}")

    def commit(self, node_request: NodeRequest, token_ids: Sequence[int], made: Sequence[tuple[bytes, int]]) -> None:
        """Let a request decode: its KV has arrived, except that of the last of `token_ids`.

        `token_ids` follow the tokens that the node knew; the next step computes the last one. `made` lists numerics ids
        of the request's blocks in order, each with a number of blocks. The blocks enter the prefix cache.
        """
        self._node_requests.apply(node_request, RequestEvent.RECEIVED)
        node_request.request.token_ids += token_ids
        node_request.num_computed = len(node_request.request.token_ids) - 1
        self._leases.copied(node_request, made)
        self._leases.publish(node_request)

    def release(self, node_request: NodeRequest, now: float) -> None:
        """Free the blocks of a credit whose KV did not come; the request waits for credit again, from `now` on."""
        self._leases.give_back(node_request)
        self._node_requests.apply(node_request, RequestEvent.REVOKED)
        incoming_of(node_request).waiting_since_s = now


def _num_cacheable(node_request: NodeRequest) -> int:
    """Return the leading tokens that need no transfer if they are cached.

    The last token of a running sequence is excluded: its node may have no KV of it yet.
    """
    if incoming_of(node_request).is_whole:
        return 0
    return len(node_request.request.token_ids) - (node_request.num_ahead > 0)


def _tokens_to_hold(node_request: NodeRequest) -> int:
    return len(node_request.request.token_ids) + max(1, node_request.num_ahead)
