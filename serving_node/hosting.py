"""Blocks of this node's pool that hold tiles of other nodes' requests. Pure.

Tiles are recalled for an older request that has no room beside them: theirs begins again, and comes behind that one
here. As only older ones do so, the oldest keeps what it has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from serving_core.blocks import BlockAllocator, BlockLease

MOST_PARTS: Final = 3, 4  # of a pool: so much of it may be others'


def most_hosted_tokens(num_blocks: int, block_size: int, tile_tokens: int) -> int:
    """That a node holds for others at most: in whole tiles; 0 without tiles."""
    parts, of = MOST_PARTS
    return num_blocks * block_size * parts // of // tile_tokens * tile_tokens if tile_tokens else 0


@dataclass(slots=True)
class _Hosted:
    """One annex."""

    lease: BlockLease
    age: int  # of its request
    is_recalled: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.lease.block_ids)


class Hosting:
    """The annexes of other nodes' requests here, by number."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        tile_tokens: int,
        on_recalled: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_recalled` hears of each that is to be released."""
        self._allocator = allocator
        self._blocks_each = tile_tokens // block_size
        self._most_blocks = most_hosted_tokens(allocator.num_blocks, block_size, tile_tokens) // block_size
        self._on_recalled = on_recalled
        self._annexes: dict[int, _Hosted] = {}
        self.num_recalled = 0

    @property
    def blocks_each(self) -> int:
        """Blocks of a tile; 0 without tiles."""
        return self._blocks_each

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that hold KV of other nodes' requests, by the number of the annex."""
        return {number: each.lease for number, each in self._annexes.items()}

    @property
    def num_blocks(self) -> int:
        """Blocks that are others'."""
        return sum(each.num_blocks for each in self._annexes.values())

    def num_firm(self, age: float) -> int:
        """Blocks that are not taken back for a request of this age."""
        return sum(each.num_blocks for each in self._annexes.values() if each.age <= age)

    @property
    def is_recalling(self) -> bool:
        """Whether any come free in a moment."""
        return any(each.is_recalled for each in self._annexes.values())

    @property
    def may_grow(self) -> bool:
        """Whether one more tile may be others', if there is room."""
        return self._most_blocks - self.num_blocks >= self._blocks_each > 0

    def may_grow_for(self, age: int) -> bool:
        """The same for a request of this age, once younger ones are recalled."""
        return self._most_blocks - self.num_firm(age) >= self._blocks_each > 0

    def lease(self, number: int, most_tiles: int, age: int, *, num_spare: int = 0) -> list[int]:
        """Blocks of so many tiles at most, as far as there is room beside num_spare; perhaps none. `age` is that of
        their request."""
        assert number not in self._annexes
        room = min(self._most_blocks - self.num_blocks, self._allocator.num_free) - num_spare
        num_tiles = min(most_tiles, room // self._blocks_each) if self._blocks_each else 0
        if num_tiles <= 0:
            return []
        lease = self._allocator.allocate(num_tiles * self._blocks_each)
        self._annexes[number] = _Hosted(lease, age)
        return list(lease.block_ids)

    def recall(self) -> None:
        """Takes the blocks of the youngest request back, which begins again; they come free in a moment."""
        youngest = max(each.age for each in self._annexes.values())
        for number, each in self._annexes.items():
            if each.age == youngest:
                each.is_recalled = True
                self.num_recalled += 1
                self._on_recalled(number)

    def release(self, number: int) -> None:
        """Nobody has the annex any more; it may have got no blocks."""
        if (hosted := self._annexes.pop(number, None)) is not None:
            hosted.lease.release()
