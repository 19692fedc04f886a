"""Running answers on their way to other nodes, seen from the node that they leave. Pure.

An answer that moves goes on while its full blocks leave (`Send`, `SendMore`). It stops for good, between two steps,
when all that was full has left, or before it needs more blocks than the other node has granted; the rest follows with
the tokens that the other node does not know (`FinishSend`). The last token's KV is computed there.
What the ticket says to be there already is compared by name, and does not leave.

Who goes on is the coordinator's to say: one that has stopped waits for Cancel or Keep, whatever becomes of the
transfer, since what was lost may be the word of its success.

Keep lets an answer write on at once, though the transport may still hold blocks of a transfer that was just cancelled.
A full block never changes. The last one does, and no receiver can take the changed bytes for what was sent: their
checksum was taken before (SendingTransfer). Besides, the coordinator has called the other node's attempt off before it
says Keep, and listens to nothing of that epoch any more.
"""

from collections.abc import Iterable
from typing import Final

from kv_transfer.results import Sent, TransferError, TransferFailed
from kv_transfer.ticket import Ticket
from protos import fleet_pb2
from protos.convert import attempt_of
from serving_core import reasons
from serving_core.leases import Leases
from serving_core.residents import Move, Resident, Residents, Stage
from serving_node.decisions import CancelTransfer, Send, SendMore
from serving_node.handovers import HandOvers
from serving_node.outputs import Endings

MAX_TAIL_TOKENS: Final = 512  # of 5 bytes each at most: they leave room for makers in a tail


class Moves:
    """The transfers of running answers that leave one node."""

    def __init__(self, residents: Residents, leases: Leases, hand_overs: HandOvers, endings: Endings) -> None:
        self._residents = residents
        self._leases = leases
        self._hand_overs = hand_overs
        self._endings = endings
        self._under_way: dict[int, Resident] = {}  # by epoch
        self.num_kv_bytes = 0  # that travelled, over all ranks
        self.num_failed = 0

    def __contains__(self, epoch: int) -> bool:
        """Whether the transfer of this epoch is one of these."""
        return epoch in self._under_way

    def migrate(self, migrate: fleet_pb2.Migrate) -> None:
        """Another node has room for the answer: its ticket."""
        resident = self._find(migrate.attempt)
        if resident is None:
            return
        try:
            ticket = Ticket.decode(migrate.ticket)
            move = self._move(resident, ticket)
        except TransferError as error:
            self._fail(resident, reasons.TRANSFER_FAILED, str(error))
            return
        if not _is_behind(resident, ticket):
            message = "the answer was written behind other blocks than the other node has of its tokens"
            self._fail(resident, reasons.PAIRING_MISMATCH, message)
            return
        resident.move, resident.ticket, resident.is_sending = move, migrate.ticket, True
        self._under_way[resident.request.epoch] = resident
        self._endings.decide(Send(resident, self._leases.final_blocks(resident)))
        self._stop_if_due(resident)

    def keep(self, keep: fleet_pb2.Keep) -> None:
        """The answer is this node's, whether it was to move or its prompt was read for another node."""
        resident = self._find(keep.attempt)
        if resident is None:
            return
        if resident.hands_over:
            self._hand_overs.keep(resident)
        elif resident.stage in (Stage.AWAITING, Stage.GRANTED):
            self._endings.fail(resident, reasons.PAIRING_MISMATCH, "what another node has the KV of cannot be kept")
        else:
            self._stay(resident)

    def note_written(self, residents: Iterable[Resident]) -> None:
        """A step is done, and its tokens are told: what it has filled may leave."""
        for resident in residents:
            if resident.move is None or resident.is_ending:
                continue
            self._stop_if_due(resident)
            if resident.stage is Stage.WRITING and resident.num_computed % self._leases.block_size == 0:
                self._endings.decide(SendMore(resident, self._leases.final_blocks(resident)))

    def caught_up(self, epoch: int) -> None:
        """Everything that was full has left."""
        resident = self._under_way.get(epoch)
        if resident is not None and resident.move is not None and not resident.is_ending:
            resident.move.has_caught_up = True
            self._stop_if_due(resident)

    def sent(self, epoch: int, result: Sent | TransferFailed, now: float) -> None:
        """A transfer is over."""
        resident = self._under_way.pop(epoch)
        resident.is_sending = False
        resident.ticket = b""
        move, resident.move = resident.move, None
        resident.waiting_since_s = now
        if isinstance(result, Sent):
            self.num_kv_bytes += result.num_bytes
        elif move is not None and not resident.is_ending:
            self.num_failed += 1
            self._fail(resident, result.reason, result.message)
        self._endings.settle(resident)

    def _find(self, attempt: fleet_pb2.Attempt) -> Resident | None:
        """An attempt that is not ending; one that is unknown is answered as failed."""
        resident = self._residents.find(attempt)
        if resident is None:
            message = "the node has nothing of this attempt"
            failed = fleet_pb2.Failed(attempt=attempt, reason=reasons.TRANSFER_FAILED, message=message)
            self._endings.tell(failed=failed)
        return None if resident is None or resident.is_ending else resident

    def _move(self, resident: Resident, ticket: Ticket) -> Move:
        """Raises TransferError where it cannot move."""
        if resident.stage is not Stage.WRITING:
            raise TransferError("the answer is not being written now")
        if resident.hosts:
            raise TransferError("the answer is longer than a pool, and stays")
        if resident.is_sending:
            raise TransferError("the transfer before this one has not ended")
        num_tokens = len(resident.request.token_ids) + resident.num_candidates
        if not 0 <= num_tokens - ticket.num_tokens < MAX_TAIL_TOKENS:
            raise TransferError(f"the ticket knows {ticket.num_tokens} tokens of {num_tokens}")
        num_blocks = self._leases.blocks_for(resident.num_computed + resident.in_step + resident.num_candidates)
        if num_blocks > ticket.num_blocks:
            raise TransferError(f"the answer has {num_blocks} blocks by now and {ticket.num_blocks} were granted")
        return Move(ticket.num_blocks, ticket.num_tokens)

    def _stop_if_due(self, resident: Resident) -> None:
        move = resident.move
        if move is None or resident.in_step or resident.stage is not Stage.WRITING:
            return
        if not move.has_caught_up and not self._is_at_limit(resident, move):
            return
        self._residents.enter(resident, Stage.STOPPED)
        resident.tail = resident.request.token_ids[move.num_tokens :]
        self._hand_overs.finish_send(resident)

    def _stay(self, resident: Resident) -> None:
        if resident.move is not None:
            self._endings.decide(CancelTransfer(resident.request.epoch))
        resident.move = None
        if resident.stage is Stage.STOPPED:
            self._residents.enter(resident, Stage.WRITING)

    def _is_at_limit(self, resident: Resident, move: Move) -> bool:
        """Whether the other node could not take one more token."""
        num_blocks = self._leases.blocks_for(resident.num_computed + 1)
        num_unknown = len(resident.request.token_ids) - move.num_tokens
        return num_blocks > move.num_blocks or num_unknown == MAX_TAIL_TOKENS

    def _fail(self, resident: Resident, reason: str, message: str) -> None:
        wire = attempt_of(resident.request)
        self._endings.tell(move_failed=fleet_pb2.MoveFailed(attempt=wire, reason=reason, message=message))


def _is_behind(resident: Resident, ticket: Ticket) -> bool:
    """Whether the blocks that the other node has are, to the bit, the answer's own."""
    num_cached = ticket.num_cached_blocks
    return not num_cached or resident.names.names[num_cached - 1 : num_cached] == [ticket.behind]
