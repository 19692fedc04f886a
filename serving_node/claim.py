"""What the oldest request of another node that waits for blocks here holds back. Pure.

Younger ones that come and go would leave no room for a tile at any one moment: so none starts while what is free, and
what younger ones hold, makes up a tile. If that has not become free after a while, the youngest give way, as they do to
an older one of their own node. A claim ends as the tile is there, or is not asked for any more: its request has room
elsewhere, or is gone.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

from decode_node.writing import can_give_way
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents

LAPSE_S: Final = 2.0  # behind the last question: a few of annexing.py's RETRY_S
HOLD_S: Final = 5.0  # behind which younger ones give way


class Claim:
    """That of one node: of all who wait, the oldest has it."""

    def __init__(self, residents: Residents, leases: Leases, num_blocks: int) -> None:
        """`num_blocks` are those of a tile."""
        self._residents, self._leases, self._num_blocks = residents, leases, num_blocks
        self.age: float = math.inf  # of the request; inf: there is none
        self._due_s = self._ends_s = 0.0
        self._is_due = False  # younger ones are to give way

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
        if age == self.age:
            self._ends_s = now + LAPSE_S

    def end(self, age: int) -> None:
        """A request of this age has found some."""
        if age == self.age:
            self.age = math.inf

    def tick(self, now: float) -> None:
        if now >= self._ends_s:
            self.age = math.inf
        self._is_due = now >= self._due_s

    def held_back_from(self) -> float:
        """The age from which on nothing starts; inf where nothing is held back."""
        if self.age == math.inf or not self._makes_up(lambda each: each.age > self.age):
            return math.inf
        return self.age

    def victims(self) -> Iterable[Resident]:
        """Those that are to give way now, between two steps."""
        if self.age == math.inf or not self._is_due or any(each.is_revoked for each in self._residents):
            return []
        victims: list[Resident] = []
        younger = [each for each in self._residents if each.age > self.age and can_give_way(each)]
        while not self._makes_up(victims.__contains__):
            if not younger:
                return []
            victims.append(younger.pop())
        return victims

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
