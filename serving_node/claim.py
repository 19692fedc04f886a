"""What the oldest request of another node that waits for blocks here holds back. Pure.

Younger ones that come and go would leave no room for a tile at any one moment: so they leave the blocks of one, where
what is free, and what younger ones hold, makes it up. Grants of which nothing has come give way at once: the node that
is to read them may be the one that waits. Where it still asks after a while, the youngest of all others do, as they do
to an older one of their own node, and where those hold too little, tiles of younger requests are recalled. A claim ends
a while behind the step in which its request may be since its last question: until then that may have filled the tile
that it got, and want the next.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

from decode_node.batch import can_give_way
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents, Stage
from serving_node.hosting import Hosting

LAPSE_S: Final = 2.0  # behind the last question and a step: a few of annexing.py's RETRY_S
MOST_STEP_S: Final = 30.0  # that is waited for
HOLD_S: Final = 5.0  # behind which younger ones give way


class Claim:
    """That of one node: of all who wait, the oldest has it."""

    def __init__(self, residents: Residents, leases: Leases, hosting: Hosting) -> None:
        self._residents, self._leases, self._hosting = residents, leases, hosting
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

    def gate(self, num_blocks: Callable[[Resident], int]) -> Callable[[Resident], bool]:
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

    def victims(self) -> Iterable[Resident]:
        """Those that are to give way now, between two steps; without a claim nobody is looked at."""
        if self.age == math.inf or self._is_served or any(each.is_revoked for each in self._residents):
            return []
        victims: list[Resident] = []
        younger = [each for each in self._residents if self._is_younger(each) and self._gives_way(each)]
        while not self._makes_up(victims.__contains__):
            if not younger:
                return []
            victims.append(younger.pop())
        return victims

    def _is_younger(self, resident: Resident) -> bool:
        return resident.age > self.age

    def _gives_way(self, resident: Resident) -> bool:
        loses_nothing = resident.stage is Stage.GRANTED and not resident.is_coming
        return (loses_nothing or self._is_due) and can_give_way(resident)

    def _makes_up(self, leaves: Callable[[Resident], bool]) -> bool:
        """Whether there are the blocks of a tile, if these leave."""
        stay, leave = set[int](), set[int]()
        for each in self._residents:
            if each.lease is not None:
                (leave if leaves(each) else stay).update(each.lease.block_ids)
        return len(leave - stay) + self._leases.num_free >= self._hosting.blocks_each
