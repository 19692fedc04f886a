"""Migrate running requests to another node, with their KV: choose request and target, and follow the migration. Pure.

    begin        Reserve to the target, under an epoch of its own, for the tokens known and some more
    Reserved     Migrate, with the transfer descriptor, to the source, which decodes on while blocks travel, then stops
    Committed    the target decodes on; Cancel to the source, whose tokens before the target's first one still count
    else         Cancel to the target, and after its reply Keep to the source, which decodes on

Blocks that the target has cached do not travel: its descriptor names the last one. A source that has decoded the
sequence beside others reports PAIRING_MISMATCH, and the next migration sends all blocks.

The coordinator alone decides which node goes on. A source that has stopped waits for Cancel or Keep whatever has
failed, and a Committed that crosses the Cancel to its target is ignored. Until Committed the request belongs to the
source: its end, the loss of the source and its failures are handled as if there were no migration.

A drained node: prompts without a token restart on other nodes, KV transfers under way finish, and running requests
migrate, MAX_DRAIN_MOVES at a time, to the node with most room. A request that no other node has room for stays until
one has. A node that stops decoding only keeps its prompts.

A full node: where a prefilled prompt has waited for blocks for WAIT_S, the youngest running request migrates.

A late node: a request whose SLO on TPOT is shorter than a step of its node falls further behind with each token. Where
its slack does not last until its end, it migrates to the node with most room on which it is in time and makes no other
late. It goes to the node that placement spares for prompts to come (placement/lateness.py) only if fewer of those would
be late than sequences are here. The request that is least behind goes first.

From a full or late node one request migrates at a time, and no request twice within REST_S.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.control.instructions import Instruction, MoveOutcome, Send
from coordinator.control.live import LiveAnswers, move_ended
from coordinator.control.load import Ledger
from coordinator.control.nodes import PARTS, Node, does, fitting, has_path
from coordinator.control.placement.lateness import Lateness, spared, step_s
from coordinator.control.placement.policy import Coming, Wanted
from coordinator.control.request import Move, MoveStage, Releases, TrackedRequest, tell_sender
from coordinator.control.timeline import Phase
from protos import fleet_pb2
from serving_core import reasons
from serving_core.due import Due
from serving_core.errors import RequestError
from serving_core.prefix import GRAFT, tells_bits
from serving_core.shapes import DECODE, PREFILL

NUM_TOKENS_AHEAD: Final = 128  # decoded by the source meanwhile: ample even while the KV of a long sequence travels
MIN_TOKENS_LEFT: Final = 8  # a request that is about to end finishes sooner where it is
RESERVE_TIMEOUT_S: Final = 5.0  # for the target's blocks, while the source decodes on


def may_move(request: TrackedRequest, now: float, *, rest_s: float) -> bool:
    """Return whether the request is decoding and its last migration ended at least `rest_s` seconds ago."""
    if request.timeline.phase is not Phase.DECODE or request.num_tokens_left < MIN_TOKENS_LEFT:
        return False
    return request.move is None and (request.moved_s is None or now - request.moved_s >= rest_s)


def roomiest(request: TrackedRequest, nodes: Iterable[Node], ledger: Ledger) -> Node | None:
    """Return the node with most room for a running request; None where no node can take it.

    A target must be ready, take KV transfers, have a running slot and blocks free now, and hold the whole request.
    Blocks that it shares with others there take no room. The first by name is chosen among equals.
    """
    num_needed, max_tokens, is_whole = _num_tokens_needed(request), request.max_tokens, _is_whole(request)

    def free(node: Node) -> int:
        num_shared = 0 if is_whole else ledger.tokens_shared(node, request.prompt)
        return node.pool_tokens - ledger.tokens_taken(node) + num_shared

    def has_room(node: Node) -> bool:
        has_slot = ledger.of(node).num_answers < node.usable.slots
        return node.usable.takes_handovers and has_slot and free(node) >= num_needed

    able = [node for node in fitting(nodes, DECODE, max_tokens) if max_tokens <= node.pool_tokens and has_room(node)]
    return min(able, key=lambda node: (-free(node), node.name), default=None)


class Moves:
    """Start migrations and follow each one to its end."""

    def __init__(self, live: LiveAnswers) -> None:
        self._live = live

    def begin(self, request: TrackedRequest, target: Node, now: float) -> list[Instruction]:
        """Start the migration of a request for which `may_move` is true."""
        attempt = request.attempt
        move = Move(self._live.next_epoch(), attempt.decode, attempt.epoch, target, now, is_whole=_is_whole(request))
        request.move = move
        self._live.ledger.write(request.request_id, target, _num_tokens_needed(request), _marks_shared(request, move))
        reserve = fleet_pb2.Reserve(
            job=request.job(move.epoch, request.known, now),
            num_tokens_ahead=_num_tokens_ahead(request),
            is_whole=move.is_whole,
        )
        tell_sender(reserve, move.source)
        return [Send(target, fleet_pb2.NodeCommand(reserve=reserve, attempt=reserve.job.attempt))]

    def find(self, node: Node, attempt: fleet_pb2.Attempt) -> TrackedRequest | None:
        """Return the request in whose migration this attempt of the node takes part, beside the current attempt."""
        request = self._live.find(attempt.request_id)
        move = request.move if request is not None else None
        if move is None:
            return None
        other = (move.source, move.source_epoch) if move.stage is MoveStage.MOVED else (move.target, move.epoch)
        return request if other == (node, attempt.epoch) else None

    def handle(self, request: TrackedRequest, kind: str, event: object, now: float) -> list[Instruction]:
        """Handle an event about a request that `find` has returned."""
        move = _move_of(request)
        match kind, move.stage:
            case (("failed" | "cancelled"), _):
                return self._let_go(request, now)
            case "reserved", MoveStage.RESERVING:
                assert isinstance(event, fleet_pb2.Reserved)
                move.stage = MoveStage.MOVING
                about = _source_attempt(request)
                migrate = fleet_pb2.Migrate(attempt=about, descriptor=event.descriptor)
                return [Send(move.source, fleet_pb2.NodeCommand(migrate=migrate, attempt=about))]
            case "committed", MoveStage.MOVING:
                assert isinstance(event, fleet_pb2.Committed)
                return self._switch(request, event, now)
            case "revoked", _ if move.is_under_way:
                return self._give_up(request, now)
            case _:
                return []

    def find_told_before(self, node: Node, token: fleet_pb2.SampledToken) -> TrackedRequest | None:
        """Return the request of a token that the source sampled before the request migrated away from it."""
        request = self._live.find(token.attempt.request_id)
        move = request.move if request is not None else None
        if move is None or move.stage is not MoveStage.MOVED or token.index >= move.next_index:
            return None
        return request if (node, token.attempt.epoch) == (move.source, move.source_epoch) else None

    def on_source_failed(self, request: TrackedRequest, event: fleet_pb2.MoveFailed, now: float) -> list[Instruction]:
        """Handle that the source cannot send. It may have stopped decoding, and then waits for Keep or Cancel."""
        request.moves_whole |= event.reason == reasons.PAIRING_MISMATCH
        is_moving = request.move is not None and request.move.stage is MoveStage.MOVING
        return self._give_up(request, now) if is_moving else []

    def _give_up(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Abandon a migration: the target drops its part, and then the source is told to go on."""
        move = _move_of(request)
        instructions = [self._live.cancel(request, move.target, move.epoch, now), *self._off(request, now)]
        if move.stage is MoveStage.MOVING:
            move.stage = MoveStage.ABANDONED
        else:
            request.end_move(now)
        return instructions

    def lose(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """Handle the loss of a node that may have a part in the migration, beside its part in the current attempt."""
        move = request.move
        if move is None:
            return []
        other = move.source if move.stage is MoveStage.MOVED else move.target
        return self._let_go(request, now) if node is other else []

    def tick(self, request: TrackedRequest, move: Move, now: float) -> list[Instruction]:
        """Abandon a migration whose target has not reserved blocks within RESERVE_TIMEOUT_S."""
        is_late = move.stage is MoveStage.RESERVING and now - move.started_s >= RESERVE_TIMEOUT_S
        return self._give_up(request, now) if is_late else []

    def _let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Handle that the node beside the current attempt's holds nothing any more."""
        move = _move_of(request)
        if move.stage is MoveStage.MOVED:
            return self._source_let_go(request, now)
        instructions = self._off(request, now) if move.is_under_way else []
        request.end_move(now)
        return instructions if move.stage is MoveStage.RESERVING else [*instructions, keep(request)]

    def _source_let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        move = _move_of(request)
        if len(request.output) < move.next_index:
            error = RequestError(reasons.WORKER_LOST, f"the {move.source.kind} was lost")
            return self._live.restart(request, move.source, error, now)
        move.source_holds = False
        request.settle_move(now)
        return []

    def _switch(self, request: TrackedRequest, event: fleet_pb2.Committed, now: float) -> list[Instruction]:
        """Make the target's attempt the current one."""
        move, live = _move_of(request), self._live
        instructions = live.release(request, now)
        request.attempt = replace(
            request.attempt,
            epoch=move.epoch,
            decode=move.target,
            prefill_holds=False,
            decode_holds=True,
            is_committed=True,
            has_counted_kv=True,
        )
        move.stage, move.next_index = MoveStage.MOVED, event.next_index
        request.timeline.placed(now, request.attempt.prefill.name, move.target.name)
        live.ledger.let_go(request.request_id, move.source)
        live.ledger.let_go(request.request_id, request.attempt.prefill)
        live.ledger.write(request.request_id, move.target, len(request.known), _marks_shared(request, move))
        request.num_moves += 1
        request.num_kv_bytes += event.num_bytes
        request.num_kv_bytes_saved += event.num_bytes_saved
        request.num_moved_kv_bytes += event.num_bytes
        live.metrics.kv_moved(event.num_bytes, event.num_bytes_saved)
        return [*instructions, move_ended(request, move, MoveOutcome.MOVED, now, event.num_bytes)]

    def _off(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Record, once, that the migration will not happen."""
        move = _move_of(request)
        self._live.ledger.let_go(request.request_id, move.target)
        is_refused = move.stage is MoveStage.RESERVING
        outcome = MoveOutcome.REFUSED if is_refused else MoveOutcome.FAILED
        return [move_ended(request, move, outcome, now)]


def keep(request: TrackedRequest) -> Instruction:
    """Return the command that tells the node of the current attempt to decode the request itself."""
    about = fleet_pb2.Attempt(request_id=request.request_id, epoch=request.attempt.epoch)
    return Send(request.attempt.decode, fleet_pb2.NodeCommand(keep=fleet_pb2.Keep(attempt=about), attempt=about))


def _num_tokens_needed(request: TrackedRequest) -> int:
    """Return the tokens of room needed on the target: those known, and those that the source decodes meanwhile."""
    return len(request.prompt) + len(request.output) + _num_tokens_ahead(request)


def _is_whole(request: TrackedRequest) -> bool:
    """Return whether all blocks of a request travel, whatever its target has cached."""
    makers = request.attempt.decode.makers
    return request.moves_whole or not all(maker == GRAFT or tells_bits(maker) for maker in makers)


def _marks_shared(request: TrackedRequest, move: Move) -> Sequence[int]:
    """Return the marks of the blocks that the target may share between this request and others."""
    return () if move.is_whole else request.prompt.marks_shared(move.target.block_size)


def _num_tokens_ahead(request: TrackedRequest) -> int:
    return min(NUM_TOKENS_AHEAD, request.num_tokens_left)


def _move_of(request: TrackedRequest) -> Move:
    assert request.move is not None
    return request.move


def _source_attempt(request: TrackedRequest) -> fleet_pb2.Attempt:
    return fleet_pb2.Attempt(request_id=request.request_id, epoch=_move_of(request).source_epoch)


MAX_DRAIN_MOVES: Final = 4  # migrations under way from one node to another
RETRY_S: Final = 1.0  # between two migrations of one request


def check_target(node: Node, nodes: Collection[Node], *, embeds: bool = False) -> None:
    """Raise RequestError when no other node could take the work of this one."""
    others = [other for other in nodes if other is not node]
    if not has_path(others, embeds=embeds):
        missing = [PARTS[role][0] for role in ((PREFILL,) if embeds else PARTS) if not fitting(others, role, 0)]
        what = f"no other node {' or '.join(missing)}" if missing else "the others take no hand-overs"
        raise RequestError(reasons.NO_OTHER_NODE, f"node {node.name} cannot drain: {what}")


def num_left(node: Node, requests: Iterable[TrackedRequest], releases: Releases) -> int:
    """Return the number of requests that the node still has a part in.

    All requests of other nodes whose distributed KV it holds count as one.
    """
    is_host = node.load.num_blocks_hosted > 0
    return sum(_has_part(node, request) for request in requests) + releases.count(node) + is_host


def prompts_to_restart(requests: Iterable[TrackedRequest], nodes: Collection[Node]) -> Iterator[TrackedRequest]:
    """Yield the requests without a token that have a part on a draining node."""
    if all(node.is_ready for node in nodes):
        return
    for request in requests:
        attempt = request.attempt
        is_begun = attempt.has_first_token or attempt.early or (attempt.is_committed and not attempt.is_local)
        if not is_begun and not all(node.is_ready for node in attempt.holders()):
            yield request


def leaving_drained(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Yield the requests to migrate from draining nodes now, each with its target.

    The caller must start each migration before it asks for the next one.
    """
    leaves = {node for node in nodes if not (node.is_ready and does(node, DECODE))}
    requests = list(requests) if leaves else []
    under_way = Counter((request.move.source, request.move.target) for request in requests if request.move)
    for request in requests:
        source = request.attempt.decode
        if source not in leaves or not may_move(request, now, rest_s=RETRY_S):
            continue
        free = [node for node in nodes if node is not source and under_way[source, node] < MAX_DRAIN_MOVES]
        target = roomiest(request, free, ledger)
        if target is not None:
            under_way[source, target] += 1
            yield request, target


def _has_part(node: Node, request: TrackedRequest) -> bool:
    move = request.move
    is_target = move is not None and move.is_under_way and move.target is node
    return is_target or any(node is holder for holder in request.attempt.holders())


WAIT_S: Final = 0.5
REST_S: Final = 10.0


def leaving_full(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Yield the requests to migrate from full nodes now, each with its target.

    The caller must start each migration before it asks for the next one.
    """
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
    """Return the sources and targets of all migrations under way."""
    return {node for request in requests if request.move for node in (request.move.source, request.move.target)}


def _waits(request: TrackedRequest, now: float) -> bool:
    since_s = request.attempt.waits_since_s
    return since_s is not None and now - since_s >= WAIT_S


def leaving_late(
    requests: Iterable[TrackedRequest], nodes: Collection[Node], ledger: Ledger, now: float, coming: Coming
) -> Iterator[tuple[TrackedRequest, Node]]:
    """Yield the requests to migrate from late nodes now, each with its target.

    The caller must start each migration before it asks for the next one. `coming` describes the requests that are
    expected.
    """
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
    """Find late requests and their targets at one moment, at which nothing changes."""

    ledger: Ledger
    now: float
    coming: Coming
    spared: Node | None

    def late(self, requests: Iterable[TrackedRequest], source: Node) -> list[TrackedRequest]:
        """Return the requests that fall behind on a node and will miss their SLO there, the one least behind first."""
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
        """Return a node on which the request, one of `num_late` late ones, would be in time and make no other late."""
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
        """Return whether the last token could be in time if each step takes `each_s`."""
        last = request.sampling.max_tokens - 1
        return self.now + request.num_tokens_left * each_s <= due.token_s(last)
