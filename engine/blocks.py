"""Who owns which KV block.

A lease is the right to use blocks; it is given back exactly once. The allocator touches no tensor.
"""

import heapq

from engine.errors import OutOfBlocks


class BlockLease:
    """Blocks held by one owner, in table order. Releasing twice is a bug and raises."""

    def __init__(self, allocator: "BlockAllocator", block_ids: list[int]) -> None:
        self._allocator = allocator
        self._block_ids = block_ids
        self._released = False

    @property
    def block_ids(self) -> list[int]:
        """The block table; grows in place with `grow`. Callers do not change it."""
        assert not self._released, "a released lease was used"
        return self._block_ids

    def grow(self, num_blocks: int) -> None:
        """Appends blocks to the table, all or none. Raises OutOfBlocks."""
        assert not self._released, "a released lease was used"
        self._block_ids.extend(self._allocator._take(num_blocks))

    def release(self) -> None:
        """Gives every block back."""
        assert not self._released, "a lease was released twice"
        self._released = True
        self._allocator._give_back(self)


class BlockAllocator:
    """Free list of one node's KV pool. Lowest ids go out first, so tables tend to be contiguous runs."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a heap
        self._leases: dict[int, BlockLease] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> BlockLease:
        """Leases num_blocks blocks. Raises OutOfBlocks, and then takes none."""
        lease = BlockLease(self, self._take(num_blocks))
        self._leases[id(lease)] = lease
        return lease

    def check_integrity(self) -> None:
        """Recounts everything from scratch: each block is free or in exactly one lease."""
        leased = [block for lease in self._leases.values() for block in lease._block_ids]
        assert sorted(self._free + leased) == list(range(self.num_blocks)), "a block is lost or owned twice"

    def _take(self, num_blocks: int) -> list[int]:
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        return [heapq.heappop(self._free) for _ in range(num_blocks)]

    def _give_back(self, lease: BlockLease) -> None:
        del self._leases[id(lease)]
        for block in lease._block_ids:
            heapq.heappush(self._free, block)
