"""Who gets blocks and seats next: one order of age over prompts that are read here and those that other nodes read.
Pure.
"""

from collections.abc import Iterator
from typing import Final

from decode_node.credit import Credit
from prefill_node.reading import Reading
from serving_core.residents import Resident, Residents, Stage

HOLDING: Final = (Stage.WRITING, Stage.GRANTED, Stage.READING)


class Room:
    """The blocks and seats of one node, between its two halves."""

    def __init__(self, residents: Residents, reading: Reading, credit: Credit, max_num_seqs: int) -> None:
        self._residents = residents
        self._reading = reading
        self._credit = credit
        self._max_num_seqs = max_num_seqs
        self._oldest_without: Resident | None = None  # of those that wait for credit

    def grant(self) -> Iterator[Resident]:
        """Gives credit, oldest first, to those that it yields. What prompts need that were here before is kept for
        them: for those that gave way, and for the oldest."""
        self._oldest_without = None
        if not self._residents.count(Stage.AWAITING):
            return
        num_promised, is_head = 0, True
        for resident in self._residents.in_stage(Stage.QUEUED, Stage.AWAITING):
            if resident.is_ending:
                continue
            if resident.stage is Stage.QUEUED:
                if is_head or resident.has_first_token:
                    num_promised += self._reading.num_needed(resident)
                is_head = False
                continue
            if not self.has_seat(resident):
                return
            if not self._credit.grant(resident, num_spare=num_promised + self._num_growing()):
                self._oldest_without = resident
                return
            yield resident

    def has_seat(self, resident: Resident) -> bool:
        """Whether there is a seat for it, if it needs one that it does not have."""
        return resident.hands_over or resident.has_first_token or self._num_seated() < self._max_num_seqs

    def start(self, resident: Resident) -> bool:
        """Gives a prompt its blocks, unless there are too few or an older request waits for them."""
        older = self._oldest_without
        if older is not None and older.age < resident.age:
            return False
        return self._reading.start(resident, num_spare=self._num_growing())

    def _num_growing(self) -> int:
        """Requests that hold blocks here and will need more."""
        return sum(each.stage in HOLDING and not each.hands_over for each in self._residents)

    def _num_seated(self) -> int:
        """Answers that are written here, or will be as soon as their KV is there."""
        return sum(not each.hands_over and _is_seated(each) for each in self._residents)


def _is_seated(resident: Resident) -> bool:
    return resident.stage in HOLDING or (resident.stage is Stage.QUEUED and resident.has_first_token)
