"""Attempts that nodes were told to drop and have not yet let go of. Pure."""

from dataclasses import dataclass

from coordinator.control.registry import Node
from protos import fleet_pb2

RESEND_S = 5.0


@dataclass(slots=True)
class _Release:
    node: Node
    attempt: fleet_pb2.Attempt
    asked_s: float


class Releases:
    """Remembers each Cancel until the node has answered it or is lost, and asks again every RESEND_S seconds."""

    def __init__(self) -> None:
        self._releases: dict[tuple[Node, int], _Release] = {}  # epochs are never used twice

    def __len__(self) -> int:
        return len(self._releases)

    def ask(self, node: Node, request_id: str, epoch: int, now: float) -> fleet_pb2.NodeCommand:
        """The Cancel to send to the node."""
        release = _Release(node, fleet_pb2.Attempt(request_id=request_id, epoch=epoch), now)
        self._releases[node, epoch] = release
        return _cancel(release)

    def settle(self, node: Node, epoch: int) -> bool:
        """The node holds nothing of the attempt any more. False when it was not asked to let go."""
        return self._releases.pop((node, epoch), None) is not None

    def count(self, node: Node) -> int:
        """Attempts that the node has yet to let go of."""
        return sum(release.node is node for release in self._releases.values())

    def lose(self, node: Node) -> None:
        self._releases = {key: release for key, release in self._releases.items() if release.node is not node}

    def overdue(self, now: float) -> list[tuple[Node, fleet_pb2.NodeCommand]]:
        """The Cancels to send again."""
        late = [release for release in self._releases.values() if now - release.asked_s >= RESEND_S]
        for release in late:
            release.asked_s = now
        return [(release.node, _cancel(release)) for release in late]


def _cancel(release: _Release) -> fleet_pb2.NodeCommand:
    return fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel(attempt=release.attempt), attempt=release.attempt)
