"""The half that turns KV into answers, before it can: credit for prompts that other nodes read, and for answers that
other nodes have begun to write. No I/O, no clock.

Credit is blocks for the prompt and the first token to come, or for an answer and what it grows by meanwhile; it is
granted while there are seats and blocks, and leaves every request that grows one block to grow into.
Leading blocks of a prompt that the pool holds already need no transfer: they are leased with the rest, so nobody can
have them for other tokens. Where more of them are on their way here for another request that begins alike, a prompt
gets its credit behind that one: they travel once, and are held once. A running answer is to go on in the bits that it
would have had where it was: of its blocks those count as here that have the same bits wherever they are, and its ticket
names the last one, for its node to compare.
"""

from collections.abc import Sequence
from typing import Final

from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents, Stage

SHARED_BLOCKS: Final = 4  # for fewer that are on their way for another one nobody waits


class Credit:
    """Who waits for blocks on this node, and who has been granted them."""

    def __init__(self, residents: Residents, leases: Leases, *, max_num_queued: int) -> None:
        self._residents = residents
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
        waiting = self._residents.in_stage(Stage.AWAITING)
        if sum(not each.is_to_share for each in waiting) >= self._max_num_queued:  # the others have seats
            raise RequestError(reasons.QUEUE_FULL, f"the decode queue holds its {self._max_num_queued} requests")

    def grant(self, resident: Resident, *, num_spare: int) -> bool:
        """Gives one that waits its blocks, if that leaves num_spare free. Tells whether it did."""
        num_to_hold, num_cacheable = _tokens_to_hold(resident), _num_cacheable(resident)
        if not self._leases.take(resident, num_to_hold, num_cacheable=num_cacheable, num_spare=num_spare):
            return False
        self._residents.enter(resident, Stage.GRANTED)
        return True

    def num_to_hold(self, resident: Resident) -> int:
        """Blocks of a grant; some may be here already."""
        return self._leases.blocks_for(_tokens_to_hold(resident))

    def waits(self, resident: Resident) -> bool:
        """Whether one that waits is to get its blocks behind another one, with which more of its beginning comes."""
        if not resident.is_to_share:
            resident.ahead = None if resident.is_alone else self._find_ahead(resident)
        return resident.is_to_share

    def wait_no_more(self, resident: Resident, now: float) -> None:
        """What another one brings has taken too long: it waits for room alone from now on."""
        resident.ahead, resident.is_alone, resident.waiting_since_s = None, True, now

    def _find_ahead(self, resident: Resident) -> Resident | None:
        token_ids, num_cacheable = resident.request.token_ids, _num_cacheable(resident)
        num_held = self._leases.num_held_tokens(resident, num_cacheable)
        end = num_held + SHARED_BLOCKS * self._leases.block_size
        for other in self._residents.in_stage(Stage.GRANTED) if end <= num_cacheable else ():
            others = other.request.token_ids
            if (
                token_ids[num_held:end] == others[num_held:end]  # which tells most apart at their first token
                and token_ids[:num_held] == others[:num_held]
                and self._leases.may_share(resident, other)
                and resident.may_wait_for(other)
            ):
                return other
        return None

    def num_blocks(self, resident: Resident) -> int:
        """Blocks that may come: they need not all."""
        return self._leases.blocks_for(len(resident.request.token_ids) + resident.num_ahead)

    def check_tail(self, resident: Resident, num_tokens: int, num_come: int) -> None:
        """Raises ValueError when what has come, so many blocks beside those that were there, cannot go on with so many
        tokens behind those that were known."""
        request = resident.request
        num_needed = self._leases.blocks_for(len(request.token_ids) + num_tokens - 1)
        if not resident.num_ahead and num_tokens != 1:
            raise ValueError(f"{num_tokens} tokens came with a prompt's KV; it must be 1")
        if num_needed > self.num_blocks(resident):
            raise ValueError(f"{num_tokens} tokens came with the KV; {resident.num_ahead} were granted")
        if num_come < num_needed - resident.num_cached_blocks:
            raise ValueError(f"{num_come} blocks came; it must be {num_needed - resident.num_cached_blocks}")
        if request.num_output_tokens + num_tokens >= request.sampling.max_tokens:
            raise ValueError(f"{num_tokens} tokens came with the KV; max_tokens is {request.sampling.max_tokens}")

    def commit(self, resident: Resident, token_ids: Sequence[int], made: Sequence[tuple[bytes, int]]) -> None:
        """The KV is all there but for that of the last of these tokens, which follow those that were known: the next
        step computes it. `made`: as Leases.copied has it."""
        assert resident.stage is Stage.GRANTED
        self._residents.enter(resident, Stage.WRITING)
        resident.request.token_ids += token_ids
        resident.num_computed = len(resident.request.token_ids) - 1
        self._leases.copied(resident, made)
        self._leases.publish(resident)
        resident.has_first_token = True

    def take_back(self, resident: Resident, now: float) -> None:
        """The grant is over and nothing has come of it: it waits again."""
        self._leases.give_back(resident)
        resident.is_revoked = False
        self._residents.enter(resident, Stage.AWAITING)
        resident.waiting_since_s = now


def _num_cacheable(resident: Resident) -> int:
    """Leading tokens that need not come if they are here. Of an answer's last one its node may have no KV yet."""
    if resident.comes_whole:
        return 0
    return len(resident.request.token_ids) - (resident.num_ahead > 0)


def _tokens_to_hold(resident: Resident) -> int:
    return len(resident.request.token_ids) + max(1, resident.num_ahead)
