"""Which running answers move because their node cannot keep their limit any more while another one can. Pure.

An answer whose limit is shorter than a step of its node with all answers in it falls behind with each token. Where
what it is ahead does not last until its end, it moves to the node with most room on which a step, with this answer in
it too, keeps its limit and makes nobody else late, and where it could still be in time. It goes to the node that is
spared answers for prompts to come (coordinator/control/placement/lateness.py) only if fewer of these would be late for
it than answers are here: once it is there, those cost nothing that end before it. Of several on one node that goes
first which is least behind. One move at a time for each node, and no answer twice within REST_S; so each look sees what
the move before has changed.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from coordinator.control.attempts import TrackedRequest
from coordinator.control.balance import REST_S, moving
from coordinator.control.ledger import Ledger
from coordinator.control.moves import may_move, roomiest
from coordinator.control.placement.lateness import Lateness, spared, step_s
from coordinator.control.placement.policy import Coming, Wanted
from coordinator.control.registry import Node
from serving_core.due import Due


def departures(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float, coming: Coming
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Answers that are to move now, and where to. Each must have begun to move when the next one is asked for. `coming`
    is what else is to be read."""
    if not ledger.has_limits or len(nodes) < 2:
        return
    requests = list(requests)
    busy = moving(requests)
    for source in nodes:
        if source in busy:
            continue
        look = _Look(ledger, now, coming, spared(nodes, ledger, now))
        late = look.late(requests, source)
        for request in late:
            free = [node for node in nodes if node is not source and node not in busy]
            if (target := look.relief(request, len(late), free)) is not None:
                busy |= {source, target}
                yield request, target
                break


@dataclass(frozen=True, slots=True)
class _Look:
    """At a moment at which nothing changes."""

    ledger: Ledger
    now: float
    coming: Coming
    spared: Node | None

    def late(self, requests: Iterable[TrackedRequest], source: Node) -> list[TrackedRequest]:
        """Those that fall behind on a node, and will be late there, the one that is least behind first."""
        now_s = step_s(source, self.ledger)
        late = [
            (each, due)
            for each in requests
            if each.attempt.decode is source and (due := each.due) is not None and due.tpot_s < now_s
            if not self._is_in_time(each, due, now_s)
            if may_move(each, self.now, rest_s=REST_S)
        ]
        return [each for each, due in sorted(late, key=lambda pair: -pair[1].token_s(len(pair[0].output)))]

    def relief(self, request: TrackedRequest, num_late: int, free: list[Node]) -> Node | None:
        """Where the answer, one of so many that are late, would be in time, and nobody late for it."""
        due, known = request.due, request.known
        assert due is not None
        num_output = len(request.output)
        wanted = Wanted(known, request.max_tokens, due=due, num_output=num_output, coming=self.coming)
        lateness = Lateness(self.ledger, wanted, self.now)

        def relieves(node: Node) -> bool:
            then_s, there = step_s(node, self.ledger, num_more=1, num_more_cached=len(known)), lateness.on(node)
            num_lost = there.num_lost() if node is self.spared else 0
            return self._is_in_time(request, due, then_s) and there.writing(0.0) <= 0 and num_lost < num_late

        able = [node for node in free if relieves(node)]
        return roomiest(request, able, self.ledger)

    def _is_in_time(self, request: TrackedRequest, due: Due, each_s: float) -> bool:
        """Whether its last token could be, in such steps."""
        last = request.sampling.max_tokens - 1
        return self.now + request.num_tokens_left * each_s <= due.token_s(last)
