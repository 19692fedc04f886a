"""Place the prompts that leave a policy no choice. Pure.

A request for an embedding needs no decode node. An output that is restarted after it has become longer than the pool of
every prefill node is prefilled by a decode node.
"""

from collections.abc import Sequence

from coordinator.control.load import Ledger
from coordinator.control.nodes import Node, candidates, fitting
from coordinator.control.placement.costs import Costs, TransferEstimates
from coordinator.control.placement.policy import Placed, Wanted
from serving_core.shapes import DECODE, PREFILL


def best_prefill_node(nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: TransferEstimates) -> Placed:
    """Return the prefill node that costs the fewest seconds, other requests included. Raise RequestError for none."""
    prefill_nodes = candidates(nodes, PREFILL, len(wanted.prompt))
    costs = Costs(nodes, ledger, wanted.prompt, handover)

    def order(node: Node) -> tuple[bool, float, str]:
        reading = costs.reading(node)
        return node in wanted.avoid, reading.own_s + reading.others_s, node.name

    prefill_node = min(prefill_nodes, key=order)
    return Placed(prefill_node, prefill_node)


def best_decode_node(
    nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: TransferEstimates
) -> Placed | None:
    """Return the decode node with most room for a restarted output that no prefill node can hold.

    Return None where a prefill node can hold it, or no decode node can.
    """
    prefill_nodes = fitting(nodes, PREFILL, 0)
    if not wanted.num_output or not prefill_nodes or fitting(prefill_nodes, PREFILL, len(wanted.prompt)):
        return None
    costs = Costs(nodes, ledger, wanted.prompt, handover)

    def order(node: Node) -> tuple[bool, bool, float, str]:
        writing = costs.writing(node)
        return node in wanted.avoid, writing.is_full, writing.part, node.name

    decode_node = min(fitting(nodes, DECODE, wanted.num_tokens), key=order, default=None)
    return None if decode_node is None else Placed(decode_node, decode_node)
