"""Distributed KV: blocks of this node that hold KV of other nodes' requests, and claims of requests on them. Pure.

KV of other nodes' requests is recalled for an older request that has no room beside it; the younger request then begins
again, behind the older one. Only older requests do so, which is why the oldest keeps what it has.

A claim keeps a group of blocks free for the oldest request of another node that waits here, once free blocks and those
of younger requests make one up; else requests that come and go would never leave that much at one moment. Credits of
which nothing has arrived are withdrawn at once, as their node may be the one that waits. If the request still asks
after a while, the youngest other requests are preempted, and if those hold too little, KV of younger requests is
recalled. A claim ends a while after the request's last question.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from decode_node.batch import can_give_way
from serving_core.blocks import BlockAllocator, BlockLease
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest, NodeRequests, Stage

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


LAPSE_S: Final = 2.0  # behind the last question and a step: a few of annexing.py's RETRY_S
MOST_STEP_S: Final = 30.0  # that is waited for
HOLD_S: Final = 5.0  # behind which younger ones give way


class Claim:
    """That of one node: of all who wait, the oldest has it."""

    def __init__(self, node_requests: NodeRequests, leases: Leases, hosting: Hosting) -> None:
        self._node_requests, self._leases, self._hosting = node_requests, leases, hosting
        self.age: float = math.inf  # of the request; inf: there is none
        self._due_s = self._ends_s = 0.0
        self._is_due = False  # younger ones are to give way
        self._is_served = False  # it has what it last asked for

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        return self._ends_s if self.age < math.inf else None

    def put(self, age: int, now: float, step_s: float) -> None:
        """A request of this age, whose steps take so long, has found no room, not for the first time."""
        if age < self.age:
            self.age, self._due_s = age, now + HOLD_S
        self._ask(age, now, step_s, is_served=False)

    def serve(self, age: int, now: float, step_s: float) -> None:
        """One has found some."""
        self._ask(age, now, step_s, is_served=True)

    def _ask(self, age: int, now: float, step_s: float, *, is_served: bool) -> None:
        if age == self.age:
            self._ends_s = now + LAPSE_S + min(step_s, MOST_STEP_S)
            self._is_due, self._is_served = now >= self._due_s, is_served

    def tick(self, now: float) -> None:
        if now >= self._ends_s:
            self.age = math.inf

    def num_kept_from(self, age: int) -> int:
        """Free blocks that one of this age is to leave."""
        return self._hosting.blocks_each if age > self.held_back_from() else 0

    def gate(self, num_blocks: Callable[[NodeRequest], int]) -> Callable[[NodeRequest], bool]:
        """Tells of requests which would take so many blocks, one after the other, whether they leave enough."""
        held_back_from = self.held_back_from()
        return lambda each: each.age <= held_back_from or self._leaves_enough(num_blocks(each))

    def _leaves_enough(self, num_blocks: int) -> bool:
        return self._leases.num_free - num_blocks >= self._hosting.blocks_each

    def held_back_from(self) -> float:
        """The age behind which all leave the blocks of a tile; inf where nobody has to."""
        return self.age if self.age < math.inf and self._makes_up(self._is_younger) else math.inf

    def recalls(self) -> bool:
        """Whether tiles of younger requests are to be recalled: younger ones here would not be enough without."""
        hosting = self._hosting
        if not self._is_due or self._is_served or hosting.is_recalling:
            return False
        has_younger = hosting.num_blocks > hosting.num_firm(self.age)
        return has_younger and not (hosting.may_grow and self._makes_up(self._is_younger))

    def victims(self) -> Iterable[NodeRequest]:
        """Those that are to give way now, between two steps; without a claim nobody is looked at."""
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
        loses_nothing = node_request.stage is Stage.GRANTED and not node_request.is_coming
        return (loses_nothing or self._is_due) and can_give_way(node_request)

    def _makes_up(self, leaves: Callable[[NodeRequest], bool]) -> bool:
        """Whether there are the blocks of a tile, if these leave."""
        stay, leave = set[int](), set[int]()
        for each in self._node_requests:
            if each.lease is not None:
                (leave if leaves(each) else stay).update(each.lease.block_ids)
        return len(leave - stay) + self._leases.num_free >= self._hosting.blocks_each
