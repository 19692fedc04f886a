"""Prompts on their way from the node that read them to the node that answers, seen from either. Pure.

The node that writes grants blocks (`Receive`), and its ticket goes by way of the coordinator to the node that reads,
which sends (`Send`, `FinishSend`). A grant that is taken back voids its ticket: the sender keeps what it has read and
waits for another one, or is told to answer it itself.

For the node that it comes to, an answer that moves is no different, but for the tokens that come with it: moves.py has
the other side.
"""

from collections.abc import Callable, Iterable
from typing import Final

from decode_node.credit import Credit
from kv_transfer.results import Received, Sent, TransferFailed
from prefill_node.reading import Reading
from protos import fleet_pb2
from protos.convert import attempt_of, from_tail, to_tail
from serving_core import reasons
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents, Stage
from serving_node.decisions import CancelTransfer, FinishSend, Receive, Send
from serving_node.outputs import Endings

MAY_WAIT: Final = (Stage.AWAITING, Stage.READ, Stage.STOPPED)


class HandOvers:
    """The transfers of one node, in both directions."""

    def __init__(
        self,
        residents: Residents,
        leases: Leases,
        reading: Reading,
        credit: Credit,
        endings: Endings,
        *,
        block_bytes: int,
        credit_timeout_s: float,
        ticket_timeout_s: float,
        on_committed: Callable[[], None],
    ) -> None:
        """`block_bytes` are those of one block over all ranks and layers."""
        self._residents = residents
        self._leases = leases
        self._reading = reading
        self._credit = credit
        self._endings = endings
        self._block_bytes = block_bytes
        self._credit_timeout_s = credit_timeout_s
        self._ticket_timeout_s = ticket_timeout_s
        self._on_committed = on_committed
        self._under_way: dict[int, Resident] = {}  # in either direction, by epoch
        self.num_kv_bytes = 0  # that travelled, over all ranks
        self.num_failed = 0  # but for those of answers that were over, and what the other node gave up and counts

    @property
    def wake_at_s(self) -> float | None:
        """When the next `tick` is due."""
        return min((self._deadline_s(each) for each in self._waiting()), default=None)

    def receive(self, resident: Resident) -> None:
        """The resident has been granted blocks: the other node may send."""
        resident.is_receiving, resident.is_coming = True, False
        self._under_way[resident.request.epoch] = resident
        self._endings.decide(Receive(resident, self._credit.num_blocks(resident)))

    def deliver(self, deliver: fleet_pb2.Deliver) -> None:
        """The other node has room: its ticket."""
        resident = self._residents.find(deliver.attempt)
        if resident is None or resident.is_ending or not resident.is_outgoing:
            return
        if resident.is_sending:  # by the ticket of a grant that was taken back
            resident.next_ticket = deliver.ticket
        elif not resident.ticket:
            self._send(resident, deliver.ticket)

    def keep(self, resident: Resident) -> None:
        """Nobody else is to answer: it is read on as it is, and then waits for nothing but a seat. A transfer by a
        ticket that is void may still be ending."""
        resident.is_kept = True
        if resident.is_sending:
            self._endings.decide(CancelTransfer(resident.request.epoch))

    def granted(self, epoch: int, ticket: bytes) -> None:
        """Every rank awaits the blocks of a `Receive`: this ticket lets the other node send them."""
        resident = self._under_way[epoch]
        if not resident.is_ending and not resident.is_revoked:
            self._endings.tell(reserved=fleet_pb2.Reserved(attempt=attempt_of(resident.request), ticket=ticket))

    def coming(self, epoch: int) -> None:
        """The other node has begun to send what a `Receive` waits for."""
        if resident := self._under_way.get(epoch):
            resident.is_coming = True

    def received(self, epoch: int, result: Received | TransferFailed, now: float) -> None:
        """A `Receive` is over."""
        resident = self._under_way.pop(epoch)
        resident.is_receiving = False
        if isinstance(result, Received):
            self.num_kv_bytes += result.num_bytes
        elif not (resident.is_revoked or resident.is_ending or result.reason == reasons.TRANSFER_ABORTED):
            self.num_failed += 1
        if resident.is_ending:
            self._endings.settle(resident)
        elif isinstance(result, Received):
            self._commit(resident, result, now)
        elif resident.is_revoked:
            self._credit.take_back(resident, now)
            self._endings.tell(revoked=fleet_pb2.Revoked(attempt=attempt_of(resident.request)))
        elif result.reason != reasons.TRANSFER_ABORTED:
            # The sender's own word on an abort, perhaps the last token, may still be on its way to the coordinator,
            # which cancels this attempt then; a failure from here could overtake it.
            self._endings.fail(resident, result.reason, result.message)

    def sent(self, epoch: int, result: Sent | TransferFailed, now: float) -> None:
        """A `Send` is over."""
        resident = self._under_way.pop(epoch)
        resident.is_sending = False
        if not resident.is_outgoing:
            self._endings.settle(resident)
        elif isinstance(result, Sent):
            self.num_kv_bytes += result.num_bytes
            wire = attempt_of(resident.request)
            self._endings.end(resident, transferred=fleet_pb2.Transferred(attempt=wire, num_bytes=result.num_bytes))
        elif result.reason == reasons.TRANSFER_REVOKED and not resident.is_ending:
            ticket, resident.ticket, resident.next_ticket = resident.next_ticket, b"", b""
            resident.waiting_since_s = now
            if ticket:
                self._send(resident, ticket)
        else:
            self.num_failed += not resident.is_ending
            self._endings.fail(resident, result.reason, result.message)

    def tick(self, now: float) -> None:
        """Ends what has waited too long."""
        for resident in self._waiting():
            if now < self._deadline_s(resident):
                continue
            if resident.stage is Stage.AWAITING and resident.is_to_share:
                self._credit.wait_no_more(resident, now)
            elif resident.stage is Stage.AWAITING:
                timeout_s = self._credit_timeout_s
                message = f"the decode node had no room for the request within {timeout_s} s"
                self._endings.fail(resident, reasons.QUEUE_FULL, message)
            else:
                what = "ticket" if resident.stage is Stage.READ else "word on an answer that has stopped"
                message = f"no {what} came within {self._ticket_timeout_s} s"
                self._endings.fail(resident, reasons.TRANSFER_FAILED, message)

    def note_read(self, residents: Iterable[Resident], now: float) -> None:
        """Prompts that another node waits for: those of which everything is computed now."""
        for resident in residents:
            if resident.stage is not Stage.READING or not resident.tail or resident.num_to_compute:
                continue
            self._residents.enter(resident, Stage.READ)
            resident.waiting_since_s = now
            if resident.is_sending and resident.is_outgoing and not resident.is_ending:
                self.finish_send(resident)

    def _send(self, resident: Resident, ticket: bytes) -> None:
        resident.ticket = ticket
        resident.is_sending = True
        self._under_way[resident.request.epoch] = resident
        self._endings.decide(Send(resident, self._leases.final_blocks(resident)))
        if resident.stage is Stage.READ:
            self.finish_send(resident)

    def finish_send(self, resident: Resident) -> None:
        """All of what is being sent is final, and its tail is known."""
        tail = to_tail(resident.tail, self._leases.makers_of(resident))
        self._endings.decide(FinishSend(resident, self._leases.filled_blocks(resident), tail))

    def _commit(self, resident: Resident, received: Received, now: float) -> None:
        try:
            token_ids, made = from_tail(received.tail)
            self._credit.check_tail(resident, len(token_ids), received.num_bytes // self._block_bytes)
        except ValueError as error:
            self._endings.fail(resident, reasons.TRANSFER_FAILED, str(error))
            return
        resident.is_revoked = False  # it came too late
        self._credit.commit(resident, token_ids, made)
        resident.note_begun(now)  # the coordinator's word of that may still be on its way
        self._reading.count(resident)
        committed = fleet_pb2.Committed(
            attempt=attempt_of(resident.request),
            num_bytes=received.num_bytes,
            num_bytes_saved=resident.num_cached_blocks * self._block_bytes,
            next_index=resident.request.num_output_tokens,
        )
        self._endings.tell(committed=committed)
        self._on_committed()

    def revoke(self, resident: Resident) -> None:
        self._endings.decide(CancelTransfer(resident.request.epoch))

    def _waiting(self) -> list[Resident]:
        """Those that wait for another node."""
        return [each for each in self._residents.in_stage(*MAY_WAIT) if _is_waiting(each)]

    def _deadline_s(self, resident: Resident) -> float:
        is_awaiting = resident.stage is Stage.AWAITING
        timeout_s = self._credit_timeout_s if is_awaiting else self._ticket_timeout_s
        return resident.waiting_since_s + timeout_s


def _is_waiting(resident: Resident) -> bool:
    """Whether one that may wait for another node does, which may take too long."""
    if resident.is_ending or resident.is_sending:
        return False
    return resident.is_outgoing or resident.stage is not Stage.READ
