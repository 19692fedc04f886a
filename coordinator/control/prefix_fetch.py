"""Carry out remote prefix fetches. Pure.

In a remote prefix fetch a prefill node gets blocks of a prompt from another node's prefix cache. Placement chooses the
source, by the time that a fetch takes (coordinator/control/placement/costs.py), and the Job names it to the prefill
node. When that node has reserved blocks it sends PrefixFetchBegun, whose transfer descriptor goes to the source with
the tokens (SendPrefix). PrefixFetchEnded ends the fetch, whatever its outcome, and tokens that have not come are
computed. Where the source has nothing to send or is lost, the prefill node gets, at once, a Cancel with the fetch's
epoch. The end of a fetch never ends the request.
"""

from dataclasses import replace
from typing import Final

from coordinator.control.instructions import Instruction, Releases, Send
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Node, Registry
from coordinator.control.placement.costs import PrefixFetchEstimator
from coordinator.control.request import ON_NODES, Request, State, Transition
from protos import fleet_pb2


class PrefixFetches:
    """Follow the remote prefix fetches of requests. Methods handle events and return the instructions that follow."""

    def __init__(
        self, registry: Registry, metrics: Metrics, releases: Releases, estimator: PrefixFetchEstimator
    ) -> None:
        self._registry, self._metrics = registry, metrics
        self._releases, self._estimator = releases, estimator

    def begun(self, request: Request, node: Node, event: fleet_pb2.PrefixFetchBegun, now: float) -> list[Instruction]:
        """Return the SendPrefix command for the source, since the prefill node has reserved blocks for the fetch.

        If the source is lost, does what `source_gone` does. Returns nothing if the attempt has no fetch.
        """
        fetch, prompt = request.attempt.prefix_fetch, request.known
        if fetch is None or node is not request.attempt.prefill:
            return []
        if fetch.source not in self._registry:
            return self.source_gone(request, fetch.source, event, now)
        request.attempt.prefix_fetch = replace(fetch, has_begun=True)
        about = fleet_pb2.Attempt(request_id=request.request_id, epoch=fetch.epoch)
        send_prefix = fleet_pb2.SendPrefix(
            attempt=about,
            descriptor=event.descriptor,
            token_ids=prompt.token_ids[: fetch.num_tokens],
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
        )
        return [Send(fetch.source, fleet_pb2.NodeCommand(send_prefix=send_prefix, attempt=about))]

    def ended(self, request: Request, node: Node, event: fleet_pb2.PrefixFetchEnded, now: float) -> list[Instruction]:
        """Record the duration, the bytes and the outcome of a fetch that has ended. Returns no instruction."""
        attempt, fetch = request.attempt, request.attempt.prefix_fetch
        if fetch is None or node is not attempt.prefill:
            return []
        attempt.prefix_fetch = None
        num_tokens = event.num_blocks * attempt.prefill.block_size
        pair = fetch.source.name, attempt.prefill.name
        self._estimator.ended(pair, num_tokens or fetch.num_fetched, event.seconds, now)
        request.prefix_fetch_s += event.seconds
        request.num_fetched_kv_bytes += event.num_bytes
        self._metrics.prefix_fetch_ended(event.num_blocks, event.num_bytes, event.seconds)
        return []

    def source_gone(self, request: Request, node: Node, event: object, now: float) -> list[Instruction]:
        """Return the Cancel of a fetch whose source sends nothing more; the prefill node then computes what is missing.

        Returns nothing if the attempt has no fetch, or is prefilled.
        """
        attempt, fetch = request.attempt, request.attempt.prefix_fetch
        if fetch is None or request.state is not State.PREFILLING or attempt.prefill not in attempt.holders:
            return []
        return [self._releases.cancel(request, attempt.prefill, fetch.epoch, now)]


TRANSITIONS: Final = (
    Transition(ON_NODES, "prefix_fetch_begun", PrefixFetches.begun),
    Transition(ON_NODES, "prefix_fetch_ended", PrefixFetches.ended),
    Transition((State.PREFILLING,), "prefix_source_failed", PrefixFetches.source_gone),
    Transition((State.PREFILLING,), "prefix_source_lost", PrefixFetches.source_gone),
)
