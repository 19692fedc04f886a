"""How much of the pool prompts that are read for other nodes may hold. Pure.

Together they hold at most half of it, where there are answers of the node's own, or as much as one of them needs. An
older one never waits for younger ones that have been read: those are evicted, and the few that were evicted often
enough do not count against it.
"""

from decode_node.writing import Writing, can_give_way
from prefill_node.reading import Reading
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
        num_firm = sum(num_blocks_of(each) for each in self._outgoing() if not _yields(each, resident))
        return num_firm > 0 and num_firm > self._num_left_beside(resident)

    def make_room(self, resident: Resident) -> None:
        """Takes from younger prompts that wait what a prompt for another node would have too much with them."""
        if all(each.is_outgoing for each in self._residents):
            return
        outgoing = self._outgoing()
        num_blocks, num_left = sum(map(num_blocks_of, outgoing)), self._num_left_beside(resident)
        for each in reversed(outgoing):
            if num_blocks <= num_left:
                return
            if _yields(each, resident) and can_give_way(each):
                num_blocks -= num_blocks_of(each)
                self._writing.give_way(each)

    def _outgoing(self) -> list[Resident]:
        """What holds blocks for other nodes, oldest first."""
        return [each for each in self._residents if each.is_outgoing and each.lease is not None]

    def _num_left_beside(self, resident: Resident) -> int:
        """Blocks that others may hold for other nodes beside this one; less than 0 where it is larger than the cap."""
        return self._leases.num_blocks // 2 - self._leases.blocks_for(self._reading.tokens_to_hold(resident))


def num_blocks_of(resident: Resident) -> int:
    """That one holds here which has some."""
    assert resident.lease is not None
    return len(resident.lease.block_ids)


def _yields(resident: Resident, older: Resident) -> bool:
    """Whether an outgoing prompt only waits, and is the younger one."""
    is_idle = resident.stage is Stage.READ and not resident.is_busy and not resident.is_ending
    return is_idle and resident.age > older.age
