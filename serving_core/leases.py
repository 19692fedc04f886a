"""The blocks of a node's requests, shared by name. Pure."""

from serving_core.blocks import BlockAllocator
from serving_core.layout import KVLayout
from serving_core.residents import Resident


class Leases:
    """Takes, grows, publishes and gives back what residents hold of one pool."""

    def __init__(self, allocator: BlockAllocator, layout: KVLayout) -> None:
        self._allocator = allocator
        self._layout = layout

    @property
    def num_free(self) -> int:
        """Blocks that can be had."""
        return self._allocator.num_free

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self._allocator.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._layout.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return self._layout.num_blocks_for(num_tokens)

    def num_needed(self, resident: Resident, num_tokens: int, *, num_cacheable: int) -> int:
        """By how much `take` with the same arguments would lower num_free."""
        return self._allocator.num_needed(self.blocks_for(num_tokens), self._names(resident, num_cacheable))

    def take(self, resident: Resident, num_tokens: int, *, num_cacheable: int, num_spare: int) -> bool:
        """Leases blocks for num_tokens tokens if that leaves num_spare free; of the leading num_cacheable tokens, full
        blocks that the pool holds, whose tokens count as computed. Tells whether it did."""
        names = self._names(resident, num_cacheable)
        num_blocks = self.blocks_for(num_tokens)
        if self._allocator.num_needed(num_blocks, names) + num_spare > self._allocator.num_free:
            return False
        resident.lease = self._allocator.allocate(num_blocks, names)
        resident.num_cached_blocks = resident.lease.num_cached
        resident.num_computed = self.num_cached_tokens(resident)
        return True

    def num_missing(self, resident: Resident, num_tokens: int) -> int:
        """Blocks that the lease lacks for num_tokens tokens in all."""
        assert resident.lease is not None
        num_missing = self._layout.num_blocks_for(num_tokens) - len(resident.lease.block_ids)
        return num_missing if num_missing > 0 else 0

    def grow(self, resident: Resident, num_blocks: int) -> None:
        """Adds blocks. Raises OutOfBlocks."""
        assert resident.lease is not None
        resident.lease.grow(num_blocks)

    def publish(self, resident: Resident) -> None:
        """Lets others use the blocks that are full of computed KV."""
        assert resident.lease is not None
        if resident.num_computed // self._layout.block_size > resident.lease.num_published:
            resident.lease.publish(self._names(resident, resident.num_computed))

    def final_blocks(self, resident: Resident) -> list[int]:
        """The blocks that no step to come will write to."""
        if resident.lease is None:
            return []
        return resident.lease.block_ids[: resident.num_computed // self._layout.block_size]

    def filled_blocks(self, resident: Resident) -> list[int]:
        """The blocks that hold any KV."""
        assert resident.lease is not None
        return resident.lease.block_ids[: self.blocks_for(resident.num_computed)]

    def give_back(self, resident: Resident) -> None:
        """Frees the blocks, if there are any; what is published stays to be found."""
        if resident.lease is not None:
            resident.lease.release()
            resident.lease = None
            resident.num_computed = 0

    def num_cached_tokens(self, resident: Resident) -> int:
        """Tokens whose KV was there when the resident got its blocks."""
        return resident.num_cached_blocks * self._layout.block_size

    def num_held_tokens(self, resident: Resident, num_cacheable: int) -> int:
        """Of the leading num_cacheable tokens, those in full blocks that the pool holds."""
        return self._allocator.num_held(self._names(resident, num_cacheable)) * self._layout.block_size

    def _names(self, resident: Resident, num_tokens: int) -> list[bytes]:
        """Names of the full blocks of the leading num_tokens tokens."""
        if not self._allocator.caching:
            return []
        return resident.names.names_of(resident.request.token_ids)[: num_tokens // self._layout.block_size]
