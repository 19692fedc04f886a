"""Index the KV blocks that a pool evicted to KV offload (host tier and disk tier). Pure and torch-free.

    the pool ──evicted──> host tier ──no slot free──> disk tier ──no slot free──> dropped
        ▲                     │                           │
        └──────loaded─────────┴───────────────────────────┘

Slots are numbered over both tiers, the host tier's first. A block hash has at most one slot, and a slot at most one
hash. In each tier the least recently used hash goes first; pinned hashes, which are being loaded, stay. A loaded block
keeps its slot: when the pool evicts the block again, nothing is copied.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from serving_core.node.blocks import NameChanges

KEPT: Final = 0.75  # weight of the old estimate when a measurement comes
FORGOTTEN: Final = 1 / 32  # fraction by which an estimate moves toward the probe's when a load is skipped because of it


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies to make before blocks are overwritten: first from host slots to disk slots, then from blocks to slots.

    Each slot is named once. `block_ids` and `slots` are pairs, in order.
    """

    demotions: list[tuple[int, int]]
    block_ids: list[int]
    slots: list[int]


class TierIndex:
    """Index the block hashes that are in KV offload on one node, by the slot of each."""

    def __init__(self, num_host: int, num_disk: int) -> None:
        self.num_host: Final = num_host
        self.num_slots: Final = num_host + num_disk
        self._free = (list(range(num_host)), list(range(num_host, self.num_slots)))
        self._by_use: tuple[OrderedDict[bytes, None], OrderedDict[bytes, None]] = (OrderedDict(), OrderedDict())
        self._slot_of: dict[bytes, int] = {}
        self._name_in: dict[int, bytes] = {}  # the inverse of the slots by hash
        self._pins: Counter[bytes] = Counter()
        # Source slots in host memory, by the disk slots that receive their content
        self._demotions: dict[int, int] = {}
        self._uncopied: dict[bytes, int] = {}  # the block of each hash whose bytes are still only in the pool
        self._changes = NameChanges()

    def __contains__(self, name: object) -> bool:
        return name in self._slot_of

    @property
    def num_held(self) -> tuple[int, int]:
        """Return the number of blocks in host memory and on disk."""
        in_host, on_disk = self._by_use
        return len(in_host), len(on_disk)

    def put(self, name: bytes, block_id: int) -> None:
        """Give the hash `name` of a block that the pool evicts a slot, evicting another hash if necessary.

        `block_id` is where the pool has it; `take_copies` returns the copies that this requires. A hash that has a slot
        counts as used now. The hash is dropped if no slot can be made free.
        """
        if name in self._slot_of:
            self._by_use[self._place_of(name)].move_to_end(name)
            return
        slot = self._vacate(0 if self.num_host else 1)
        if slot is None:
            return
        self._enter(name, slot)
        self._changes.stored(name)
        self._uncopied[name] = block_id

    def take_copies(self) -> Copies | None:
        """Return the copies that are to be made now, and forget them; None if there are none."""
        if not self._uncopied and not self._demotions:
            return None
        slots = [self._slot_of[name] for name in self._uncopied]
        demotions = [(source, slot) for slot, source in self._demotions.items()]
        copies = Copies(demotions, list(self._uncopied.values()), slots)
        self._demotions, self._uncopied = {}, {}
        return copies

    def run(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the leading hashes of `names` that are in KV offload."""
        return list(takewhile(self._slot_of.__contains__, names))

    def pin(self, names: Sequence[bytes]) -> None:
        """Keep these hashes from eviction until `unpin`, and mark them as used."""
        for name in reversed(names):  # a prefix loses its tail before its head
            self._pins[name] += 1
            self._by_use[self._place_of(name)].move_to_end(name)

    def unpin(self, names: Sequence[bytes]) -> None:
        """End a `pin` of the same hashes."""
        self._pins -= Counter(names)

    def slots_of(self, names: Sequence[bytes]) -> list[int]:
        """Return the slots of these hashes, which must be held."""
        return [self._slot_of[name] for name in names]

    def forget(self, name: bytes) -> None:
        """Drop a hash whose slot turned out to be invalid, and free the slot.

        Does nothing if the hash is gone, or while other loads use it: those find the slot invalid too.
        """
        if name in self._slot_of and self._pins[name] <= 1:
            self._free[self._place_of(name)].append(self._leave(name))
            self._uncopied.pop(name, None)
            self._changes.removed(name)

    def lose(self, slots: Sequence[int]) -> None:
        """Drop the hashes of these slots, which could not be written.

        Pinned hashes stay: their load finds the slot invalid.
        """
        for slot in slots:
            name = self._name_in.get(slot)
            if name is not None and not self._pins[name]:
                self.forget(name)

    def take_names(self) -> list[bytes]:
        """Return all hashes, for a receiver that knows none yet. `take_changes` counts from here."""
        self._changes.take()
        return list(self._slot_of)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes added and dropped since the last call, net of each other."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """Assert that each slot is free or has one hash, and that all indices agree."""
        for place, slots in enumerate((range(self.num_host), range(self.num_host, self.num_slots))):
            taken = [self._slot_of[name] for name in self._by_use[place]]
            assert sorted([*taken, *self._free[place]]) == list(slots), "a slot is lost or has two names"
        assert self._slot_of.keys() == self._by_use[0].keys() | self._by_use[1].keys(), "a name has no place"
        assert self._name_in == {slot: name for name, slot in self._slot_of.items()}, "names and slots differ"
        assert self._uncopied.keys() <= self._slot_of.keys(), "a block without a slot is to be copied"
        assert all(count > 0 for count in self._pins.values())
        self._changes.check_integrity(self._slot_of)

    def _place_of(self, name: bytes) -> int:
        return int(self._slot_of[name] >= self.num_host)

    def _enter(self, name: bytes, slot: int) -> None:
        self._slot_of[name], self._name_in[slot] = slot, name
        self._by_use[self._place_of(name)][name] = None

    def _leave(self, name: bytes) -> int:
        del self._by_use[self._place_of(name)][name]
        slot = self._slot_of.pop(name)
        del self._name_in[slot]
        return slot

    def _vacate(self, place: int) -> int | None:
        """Return a free slot of this tier, evicting if necessary; None if there is none."""
        if self._free[place]:
            return self._free[place].pop()
        victim = next((name for name in self._by_use[place] if name not in self._pins), None)
        if victim is None:
            return None
        slot = self._leave(victim)
        below = self._vacate(1) if place == 0 else None
        if below is None:
            self._uncopied.pop(victim, None)
            self._changes.removed(victim)
            return slot
        self._enter(victim, below)
        self._demotions.pop(below, None)  # of a block that came since the last copies and is evicted already
        if victim not in self._uncopied:
            self._demotions[below] = slot
        return slot


class TierRates:
    """Estimate the seconds to load a block from host memory and from disk, measured at the start and with each load.

    A too long estimate prevents loads and could never be corrected, so each skipped load moves it toward the initial
    one.
    """

    def __init__(self, num_host: int, host_s: float, disk_s: float) -> None:
        self._num_host = num_host
        self._at_start_s = (host_s, disk_s)
        self._each_s = [host_s, disk_s]

    def expected_s(self, slots: Sequence[int]) -> float:
        """Return the expected seconds to load the blocks of these slots."""
        return sum(self._each_s[slot >= self._num_host] for slot in slots)

    def add(self, slots: Sequence[int], read_s: float) -> None:
        """Record that a load of these slots took `read_s` seconds."""
        expected_s = self.expected_s(slots)
        if expected_s <= 0 or read_s <= 0:
            return
        for place in self._places(slots):
            self._each_s[place] *= KEPT + (1 - KEPT) * read_s / expected_s

    def left(self, slots: Sequence[int]) -> None:
        """Record that these slots were not loaded because computing seemed faster."""
        for place in self._places(slots):
            beyond_s = self._each_s[place] - self._at_start_s[place]
            self._each_s[place] -= FORGOTTEN * max(0.0, beyond_s)

    def _places(self, slots: Sequence[int]) -> set[bool]:
        return {slot >= self._num_host for slot in slots}
