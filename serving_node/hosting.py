"""Blocks of this node's pool that hold tiles of other nodes' requests. Pure."""

from collections.abc import Iterable
from typing import Final

from serving_core.blocks import BlockAllocator, BlockLease

MOST_PARTS: Final = 3, 4  # of a pool: so much of it may be others'


def most_hosted_tokens(num_blocks: int, block_size: int, tile_tokens: int) -> int:
    """That a node holds for others at most: in whole tiles; 0 without tiles."""
    parts, of = MOST_PARTS
    return num_blocks * block_size * parts // of // tile_tokens * tile_tokens if tile_tokens else 0


class Hosting:
    """The annexes of other nodes' requests here, by number."""

    def __init__(self, allocator: BlockAllocator, block_size: int, tile_tokens: int) -> None:
        self._allocator = allocator
        self._blocks_each = tile_tokens // block_size
        self._most_blocks = most_hosted_tokens(allocator.num_blocks, block_size, tile_tokens) // block_size
        self._leases: dict[int, BlockLease] = {}

    @property
    def blocks_each(self) -> int:
        """Blocks of a tile; 0 without tiles."""
        return self._blocks_each

    @property
    def held(self) -> Iterable[BlockLease]:
        return self._leases.values()

    @property
    def num_blocks(self) -> int:
        """Blocks that are others'."""
        return sum(len(lease.block_ids) for lease in self.held)

    @property
    def may_grow(self) -> bool:
        """Whether one more tile may be others', if there is room."""
        return self._most_blocks - self.num_blocks >= self._blocks_each > 0

    def lease(self, number: int, most_tiles: int, *, num_spare: int = 0) -> list[int]:
        """Blocks of so many tiles at most, as far as there is room beside num_spare; perhaps none."""
        assert number not in self._leases
        room = min(self._most_blocks - self.num_blocks, self._allocator.num_free) - num_spare
        num_tiles = min(most_tiles, room // self._blocks_each) if self._blocks_each else 0
        if num_tiles <= 0:
            return []
        lease = self._leases[number] = self._allocator.allocate(num_tiles * self._blocks_each)
        return list(lease.block_ids)

    def release(self, number: int) -> None:
        """Nobody has the annex any more; it may have got no blocks."""
        if (lease := self._leases.pop(number, None)) is not None:
            lease.release()
