"""How each request on a node ends: once, with nothing left held. Pure.

It is ended by its own success, by failure, by cancel or by a lost coordinator, and may at that moment be in a running
step or in a transfer. Its blocks are freed when neither touches them any more, and only then does the coordinator hear
of the end.
"""

from typing import Any

from protos import fleet_pb2
from protos.convert import attempt_of
from serving_core.leases import Leases
from serving_core.residents import Resident, Residents
from serving_node.decisions import CancelTransfer, Decision, Tell


class Endings:
    """Ends requests, and collects what is decided about all of them."""

    def __init__(self, residents: Residents, leases: Leases) -> None:
        self._residents = residents
        self._leases = leases
        self._decisions: list[Decision] = []

    def take(self) -> list[Decision]:
        """What has been decided since the last call, in order."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def decide(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def tell(self, **event: Any) -> None:
        """Decides to tell the coordinator one event, by its field of fleet_pb2.NodeEvent."""
        self.decide(Tell(event))

    def fail(self, resident: Resident, reason: str, message: str) -> None:
        """Ends a request with a reason of serving_core.reasons."""
        wire = attempt_of(resident.request)
        self.end(resident, failed=fleet_pb2.Failed(attempt=wire, reason=reason, message=message))

    def end(self, resident: Resident, **event: Any) -> None:
        """Ends a request, unless it is ending already. `event`, if any, is told once nothing is held."""
        if resident in self._residents and not resident.is_ending:
            resident.ending = event
            if resident.is_sending or resident.is_receiving:
                self.decide(CancelTransfer(resident.request.epoch))
        self.settle(resident)

    def settle(self, resident: Resident) -> None:
        """Frees a request that is ending when nothing touches it any more. To be called when a step or a transfer lets
        go of it."""
        if resident.ending is None or resident.is_busy or resident not in self._residents:
            return
        self._leases.give_back(resident)
        self._residents.remove(resident)
        if resident.ending:
            self.tell(**resident.ending)
