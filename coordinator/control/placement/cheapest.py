"""The pair of nodes that makes the fewest answers late, and of those the one that costs the fewest seconds. Pure.

Late are answers with limits, those among them that will be because a node was to be spared
(coordinator/control/placement/lateness.py); seconds are those of all requests
(coordinator/control/placement/costs.py). Without limits anywhere the seconds decide; while no rate is known, nodes that
only read come first. Of writers that cost the same the one is taken that has most of its pool left; blocks that it
holds already count as left. Nodes that have failed the request come last, and full writers behind those with room.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from coordinator.control.handover import HandoverCosts
from coordinator.control.ledger import Ledger
from coordinator.control.placement.costs import Costs
from coordinator.control.placement.lateness import Lateness, spared
from coordinator.control.placement.policy import Placed, Wanted, within_pools
from coordinator.control.registry import Node
from coordinator.control.router import candidates
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER
from serving_core.shapes import DECODE, PREFILL

Pair = tuple[Node, Node]

MOST_WEIGHED: Final = 8  # readers, writers and nodes alone, the cheapest of each, whose lateness is worked out


class Cheapest:
    """Weighs nodes alone and pairs of two."""

    def __init__(self, *, counts_late: bool = True, may_be_alone: bool = True, may_be_two: bool = True) -> None:
        """What it may not do counts where nothing else is possible."""
        self._counts_late = counts_late
        self._may_be_alone, self._may_be_two = may_be_alone, may_be_two

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: HandoverCosts, now: float
    ) -> Placed:
        """As Policy's."""
        readers = candidates(nodes, PREFILL, len(wanted.prompt))
        writers = candidates(nodes, DECODE, wanted.num_tokens)
        costs = Costs(nodes, ledger, wanted.prompt, handover)
        lateness = Lateness(ledger, wanted, now, costs.num_lent) if self._counts_late else None
        if lateness is None or not lateness.is_at_stake:
            weighing = _Weighing(costs, None, None, wanted.avoid)
        else:
            least = spared(readers, ledger)
            has_other = any(node is not least and not costs.writing(node).is_full for node in writers)
            weighing = _Weighing(costs, lateness, least if has_other else None, wanted.avoid)
        alone = list(weighing.alone(readers, writers))
        two = list(weighing.two(*within_pools(readers, writers, wanted)))
        allowed = [*(two if self._may_be_two else ()), *(alone if self._may_be_alone else ())]
        pairs = allowed or [*two, *alone]
        if not pairs:
            message = "no node that writes answers takes those of prompts that other nodes read"
            raise RequestError(NO_DECODE_WORKER, message)
        reader, writer = min(pairs, key=weighing.order)
        return weighing.placed(reader, writer)


class _Order(NamedTuple):
    """Less is better."""

    num_avoided: int
    is_second_choice: bool
    harm: int
    is_full: bool
    seconds: float
    by_kind: int  # of pairs that cost the same


