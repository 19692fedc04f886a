"""Requests that are longer than this node's pool: their oldest tiles go to other nodes as the pool fills up. Pure.

Such a request comes with the nodes that may hold some of it, its *hosts*. Its blocks have no names, since they are not
here to be found; it does not move, and has no candidates. A tile that has left is final, and never comes back: where an
annex is lost, so is the attempt, which begins again elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from serving_core import reasons
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents
from serving_node.claims import HOLD_S, LAPSE_S, Claim
from serving_node.decisions import CloseAnnexes, OpenAnnex
from serving_node.outputs import Endings

RETRY_S: Final = 0.2
PATIENCE_S: Final = 30.0  # with hosts that have no room, in all until one has some


class Opened(Protocol):
    """An annex that holds tiles now."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def is_recalled(self) -> bool:
        """Whether its node has taken the blocks back."""


class Annexing:
    """The annexes of one node's requests."""

    def __init__(self, residents: Residents, leases: Leases, endings: Endings, claim: Claim, tile_tokens: int) -> None:
        self._residents, self._leases, self._endings, self._claim = residents, leases, endings, claim
        self._tile_tokens = tile_tokens
        self._held_up: dict[Resident, tuple[float, float]] = {}  # when it is tried again, and up to when it has waited
        self.num_opened = 0
        leases.on_annexes_left = self._close

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        return min((retry_s for each, (retry_s, _) in self._held_up.items() if not each.is_busy), default=None)

    def fit(self, resident: Resident, num_tokens: int) -> int:
        """How many of so many tokens it has blocks for. Where that is not all, its oldest tiles are on their way."""
        leases = self._leases
        if resident.is_annexing or resident.in_step:
            return 0
        num_missing = leases.num_missing(resident, resident.num_computed + num_tokens)
        num_free = leases.num_free - self._claim.num_kept_from(resident.age)
        if (num_got := min(num_missing, num_free)) > 0:
            leases.grow(resident, num_got)
        if num_got >= num_missing:
            self._held_up.pop(resident, None)
        elif resident not in self._held_up:
            self._begin(resident)
            if resident.is_annexing:
                return 0
        return min(num_tokens, leases.num_tokens_held(resident) - resident.num_computed)

    def makes_room_for(self, resident: Resident) -> bool:
        """Whether its hosts are asked, and have not been for so long that all would have given way that can: between
        two steps, which may take as long as its own."""
        return resident in self._held_up and resident.waited_s < HOLD_S + LAPSE_S + resident.longest_step_s

    def youngest_held_up(self, age: int) -> Resident | None:
        """Of those that are younger than this, and whose hosts had no room when they were last asked."""
        waiting = [each for each in self._held_up if each.age > age and each.lease is not None and not each.is_busy]
        return max((each for each in waiting if not each.is_ending), key=lambda each: each.age, default=None)

    def opened(self, resident: Resident, annex: Opened | None, now: float) -> None:
        """An `OpenAnnex` is over; None where no host has room."""
        resident.is_annexing = False
        if annex is not None:
            self.num_opened += 1
            resident.request.annexes = (*resident.request.annexes, annex)
            self._leases.shed(resident, annex.num_tiles * self._tile_tokens // self._leases.block_size)
            self._held_up.pop(resident, None)
            resident.waited_s = 0.0
        else:
            self._hold_up(resident, now)
        self._endings.settle(resident)

    def tick(self, now: float) -> None:
        """Tries again where hosts had no room."""
        for resident in list(self._held_up):
            self._try_again(resident, now)

    def is_recalled(self, resident: Resident) -> bool:
        """Whether a step has found out that a host has taken blocks back: the request is to begin again, and nothing is
        lost but time."""
        return any(annex.is_recalled for annex in resident.request.annexes)

    def check(self, resident: Resident, now: float, step_s: float) -> None:
        """A step is done: ends what has lost an annex in it, and asks what it was not to ask meanwhile."""
        resident.longest_step_s = max(resident.longest_step_s, step_s)
        if error := resident.request.annex_error:
            message = f"blocks of the request on another node are lost: {error}"
            self._endings.fail(resident, reasons.TRANSFER_FAILED, message)
        if resident in self._held_up:
            self._try_again(resident, now)

    def _try_again(self, resident: Resident, now: float) -> None:
        if resident not in self._residents or resident.is_ending or resident.lease is None:
            del self._held_up[resident]
        elif now >= self._held_up[resident][0] and not resident.is_busy:
            self._hold_up(resident, now)
            if resident in self._held_up:
                self._begin(resident)

    def _begin(self, resident: Resident) -> None:
        """Sends its full tiles away, if it has any here."""
        assert resident.lease is not None
        each = self._tile_tokens // self._leases.block_size
        num_tiles = resident.num_computed // self._tile_tokens - resident.num_annexed_blocks // each
        if num_tiles and not resident.is_busy:
            resident.is_annexing, is_again = True, resident in self._held_up
            self._endings.decide(OpenAnnex(resident, resident.lease.block_ids[: num_tiles * each], is_again))

    def _hold_up(self, resident: Resident, now: float) -> None:
        """The first time it asks again at once, so that they make room."""
        retry_s, noted_s = now, now
        if resident in self._held_up:
            retry_s, (_, noted_s) = now + RETRY_S, self._held_up[resident]
        self._held_up[resident] = retry_s, now
        resident.waited_s += now - noted_s
        if resident.waited_s > PATIENCE_S:
            del self._held_up[resident]
            message = f"no other node had room for blocks of the request for {PATIENCE_S:g} s"
            self._endings.fail(resident, reasons.QUEUE_FULL, message)

    def _close(self, annexes: Sequence[Any]) -> None:
        self._endings.decide(CloseAnnexes(annexes))
