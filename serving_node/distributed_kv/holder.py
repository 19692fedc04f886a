"""Track distributed KV on this node: blocks that hold KV of other nodes' requests, and reservations on them. Pure.

KV of other nodes' requests is revoked for an older request that lacks blocks; the younger request then begins
again, behind the older one. Only older requests cause a revocation, so the oldest request keeps its blocks.

A reservation keeps the blocks of a tile free for the oldest waiting request of another node, once free blocks and the
blocks of younger requests are enough for one; otherwise short requests would never leave enough at one moment. Credits
of which no KV has arrived are revoked at once, as their node may be the waiting one. If the request still asks after a
while, the youngest other requests are preempted, and if those hold too little, KV of younger requests is revoked. A
reservation ends a while after the request's last question."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from decode_node.preemption import can_preempt
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests
from serving_node.admission import Reserve

MOST_PARTS: Final = 3, 4  # of a pool: the share that distributed KV of other nodes may take


def most_hosted_tokens(num_blocks: int, block_size: int, tile_tokens: int) -> int:
    """Return the most tokens whose KV a node of `num_blocks` blocks holds for other nodes, in whole tiles.

    0 without tiles (tile_tokens 0).
    """
    parts, of = MOST_PARTS
    return num_blocks * block_size * parts // of // tile_tokens * tile_tokens if tile_tokens else 0


@dataclass(slots=True)
class _Held:
    """Hold the blocks of one remote request."""

    lease: BlockLease
    age: int  # age of the remote request
    is_revoked: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.lease.block_ids)


class HeldKV:
    """Tracks the blocks of this node that hold KV of other nodes' requests, by the number of the connection."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        tile_tokens: int,
        on_revoked: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Create an empty tracker.

        `on_revoked` is called with the number of each connection whose blocks are revoked.
        """
        self._allocator = allocator
        self._blocks_each = tile_tokens // block_size
        self._most_blocks = most_hosted_tokens(allocator.num_blocks, block_size, tile_tokens) // block_size
        self._on_revoked = on_revoked
        self._remote_kvs: dict[int, _Held] = {}
        self.num_revoked = 0

    @property
    def blocks_each(self) -> int:
        """Return how many blocks a tile takes; 0 without tiles."""
        return self._blocks_each

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that hold KV of other nodes' requests, by the number of the connection."""
        return {number: each.lease for number, each in self._remote_kvs.items()}

    @property
    def num_blocks(self) -> int:
        """Return how many blocks hold KV of other nodes' requests."""
        return sum(each.num_blocks for each in self._remote_kvs.values())

    def num_firm(self, age: float) -> int:
        """Return how many blocks would not be revoked for a request of this age: those of requests as old or older."""
        return sum(each.num_blocks for each in self._remote_kvs.values() if each.age <= age)

    @property
    def is_revoking(self) -> bool:
        """Return whether blocks were revoked that have not been released yet."""
        return any(each.is_revoked for each in self._remote_kvs.values())

    @property
    def may_grow(self) -> bool:
        """Return whether one more tile of other nodes is below the limit, whether or not blocks are free."""
        return self._most_blocks - self.num_blocks >= self._blocks_each > 0

    def may_grow_for(self, age: int) -> bool:
        """Return whether one more tile would be below the limit once requests younger than `age` are revoked."""
        return self._most_blocks - self.num_firm(age) >= self._blocks_each > 0

    def lease(self, number: int, most_tiles: int, age: int, *, num_spare: int = 0) -> list[int]:
        """Lease the blocks of at most `most_tiles` tiles, leaving `num_spare` blocks free; return their ids.

        The list may be empty. `number` is that of the connection, which must be new, `age` that of the remote request.
        """
        assert number not in self._remote_kvs
        room = min(self._most_blocks - self.num_blocks, self._allocator.num_free) - num_spare
        num_tiles = min(most_tiles, room // self._blocks_each) if self._blocks_each else 0
        if num_tiles <= 0:
            return []
        lease = self._allocator.allocate(num_tiles * self._blocks_each)
        self._remote_kvs[number] = _Held(lease, age)
        return list(lease.block_ids)

    def revoke(self) -> None:
        """Revoke all blocks of the youngest remote request, which begins again elsewhere; the blocks come free soon.

        There must be a remote request.
        """
        youngest = max(each.age for each in self._remote_kvs.values())
        for number, each in self._remote_kvs.items():
            if each.age == youngest:
                each.is_revoked = True
                self.num_revoked += 1
                self._on_revoked(number)

    def release(self, number: int) -> None:
        """Free the blocks of connection `number`; does nothing if it has none."""
        if (held := self._remote_kvs.pop(number, None)) is not None:
            held.lease.release()


LAPSE_S: Final = 2.0  # after the last question and a step: a few times RETRY_S of distributed_kv.py
MOST_STEP_S: Final = 30.0  # limit of the step time that a reservation waits for
HOLD_S: Final = 5.0  # after which younger requests are preempted


class TileReservation(Reserve):
    """Reserves the blocks of a tile for the oldest remote request that waits for blocks of this node."""

    def __init__(self, node_requests: NodeRequests, leases: Leases, held_kv: HeldKV) -> None:
        self._node_requests, self._leases, self._held_kv = node_requests, leases, held_kv
        self.age: float = math.inf  # of the request; inf: no reservation
        self._due_s = self._ends_s = 0.0
        self._is_due = False  # younger requests are to be preempted
        self._is_served = False  # the last question was satisfied

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the reservation ends; None without one."""
        return self._ends_s if self.age < math.inf else None

    def put(self, age: int, now: float, step_s: float) -> None:
        """Reserve blocks for a remote request of this age that has asked again in vain, unless an older one has them.

        `step_s` is the seconds of one of its steps, in which it does not ask.
        """
        if age < self.age:
            self.age, self._due_s = age, now + HOLD_S
        self._ask(age, now, step_s, is_served=False)

    def serve(self, age: int, now: float, step_s: float) -> None:
        """Note that the remote request of this age has got blocks; its reservation stays for a while."""
        self._ask(age, now, step_s, is_served=True)

    def _ask(self, age: int, now: float, step_s: float, *, is_served: bool) -> None:
        if age == self.age:
            self._ends_s = now + LAPSE_S + min(step_s, MOST_STEP_S)
            self._is_due, self._is_served = now >= self._due_s, is_served

    def tick(self, now: float) -> None:
        if now >= self._ends_s:
            self.age = math.inf

    def num_kept_from(self, age: int) -> int:
        """Return how many free blocks a request must leave: a tile's if it is younger than the reservation's request.

        `age` is higher for younger requests. 0 for others, without a reservation, and if the free blocks and those of
        younger requests are too few for a tile.
        """
        return self._held_kv.blocks_each if age > self.held_back_from() else 0

    def reserve_rule(self, num_blocks: Callable[[NodeRequest], int]) -> Callable[[NodeRequest], bool]:
        """Return a function that tells, for one request after another, whether it leaves the reserved blocks free.

        `num_blocks` returns the blocks that a request would take.
        """
        held_back_from = self.held_back_from()
        return lambda each: each.age <= held_back_from or self._leaves_enough(num_blocks(each))

    def _leaves_enough(self, num_blocks: int) -> bool:
        return self._leases.num_free - num_blocks >= self._held_kv.blocks_each

    def held_back_from(self) -> float:
        """Return the age number above which requests leave the blocks of a tile free; inf without a restriction.

        There is none if the blocks of younger requests would not be enough for a tile.
        """
        return self.age if self.age < math.inf and self._makes_up(self._is_younger) else math.inf

    def revokes(self) -> bool:
        """Return whether tiles of younger remote requests must be revoked: preempting requests here is not enough."""
        held_kv = self._held_kv
        if not self._is_due or self._is_served or held_kv.is_revoking:
            return False
        has_younger = held_kv.num_blocks > held_kv.num_firm(self.age)
        return has_younger and not (held_kv.may_grow and self._makes_up(self._is_younger))

    def victims(self) -> Iterable[NodeRequest]:
        """Return the requests to preempt before the next step, so that the blocks of a tile come free.

        They are younger than the reservation's request. Empty without an unserved reservation, while any request is
        being revoked, and if those that may be preempted hold too few blocks.
        """
        if self.age == math.inf or self._is_served or any(each.is_revoked for each in self._node_requests):
            return []
        victims: list[NodeRequest] = []
        younger = [each for each in self._node_requests if self._is_younger(each) and self._gives_way(each)]
        while not self._makes_up(victims.__contains__):
            if not younger:
                return []
            victims.append(younger.pop())
        return victims

    def _is_younger(self, node_request: NodeRequest) -> bool:
        return node_request.age > self.age

    def _gives_way(self, node_request: NodeRequest) -> bool:
        loses_nothing = node_request.is_receiving and not node_request.has_arrived
        return (loses_nothing or self._is_due) and can_preempt(node_request)

    def _makes_up(self, leaves: Callable[[NodeRequest], bool]) -> bool:
        """Return whether the blocks of a tile are free once the requests for which `leaves` is true are gone."""
        stay, leave = set[int](), set[int]()
        for each in self._node_requests:
            if each.lease is not None:
                (leave if leaves(each) else stay).update(each.lease.block_ids)
        return len(leave - stay) + self._leases.num_free >= self._held_kv.blocks_each
