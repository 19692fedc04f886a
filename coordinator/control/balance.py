"""Which running answers move because one node is full while another one has room. Pure.

Where a prompt that is read has waited for blocks for WAIT_S, the youngest running answer makes place for it. One move
at a time for each node, and no answer twice within REST_S, so that nothing goes to and fro.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from coordinator.control.attempts import TrackedRequest
from coordinator.control.ledger import Ledger
from coordinator.control.moves import may_move, roomiest
from coordinator.control.registry import Node

WAIT_S: Final = 0.5
REST_S: Final = 10.0


def departures(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Answers that are to move now, and where to. Each must have begun to move when the next one is asked for."""
    requests = list(requests)
    full = {request.attempt.decode for request in requests if _waits(request, now)}
    if not full:
        return
    busy = moving(requests)
    for source in [node for node in nodes if node in full and node not in busy]:
        running = [each for each in requests if each.attempt.decode is source and may_move(each, now, rest_s=REST_S)]
        youngest = max(running, key=lambda each: each.age, default=None)
        if youngest is None:
            continue
        others = [node for node in nodes if node not in full and node not in busy]
        target = roomiest(youngest, others, ledger)
        if target is not None:
            busy |= {source, target}
            yield youngest, target


def moving(requests: Iterable[TrackedRequest]) -> set[Node]:
    """The nodes between which answers are on their way."""
    return {node for request in requests if request.move for node in (request.move.source, request.move.target)}


def _waits(request: TrackedRequest, now: float) -> bool:
    since_s = request.attempt.waits_since_s
    return since_s is not None and now - since_s >= WAIT_S
