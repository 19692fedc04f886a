"""Choose the pair of nodes that makes the fewest requests miss their SLO, and of those the cheapest in seconds. Pure.

Predicted violations are those of coordinator/control/placement/lateness.py, requests to come included; seconds are
those of all requests (coordinator/control/placement/costs.py). Without SLOs the seconds decide; while no rate is known,
pure prefill nodes come first. Among decode nodes of equal cost the one with most of its pool left is chosen; blocks
that it has cached count as left. Nodes that have failed the request come last, and full decode nodes after those with
room.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import nsmallest
from operator import itemgetter
from typing import Final, NamedTuple

from coordinator.control.load import Ledger
from coordinator.control.nodes import Node, candidates
from coordinator.control.placement.costs import Costs, TransferEstimates
from coordinator.control.placement.lateness import Lateness, spared
from coordinator.control.placement.policy import Placed, Wanted, within_pools
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER
from serving_core.shapes import DECODE, PREFILL

Pair = tuple[Node, Node]

MOST_WEIGHED: Final = 9  # cheapest pairs for which violations are predicted
MOST_PREFILL_NODES: Final = 2  # cheapest prefill nodes that are paired with decode nodes


class Cheapest:
    """Compare single nodes and pairs of nodes."""

    def __init__(self, *, counts_late: bool = True, may_be_alone: bool = True, may_be_two: bool = True) -> None:
        """Create a policy. `counts_late`: predict violations. `may_be_alone` and `may_be_two` allow one node, or two.

        A form of placement that is not allowed is still used where no other is possible.
        """
        self._counts_late = counts_late
        self._may_be_alone, self._may_be_two = may_be_alone, may_be_two

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: TransferEstimates, now: float
    ) -> Placed:
        """Return the placement, as Policy.place does."""
        prefill_nodes = candidates(nodes, PREFILL, len(wanted.prompt))
        decode_nodes = candidates(nodes, DECODE, wanted.num_tokens)
        costs = Costs(nodes, ledger, wanted.prompt, handover)
        lateness = Lateness(ledger, wanted, now, costs.num_fetched) if self._counts_late else None
        if lateness is None or not lateness.is_at_stake:
            weighing = _Weighing(costs, None, None, wanted.avoid)
        else:
            least = spared(prefill_nodes, ledger, now)
            has_other = any(node is not least and not costs.writing(node).is_full for node in decode_nodes)
            weighing = _Weighing(costs, lateness, least if has_other else None, wanted.avoid)
        alone = [(node, node) for node in set(prefill_nodes).intersection(decode_nodes)]
        two = list(_two(costs, wanted.avoid, *within_pools(prefill_nodes, decode_nodes, wanted)))
        pairs = [*(two if self._may_be_two else ()), *(alone if self._may_be_alone else ())] or [*two, *alone]
        if not pairs:
            message = "no node that writes answers takes those of prompts that other nodes read"
            raise RequestError(NO_DECODE_WORKER, message)
        return weighing.placed(*weighing.best(pairs))


def _two(
    costs: Costs, avoid: Collection[Node], prefill_nodes: Sequence[Node], decode_nodes: Sequence[Node]
) -> Iterator[Pair]:
    """Yield each of the best prefill nodes with each of the best decode nodes.

    Several of each are tried: the best prefill node may be the only decode node, or have prompts that would be late.
    """
    takers = [node for node in decode_nodes if node.usable.takes_handovers]
    if not takers:
        return
    credit_s = min(costs.writing(node).credit_s for node in takers)

    def by_seconds(node: Node) -> tuple[bool, bool, float, str]:
        reading = costs.reading(node)
        is_second_choice = node.decodes and not costs.are_known
        return node in avoid, is_second_choice, max(reading.own_s, credit_s) + reading.others_s, node.name

    best = nsmallest(MOST_WEIGHED, takers, lambda node: (node in avoid, costs.writing(node), node.name))
    for prefill_node in nsmallest(MOST_PREFILL_NODES, prefill_nodes, by_seconds):
        yield from ((prefill_node, decode_node) for decode_node in best if decode_node is not prefill_node)


class _Order(NamedTuple):
    """The order of pairs: less is better."""

    num_avoided: int
    is_second_choice: bool
    harm: int
    is_full: bool
    seconds: float
    by_kind: int  # breaks ties of seconds
    part: float  # share of the decode node's pool that would be taken
    names: tuple[str, str]


class _Weighing:
    """Compare the nodes for one request."""

    def __init__(
        self, costs: Costs, lateness: Lateness | None, spared_node: Node | None, avoid: Collection[Node]
    ) -> None:
        """Create a comparison. `spared_node` is the node to keep free of sequences, for prompts to come."""
        self._costs, self._lateness, self._spared, self._avoid = costs, lateness, spared_node, avoid
        # Caches, by pair: the chosen pair is asked for again.
        self._nums_late: dict[Pair, int] = {}
        self._crowdings: dict[Pair, float] = {}

    def placed(self, prefill_node: Node, decode_node: Node) -> Placed:
        placed = Placed(
            prefill_node,
            decode_node,
            prefix_fetch=self._costs.reading(prefill_node).prefix_fetch,
            queue_s=self._costs.queue_s(prefill_node),
            is_full=self._costs.writing(decode_node).is_full,
        )
        if self._lateness is None:
            return placed
        read, write = self._lateness.on(prefill_node), self._lateness.on(decode_node)
        num_late, crowding, wait_s = (
            self._num_late(prefill_node, decode_node),
            self._crowding(self._lateness, prefill_node, decode_node),
            0.0,
        )
        if num_late or crowding > 1:
            wait_s = max(read.reading_wait_s(), write.room_s or write.writing_wait_s())
        return placed._replace(
            num_late=num_late,
            crowding=crowding,
            wait_s=wait_s,
            prefill_s=read.own_reads_s,
            begins_s=math.inf if write.is_beyond else read.own_begins_s,
            least_prefill_s=read.least_prefill_s,
            num_late_beside=write.num_late_beside(read.own_begins_s) if crowding > 1 else 0,
        )

    def best(self, pairs: Iterable[Pair]) -> Pair:
        """Return the least pair in order.

        Predicting violations is slow: it is done for at most MOST_WEIGHED pairs, the cheapest in seconds first, and for
        no pair that cannot be better than the best so far.
        """
        least: tuple[_Order, Pair] | None = None
        for bound, pair in nsmallest(MOST_WEIGHED, [(self._bound(pair), pair) for pair in pairs], itemgetter(0)):
            if least is not None and least[0] <= bound:
                break
            order = bound
            if self._lateness is not None:
                order = bound._replace(harm=self._harm(*pair), seconds=self._seconds(*pair))
            if least is None or order < least[0]:
                least = order, pair
        assert least is not None, "there are pairs"
        return least[1]

    def _bound(self, pair: Pair) -> _Order:
        """Return a lower bound of the pair's order: no violations, and all the time of the prefill node for the
        prompt."""
        prefill_node, decode_node = pair
        writing = self._costs.writing(decode_node)
        return _Order(
            sum(node in self._avoid for node in {prefill_node, decode_node}) if self._avoid else 0,
            prefill_node.decodes and not self._costs.are_known,
            0,
            writing.is_full,
            self._costs.seconds(prefill_node, decode_node),
            0 if not prefill_node.decodes else 1 if prefill_node is decode_node else 2,
            writing.part,
            (prefill_node.name, decode_node.name),
        )

    def _harm(self, prefill_node: Node, decode_node: Node) -> int:
        """Return the predicted violations, requests to come included."""
        num_late = self._num_late(prefill_node, decode_node)
        if self._lateness is None:
            return num_late
        read, write = self._lateness.on(prefill_node), self._lateness.on(decode_node)
        if not num_late:
            num_late = int(read.is_own_late or self._crowding(self._lateness, prefill_node, decode_node) > 1)
        if self._reads_beside(prefill_node) and not read.is_own_late:
            num_late += read.lasting_begins_s > read.own_due_s
        return num_late + (write.num_lost() if decode_node is self._spared else 0)

    def _reads_beside(self, prefill_node: Node) -> bool:
        """Return whether the prompt would be prefilled beside sequences to come, while another node is spared those."""
        return self._spared is not None and prefill_node is not self._spared and prefill_node.decodes

    def _crowding(self, lateness: Lateness, prefill_node: Node, decode_node: Node) -> float:
        pair = prefill_node, decode_node
        if pair not in self._crowdings:
            self._crowdings[pair] = lateness.on(decode_node).crowding(lateness.on(prefill_node).least_prefill_s)
        return self._crowdings[pair]

    def _num_late(self, prefill_node: Node, decode_node: Node) -> int:
        if self._lateness is None:
            return 0
        pair = prefill_node, decode_node
        if pair not in self._nums_late:
            self._nums_late[pair] = self._count_late(self._lateness, prefill_node, decode_node)
        return self._nums_late[pair]

    def _count_late(self, lateness: Lateness, prefill_node: Node, decode_node: Node) -> int:
        write = lateness.on(decode_node)
        waits_s = max(self._costs.writing(decode_node).credit_s, write.room_s)
        if prefill_node is decode_node:
            return write.alone(waits_s)
        read = lateness.on(prefill_node)
        return read.reading + write.writing(waits_s, read.own_begins_s)

    def _seconds(self, prefill_node: Node, decode_node: Node) -> float:
        """Return the seconds of the pair, with the delay by sequences with an SLO on the prefill node."""
        seconds = self._costs.seconds(prefill_node, decode_node)
        if self._lateness is None:
            return seconds
        read = self._lateness.on(prefill_node)
        begins_s = read.lasting_begins_s if self._reads_beside(prefill_node) else read.own_begins_s
        return seconds + max(0.0, begins_s - self._costs.reading(prefill_node).own_s)
