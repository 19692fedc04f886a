"""Decide which evicted blocks go to KV offload (host memory, disk) and which are read back. Pure.

An evicted block is copied to a slot of KV offload before its memory is overwritten. A prompt that is about to start,
new or preempted, waits in the queue while blocks behind the cached prefix are read back, if that is faster than
computing them. Then it starts as any other prompt; other prompts start meanwhile. Blocks that do not arrive in time are
computed. Blocks for a remote prefix fetch are read back by the same rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from prefill_node.scheduler import PrefillScheduler, num_cacheable
from protos import inference_pb2
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.costs import StepCosts
from serving_core.node.leases import Leases
from serving_core.node.prefix import BlockNames
from serving_core.node.requests import NodeRequest, Waiting
from serving_core.node.tiers import TierIndex, TierRates
from serving_node.decisions import CancelLoad, Decision, Decisions, Load, Offload
from serving_node.sources import KVSource

MAX_LOADS: Final = 4  # at a time
MAX_FETCHED: Final = 2  # loads from which on none begins for another node, so that own prompts find one free
LOAD_DEADLINE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The slots of one node's KV offload and the time to read them; without slots there is no offload."""

    num_host: int = 0  # slots in host memory
    num_disk: int = 0  # slots in the file
    host_s: float = 0.0  # to read one block back, measured at start
    disk_s: float = 0.0
    reads_always: bool = False  # even where computing is faster


NO_OFFLOAD: Final = OffloadPlan()


@dataclass(slots=True)
class _Loading:
    node_request: NodeRequest | None  # waits for the blocks; None: another node waits
    on_end: Callable[[], None]  # called when the blocks are there or will not come
    lease: BlockLease  # of the cached blocks and of the blocks to be read
    names: list[bytes]  # block hashes of all of them
    loaded: list[bytes]  # block hashes of the blocks to be read
    slots: list[int]
    computed_s: float  # that computing the blocks would take
    started_s: float