class _Weighing:
    """One request on these nodes."""

    def __init__(
        self, costs: Costs, lateness: Lateness | None, spared_node: Node | None, avoid: Collection[Node]
    ) -> None:
        """`spared_node` is the one that is to be spared answers."""
        self._costs, self._lateness, self._spared, self._avoid = costs, lateness, spared_node, avoid
        self._nums_late: dict[Pair, int] = {}  # of those that were asked for: a pair that is chosen is so again

    def placed(self, reader: Node, writer: Node) -> Placed:
        placed = Placed(
            reader,
            writer,
            loan=self._costs.reading(reader).loan,
            queue_s=self._costs.queue_s(reader),
            is_full=self._costs.writing(writer).is_full,
        )
        if self._lateness is None:
            return placed
        read, write = self._lateness.on(reader), self._lateness.on(writer)
        num_late, crowding, wait_s = self._num_late(reader, writer), write.crowding(read.least_read_s), 0.0
        if num_late or crowding > 1:
            wait_s = max(read.reading_wait_s(), write.room_s or write.writing_wait_s())
        return placed._replace(
            num_late=num_late,
            crowding=crowding,
            wait_s=wait_s,
            reads_s=read.own_reads_s,
            begins_s=math.inf if write.is_beyond else read.own_begins_s,
            least_read_s=read.least_read_s,
        )

    def order(self, pair: Pair) -> _Order:
        reader, writer = pair
        return _Order(
            len({reader, writer} & set(self._avoid)),
            self._is_second_choice(reader),
            self._harm(reader, writer),
            self._costs.writing(writer).is_full,
            self._seconds(reader, writer),
            0 if not reader.usable.writes else 1 if reader is writer else 2,
        )

    def two(self, readers: Sequence[Node], writers: Sequence[Node]) -> Iterator[Pair]:
        """The two best readers, each with its best writer: two, since the best one may be the only one that writes."""
        takers = [node for node in writers if node.usable.takes_handovers]
        if not takers:
            return
        for reader in self._best_readers(readers, writers)[:2]:
            if others := [node for node in takers if node is not reader]:
                yield reader, self._best_writer(others, reader)

    def alone(self, readers: Sequence[Node], writers: Sequence[Node]) -> Iterator[Pair]:
        """The best node by itself."""
        able = set(writers)
        if both := [node for node in readers if node in able]:
            node = self._best_writer(both, None)
            yield node, node

    def _best_readers(self, readers: Sequence[Node], writers: Sequence[Node]) -> list[Node]:
        """The best first."""
        credit_s = min(self._costs.writing(node).credit_s for node in writers)

        def by_seconds(node: Node) -> tuple[bool, bool, float, str]:
            reading = self._costs.reading(node)
            seconds = max(reading.own_s, credit_s) + reading.others_s
            return node in self._avoid, self._is_second_choice(node), seconds, node.name

        ordered = sorted(readers, key=by_seconds)
        if (lateness := self._lateness) is None:
            return ordered
        few = ordered[:MOST_WEIGHED]
        return sorted(few, key=lambda node: (*by_seconds(node)[:2], lateness.on(node).reading))

    def _best_writer(self, able: Sequence[Node], reader: Node | None) -> Node:
        """Of these, beside this reader or, without one, alone."""

        def by_seconds(node: Node) -> tuple[bool, bool, float, float, str]:
            writing, seconds = self._costs.writing(node), self._costs.seconds(reader or node, node)
            return node in self._avoid, writing.is_full, seconds, writing.part, node.name

        if self._lateness is None:
            return min(able, key=by_seconds)
        few = sorted(able, key=by_seconds)[:MOST_WEIGHED]
        return min(few, key=lambda node: (node in self._avoid, self._harm(reader or node, node)))

    def _harm(self, reader: Node, writer: Node) -> int:
        """How many are late, those among them that are yet to come."""
        num_late = self._num_late(reader, writer)
        if self._lateness is not None and not num_late:
            num_late = int(self._lateness.on(reader).is_own_late)
        if self._lateness is None or writer is not self._spared:
            return num_late
        return num_late + self._lateness.on(writer).num_lost()

    def _num_late(self, reader: Node, writer: Node) -> int:
        if self._lateness is None:
            return 0
        pair = reader, writer
        if pair not in self._nums_late:
            self._nums_late[pair] = self._count_late(self._lateness, reader, writer)
        return self._nums_late[pair]

    def _count_late(self, lateness: Lateness, reader: Node, writer: Node) -> int:
        write = lateness.on(writer)
        waits_s = max(self._costs.writing(writer).credit_s, write.room_s)
        if reader is writer:
            return write.alone(waits_s)
        read = lateness.on(reader)
        return read.reading + write.writing(waits_s, read.own_begins_s)

    def _seconds(self, reader: Node, writer: Node) -> float:
        """A reader's answers with limits leave the prompt less than all of its time."""
        seconds = self._costs.seconds(reader, writer)
        if self._lateness is None:
            return seconds
        return seconds + max(0.0, self._lateness.on(reader).own_begins_s - self._costs.reading(reader).own_s)

    def _is_second_choice(self, reader: Node) -> bool:
        return reader.usable.writes and not self._costs.are_known
