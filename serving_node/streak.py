"""Steps in a row that give one token to each of the same answers, none of which ends. Pure.

What comes of them is what step_done and plan give, for less: for those who play steps through, as a simulation does,
and compute nothing in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from serving_core.leases import Leases
from serving_core.requests import Request, Work
from serving_core.residents import Resident, Residents, Stage

WAITING: Final = (Stage.QUEUED, Stage.AWAITING, Stage.READING)


@dataclass(slots=True, eq=False)
class Streak:
    """Of its steps, one runs; so many, that one too, end none of the answers."""

    residents: Sequence[Resident]  # as they are in each step: oldest first
    num_steps: int
    requests: Sequence[Request] = field(init=False)

    def __post_init__(self) -> None:
        self.requests = [resident.request for resident in self.residents]

    @property
    def is_staying(self) -> bool:
        """Whether nobody has an end or a way to another node to go."""
        return not any(each.ending is not None or each.is_sending for each in self.residents)

    @property
    def works(self) -> list[Work]:
        """The shares of the running step, for whoever goes on with it as with any other."""
        return [resident.work(1) for resident in self.residents]


def begin_streak(works: Sequence[Work], residents: Residents, eos_token_ids: Sequence[int]) -> Streak:
    """The streak that begins with a planned step; of 0 steps where that one cannot be of any."""
    at_work = [residents.of(work.request) for work in works]
    streak = Streak(at_work, min((_num_steps(each, eos_token_ids) for each in at_work), default=0))
    return streak if is_all(streak, residents) else Streak(at_work, 0)


def is_all(streak: Streak, residents: Residents) -> bool:
    """Whether nobody else writes."""
    return residents.count(Stage.WRITING) == len(streak.residents)


def is_calm(residents: Residents) -> bool:
    """Whether nobody waits for what a step may bring, blocks or a seat, and nobody has an end or a way to another node
    to go. Then steps that end no answer decide nothing until something else happens."""
    if residents.count(*WAITING):
        return False
    return not any(each.is_kept or each.ending is not None or each.is_sending for each in residents)


def take_in(streak: Streak, token_ids: Sequence[Sequence[int]], leases: Leases) -> list[Resident]:
    """Steps of the streak are done, which gave each answer these tokens: no more than a block holds, and there were
    blocks for all. Tells those that have filled one with the last token."""
    num_steps, block_size = len(token_ids[0]), leases.block_size
    streak.num_steps -= num_steps
    full: list[list[Resident]] = [[] for _ in range(num_steps)]
    for resident, new in zip(streak.residents, token_ids, strict=True):
        resident.request.token_ids += new
        num_left = block_size - resident.num_computed % block_size
        resident.num_computed += num_steps
        if num_left <= num_steps:
            full[num_left - 1].append(resident)
    for index, residents in enumerate(full):
        for resident in residents:
            leases.publish(resident)
        if index < num_steps - 1:
            grow(residents, leases)
    return full[-1]


def grow(full: Sequence[Resident], leases: Leases, num_tokens: int = 1) -> bool:
    """Gives those that have filled a block one for their next tokens, if they have none. Tells whether there were
    enough; else nobody got any."""
    missing = [leases.num_missing(each, each.num_computed + num_tokens) for each in full]
    if sum(missing) > leases.num_free:
        return False
    for resident, num_missing in zip(full, missing, strict=True):
        if num_missing:
            leases.grow(resident, num_missing)
    return True


def _num_steps(resident: Resident, eos_token_ids: Sequence[int]) -> int:
    """Steps that do not end it."""
    request, sampling = resident.request, resident.request.sampling
    may_end = bool(sampling.stop_token_ids) or (bool(eos_token_ids) and not sampling.ignore_eos)
    if resident.stage is not Stage.WRITING or resident.num_to_compute != 1 or may_end or resident.hosts:
        return 0
    return sampling.max_tokens - request.num_output_tokens - 1
