"""The half that turns KV into answers, before it can: credit for prompts that other nodes read, and for answers that
other nodes have begun to write. No I/O, no clock.

Credit is blocks for the prompt and the first token to come, or for an answer and what it grows by meanwhile; it is
granted while there are running slots and blocks, and leaves every request that grows one block to grow into. Leading
blocks of a prompt that the pool holds already need no transfer: they are leased with the rest, so nobody can have them
for other tokens. Where more of them are on their way here for another request that begins alike, a prompt gets its
credit behind that one: they travel once, and are held once. A running answer is to go on in the bits that it would have
had where it was: of its blocks those count as here that have the same bits wherever they are, and its descriptor names
the last one, for its node to compare."""

from collections.abc import Sequence
from typing import Final

from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest, NodeRequests, Stage

SHARED_BLOCKS: Final = 4  # for fewer that are on their way for another one nobody waits


class Credit:
    """Who waits for blocks on this node, and who has been granted them."""

    def __init__(self, node_requests: NodeRequests, leases: Leases, *, max_num_queued: int) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._max_num_queued = max_num_queued

    def check(self, num_tokens: int, *, may_grow_out: bool = False) -> None:
        """Raises RequestError when the queue is full, or an answer that ends with so many tokens could never be written
        here, unless it `may_grow_out` of the pool."""
        num_blocks = self._leases.blocks_for(num_tokens)
        if num_blocks > self._leases.num_blocks and not may_grow_out:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"prompt and max_tokens need {num_blocks} KV blocks, the decode node has {self._leases.num_blocks}",
            )
        waiting = self._node_requests.in_stage(Stage.AWAITING)
        if sum(not each.is_to_share for each in waiting) >= self._max_num_queued:  # the others have running slots
            raise RequestError(reasons.QUEUE_FULL, f"the decode queue holds its {self._max_num_queued} requests")

    def grant(self, node_request: NodeRequest, *, num_spare: int) -> bool:
        """Gives one that waits its blocks, if that leaves num_spare free. Tells whether it did."""
        num_to_hold, num_cacheable = _tokens_to_hold(node_request), _num_cacheable(node_request)
        if not self._leases.take(node_request, num_to_hold, num_cacheable=num_cacheable, num_spare=num_spare):
            return False
        self._node_requests.enter(node_request, Stage.GRANTED)
        return True

    def num_to_hold(self, node_request: NodeRequest) -> int:
        """Blocks of a grant; some may be here already."""
        return self._leases.blocks_for(_tokens_to_hold(node_request))

    def waits(self, node_request: NodeRequest) -> bool:
        """Whether one that waits is to get its blocks behind another one, with which more of its beginning comes."""
        if not node_request.is_to_share:
            node_request.ahead = None if node_request.is_alone else self._find_ahead(node_request)
        return node_request.is_to_share

    def wait_no_more(self, node_request: NodeRequest, now: float) -> None:
        """What another one brings has taken too long: it waits for room alone from now on."""
        node_request.ahead, node_request.is_alone, node_request.waiting_since_s = None, True, now

    def _find_ahead(self, node_request: NodeRequest) -> NodeRequest | None:
        token_ids, num_cacheable = node_request.request.token_ids, _num_cacheable(node_request)
        num_held = self._leases.num_held_tokens(node_request, num_cacheable)
        end = num_held + SHARED_BLOCKS * self._leases.block_size
        for other in self._node_requests.in_stage(Stage.GRANTED) if end <= num_cacheable else ():
            others = other.request.token_ids
            if (
                token_ids[num_held:end] == others[num_held:end]  # which tells most apart at their first token
                and token_ids[:num_held] == others[:num_held]
                and self._leases.may_share(node_request, other)
                and node_request.may_wait_for(other)
            ):
                return other
        return None

    def num_blocks(self, node_request: NodeRequest) -> int:
        """Blocks that may come: they need not all."""
        return self._leases.blocks_for(len(node_request.request.token_ids) + node_request.num_ahead)

    def check_tail(self, node_request: NodeRequest, num_tokens: int, num_come: int) -> None:
        """Raises ValueError when what has come, so many blocks beside those that were there, cannot go on with so many
        tokens behind those that were known."""
        request = node_request.request
        num_needed = self._leases.blocks_for(len(request.token_ids) + num_tokens - 1)
        if not node_request.num_ahead and num_tokens != 1:
            raise ValueError(f"{num_tokens} tokens came with a prompt's KV; it must be 1")
        if num_needed > self.num_blocks(node_request):
            raise ValueError(f"{num_tokens} tokens came with the KV; {node_request.num_ahead} were granted")
        if num_come < num_needed - node_request.num_cached_blocks:
            raise ValueError(f"{num_come} blocks came; it must be {num_needed - node_request.num_cached_blocks}")
        if request.num_output_tokens + num_tokens >= request.sampling.max_tokens:
            raise ValueError(f"{num_tokens} tokens came with the KV; max_tokens is {request.sampling.max_tokens}")

    def commit(self, node_request: NodeRequest, token_ids: Sequence[int], made: Sequence[tuple[bytes, int]]) -> None:
        """The KV is all there but for that of the last of these tokens, which follow those that were known: the next
        step computes it. `made`: as Leases.copied has it."""
        assert node_request.stage is Stage.GRANTED
        self._node_requests.enter(node_request, Stage.WRITING)
        node_request.request.token_ids += token_ids
        node_request.num_computed = len(node_request.request.token_ids) - 1
        self._leases.copied(node_request, made)
        self._leases.publish(node_request)
        node_request.has_first_token = True

    def take_back(self, node_request: NodeRequest, now: float) -> None:
        """The grant is over and nothing has come of it: it waits again."""
        self._leases.give_back(node_request)
        node_request.is_revoked = False
        self._node_requests.enter(node_request, Stage.AWAITING)
        node_request.waiting_since_s = now


def _num_cacheable(node_request: NodeRequest) -> int:
    """Leading tokens that need not come if they are here. Of an answer's last one its node may have no KV yet."""
    if node_request.comes_whole:
        return 0
    return len(node_request.request.token_ids) - (node_request.num_ahead > 0)


def _tokens_to_hold(node_request: NodeRequest) -> int:
    return len(node_request.request.token_ids) + max(1, node_request.num_ahead)