class KVOffload(KVSource):
    """Decides which blocks of one node are offloaded and which are read back."""

    kind = "KV offload"

    def __init__(
        self,
        plan: OffloadPlan,
        index: TierIndex,
        allocator: BlockAllocator,
        leases: Leases,
        prefill: PrefillScheduler,
        costs: StepCosts,
        decisions: Decisions,
        block_bytes: int,
    ) -> None:
        """Manage the slots of `plan`, whose contents `index` tracks.

        `block_bytes` is the size of one block over all ranks and layers. Evicted blocks of `allocator` go to the index.
        """
        self._index = index
        self._decisions = decisions
        self._plan = plan
        self._allocator = allocator
        self._leases = leases
        self._prefill = prefill
        self._costs = costs
        self._rates = TierRates(plan.num_host, plan.host_s, plan.disk_s)
        self._block_bytes = block_bytes
        self._loads: dict[int, _Loading] = {}
        self._num_loads = 0  # loads begun since the start
        self._last_end_s = 0.0  # end of the last load
        self._copied: frozenset[int] = frozenset()  # slots written by the last copies
        self._stats = inference_pb2.TierLoad()
        allocator.on_evict = index.put
        decisions.decide_first = self._offload

    def _offload(self) -> list[Decision]:
        """Return the copies of evicted blocks, which must be carried out before any other decision."""
        copies = self._index.take_copies()
        if copies is None:
            return []
        self._copied = frozenset(copies.slots)
        self._stats.written_bytes += len(copies.slots) * self._block_bytes
        return [Offload(copies)]

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that are being read back, by the number of the load."""
        return {load_id: load.lease for load_id, load in self._loads.items()}

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if no load runs."""
        return min((load.started_s + LOAD_DEADLINE_S for load in self._loads.values()), default=None)

    def fill(self, load: inference_pb2.NodeLoad) -> None:
        """Set the fields of `load.tier`: contents and counters of KV offload."""
        num_host, num_disk = self._index.num_held
        self._stats.host_bytes, self._stats.disk_bytes = num_host * self._block_bytes, num_disk * self._block_bytes
        load.tier.SetInParent()
        load.tier.MergeFrom(self._stats)

    def must_wait(self, node_request: NodeRequest, num_spare: int, now: float) -> bool:
        """Return whether a prompt that might start must wait for blocks from KV offload.

        Begins to read the blocks where that pays and the pool has blocks to start the prompt. The start must leave
        `num_spare` blocks free. A prompt is checked once each time that it is queued.
        """
        waiting = node_request.waiting
        if waiting is None or waiting.has_looked:
            return False
        if waiting.is_loading:
            return True
        if self._prefill.num_needed(node_request) + num_spare > self._allocator.num_free:
            return False  # without enough free blocks to start it either
        in_pool, loaded = self._find(node_request.names, node_request.request.token_ids, num_cacheable(node_request))
        if (computed_s := self._worth_reading(in_pool, loaded)) is None:
            waiting.has_looked = True
            return False
        if len(self._loads) < MAX_LOADS:
            waiting.is_loading = True
            self._begin(in_pool, loaded, computed_s, now, node_request, partial(_let_start, waiting))
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
        """Begin to read back blocks of these tokens for another node; return whether any are read.

        `names` computes their block hashes. The other node has the first `num_known` blocks. At most as many blocks are
        read as leave `num_spare` blocks free, and only where that pays. `on_end` is called when the blocks are in the
        pool or will not come.
        """
        if len(self._loads) >= MAX_FETCHED:
            return False
        in_pool, loaded = self._find(names, token_ids, len(token_ids))
        room = self._allocator.num_free - num_spare - self._allocator.num_needed(len(in_pool), in_pool)
        loaded = loaded[: max(0, room)]
        if (computed_s := self._worth_reading(in_pool, loaded, num_known)) is None:
            return False
        self._begin(in_pool, loaded, computed_s, now, None, on_end)
        return True

    def started(self, node_request: NodeRequest) -> None:
        """Count as cache misses the full blocks that a starting prompt does not have cached."""
        num_full = num_cacheable(node_request) // self._leases.block_size
        self._stats.num_misses += num_full - node_request.num_cached_blocks

    def check_integrity(self) -> None:
        """Recount the slots from scratch. Raises AssertionError if the counts differ."""
        self._index.check_integrity()

    def loaded(self, load_id: int, num_good: int, now: float) -> None:
        """Record the end of a load: its leading `num_good` blocks are in the pool on every rank.

        They enter the prefix cache, and the others count as damaged. Unknown loads are ignored.
        """
        load = self._loads.get(load_id)
        if load is None:
            return  # the load was given up
        num_held, num_lost = len(load.names) - len(load.loaded), len(load.loaded) - num_good
        load.lease.publish(load.names[: num_held + num_good])
        if num_lost:
            self._stats.num_damaged += 1
        for name in load.loaded[num_good:]:  # useless until the first of them is there again
            self._index.forget(name)
        read_s = now - load.started_s
        self._stats.num_hits += num_good
        self._stats.read_bytes += num_good * self._block_bytes
        self._stats.read_s += read_s
        self._stats.saved_s += load.computed_s * num_good / len(load.loaded) - read_s
        self._note_end(load, now, is_measure=not num_lost)
        self._end(load_id)

    def lost(self, slots: Sequence[int]) -> None:
        """Forget slots to which blocks could not be copied."""
        self._stats.written_bytes -= len(self._copied.intersection(slots)) * self._block_bytes
        self._index.lose(slots)

    def cancel(self, node_request: NodeRequest) -> None:
        """Cancel the loads for which this request waits, and free their blocks."""
        for load_id, load in list(self._loads.items()):
            if load.node_request is node_request:
                self._decisions.add(CancelLoad(load_id))
                self._end(load_id)

    def tick(self, now: float) -> None:
        """Cancel loads that have passed their deadline; their prompts start without the blocks."""
        for load_id, load in list(self._loads.items()):
            if now >= load.started_s + LOAD_DEADLINE_S:
                self._decisions.add(CancelLoad(load_id))
                self._stats.num_late += 1
                self._note_end(load, now, is_measure=True)
                self._end(load_id)

    def _find(self, names: BlockNames, token_ids: Sequence[int], num_tokens: int) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of the leading full blocks in the pool, and of those behind them in KV offload."""
        is_in_pool = self._allocator.blocks_by_name.__contains__
        in_pool = self._leases.names_in(names, token_ids, num_tokens, is_in_pool)  # looked up again now
        held = self._leases.names_in(names, token_ids, num_tokens, self._is_held)
        return in_pool, self._index.run(held[len(in_pool) :])

    def _worth_reading(self, in_pool: list[bytes], loaded: list[bytes], num_known: int = 0) -> float | None:
        """Return the seconds that computing the loaded blocks would take; None if nothing is to be read.

        The first `num_known` blocks are not counted.
        """
        num_before, size = max(len(in_pool), num_known), self._leases.block_size
        num_new = len(in_pool) + len(loaded) - num_before
        if num_new <= 0:
            return None
        computed_s = self._costs.chunk_s(num_before * size, num_new * size, is_first=False)
        slots = self._index.slots_of(loaded)
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
        self._index.pin(loaded)
        names = [*in_pool, *loaded]
        lease = self._allocator.allocate(len(names), in_pool)
        slots = self._index.slots_of(loaded)
        self._num_loads += 1
        self._loads[self._num_loads] = _Loading(node_request, on_end, lease, names, loaded, slots, computed_s, now)
        self._decisions.add(Load(self._num_loads, slots, lease.block_ids[-len(loaded) :]))

    def _note_end(self, load: _Loading, now: float, *, is_measure: bool) -> None:
        """Record the duration of a load.

        Loads share one reader, so the time in which other loads ended is not counted.
        """
        if is_measure:
            self._rates.add(load.slots, now - max(load.started_s, self._last_end_s))
        self._last_end_s = now

    def _end(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self._index.unpin(load.loaded)
        load.on_end()
        load.lease.release()

    def _is_held(self, name: bytes) -> bool:
        return name in self._allocator.blocks_by_name or name in self._index


def _let_start(waiting: Waiting) -> None:
    waiting.is_loading, waiting.has_looked = False, True
