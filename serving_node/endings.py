"""End requests, and collect the decisions about all of them. Pure.

A request ends by success, failure, cancel or the loss of the coordinator. At that moment it may be in a running step or
in a transfer: its blocks are freed when neither uses them any more, and only then is the end reported.
"""

from collections.abc import Callable
from typing import Any

from protos import fleet_pb2
from protos.convert import attempt_of
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests
from serving_node.decisions import CancelTransfer, Decision, Report


class Endings:
    """End requests, and collect the decisions about all of them."""

    def __init__(self, node_requests: NodeRequests, leases: Leases) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._decisions: list[Decision] = []
        self.decide_first: Callable[[], list[Decision]] | None = None
        """Returns the decisions that must come before all others of the same `take`."""

    def take(self) -> list[Decision]:
        """Return the decisions since the last call, in order."""
        decisions, self._decisions = self._decisions, []
        return decisions if self.decide_first is None else [*self.decide_first(), *decisions]

    def decide(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def report(self, **event: Any) -> None:
        """Decide to report one event, by the name of its field in fleet_pb2.NodeEvent."""
        self.decide(Report(event))

    def fail(self, node_request: NodeRequest, reason: str, message: str) -> None:
        """End a request with a reason of serving_core.reasons."""
        wire = attempt_of(node_request.request)
        self.end(node_request, failed=fleet_pb2.Failed(attempt=wire, reason=reason, message=message))

    def end(self, node_request: NodeRequest, **event: Any) -> None:
        """End a request unless it is already ending. `event`, if any, is reported once nothing is held."""
        if node_request in self._node_requests and node_request.ending is None:
            node_request.ending = event
            if node_request.is_sending or node_request.is_receiving:
                self.decide(CancelTransfer(node_request.request.epoch))
        self.settle(node_request)

    def settle(self, node_request: NodeRequest) -> None:
        """Free a request that is ending once no step and no transfer uses its blocks.

        Call whenever a step or a transfer releases the request.
        """
        if node_request.ending is None or node_request.is_busy or node_request not in self._node_requests:
            return
        self._leases.give_back(node_request)
        self._node_requests.remove(node_request)
        if node_request.ending:
            self.report(**node_request.ending)
