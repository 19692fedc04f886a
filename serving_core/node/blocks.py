"""Track which KV block is leased, free or cached, by block hash. Pure.

    free ──lease──> leased ──publish──> leased and hashed ──last lease ends──> cached
      ▲               │                        ▲                               │ │
      └──lease ends───┘                        └───────lease by hash───────────┘ │
                      ▲                                                          │
                      └───────evicted, when none is free: the hash is dropped────┘

A lease is the right to use blocks; it is released exactly once. Several leases may share a published block, to read
only: its owner writes to the block before publishing it, and nobody does afterwards. `names` are block hashes
(serving_core/node/prefix.py). The allocator touches no tensor.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from serving_core.errors import OutOfBlocks


class BlockLease:
    """Blocks leased to one owner, in table order. A second release is a bug and raises.

    The first `num_private` blocks are never shared. The `num_published` blocks behind them hold final KV; the leading
    `num_cached` of these held it before the lease.
    """

    def __init__(
        self, allocator: "BlockAllocator", block_ids: list[int], num_cached: int, num_private: int = 0
    ) -> None:
        self._allocator = allocator
        self._block_ids = block_ids
        self._released = False
        self.num_private = num_private
        self.num_cached = num_cached
        self.num_published = num_cached

    @property
    def block_ids(self) -> list[int]:
        """Return the block table, which `grow` extends in place. Callers must not change it."""
        assert not self._released, "a released lease was used"
        return self._block_ids

    def grow(self, num_blocks: int) -> None:
        """Append `num_blocks` free blocks to the table, all or none. Raises OutOfBlocks when too few are free."""
        assert not self._released, "a released lease was used"
        self._block_ids.extend(self._allocator._take(num_blocks))

    def publish(self, names: Sequence[bytes]) -> None:
        """Publish the first len(names) blocks that are not private, full and final, under these block hashes.

        Later leases then find them. A hash that a leased block already has stays with that block until no lease has
        it, and then goes to this lease's copy. Hashes of earlier calls are not examined again.
        """
        assert not self._released, "a released lease was used"
        first = self.num_private
        assert first + len(names) <= len(self._block_ids), "more names than blocks"
        if len(names) > (num_published := self.num_published):
            self._allocator._name(self._block_ids[first + num_published : first + len(names)], names[num_published:])
            self.num_published = len(names)

    def publish_private(self, names: Sequence[bytes]) -> "BlockLease":
        """Publish the private blocks under these block hashes, and take new ones in their place. Raises OutOfBlocks.

        Returns a lease of the published blocks.
        """
        assert not self._released, "a released lease was used"
        old, self._block_ids[: self.num_private] = (
            self._block_ids[: self.num_private],
            self._allocator._take(self.num_private),
        )
        published = self._allocator._new_lease(old, 0)
        published.publish(names)
        return published

    def shed(self, num_blocks: int) -> None:
        """Free the leading `num_blocks` blocks, none of which was ever published (asserted)."""
        assert not self._released, "a released lease was used"
        assert not self.num_published, "a published block was shed"
        self._allocator._put_back(self._block_ids[:num_blocks])
        del self._block_ids[:num_blocks]

    def trim(self, num_blocks: int) -> None:
        """Free the last `num_blocks` blocks, none of which was ever published (asserted)."""
        assert not self._released, "a released lease was used"
        num_left = len(self._block_ids) - num_blocks
        assert num_left >= self.num_private + self.num_published, "a published block was trimmed"
        self._allocator._put_back(self._block_ids[num_left:])
        del self._block_ids[num_left:]

    def release(self) -> None:
        """End the lease. Published blocks that no other lease has stay cached; the others become free."""
        assert not self._released, "a lease was released twice"
        self._released = True
        self._allocator._give_back(self)


class BlockAllocator:
    """Lease, publish and evict the blocks of one node's KV pool.

    Free blocks are leased lowest id first, so that tables tend to be contiguous; when none is free, the least recently
    used cached blocks are evicted. Without `caching` no block ever has a hash.

    If the leases publish the hashes of prompts from their first block on, a hash is evicted only after all behind it:
    of several copies of a block a leased one has the hash, so that the leases of a cached block have all ended, and
    each has released the blocks before it later.
    """

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._free = list(range(num_blocks))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()  # hashed and in no lease, least recently used first
        self._num_leases = [0] * num_blocks  # number of leases of each block
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._copy_of: dict[int, bytes] = {}  # the hash of each published block that another block has it for
        self._copies: dict[bytes, dict[int, None]] = {}  # the same blocks by hash, in the order of publication
        self._leases: dict[int, BlockLease] = {}
        self._changes = NameChanges()
        self.on_evict: Callable[[bytes, int], None] | None = None
        """Called with each dropped hash and its block, whose KV stays until it is overwritten."""

    # ---- figures ----

    @property
    def blocks_by_name(self) -> Mapping[bytes, int]:
        """Return the block of every published hash, leased or cached, as a live view."""
        return MappingProxyType(self._block_of)

    @property
    def num_free(self) -> int:
        """Return the number of blocks that can be leased, including cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Return the number of unleased blocks that hold the KV of an earlier request."""
        return len(self._cached)

    def num_held(self, names: Sequence[bytes]) -> int:
        """Return how many of the leading hashes of `names` have a block, leased or cached."""
        return next((index for index, name in enumerate(names) if name not in self._block_of), len(names))

    def num_needed(self, num_blocks: int, names: Sequence[bytes]) -> int:
        """Return by how much `allocate` with the same arguments would lower num_free.

        `allocate` succeeds if num_free is at least this.
        """
        held = (self._block_of[name] for name in names[: self.num_held(names)])
        return num_blocks - sum(self._num_leases[block] > 0 for block in held)

    def num_leaked(self, leases: Iterable[BlockLease]) -> int:
        """Return the number of leases' blocks outside `leases`: 0 if these are all existing leases."""
        known = {id(lease) for lease in leases}
        return sum(len(lease._block_ids) for key, lease in self._leases.items() if key not in known)

    # ---- leases ----

    def allocate(self, num_blocks: int, names: Sequence[bytes] = (), num_private: int = 0) -> BlockLease:
        """Lease `num_blocks` blocks, all or none. Raises OutOfBlocks when too few are free.

        Behind `num_private` blocks come those of the leading hashes, as many as exist (the lease's num_cached); they
        keep their KV and may be in other leases too. The other blocks are in no other lease and hold no valid data.
        """
        assert num_private + len(names) <= num_blocks, "more names than blocks"
        needed = self.num_needed(num_blocks, names)
        if needed > self.num_free:
            raise self._out_of_blocks(needed)
        held = [self._block_of[name] for name in names[: self.num_held(names)]]
        for block in held:
            self._num_leases[block] += 1
            self._cached.pop(block, None)
        new = self._take(num_blocks - len(held))
        return self._new_lease(new[:num_private] + held + new[num_private:], len(held), num_private)

    def _new_lease(self, block_ids: list[int], num_cached: int, num_private: int = 0) -> BlockLease:
        lease = BlockLease(self, block_ids, num_cached, num_private)
        self._leases[id(lease)] = lease
        return lease

    def _take(self, num_blocks: int) -> list[int]:
        """Return blocks for one lease, ready to be written."""
        if num_blocks > self.num_free:
            raise self._out_of_blocks(num_blocks)
        num_evicted = max(0, num_blocks - len(self._free))
        blocks = [heapq.heappop(self._free) for _ in range(num_blocks - num_evicted)]
        blocks += sorted(self._evict() for _ in range(num_evicted))
        for block in blocks:
            self._num_leases[block] = 1
        return blocks

    def drop(self, names: Iterable[bytes]) -> None:
        """Evict the cached blocks with these hashes; a leased block keeps its hash."""
        for name in names:
            if (block := self._block_of.get(name, -1)) in self._cached:
                del self._cached[block]
                heapq.heappush(self._free, self._forget(block))

    def _evict(self) -> int:
        return self._forget(self._cached.popitem(last=False)[0])

    def _forget(self, block: int) -> int:
        """Drop the hash of a block in no lease, and return the block."""
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._changes.removed(name)
        if self.on_evict is not None:
            self.on_evict(name, block)
        return block

    def _give_back(self, lease: BlockLease) -> None:
        del self._leases[id(lease)]
        self._put_back(lease._block_ids)

    def _put_back(self, block_ids: Sequence[int]) -> None:
        num_leases, name_of = self._num_leases, self._name_of
        for block in reversed(block_ids):  # a prefix loses its tail before its head: without the head, no block
            num_leases[block] = num_left = num_leases[block] - 1  # behind it can be found
            if num_left:
                continue
            if block not in name_of:
                self._drop_copy(block)
                heapq.heappush(self._free, block)
            elif copies := self._copies.get(name_of[block]):
                self._move_name(block, self._drop_copy(next(iter(copies))))
            else:
                self._cached[block] = None

    def _out_of_blocks(self, num_blocks: int) -> OutOfBlocks:
        return OutOfBlocks(f"{num_blocks} blocks asked for, {self.num_free} of {self.num_blocks} are free")

    # ---- block hashes ----

    def _name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        if not self.caching:
            return
        block_of, cached = self._block_of, self._cached
        for block, name in zip(blocks, names, strict=True):
            if name not in block_of:
                block_of[name] = block
                self._name_of[block] = name
                self._changes.stored(name)
            elif (holder := block_of[name]) in cached:
                del cached[holder]
                self._move_name(holder, block)
            else:
                self._copy_of[block] = name
                self._copies.setdefault(name, {})[block] = None

    def _move_name(self, old: int, new: int) -> None:
        """Give the hash of a block in no lease to a leased copy of the block, and free the block."""
        name = self._name_of.pop(old)
        self._name_of[new], self._block_of[name] = name, new
        heapq.heappush(self._free, old)

    def _drop_copy(self, block: int) -> int:
        """Forget whose copy the block is, if it is one, and return the block."""
        if (name := self._copy_of.pop(block, None)) is not None:
            del self._copies[name][block]
            if not self._copies[name]:
                del self._copies[name]
        return block

    def take_names(self) -> list[bytes]:
        """Return all published hashes, for a receiver that knows none yet. `take_changes` counts from here."""
        self._changes.take()
        return list(self._block_of)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes added and dropped since the last call: at most num_blocks of each.

        A hash that was added and dropped in between is in neither.
        """
        return self._changes.take()

    def check_integrity(self) -> None:
        """Assert that each block is free, cached or leased, that only hashed blocks are shared, and all counts."""
        leases = Counter(block for lease in self._leases.values() for block in lease._block_ids)
        owned = [*self._free, *self._cached, *leases]
        assert sorted(owned) == list(range(self.num_blocks)), "a block is lost or owned twice"
        assert self._num_leases == [leases[block] for block in range(self.num_blocks)], "leases are miscounted"
        for lease in self._leases.values():
            assert len(set(lease._block_ids)) == len(lease._block_ids), "a block is twice in a lease"
            end = lease.num_private + lease.num_published
            assert lease.num_cached <= lease.num_published
            assert end <= len(lease._block_ids)
            for index, block in enumerate(lease._block_ids):
                assert leases[block] == 1 or block in self._name_of, "a block without a name is shared"
                assert lease.num_private <= index < end or block not in self._name_of, "a block has a name too early"
        assert self._block_of == {name: block for block, name in self._name_of.items()}, "names and blocks differ"
        assert set(self._cached) == set(self._name_of) - set(leases), "a cached block has no name"
        copies = {block: name for name, blocks in self._copies.items() for block in blocks}
        assert self._copy_of == copies, "copies and names differ"
        assert all(leases[block] == 1 and leases[self._block_of[copies[block]]] for block in copies), "a copy is cached"
        assert all(self._copies.values()), "a name without copies is kept"
        assert self.caching or not self._name_of, "a block has a name without caching"
        self._changes.check_integrity(self._block_of)


class NameChanges:
    """Net additions and removals of block hashes since the last report."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}  # in order
        self._removed: dict[bytes, None] = {}

    def stored(self, name: bytes) -> None:
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def removed(self, name: bytes) -> None:
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    def check_integrity(self, held: Collection[bytes]) -> None:
        assert all(name in held for name in self._stored), "a name is not there that is said to be"
        assert not any(name in held for name in self._removed), "a name is there that is said to be gone"
