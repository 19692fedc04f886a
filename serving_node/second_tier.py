"""What becomes of blocks that the pool gives up, and of prompts whose blocks lie in the second tier. Pure.

A block that the pool gives up is copied to a slot of the tier before anything else is written to it. A prompt that is
about to start, new or put back, waits in the queue while blocks behind those that the pool holds are read back, if that
is faster than computing them; then it starts as any other, with what the pool holds. Others start meanwhile. Whatever
does not come, or not in time, is computed. What another node is to be lent is read back by the same rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from prefill_node.reading import Reading, num_cacheable
from protos import inference_pb2
from serving_core.blocks import BlockAllocator, BlockLease
from serving_core.costs import StepCosts
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest
from serving_core.prefix import BlockNames
from serving_core.tiers import TierIndex, TierRates
from serving_node.decisions import CancelLoad, Decision, Load, Spill

MAX_LOADS: Final = 4  # at a time
MAX_FETCHED: Final = 2  # loads at which none is begun for another node: this one's prompts wait for a free one
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
    node_request: NodeRequest | None  # that waits for them; None: another node does
    on_end: Callable[[], None]  # when they are there, or will not come
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
        self._copied: frozenset[int] = frozenset()  # slots that got blocks of the pool by the last copies
        self._told = inference_pb2.TierLoad()
        if self.index.num_slots:
            allocator.on_evict = self.index.put

    def take_decisions(self) -> list[Decision]:
        """What has been decided since the last call. Blocks are to be copied before any other decision is carried
        out."""
        decisions, self._decisions = self._decisions, []
        copies = self.index.take_copies()
        if copies is None:
            return decisions
        self._copied = frozenset(copies.slots)
        self._told.written_bytes += len(copies.slots) * self._block_bytes
        return [Spill(copies), *decisions]

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that are being read back, by the number of the load."""
        return {load_id: load.lease for load_id, load in self._loads.items()}

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

    def holds_up(self, node_request: NodeRequest, num_spare: int, now: float) -> bool:
        """Whether a prompt that might start, if that leaves num_spare blocks free, is to wait for blocks of its own.
        Has them read where that pays, once each time that the prompt is queued."""
        if not self.index.num_slots or node_request.has_looked:
            return False
        if node_request.is_loading:
            return True
        if self._reading.num_needed(node_request) + num_spare > self._allocator.num_free:
            return False  # nor is there room to start it
        in_pool, loaded = self._find(node_request.names, node_request.request.token_ids, num_cacheable(node_request))
        if (computed_s := self._worth_reading(in_pool, loaded)) is None:
            node_request.has_looked = True
            return False
        if len(self._loads) < MAX_LOADS:
            node_request.is_loading = True
            self._begin(in_pool, loaded, computed_s, now, node_request, partial(_let_start, node_request))
        return True

    def fetch(
        self,
        names: BlockNames,
        token_ids: Sequence[int],
        num_known: int,
        num_spare: int,
        now: float,
        on_end: Callable[[], None],
    ) -> bool:
        """Has full blocks of these tokens, behind those that the pool holds, read back for another node, which has the
        first num_known: as many as leave num_spare free, where that pays. on_end is called when they are in the pool,
        or will not come. False where nothing is read."""
        if not self.index.num_slots or len(self._loads) >= MAX_FETCHED:
            return False
        in_pool, loaded = self._find(names, token_ids, len(token_ids))
        room = self._allocator.num_free - num_spare - self._allocator.num_needed(len(in_pool), in_pool)
        loaded = loaded[: max(0, room)]
        if (computed_s := self._worth_reading(in_pool, loaded, num_known)) is None:
            return False
        self._begin(in_pool, loaded, computed_s, now, None, on_end)
        return True

    def note_start(self, node_request: NodeRequest) -> None:
        """A prompt has got its blocks."""
        if self.index.num_slots:
            num_full = num_cacheable(node_request) // self._leases.block_size
            self._told.num_misses += num_full - node_request.num_cached_blocks

    def loaded(self, load_id: int, num_good: int, now: float) -> None:
        """The leading ones of these blocks, so many, are in the pool, on every rank."""
        load = self._loads.get(load_id)
        if load is None:
            return  # it was given up
        num_held, num_lost = len(load.names) - len(load.loaded), len(load.loaded) - num_good
        load.lease.publish(load.names[: num_held + num_good])
        if num_lost:
            self._told.num_damaged += 1
        for name in load.loaded[num_good:]:  # of no use before the first of them is there again
            self.index.forget(name)
        read_s = now - load.started_s
        self._told.num_hits += num_good
        self._told.read_bytes += num_good * self._block_bytes
        self._told.read_s += read_s
        self._told.saved_s += load.computed_s * num_good / len(load.loaded) - read_s
        self._note_end(load, now, is_measure=not num_lost)
        self._end(load_id)

    def lost(self, slots: Sequence[int]) -> None:
        """What was to be copied there could not be."""
        self._told.written_bytes -= len(self._copied.intersection(slots)) * self._block_bytes
        self.index.lose(slots)

    def cancel(self, node_request: NodeRequest) -> None:
        """What is being read back for it nobody waits for any more."""
        for load_id, load in list(self._loads.items()):
            if load.node_request is node_request:
                self._decisions.append(CancelLoad(load_id))
                self._end(load_id)

    def tick(self, now: float) -> None:
        """Gives up what takes too long."""
        for load_id, load in list(self._loads.items()):
            if now >= load.started_s + LOAD_DEADLINE_S:
                self._decisions.append(CancelLoad(load_id))
                self._told.num_late += 1
                self._note_end(load, now, is_measure=True)
                self._end(load_id)

    def _find(self, names: BlockNames, token_ids: Sequence[int], num_tokens: int) -> tuple[list[bytes], list[bytes]]:
        """Of the leading full blocks of num_tokens of these tokens the names of those in the pool, and of those behind
        them in the tier."""
        is_in_pool = self._allocator.blocks_by_name.__contains__
        in_pool = self._leases.names_in(names, token_ids, num_tokens, is_in_pool)  # which are found again now
        held = self._leases.names_in(names, token_ids, num_tokens, self._is_held)
        return in_pool, self.index.run(held[len(in_pool) :])

    def _worth_reading(self, in_pool: list[bytes], loaded: list[bytes], num_known: int = 0) -> float | None:
        """Seconds that those to be loaded would take to be computed, but for those among the first num_known; None
        where nothing is to be read."""
        num_before, size = max(len(in_pool), num_known), self._leases.block_size
        num_new = len(in_pool) + len(loaded) - num_before
        if num_new <= 0:
            return None
        computed_s = self._costs.chunk_s(num_before * size, num_new * size, is_first=False)
        slots = self.index.slots_of(loaded)
        if not self._plan.reads_always and self._rates.expected_s(slots) >= computed_s:
            self._rates.left(slots)
            return None
        return computed_s

    def _begin(
        self,
        in_pool: list[bytes],
        loaded: list[bytes],
        computed_s: float,
        now: float,
        node_request: NodeRequest | None,
        on_end: Callable[[], None],
    ) -> None:
        self.index.pin(loaded)
        names = [*in_pool, *loaded]
        lease = self._allocator.allocate(len(names), in_pool)
        slots = self.index.slots_of(loaded)
        self._num_loads += 1
        self._loads[self._num_loads] = _Loading(node_request, on_end, lease, names, loaded, slots, computed_s, now)
        self._decisions.append(Load(self._num_loads, slots, lease.block_ids[-len(loaded) :]))

    def _note_end(self, load: _Loading, now: float, *, is_measure: bool) -> None:
        """Loads share one reader: the seconds in which others came to their ends are theirs."""
        if is_measure:
            self._rates.add(load.slots, now - max(load.started_s, self._last_end_s))
        self._last_end_s = now

    def _end(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self.index.unpin(load.loaded)
        load.on_end()
        load.lease.release()

    def _is_held(self, name: bytes) -> bool:
        return name in self._allocator.blocks_by_name or name in self.index


def _let_start(node_request: NodeRequest) -> None:
    node_request.is_loading, node_request.has_looked = False, True
