"""What the oldest request of another node that waits for blocks here holds back. Pure.

Younger ones that come and go would leave no room for a tile at any one moment: so they leave the blocks of one, where
what is free, and what younger ones hold, makes it up. Grants of which nothing has come give way at once: the node that
is to read them may be the one that waits. If the tile is not free after a while, the youngest of all others do, as they
do to an older one of their own node. A claim ends a while behind the last question: until then its request may have
filled the tile that it got, and want the next.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

from decode_node.writing import can_give_way
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents, Stage

LAPSE_S: Final = 2.0  # behind the last question: a few of annexing.py's RETRY_S, or a step
HOLD_S: Final = 5.0  # behind which younger ones give way


class Claim:
    """That of one node: of all who wait, the oldest has it."""

    def __init__(self, residents: Residents, leases: Leases, num_blocks: int) -> None:
        """`num_blocks` are those of a tile."""
        self._residents, self._leases, self._num_blocks = residents, leases, num_blocks
        self.age: float = math.inf  # of the request; inf: there is none
        self._due_s = self._ends_s = 0.0
        self._is_due = False  # younger ones are to give way
        self._is_served = False  # it has what it last asked for

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        if self.age == math.inf:
            return None
        return self._ends_s if self._is_due else min(self._due_s, self._ends_s)

    def put(self, age: int, now: float) -> None:
        """A request of this age has found no room, not for the first time."""
        if age < self.age:
            self.age, self._due_s, self._is_due = age, now + HOLD_S, False
        self._ask(age, now, is_served=False)

    def serve(self, age: int, now: float) -> None:
        """A request of this age has found some."""
        self._ask(age, now, is_served=True)

    def _ask(self, age: int, now: float, *, is_served: bool) -> None:
        if age == self.age:
            self._ends_s, self._is_served = now + LAPSE_S, is_served

    def tick(self, now: float) -> None:
        if now >= self._ends_s:
            self.age = math.inf
        self._is_due = now >= self._due_s

    def num_kept_from(self, age: int) -> int:
        """Free blocks that one of this age is to leave."""
        return self._num_blocks if age > self.held_back_from() else 0

    def leaves_enough(self, num_blocks: int) -> bool:
        """Whether the blocks of a tile are free beside so many."""
        return self._leases.num_free - num_blocks >= self._num_blocks

    def held_back_from(self) -> float:
        """The age from which on all leave the blocks of a tile; inf where nobody has to."""
        if self.age == math.inf or not self._makes_up(lambda each: each.age > self.age):
            return math.inf
        return self.age

    def victims(self) -> Iterable[Resident]:
        """Those that are to give way now, between two steps."""
        if self.age == math.inf or self._is_served or any(each.is_revoked for each in self._residents):
            return []
        victims: list[Resident] = []
        younger = [each for each in self._residents if each.age > self.age and self._gives_way(each)]
        while not self._makes_up(victims.__contains__):
            if not younger:
                return []
            victims.append(younger.pop())
        return victims

    def _gives_way(self, resident: Resident) -> bool:
        loses_nothing = resident.stage is Stage.GRANTED and not resident.is_coming
        return (loses_nothing or self._is_due) and can_give_way(resident)

    def _makes_up(self, leaves: Callable[[Resident], bool]) -> bool:
        """Whether there are the blocks of a tile, if these leave."""
        num_missing = self._num_blocks - self._leases.num_free
        if num_missing <= 0:
            return True
        stay, leave = set[int](), set[int]()
        for each in self._residents:
            if each.lease is not None:
                (leave if leaves(each) else stay).update(each.lease.block_ids)
        return len(leave - stay) >= num_missing
