"""Where a prompt is read that leaves a policy no choice. Pure.

Of one of which an embedding is wanted nobody writes an answer. An answer that begins again after it has become longer
than the pool of every reader is read by a node that writes.
"""

from collections.abc import Sequence

from coordinator.control.load import Ledger
from coordinator.control.nodes import Node, candidates, fitting
from coordinator.control.placement.costs import Costs
from coordinator.control.placement.policy import Placed, Wanted
from coordinator.control.transfer_costs import HandoverCosts
from serving_core.shapes import DECODE, PREFILL


def best_reader(nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: HandoverCosts) -> Placed:
    """The node that costs the fewest seconds, those of others too. Raises RequestError when there is none."""
    readers = candidates(nodes, PREFILL, len(wanted.prompt))
    costs = Costs(nodes, ledger, wanted.prompt, handover)

    def order(node: Node) -> tuple[bool, float, str]:
        reading = costs.reading(node)
        return node in wanted.avoid, reading.own_s + reading.others_s, node.name

    reader = min(readers, key=order)
    return Placed(reader, reader)


def best_writer(nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: HandoverCosts) -> Placed | None:
    """The node with most room for an answer that goes on and has outgrown the readers; None where it has not, or fits
    on no writer either."""
    readers = fitting(nodes, PREFILL, 0)
    if not wanted.num_output or not readers or fitting(readers, PREFILL, len(wanted.prompt)):
        return None
    costs = Costs(nodes, ledger, wanted.prompt, handover)

    def order(node: Node) -> tuple[bool, bool, float, str]:
        writing = costs.writing(node)
        return node in wanted.avoid, writing.is_full, writing.part, node.name

    writer = min(fitting(nodes, DECODE, wanted.num_tokens), key=order, default=None)
    return None if writer is None else Placed(writer, writer)
