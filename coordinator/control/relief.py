"""Which running answers move because their node cannot keep their limit any more while another one can. Pure.

An answer whose limit is shorter than a step of its node with all answers in it falls behind with each token. Where
what it is ahead does not last until its end, it moves to the node with most room on which a step, with this answer in
it too, keeps its limit and makes nobody else late, and where it could still be in time. It does not go to the node that
is spared answers for prompts to come (coordinator/control/placement/lateness.py), if it would take longer than those
that are there: one answer that is late is less than the prompts that would wait. Of several on one node that goes first
which is least behind. One move at a time for each node, and no answer twice within REST_S; so each look sees what the
move before has changed.
"""

from collections.abc import Collection, Iterable, Iterator

from coordinator.control.attempts import TrackedRequest
from coordinator.control.balance import REST_S, moving
from coordinator.control.ledger import Ledger
from coordinator.control.moves import may_move, num_tokens_needed
from coordinator.control.placement.lateness import Lateness, spared, step_s
from coordinator.control.placement.policy import Wanted
from coordinator.control.registry import Node
from coordinator.control.router import roomiest
from serving_core.due import Due


def departures(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float, requests_per_s: float
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Answers that are to move now, and where to. Each must have begun to move when the next one is asked for. So many
    requests come a second, lately."""
    if not ledger.has_limits or len(nodes) < 2:
        return
    requests = list(requests)
    busy = moving(requests)
    for source in nodes:
        if source in busy:
            continue
        spared_node = spared(nodes, ledger)
        for request in _late(requests, source, ledger, now):
            free = [node for node in nodes if node is not source and node not in busy]
            if (target := _relief(request, free, spared_node, ledger, now, requests_per_s)) is not None:
                busy |= {source, target}
                yield request, target
                break


def _late(requests: Iterable[TrackedRequest], source: Node, ledger: Ledger, now: float) -> list[TrackedRequest]:
    """Those that fall behind on a node, and will be late there, the one that is least behind first."""
    now_s = step_s(source, ledger)
    late = [
        (each, due)
        for each in requests
        if each.attempt.decode is source and (due := each.due) is not None and due.tpot_s < now_s
        if not _is_in_time(each, due, now_s, now)
        if may_move(each, now, rest_s=REST_S)
    ]
    return [each for each, due in sorted(late, key=lambda pair: -pair[1].token_s(len(pair[0].output)))]


def _relief(
    request: TrackedRequest,
    free: list[Node],
    spared_node: Node | None,
    ledger: Ledger,
    now: float,
    requests_per_s: float,
) -> Node | None:
    """Where the answer would be in time, and nobody late for it."""
    due, known = request.due, request.known
    assert due is not None
    wanted = Wanted(known, request.max_tokens, due=due, num_output=len(request.output), requests_per_s=requests_per_s)
    lateness = Lateness(ledger, wanted, now)

    def relieves(node: Node) -> bool:
        then_s, there = step_s(node, ledger, num_more=1, num_more_cached=len(known)), lateness.on(node)
        num_late = there.writing(0.0) + (there.num_lost() if node is spared_node else 0)
        return _is_in_time(request, due, then_s, now) and num_late <= 0

    able = [node for node in free if relieves(node)]
    return roomiest(able, ledger, num_tokens_needed(request), request.max_tokens)


def _is_in_time(request: TrackedRequest, due: Due, each_s: float, now: float) -> bool:
    """Whether its last token could be, in such steps."""
    last = request.sampling.max_tokens - 1
    return now + request.num_tokens_left * each_s <= due.token_s(last)
