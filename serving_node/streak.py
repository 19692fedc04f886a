"""Steps in a row that give one token to each of the same answers, none of which ends. Pure.

What comes of them is what step_done and plan give, for less: for those who play steps through, as a simulation does,
and compute nothing in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos import convert, fleet_pb2
from serving_core.leases import Leases
from serving_core.requests import Request, SampledToken, Work
from serving_core.residents import Resident, Residents, Stage


@dataclass(slots=True, eq=False)
class Streak:
    """Of its steps, one runs; so many, that one too, end none of the answers."""

    residents: Sequence[Resident]  # as they are in each step: oldest first
    num_steps: int

    @property
    def goes_on(self) -> bool:
        """Whether the running step may end as one of the streak: nobody has an end or a way to another node to go."""
        return self.num_steps > 0 and not any(each.is_ending or each.is_sending for each in self.residents)

    @property
    def requests(self) -> list[Request]:
        return [resident.request for resident in self.residents]

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


def take_in(streak: Streak, tokens: Sequence[SampledToken], leases: Leases, told: fleet_pb2.StepTokens) -> None:
    """A step of the streak is done: adds its tokens to what is told of it."""
    streak.num_steps -= 1
    block_size = leases.block_size
    for resident, token in zip(streak.residents, tokens, strict=True):
        resident.num_computed += 1
        if resident.num_computed % block_size == 0:
            leases.publish(resident)
        resident.request.token_ids.append(token.token_id)
        convert.tell_token(told.tokens.add(), resident.request, token, None)


def grow(streak: Streak, leases: Leases) -> bool:
    """Gives those blocks for their next token that need some. Tells whether there were enough; else nobody got any."""
    block_size = leases.block_size
    needy = [each for each in streak.residents if each.num_computed % block_size == 0]
    missing = [leases.num_missing(each, each.num_computed + 1) for each in needy]
    if sum(missing) > leases.num_free:
        return False
    for resident, num_missing in zip(needy, missing, strict=True):
        if num_missing:
            leases.grow(resident, num_missing)
    return True


def _num_steps(resident: Resident, eos_token_ids: Sequence[int]) -> int:
    """Steps that do not end it."""
    request, sampling = resident.request, resident.request.sampling
    may_end = bool(sampling.stop_token_ids) or (bool(eos_token_ids) and not sampling.ignore_eos)
    if resident.stage is not Stage.WRITING or resident.num_to_compute != 1 or may_end:
        return 0
    return sampling.max_tokens - request.num_output_tokens - 1
