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
from coordinator.control.request import PrefixFetch, TrackedRequest
from protos import fleet_pb2
from serving_core.node import requests as node_requests

EVENTS: Final = ("prefix_fetch_begun", "prefix_fetch_ended")


class PrefixSends:
    """Track the remote prefix fetches of live requests."""

    def __init__(self, live: LiveAnswers) -> None:
        self._live = live

    def find(self, node: Node, attempt: node_requests.Attempt) -> TrackedRequest | None:
        """Return the request for which this node is the source of a remote prefix fetch with this epoch."""
        request = self._live.find(attempt.request_id)
        prefix_fetch = None if request is None or request.is_waiting else request.attempt.prefix_fetch
        is_it = prefix_fetch is not None and prefix_fetch.epoch == attempt.epoch and prefix_fetch.source is node
        return request if is_it else None

    def handle(self, request: TrackedRequest, node: Node, kind: str, body: Any, now: float) -> list[Instruction]:
        """Handle one of EVENTS, which the prefill node of the current attempt has sent."""
        if request.attempt.prefix_fetch is None or node is not request.attempt.prefill:
            return []
        if kind == "prefix_fetch_begun":
            return self._on_prefix_fetch_begun(request, request.attempt.prefix_fetch, body, now)
        return self._on_prefix_fetch_ended(request, request.attempt.prefix_fetch, body, now)

    def lost(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Tell the prefill node to go on without the fetch: its source sends nothing, or no more."""
        attempt = request.attempt
        holds = attempt.decode_holds if attempt.is_local else attempt.prefill_holds
        if attempt.prefix_fetch is None or attempt.has_first_token or not holds:
            return []
        return [self._live.cancel(request, attempt.prefill, attempt.prefix_fetch.epoch, now)]

    def lose(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """Handle the loss of a node that may be the source of the request's fetch."""
        prefix_fetch = request.attempt.prefix_fetch if request in self._live else None
        return self.lost(request, now) if prefix_fetch is not None and prefix_fetch.source is node else []

    def _on_prefix_fetch_begun(
        self, request: TrackedRequest, prefix_fetch: PrefixFetch, event: fleet_pb2.PrefixFetchBegun, now: float
    ) -> list[Instruction]:
        if prefix_fetch.source not in self._live.registry.nodes:
            return self.lost(request, now)
        prompt = request.known
        request.attempt.is_lent = True
        about = fleet_pb2.Attempt(request_id=request.request_id, epoch=prefix_fetch.epoch)
        send_prefix = fleet_pb2.SendPrefix(
            attempt=about,
            descriptor=event.descriptor,
            token_ids=prompt.token_ids[: prefix_fetch.num_tokens],
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
        )
        return [Send(prefix_fetch.source, fleet_pb2.NodeCommand(send_prefix=send_prefix, attempt=about))]

    def _on_prefix_fetch_ended(
        self, request: TrackedRequest, prefix_fetch: PrefixFetch, event: fleet_pb2.PrefixFetchEnded, now: float
    ) -> list[Instruction]:
        attempt, metrics = request.attempt, self._live.metrics
        attempt.prefix_fetch = None
        num_tokens = event.num_blocks * attempt.prefill.block_size
        pair = prefix_fetch.source.name, attempt.prefill.name
        self._live.handover.prefix_fetches.ended(pair, num_tokens or prefix_fetch.num_fetched, event.seconds, now)
        request.loan_s += event.seconds
        request.lent_kv_bytes += event.num_bytes
        metrics.prefix_fetch_ended(event.num_blocks, event.num_bytes, event.seconds)
        return []
