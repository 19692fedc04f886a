"""What leaves a node that drains, or that writes no more: which prompts begin elsewhere, which answers move. Pure.

Prompts without a token begin again on other nodes. Hand-overs that are under way finish. Running answers move, a few at
a time, to the node with most room; one that no other node has room for stays until one has, or until it ends. A node
that only writes no more keeps its prompts.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from coordinator.control.attempts import TrackedRequest
from coordinator.control.ledger import Ledger
from coordinator.control.moves import may_move, roomiest
from coordinator.control.registry import Node
from coordinator.control.releases import Releases
from coordinator.control.router import PARTS, does, fitting, has_path
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.shapes import DECODE, PREFILL

MAX_MOVES: Final = 4  # at once, from one node to another
RETRY_S: Final = 1.0  # between two moves of one answer


def check_target(node: Node, nodes: Collection[Node], *, embeds: bool = False) -> None:
    """Raises RequestError when no other node could take the work of this one."""
    others = [other for other in nodes if other is not node]
    if not has_path(others, embeds=embeds):
        missing = [PARTS[role][0] for role in ((PREFILL,) if embeds else PARTS) if not fitting(others, role, 0)]
        what = f"no other node {' or '.join(missing)}" if missing else "the others take no hand-overs"
        raise RequestError(reasons.NO_OTHER_NODE, f"node {node.name} cannot drain: {what}")


def num_left(node: Node, requests: Iterable[TrackedRequest], releases: Releases) -> int:
    """Answers that the node still has a part in; of those whose blocks it holds for other nodes, one stands for all."""
    is_host = node.load.num_blocks_hosted > 0
    return sum(_has_part(node, request) for request in requests) + releases.count(node) + is_host


def prompts(requests: Iterable[TrackedRequest], nodes: Collection[Node]) -> Iterator[TrackedRequest]:
    """Those without a token that have a part on a node that drains."""
    if all(node.is_ready for node in nodes):
        return
    for request in requests:
        attempt = request.attempt
        is_begun = attempt.has_first_token or attempt.early or (attempt.is_committed and not attempt.is_local)
        if not is_begun and not all(node.is_ready for node in attempt.holders()):
            yield request


def departures(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Answers that are to move now, and where to. Each must have begun to move when the next one is asked for."""
    leaves = {node for node in nodes if not (node.is_ready and does(node, DECODE))}
    requests = list(requests) if leaves else []
    under_way = Counter((request.move.source, request.move.target) for request in requests if request.move)
    for request in requests:
        source = request.attempt.decode
        if source not in leaves or not may_move(request, now, rest_s=RETRY_S):
            continue
        free = [node for node in nodes if node is not source and under_way[source, node] < MAX_MOVES]
        target = roomiest(request, free, ledger)
        if target is not None:
            under_way[source, target] += 1
            yield request, target


def _has_part(node: Node, request: TrackedRequest) -> bool:
    move = request.move
    is_target = move is not None and move.is_under_way and move.target is node
    return is_target or any(node is holder for holder in request.attempt.holders())
