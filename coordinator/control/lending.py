"""Blocks of prompts that nodes lend each other, as the coordinator carries it through. Pure.

Placement says who lends what to the node that reads (coordinator/control/placement/costs.py), and the job tells that
node. When it has room it says Borrowing, whose descriptor goes to the lender with the tokens (Lend); Borrowed ends the
loan, however it went, and what has not come is computed. Where the lender has nothing to lend or is lost, the node that
reads is told at once, by a Cancel of the loan. No end of a loan is one of the request.
"""

from typing import Any, Final

from coordinator.control.instructions import Instruction, Send
from coordinator.control.live import LiveAnswers
from coordinator.control.nodes import Node
from coordinator.control.request import Loan, TrackedRequest
from protos import fleet_pb2
from serving_core import node_requests

EVENTS: Final = ("borrowing", "borrowed")


class Lending:
    """The loans to nodes that read."""

    def __init__(self, live: LiveAnswers) -> None:
        self._live = live

    def find(self, node: Node, attempt: node_requests.Attempt) -> TrackedRequest | None:
        """The request for which this node is to lend by a transfer of this epoch."""
        request = self._live.find(attempt.request_id)
        loan = None if request is None or request.is_waiting else request.attempt.loan
        is_it = loan is not None and loan.epoch == attempt.epoch and loan.lender is node
        return request if is_it else None

    def handle(self, request: TrackedRequest, node: Node, kind: str, body: Any, now: float) -> list[Instruction]:
        """What a node of the current attempt says of its loan: one of EVENTS."""
        if request.attempt.loan is None or node is not request.attempt.prefill:
            return []
        if kind == "borrowing":
            return self._on_borrowing(request, request.attempt.loan, body, now)
        return self._on_borrowed(request, request.attempt.loan, body, now)

    def lost(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """The lender sends nothing, or no more: the node that reads is to go on without."""
        attempt = request.attempt
        holds = attempt.decode_holds if attempt.is_local else attempt.prefill_holds
        if attempt.loan is None or attempt.has_first_token or not holds:
            return []
        return [self._live.cancel(request, attempt.prefill, attempt.loan.epoch, now)]

    def lose(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """A node is gone."""
        loan = request.attempt.loan if request in self._live else None
        return self.lost(request, now) if loan is not None and loan.lender is node else []

    def _on_borrowing(
        self, request: TrackedRequest, loan: Loan, event: fleet_pb2.Borrowing, now: float
    ) -> list[Instruction]:
        if loan.lender not in self._live.registry.nodes:
            return self.lost(request, now)
        prompt = request.known
        request.attempt.is_lent = True
        about = fleet_pb2.Attempt(request_id=request.request_id, epoch=loan.epoch)
        lend = fleet_pb2.Lend(
            attempt=about,
            descriptor=event.descriptor,
            token_ids=prompt.token_ids[: loan.num_tokens],
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
        )
        return [Send(loan.lender, fleet_pb2.NodeCommand(lend=lend, attempt=about))]

    def _on_borrowed(
        self, request: TrackedRequest, loan: Loan, event: fleet_pb2.Borrowed, now: float
    ) -> list[Instruction]:
        attempt, metrics = request.attempt, self._live.metrics
        attempt.loan = None
        num_tokens = event.num_blocks * attempt.prefill.block_size
        pair = loan.lender.name, attempt.prefill.name
        self._live.handover.loans.ended(pair, num_tokens or loan.num_lent, event.seconds, now)
        request.loan_s += event.seconds
        request.lent_kv_bytes += event.num_bytes
        metrics.borrowed(event.num_blocks, event.num_bytes, event.seconds)
        return []
