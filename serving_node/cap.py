"""How much of the pool prompts that are read for other nodes may hold. Pure.

Together they hold at most half of it, where there are answers of the node's own, or as much as one of them needs. What
several hold counts once. An older one never waits for younger ones that have been read: those are evicted, and the few
that were evicted often enough do not count against it.
"""

from collections.abc import Collection

from decode_node.batch import Writing, can_give_way
from prefill_node.reading import Reading, num_cacheable
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents, Stage


class Cap:
    """That of one node."""

    def __init__(self, residents: Residents, leases: Leases, reading: Reading, writing: Writing) -> None:
        self._residents = residents
        self._leases = leases
        self._reading = reading
        self._writing = writing

    def holds_back(self, resident: Resident) -> bool:
        """Whether a prompt for another node has to wait until older ones, or those that cannot give way, have left."""
        if not resident.is_outgoing or all(each.is_outgoing for each in self._residents):
            return False
        firm = [each for each in self._outgoing() if not _yields(each, resident)]
        return bool(firm) and self._exceed(firm, resident)

    def make_room(self, resident: Resident) -> None:
        """Takes from younger prompts that wait what a prompt for another node would have too much with them."""
        if all(each.is_outgoing for each in self._residents):
            return
        for each in reversed(self._outgoing()):
            if _yields(each, resident) and can_give_way(each):
                if not self._exceed(self._outgoing(), resident):
                    return
                self._writing.give_way(each)

    def _outgoing(self) -> list[Resident]:
        """What holds blocks for other nodes, oldest first."""
        return [each for each in self._residents if each.is_outgoing and each.lease is not None]

    def _exceed(self, outgoing: Collection[Resident], resident: Resident) -> bool:
        """Whether these and one more would hold more than the cap together."""
        leases = self._leases
        num_left = leases.num_blocks // 2 - leases.blocks_for(self._reading.tokens_to_hold(resident))
        if sum(map(num_blocks_of, outgoing)) <= num_left:
            return False
        found = leases.blocks_found(resident, num_cacheable(resident))
        held = {block for each in outgoing if each.lease is not None for block in each.lease.block_ids}
        return len(held.union(found)) > num_left + len(found)


def num_blocks_of(resident: Resident) -> int:
    """That one holds here which has some."""
    assert resident.lease is not None
    return len(resident.lease.block_ids)


def _yields(resident: Resident, older: Resident) -> bool:
    """Whether an outgoing prompt only waits, and is the younger one."""
    is_idle = resident.stage is Stage.READ and not resident.is_busy and not resident.is_ending
    return is_idle and resident.age > older.age
