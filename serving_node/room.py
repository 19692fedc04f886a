"""Who gets blocks and seats next: one order of age over prompts that are read here and those that other nodes read.
Pure.

Nodes that read for each other could each be full of what waits for the other one. So a node that would stand still
takes blocks and seats back from its youngest, for the oldest that lacks some: the oldest request of the whole fleet is
the oldest on both of its nodes, gets what it needs on either, and finishes.
"""

from collections.abc import Iterator
from typing import Final

from decode_node.credit import Credit
from decode_node.writing import Writing
from prefill_node.reading import Reading
from serving_core.residents import Resident, Residents, Stage

HOLDING: Final = (Stage.WRITING, Stage.GRANTED, Stage.READING)
WITHOUT: Final = (Stage.QUEUED, Stage.AWAITING)


class Room:
    """The blocks and seats of one node, between its two halves."""

    def __init__(
        self, residents: Residents, reading: Reading, credit: Credit, writing: Writing, num_seats: int
    ) -> None:
        self._residents = residents
        self._reading = reading
        self._credit = credit
        self._writing = writing
        self.num_seats = num_seats  # may change; who has one keeps it
        self._oldest_without: Resident | None = None  # of those that wait for credit
        self._preferred: Resident | None = None  # others gave way to it

    def grant(self) -> Iterator[Resident]:
        """Gives credit, oldest first, to those that it yields. What prompts need that were here before is kept for
        them: for those that gave way, and for the oldest."""
        self._oldest_without = None
        if not self._residents.count(Stage.AWAITING):
            return
        num_promised, num_promised_seats, is_head = 0, 0, True
        for resident in self._residents.in_stage(*WITHOUT):
            if resident.is_ending:
                continue
            if resident.stage is Stage.QUEUED:
                if is_head or resident.has_first_token:
                    num_promised += self._reading.num_needed(resident)
                    num_promised_seats += not resident.hands_over
                is_head = False
                continue
            if self._num_seated() + num_promised_seats >= self.num_seats or self._is_behind(resident):
                return
            if not self._credit.grant(resident, num_spare=num_promised + self._num_seated()):
                self._oldest_without = resident
                return
            yield resident

    def has_seat(self, resident: Resident) -> bool:
        """Whether there is a seat for it, if it needs one that it does not have."""
        return resident.hands_over or self._num_seated() < self.num_seats

    def start(self, resident: Resident) -> bool:
        """Gives a prompt its blocks, unless there are too few or an older request waits for them."""
        older = self._oldest_without
        if (older is not None and older.age < resident.age) or self._is_behind(resident):
            return False
        return self._reading.start(resident, num_spare=self._num_seated())

    def make_way(self) -> bool:
        """For a node that has nothing to compute: takes from the youngest what an older one lacks. Tells whether
        anything is free at once; a grant that is taken back comes free later."""
        if any(_lets_go_soon(each) for each in self._residents):
            return False
        for resident in self._residents.in_stage(*WITHOUT, Stage.WRITING):
            if victim := self._youngest_behind(resident):
                self._preferred = resident
                self._writing.give_way(victim)
                return not victim.is_revoked
        return False

    def _youngest_behind(self, resident: Resident) -> Resident | None:
        """The youngest that holds what this one lacks, and is younger."""
        needs_seat = resident.stage is not Stage.WRITING and not self.has_seat(resident)
        for each in reversed(list(self._residents)):
            if each is resident:
                return None
            if each.stage in HOLDING or (each.stage is Stage.READ and not needs_seat):
                return each
        return None

    def _is_behind(self, resident: Resident) -> bool:
        """Whether an older one that others gave way to still has no blocks."""
        preferred = self._preferred
        if preferred is None or preferred not in self._residents or preferred.stage not in WITHOUT:
            self._preferred = None
            return False
        return not preferred.is_ending and preferred.age < resident.age

    def _num_seated(self) -> int:
        """Answers that are written here, or will be as soon as their KV is there: they will need more blocks."""
        return sum(each.stage in HOLDING and not each.hands_over for each in self._residents)


def _lets_go_soon(resident: Resident) -> bool:
    """Whether its blocks come free without any other request, or without a step of this node."""
    if resident.stage is Stage.GRANTED and not resident.is_receiving:
        return True  # its sender gave it up, and it is cancelled in a moment
    return resident.is_revoked or resident.is_ending or (resident.is_sending and resident.lease is not None)
