"""What one request holds on a decode node."""

from dataclasses import dataclass

from decode_node.ranks import DecodeRanks
from decode_node.reservation import Reservation
from decode_node.scheduler import DecodeScheduler
from kv_transfer.ticket import Ticket
from serving_core.requests import Request


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on this node, from Reserve until everything it holds is free."""

    reservation: Reservation
    scheduler: DecodeScheduler
    ranks: DecodeRanks
    prefill_tp: int | None  # ranks of the node that will send; None: this node computes the prompt
    ticket: Ticket | None = None  # while a rank's receiver may write to the blocks
    prefill_started_at: float | None = None  # when the first step began that computed some of a local prompt

    @property
    def request(self) -> Request:
        return self.reservation.request

    @property
    def is_busy(self) -> bool:
        return self.reservation.in_step or self.ticket is not None

    def note_step(self, started_at: float) -> None:
        """A step of this request begins."""
        if self.prefill_started_at is None and self.reservation.computes_prompt:
            self.prefill_started_at = started_at

    def stop(self) -> None:
        self.reservation.cancelled = True
        if self.ticket is not None:
            self.ranks.cancel(self.request.epoch)

    def release(self) -> None:
        self.scheduler.remove(self.reservation)
