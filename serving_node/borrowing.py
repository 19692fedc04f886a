"""Blocks of prompts that come from other nodes, which hold more of their tokens than this one. Pure.

The coordinator has priced it and says who would lend (`Job.borrow`). A prompt that is about to start waits in the queue
while those blocks come: this node opens room for them (`Borrow`), its ticket goes by way of the coordinator to the
lender, and what comes is published as blocks that the pool holds. Then it starts as any other. Others start meanwhile.
Whatever does not come, or not in time, is computed; a prompt is offered blocks once.
"""

from dataclasses import dataclass
from typing import Final

from kv_transfer.results import Received, TransferFailed
from prefill_node.reading import Reading, num_cacheable
from protos import fleet_pb2
from protos.convert import attempt_of, from_tail
from serving_core.blocks import BlockLease
from serving_core.leases import Leases, Loan
from serving_core.residents import Offer, Resident
from serving_node.decisions import Borrow, CancelTransfer
from serving_node.endings import Endings

MAX_LOANS: Final = 16  # at a time


@dataclass(slots=True)
class _Borrowing:
    resident: Resident
    offer: Offer
    loan: Loan
    started_s: float
    is_over: bool = False  # nobody waits for it; what is under way may still write to its blocks
    cancelled: fleet_pb2.Attempt | None = None  # by the coordinator, which waits for a word


class Borrowings:
    """The loans to one node."""

    def __init__(self, leases: Leases, reading: Reading, endings: Endings, block_bytes: int) -> None:
        """`block_bytes` are those of one block over all ranks and layers."""
        self._leases = leases
        self._reading = reading
        self._endings = endings
        self._block_bytes = block_bytes
        self._under_way: dict[int, _Borrowing] = {}  # by epoch

    def __contains__(self, epoch: int) -> bool:
        """Whether the transfer of this epoch is one of these."""
        return epoch in self._under_way

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that are being fetched from other nodes, by epoch."""
        return {epoch: each.loan.lease for epoch, each in self._under_way.items()}

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        return min((_late_at_s(each) for each in self._under_way.values() if not each.is_over), default=None)

    def holds_up(self, resident: Resident, num_spare: int, now: float) -> bool:
        """Whether a prompt that might start, if that leaves num_spare blocks free, is to wait for blocks of its own.
        Takes up what it was offered."""
        offer = resident.offer
        if offer is None:
            return False
        if resident.is_loading:
            return True
        if self._reading.num_needed(resident) + num_spare > self._leases.num_free:
            return False  # nor is there room to start it
        num_tokens = min(offer.num_tokens, num_cacheable(resident))
        num_missing = num_tokens - self._leases.num_held_tokens(resident, num_tokens)
        is_known = offer.epoch in self._under_way
        if num_missing < self._leases.block_size or len(self._under_way) >= MAX_LOANS or is_known:
            resident.offer = None
            return False
        self._begin(resident, offer, num_tokens, now)
        return True

    def granted(self, epoch: int, ticket: bytes) -> None:
        """Every rank awaits the blocks: this ticket lets the lender send them."""
        borrowing = self._under_way[epoch]
        if borrowing.resident.is_ending:
            self._give_up(borrowing)
        elif not borrowing.is_over:
            wire = attempt_of(borrowing.resident.request)
            self._endings.tell(borrowing=fleet_pb2.Borrowing(attempt=wire, ticket=ticket))

    def received(self, epoch: int, result: Received | TransferFailed, now: float) -> None:
        """The transfer is over: nobody writes to the blocks any more."""
        borrowing = self._under_way.pop(epoch)
        num_blocks = self._adopt(borrowing, result) if isinstance(result, Received) else 0
        borrowing.loan.lease.release()
        self._let_start(borrowing)
        self._endings.tell(
            borrowed=fleet_pb2.Borrowed(
                attempt=attempt_of(borrowing.resident.request),
                num_blocks=num_blocks,
                num_bytes=num_blocks * self._block_bytes,
                seconds=now - borrowing.started_s,
            )
        )
        if borrowing.cancelled is not None:
            self._endings.tell(cancelled=fleet_pb2.Cancelled(attempt=borrowing.cancelled))

    def cancel(self, attempt: fleet_pb2.Attempt) -> bool:
        """The lender will send nothing, says the coordinator. False where this is no loan."""
        borrowing = self._under_way.get(attempt.epoch)
        if borrowing is None:
            return False
        borrowing.cancelled = attempt
        self._give_up(borrowing)
        return True

    def detached(self) -> None:
        """The coordinator is gone."""
        for borrowing in list(self._under_way.values()):
            self._give_up(borrowing)

    def tick(self, now: float) -> None:
        """Gives up what takes too long."""
        for borrowing in list(self._under_way.values()):
            if now >= _late_at_s(borrowing):
                self._give_up(borrowing)

    def _begin(self, resident: Resident, offer: Offer, num_tokens: int, now: float) -> None:
        loan = self._leases.begin_loan(resident, num_tokens)
        self._under_way[offer.epoch] = _Borrowing(resident, offer, loan, now)
        resident.is_loading = True
        self._endings.decide(Borrow(offer, loan.lease.block_ids, loan.lease.num_cached))

    def _adopt(self, borrowing: _Borrowing, received: Received) -> int:
        """Blocks that have come as they should."""
        loan = borrowing.loan
        try:
            token_ids, made = from_tail(received.tail)
        except ValueError:
            return 0
        num_blocks = sum(num_made for _, num_made in made)
        num_new = num_blocks - len(loan.names)
        is_odd = token_ids or num_blocks > len(loan.lease.block_ids) or num_new < 0
        if is_odd or received.num_bytes < num_new * self._block_bytes:
            return 0
        self._leases.lent(borrowing.resident, loan, num_blocks, made)
        return num_new

    def _give_up(self, borrowing: _Borrowing) -> None:
        if not borrowing.is_over:
            borrowing.is_over = True
            self._let_start(borrowing)
            self._endings.decide(CancelTransfer(borrowing.offer.epoch))

    def _let_start(self, borrowing: _Borrowing) -> None:
        resident = borrowing.resident
        if resident.offer is borrowing.offer:
            resident.is_loading, resident.offer = False, None


def _late_at_s(borrowing: _Borrowing) -> float:
    return borrowing.started_s + borrowing.offer.patience_s
