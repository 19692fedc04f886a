"""Which KV blocks that a pool gave up lie in the second tier, and where. Pure, and torch-free.

    the pool ──evicted──> host memory ──no slot left──> the file ──no slot left──> gone
        ▲                      │                            │
        └──────read back───────┴────────────────────────────┘

Slots are numbered over both places, those of host memory first. A name has one slot and a slot one name. Of each place
what was not put or read for longest goes first; what is pinned, since it is being read, stays. A block that was read
back keeps its slot: when the pool gives it up again, nothing is to be copied.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from serving_core.blocks import NameChanges

KEPT: Final = 0.75  # of an estimate, when a measurement comes
FORGOTTEN: Final = 1 / 32  # of what makes an estimate longer than the probe's, when nothing is read because of it


@dataclass(frozen=True, slots=True)
class Copies:
    """What is to be copied before anything is written to these blocks: first from slots of host memory to those of the
    file, each of which is named once, then each block to its slot."""

    demotions: list[tuple[int, int]]
    block_ids: list[int]
    slots: list[int]


class TierIndex:
    """The names in the second tier of one node."""

    def __init__(self, num_host: int, num_disk: int) -> None:
        self.num_host: Final = num_host
        self.num_slots: Final = num_host + num_disk
        self._free = (list(range(num_host)), list(range(num_host, self.num_slots)))
        self._by_use: tuple[OrderedDict[bytes, None], OrderedDict[bytes, None]] = (OrderedDict(), OrderedDict())
        self._slot_of: dict[bytes, int] = {}
        self._name_in: dict[int, bytes] = {}  # the same the other way round
        self._pins: Counter[bytes] = Counter()
        self._demotions: dict[int, int] = {}  # slots of host memory, by those of the file that are to have the same
        self._uncopied: dict[bytes, int] = {}  # the block of each name whose bytes are still in the pool alone
        self._changes = NameChanges()

    def __contains__(self, name: object) -> bool:
        return name in self._slot_of

    @property
    def num_held(self) -> tuple[int, int]:
        """Blocks in host memory, and in the file."""
        in_host, on_disk = self._by_use
        return len(in_host), len(on_disk)

    def put(self, name: bytes, block_id: int) -> None:
        """The pool gives up the block of this name. If it is to be copied, `take_copies` says so."""
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
        """What is to be copied by now, if anything is."""
        if not self._uncopied and not self._demotions:
            return None
        slots = [self._slot_of[name] for name in self._uncopied]
        demotions = [(source, slot) for slot, source in self._demotions.items()]
        copies = Copies(demotions, list(self._uncopied.values()), slots)
        self._demotions, self._uncopied = {}, {}
        return copies

    def run(self, names: Sequence[bytes]) -> list[bytes]:
        """The leading ones of these names that are here."""
        return list(takewhile(self._slot_of.__contains__, names))

    def pin(self, names: Sequence[bytes]) -> None:
        """They are to stay until `unpin`, and count as used."""
        for name in reversed(names):  # a prefix loses its tail before its head
            self._pins[name] += 1
            self._by_use[self._place_of(name)].move_to_end(name)

    def unpin(self, names: Sequence[bytes]) -> None:
        """The end of a `pin` of the same names."""
        self._pins -= Counter(names)

    def slots_of(self, names: Sequence[bytes]) -> list[int]:
        """Where these are, which are here."""
        return [self._slot_of[name] for name in names]

    def forget(self, name: bytes) -> None:
        """What was to be there is not. Nothing happens where the name is gone by now, nor while others read it, too:
        the slot is nobody else's until they have found the same."""
        if name in self._slot_of and self._pins[name] <= 1:
            self._free[self._place_of(name)].append(self._leave(name))
            self._uncopied.pop(name, None)
            self._changes.removed(name)

    def lose(self, slots: Sequence[int]) -> None:
        """What was to be there could not be written. What is being read stays: whoever reads it finds out."""
        for slot in slots:
            name = self._name_in.get(slot)
            if name is not None and not self._pins[name]:
                self.forget(name)

    def take_names(self) -> list[bytes]:
        """All names, for one who knows none of them yet. Changes count from here."""
        self._changes.take()
        return list(self._slot_of)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names that came, and names that went, since the last call, netted out."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """Recounts everything from scratch: each slot is free or has one name."""
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
        """A slot of this place that is nobody's now; None where there is none to be had."""
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
        self._demotions.pop(below, None)  # of one that came there since the last copies, and has had to leave again
        if victim not in self._uncopied:
            self._demotions[below] = slot
        return slot


class TierRates:
    """Seconds that a block takes to be read back, of host memory and of the file: measured at start, then as read. An
    estimate by which nothing is read could not be measured again; so it comes closer to that of the start."""

    def __init__(self, num_host: int, host_s: float, disk_s: float) -> None:
        self._num_host = num_host
        self._at_start_s = (host_s, disk_s)
        self._each_s = [host_s, disk_s]

    def expected_s(self, slots: Sequence[int]) -> float:
        """Seconds to read these."""
        return sum(self._each_s[slot >= self._num_host] for slot in slots)

    def add(self, slots: Sequence[int], read_s: float) -> None:
        """They took so long."""
        expected_s = self.expected_s(slots)
        if expected_s <= 0 or read_s <= 0:
            return
        for place in self._places(slots):
            self._each_s[place] *= KEPT + (1 - KEPT) * read_s / expected_s

    def left(self, slots: Sequence[int]) -> None:
        """They were not read, as computing seemed faster."""
        for place in self._places(slots):
            beyond_s = self._each_s[place] - self._at_start_s[place]
            self._each_s[place] -= FORGOTTEN * max(0.0, beyond_s)

    def _places(self, slots: Sequence[int]) -> set[bool]:
        return {slot >= self._num_host for slot in slots}
