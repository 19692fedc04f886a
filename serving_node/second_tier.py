"""What becomes of blocks that the pool gives up, and of prompts whose blocks lie in the second tier. Pure.

A block that the pool gives up is copied to a slot of the tier before anything else is written to it. A prompt that is
about to start, new or put back, waits in the queue while blocks behind those that the pool holds are read back, if that
is faster than computing them; then it starts as any other, with what the pool holds. Others start meanwhile. Whatever
does not come, or not in time, is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prefill_node.reading import Reading, num_cacheable
from protos import inference_pb2
from serving_core.blocks import BlockAllocator, BlockLease
from serving_core.costs import StepCosts
from serving_core.leases import Leases
from serving_core.residents import Resident
from serving_core.tiers import TierIndex, TierRates
from serving_node.decisions import CancelLoad, Decision, Load, Spill

MAX_LOADS: Final = 4  # at a time
LOAD_DEADLINE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The second tier of one node; without slots there is none."""

    num_host: int = 0  # slots in host memory
    num_disk: int = 0  # slots in the file
    host_s: float = 0.0  # to read one back, as measured at start
    disk_s: float = 0.0
    reads_always: bool = False  # also where computing would be faster


NO_TIER: Final = TierPlan()


@dataclass(slots=True)
class _Loading:
    resident: Resident
    lease: BlockLease  # of the blocks that the pool held, and of those to come
    names: list[bytes]  # of them all
    loaded: list[bytes]  # of those to come
    slots: list[int]
    computed_s: float  # that they would have taken
    started_s: float


class SecondTier:
    """The blocks of one node beyond its pool."""

    def __init__(
        self,
        plan: TierPlan,
        allocator: BlockAllocator,
        leases: Leases,
        reading: Reading,
        costs: StepCosts,
        block_bytes: int,
    ) -> None:
        """`block_bytes` are those of one block over all ranks and layers."""
        self.index: Final = TierIndex(plan.num_host, plan.num_disk)
        self._plan = plan
        self._allocator = allocator
        self._leases = leases
        self._reading = reading
        self._costs = costs
        self._rates = TierRates(plan.num_host, plan.host_s, plan.disk_s)
        self._block_bytes = block_bytes
        self._loads: dict[int, _Loading] = {}
        self._num_loads = 0  # that ever began
        self._last_end_s = 0.0  # of a load
        self._decisions: list[Decision] = []
        self._told = inference_pb2.TierLoad()
        if self.index.num_slots:
            allocator.on_evict = self._evicted

    def take_decisions(self) -> list[Decision]:
        """What has been decided since the last call. Blocks are to be copied before any other decision is carried
        out."""
        decisions, self._decisions = self._decisions, []
        copies = self.index.take_copies()
        return decisions if copies is None else [Spill(copies), *decisions]

    @property
    def held(self) -> Iterable[BlockLease]:
        """Of blocks that are being read back."""
        return [load.lease for load in self._loads.values()]

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        return min((load.started_s + LOAD_DEADLINE_S for load in self._loads.values()), default=None)

    def fill(self, load: inference_pb2.NodeLoad) -> None:
        """Says what the tier holds and has done."""
        if not self.index.num_slots:
            return
        num_host, num_disk = self.index.num_held
        self._told.host_bytes, self._told.disk_bytes = num_host * self._block_bytes, num_disk * self._block_bytes
        load.tier.SetInParent()
        load.tier.MergeFrom(self._told)

    def holds_up(self, resident: Resident, num_spare: int, now: float) -> bool:
        """Whether a prompt that might start, if that leaves num_spare blocks free, is to wait for blocks of its own.
        Has them read where that pays, once each time that the prompt is queued."""
        if not self.index.num_slots or resident.has_looked:
            return False
        if resident.is_loading:
            return True
        if self._reading.num_needed(resident) + num_spare > self._allocator.num_free:
            return False  # nor is there room to start it
        if (found := self._worth_reading(resident)) is None:
            return False
        if len(self._loads) < MAX_LOADS:
            self._begin(resident, *found, now)
        return True

    def note_start(self, resident: Resident) -> None:
        """A prompt has got its blocks."""
        if self.index.num_slots:
            num_full = num_cacheable(resident) // self._leases.block_size
            self._told.num_misses += num_full - resident.num_cached_blocks

    def loaded(self, load_id: int, num_good: int, now: float) -> None:
        """The leading ones of these blocks, so many, are in the pool, on every rank."""
        load = self._loads.get(load_id)
        if load is None:
            return  # it was given up
        num_held, num_lost = len(load.names) - len(load.loaded), len(load.loaded) - num_good
        load.lease.publish(load.names[: num_held + num_good])
        if num_lost:
            self.index.forget(load.loaded[num_good])
            self._told.num_damaged += 1
        read_s = now - load.started_s
        self._told.num_hits += num_good
        self._told.read_bytes += num_good * self._block_bytes
        self._told.read_s += read_s
        self._told.saved_s += load.computed_s * num_good / len(load.loaded) - read_s
        self._end(load_id, now, is_measure=not num_lost)

    def tick(self, now: float) -> None:
        """Gives up what takes too long."""
        for load_id, load in list(self._loads.items()):
            if now >= load.started_s + LOAD_DEADLINE_S:
                self._decisions.append(CancelLoad(load_id))
                self._told.num_late += 1
                self._end(load_id, now, is_measure=True)

    def _worth_reading(self, resident: Resident) -> tuple[list[bytes], list[bytes], float] | None:
        """The names of leading blocks, of those among them that are to be read back, and the seconds that they would
        take to be computed; None where nothing is to be read."""
        num_cached = self._leases.num_held_tokens(resident, num_cacheable(resident))  # which are found again below
        names = self._leases.names_in(resident, num_cacheable(resident), self._is_held)
        num_held = num_cached // self._leases.block_size
        loaded = self.index.run(names[num_held:])
        if not loaded:
            return None
        size = self._leases.block_size
        computed_s = self._costs.chunk_s(num_held * size, len(loaded) * size, is_first=False)
        slots = self.index.slots_of(loaded)
        if not self._plan.reads_always and self._rates.expected_s(slots) >= computed_s:
            self._rates.left(slots)
            return None
        return names[: num_held + len(loaded)], loaded, computed_s

    def _begin(
        self, resident: Resident, names: list[bytes], loaded: list[bytes], computed_s: float, now: float
    ) -> None:
        self.index.pin(loaded)
        lease = self._allocator.allocate(len(names), names[: len(names) - len(loaded)])
        slots = self.index.slots_of(loaded)
        self._num_loads += 1
        self._loads[self._num_loads] = _Loading(resident, lease, names, loaded, slots, computed_s, now)
        resident.is_loading = True
        self._decisions.append(Load(self._num_loads, slots, lease.block_ids[-len(loaded) :]))

    def _end(self, load_id: int, now: float, *, is_measure: bool) -> None:
        """Loads share one reader: the seconds in which others came to their ends are theirs."""
        load = self._loads.pop(load_id)
        if is_measure:
            self._rates.add(load.slots, now - max(load.started_s, self._last_end_s))
        self._last_end_s = now
        self.index.unpin(load.loaded)
        load.lease.release()
        load.resident.is_loading, load.resident.has_looked = False, True

    def _evicted(self, name: bytes, block_id: int) -> None:
        if self.index.put(name, block_id):
            self._told.written_bytes += self._block_bytes

    def _is_held(self, name: bytes) -> bool:
        return name in self._allocator.blocks_by_name or name in self.index
