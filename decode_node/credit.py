"""The half that turns KV into answers, before it can: credit for prompts that other nodes read. No I/O, no clock.

Credit is blocks for the prompt and the first token to come; it is granted in order of age while there are seats and
blocks, and leaves every request that grows one block to grow into. Leading blocks that the pool holds already need no
transfer: they are leased with the rest, so nobody can have them for other tokens.
"""

from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents, Stage


class Credit:
    """Who waits for blocks on this node, and who has been granted them."""

    def __init__(self, residents: Residents, leases: Leases, *, max_num_queued: int) -> None:
        self._residents = residents
        self._leases = leases
        self._max_num_queued = max_num_queued

    def check(self, num_tokens: int) -> None:
        """Raises RequestError when the queue is full, or an answer that ends with so many tokens could never be written
        here."""
        num_blocks = self._leases.blocks_for(num_tokens)
        if num_blocks > self._leases.num_blocks:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"prompt and max_tokens need {num_blocks} KV blocks, the decode node has {self._leases.num_blocks}",
            )
        if self._residents.count(Stage.AWAITING) >= self._max_num_queued:
            raise RequestError(reasons.QUEUE_FULL, f"the decode queue holds its {self._max_num_queued} requests")

    def grant(self, resident: Resident, *, num_spare: int) -> bool:
        """Gives one that waits its blocks, if that leaves num_spare free. Tells whether it did."""
        num_tokens = len(resident.request.token_ids)
        if not self._leases.take(resident, num_tokens + 1, num_cacheable=num_tokens, num_spare=num_spare):
            return False
        resident.stage = Stage.GRANTED
        return True

    def commit(self, resident: Resident, first_token_id: int) -> None:
        """The prompt's KV is all there, and this token follows it: the next step computes it."""
        assert resident.stage is Stage.GRANTED
        resident.stage = Stage.WRITING
        resident.num_computed = len(resident.request.token_ids)
        self._leases.publish(resident)
        resident.has_first_token = True
        resident.request.token_ids.append(first_token_id)

    def take_back(self, resident: Resident, now: float) -> None:
        """The grant is over and nothing has come of it: it waits again."""
        self._leases.give_back(resident)
        resident.is_revoked = False
        resident.stage = Stage.AWAITING
        resident.waiting_since_s = now
