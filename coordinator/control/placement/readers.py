"""Where a prompt is read of which an embedding is all that is wanted, whatever the policy: nobody writes. Pure."""

from collections.abc import Sequence

from coordinator.control.handover import HandoverCosts
from coordinator.control.ledger import Ledger
from coordinator.control.placement.costs import Costs
from coordinator.control.placement.policy import Placed, Wanted
from coordinator.control.registry import Node
from coordinator.control.router import candidates
from serving_core.shapes import PREFILL


def best_reader(nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: HandoverCosts) -> Placed:
    """The node that costs the fewest seconds, those of others too. Raises RequestError when there is none."""
    readers = candidates(nodes, PREFILL, len(wanted.prompt))
    costs = Costs(nodes, ledger, wanted.prompt, handover)

    def order(node: Node) -> tuple[bool, float, str]:
        reading = costs.reading(node)
        return node in wanted.avoid, reading.own_s + reading.others_s, node.name

    reader = min(readers, key=order)
    return Placed(reader, reader)
