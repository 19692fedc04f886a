"""Carry out remote prefix fetches: a prefill node gets blocks of a prompt from another node's prefix cache. Pure.

Placement chooses the source of the fetch (coordinator/control/placement/costs.py), and the Job names it to the prefill
node. When that node has reserved blocks it sends Borrowing, whose transfer descriptor goes to the source with the
tokens (Lend). Borrowed ends the fetch, whatever its outcome, and tokens that have not come are computed. Where the
source has nothing to send or is lost, the prefill node is told at once, by a Cancel with the fetch's epoch. The end of
a fetch never ends the request.
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
    """Track the remote prefix fetches of live requests."""

    def __init__(self, live: LiveAnswers) -> None:
        self._live = live

    def find(self, node: Node, attempt: node_requests.Attempt) -> TrackedRequest | None:
        """Return the request for which this node is the source of a remote prefix fetch with this epoch."""
        request = self._live.find(attempt.request_id)
        loan = None if request is None or request.is_waiting else request.attempt.loan
        is_it = loan is not None and loan.epoch == attempt.epoch and loan.lender is node
        return request if is_it else None

    def handle(self, request: TrackedRequest, node: Node, kind: str, body: Any, now: float) -> list[Instruction]:
        """Handle one of EVENTS, which the prefill node of the current attempt has sent."""
        if request.attempt.loan is None or node is not request.attempt.prefill:
            return []
        if kind == "borrowing":
            return self._on_borrowing(request, request.attempt.loan, body, now)
        return self._on_borrowed(request, request.attempt.loan, body, now)

    def lost(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Tell the prefill node to go on without the fetch: its source sends nothing, or no more."""
        attempt = request.attempt
        holds = attempt.decode_holds if attempt.is_local else attempt.prefill_holds
        if attempt.loan is None or attempt.has_first_token or not holds:
            return []
        return [self._live.cancel(request, attempt.prefill, attempt.loan.epoch, now)]

    def lose(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """Handle the loss of a node that may be the source of the request's fetch."""
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
