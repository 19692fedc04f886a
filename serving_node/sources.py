"""Define what the node's scheduler asks of KV that lies outside the pool or does not belong to its requests."""

from protos import fleet_pb2, inference_pb2
from serving_core.node.blocks import BlockLease
from serving_core.node.requests import NodeRequest


class KVSource:
    """A place of KV beside the pool of one node: host memory and disk, other nodes. Methods do nothing by default.

    The scheduler of a node has a list of the sources that are switched on, and calls all of them.
    """

    kind = ""  # of lease holder, in `NodeScheduler.leases`

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks of the pool that the source holds, by number."""
        return {}

    @property
    def is_idle(self) -> bool:
        """Return whether the node can end without loss to another node."""
        return True

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if nothing waits."""
        return None

    def tick(self, now: float) -> None:
        """End waits that have passed their deadline."""

    def must_wait(self, node_request: NodeRequest, num_spare: int, now: float) -> bool:
        """Return whether a prompt that might start must wait for blocks of the source.

        The source may begin to bring them. The start of the prompt must leave `num_spare` blocks free.
        """
        return False

    def started(self, node_request: NodeRequest) -> None:
        """Note that a prompt has got its blocks and starts."""

    def cancel(self, node_request: NodeRequest) -> None:
        """Stop bringing blocks for a request, which ends."""

    def cancel_fetch(self, attempt: fleet_pb2.Attempt) -> bool:
        """Cancel the fetch of blocks with this attempt; return False if the source has none."""
        return False

    def detached(self) -> None:
        """Cancel everything that needs the coordinator, which is gone."""

    def fill(self, load: inference_pb2.NodeLoad) -> None:
        """Set the source's fields of the node's load."""

    def check_integrity(self) -> None:
        """Recount the source's state from scratch. Raises AssertionError if the counts differ."""


class StepSource(KVSource):
    """A source with blocks that steps read, which takes part in the planning of each step."""

    def before_step(self) -> None:
        """Preempt requests for the KV of other nodes, before a step is planned."""

    def after_step(self, node_requests: list[NodeRequest], step_s: float, now: float) -> None:
        """Handle what a step of these requests, which took `step_s` seconds, found out about their remote KV."""

    def unblock(self) -> bool:
        """Fail or preempt requests of a node that has nothing to compute; return whether that changed anything."""
        return False
