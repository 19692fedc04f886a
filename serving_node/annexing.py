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
from serving_node.claim import Claim
from serving_node.decisions import CloseAnnexes, OpenAnnex
from serving_node.endings import Endings

RETRY_S: Final = 0.5
PATIENCE_S: Final = 30.0  # with hosts that have no room


class Opened(Protocol):
    """An annex that holds tiles now."""

    @property
    def num_tiles(self) -> int: ...


class Annexing:
    """The annexes of one node's requests."""

    def __init__(self, residents: Residents, leases: Leases, endings: Endings, claim: Claim, tile_tokens: int) -> None:
        self._residents, self._leases, self._endings, self._claim = residents, leases, endings, claim
        self._tile_tokens = tile_tokens
        self._held_up: dict[Resident, tuple[float, float]] = {}  # when it is tried again, and since when
        self.num_opened = 0
        leases.on_annexes_left = self._close

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        return min((retry_s for retry_s, _ in self._held_up.values()), default=None)

    def fit(self, resident: Resident, num_tokens: int) -> int:
        """How many of so many tokens it has blocks for. Where that is not all, its oldest tiles are on their way."""
        leases = self._leases
        if resident.is_annexing or resident.in_step:
            return 0
        num_missing = leases.num_missing(resident, resident.num_computed + num_tokens)
        num_free = leases.num_free if resident.age < self._claim.held_back_from() else 0
        if num_got := min(num_missing, num_free):
            leases.grow(resident, num_got)
        if num_got == num_missing:
            self._held_up.pop(resident, None)
        elif resident not in self._held_up:
            self._begin(resident)
            if resident.is_annexing:
                return 0
        return min(num_tokens, leases.num_tokens_held(resident) - resident.num_computed)

    def waits(self, resident: Resident) -> bool:
        """Whether its tiles are leaving, or wait for a host that has room."""
        return resident.is_annexing or resident in self._held_up

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
        else:
            self._hold_up(resident, now)
        self._endings.settle(resident)

    def tick(self, now: float) -> None:
        """Tries again where hosts had no room."""
        for resident, (retry_s, since_s) in list(self._held_up.items()):
            if resident not in self._residents or resident.is_ending or resident.lease is None:
                del self._held_up[resident]
            elif now >= retry_s:
                self._begin(resident)
                self._held_up[resident] = now + RETRY_S, since_s

    def check(self, resident: Resident) -> None:
        """A step is done: ends what has lost an annex in it."""
        if error := resident.request.annex_error:
            message = f"blocks of the request on another node are lost: {error}"
            self._endings.fail(resident, reasons.TRANSFER_FAILED, message)

    def _begin(self, resident: Resident) -> None:
        """Sends its full tiles away, if it has any here."""
        assert resident.lease is not None
        each = self._tile_tokens // self._leases.block_size
        num_tiles = resident.num_computed // self._tile_tokens - resident.num_annexed_blocks // each
        if num_tiles and not resident.is_busy:
            resident.is_annexing, is_again = True, resident in self._held_up
            self._endings.decide(OpenAnnex(resident, resident.lease.block_ids[: num_tiles * each], is_again))

    def _hold_up(self, resident: Resident, now: float) -> None:
        _, since_s = self._held_up.get(resident, (now, now))
        self._held_up[resident] = now + RETRY_S, since_s
        if now - since_s > PATIENCE_S:
            del self._held_up[resident]
            message = f"no other node had room for blocks of the request for {PATIENCE_S:g} s"
            self._endings.fail(resident, reasons.QUEUE_FULL, message)

    def _close(self, annexes: Sequence[Any]) -> None:
        self._endings.decide(CloseAnnexes(annexes))
