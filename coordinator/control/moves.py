"""Running answers that move from the node that writes them to another one, with their KV. Pure.

    begin        Reserve to the target, under an epoch of its own: room for what is known of the answer and some more
    Reserved     Migrate, with the ticket, to the source, which writes on while its blocks travel, then stops for good
    Committed    the target writes on; Cancel to the source, whose tokens before the target's first one still count
    else         Cancel to the target, and when that has answered, Keep to the source, which writes on

Blocks that the target holds already do not travel: its ticket names the last one. A source that has written the answer
behind others says PAIRING_MISMATCH, and the answer moves whole the next time. So it does from a node that may hold
blocks whose bits their names do not tell.

The coordinator alone decides who goes on: a source that has stopped waits for Cancel or Keep, whatever has failed, and
a commit that crosses the Cancel to its target counts for nothing. Until the commit the answer is the source's: its end,
the loss of the source and its failures are handled as if nothing moved.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from coordinator.control.attempts import Move, MoveStage, TrackedRequest, tell_sender
from coordinator.control.instructions import Instruction, MoveOutcome, Send
from coordinator.control.ledger import Ledger
from coordinator.control.live import LiveAnswers, move_ended
from coordinator.control.registry import Node
from coordinator.control.router import fitting
from coordinator.control.timeline import Phase
from protos import fleet_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.prefix import GRAFT, tells_bits
from serving_core.shapes import DECODE

NUM_TOKENS_AHEAD: Final = 128  # that the source may write meanwhile: more than it does while a long answer's KV travels
MIN_TOKENS_LEFT: Final = 8  # an answer that is about to end does so sooner where it is
RESERVE_TIMEOUT_S: Final = 5.0  # for the target's blocks; the source goes on all the while


def may_move(request: TrackedRequest, now: float, *, rest_s: float) -> bool:
    """Whether the answer is being written, and an earlier move has been over for rest_s."""
    if request.timeline.phase is not Phase.DECODE or request.num_tokens_left < MIN_TOKENS_LEFT:
        return False
    return request.move is None and (request.moved_s is None or now - request.moved_s >= rest_s)


def roomiest(request: TrackedRequest, nodes: Iterable[Node], ledger: Ledger) -> Node | None:
    """Where a running answer may go: of the ready nodes that take answers over, have room for it now and can hold all
    of it, the one with most room, the first by name of equals; what it has in common with others there takes none. None
    when there is none."""
    num_needed, max_tokens, is_whole = _num_tokens_needed(request), request.max_tokens, _is_whole(request)

    def free(node: Node) -> int:
        num_shared = 0 if is_whole else ledger.tokens_shared(node, request.prompt)
        return node.pool_tokens - ledger.tokens_taken(node) + num_shared

    def has_room(node: Node) -> bool:
        has_seat = ledger.of(node).num_answers < node.usable.seats
        return node.usable.takes_handovers and has_seat and free(node) >= num_needed

    able = [node for node in fitting(nodes, DECODE, max_tokens) if max_tokens <= node.pool_tokens and has_room(node)]
    return min(able, key=lambda node: (-free(node), node.name), default=None)


class Moves:
    """Moves answers when it is told to, and follows each move to its end."""

    def __init__(self, live: LiveAnswers) -> None:
        self._live = live

    def begin(self, request: TrackedRequest, target: Node, now: float) -> list[Instruction]:
        """The answer is to move. `may_move` says whether it can."""
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
        """The answer on whose move this node has a word with this attempt, beside the current one."""
        request = self._live.find(attempt.request_id)
        move = request.move if request is not None else None
        if move is None:
            return None
        other = (move.source, move.source_epoch) if move.stage is MoveStage.MOVED else (move.target, move.epoch)
        return request if other == (node, attempt.epoch) else None

    def handle(self, request: TrackedRequest, kind: str, event: object, now: float) -> list[Instruction]:
        """What a node says of an answer that `find` has found."""
        move = _move_of(request)
        match kind, move.stage:
            case (("failed" | "cancelled"), _):
                return self._let_go(request, now)
            case "reserved", MoveStage.RESERVING:
                assert isinstance(event, fleet_pb2.Reserved)
                move.stage = MoveStage.MOVING
                about = _source_attempt(request)
                migrate = fleet_pb2.Migrate(attempt=about, ticket=event.ticket)
                return [Send(move.source, fleet_pb2.NodeCommand(migrate=migrate, attempt=about))]
            case "committed", MoveStage.MOVING:
                assert isinstance(event, fleet_pb2.Committed)
                return self._switch(request, event, now)
            case "revoked", _ if move.is_under_way:
                return self._give_up(request, now)
            case _:
                return []

    def find_told_before(self, node: Node, token: fleet_pb2.SampledToken) -> TrackedRequest | None:
        """The answer to which this token belongs, though it has moved away from the node meanwhile."""
        request = self._live.find(token.attempt.request_id)
        move = request.move if request is not None else None
        if move is None or move.stage is not MoveStage.MOVED or token.index >= move.next_index:
            return None
        return request if (node, token.attempt.epoch) == (move.source, move.source_epoch) else None

    def on_source_failed(self, request: TrackedRequest, event: fleet_pb2.MoveFailed, now: float) -> list[Instruction]:
        """The source cannot send. It may have stopped, and waits."""
        request.moves_whole |= event.reason == reasons.PAIRING_MISMATCH
        is_moving = request.move is not None and request.move.stage is MoveStage.MOVING
        return self._give_up(request, now) if is_moving else []

    def _give_up(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """The answer is to stay: the target drops what it has, and then the source is told."""
        move = _move_of(request)
        instructions = [self._live.cancel(request, move.target, move.epoch, now), *self._off(request, now)]
        if move.stage is MoveStage.MOVING:
            move.stage = MoveStage.ABANDONED
        else:
            request.end_move(now)
        return instructions

    def lose(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """A node is lost that may have a part in the answer's move, beside its part in the current attempt."""
        move = request.move
        if move is None:
            return []
        other = move.source if move.stage is MoveStage.MOVED else move.target
        return self._let_go(request, now) if node is other else []

    def tick(self, request: TrackedRequest, move: Move, now: float) -> list[Instruction]:
        """What the mere passing of time asks for."""
        is_late = move.stage is MoveStage.RESERVING and now - move.started_s >= RESERVE_TIMEOUT_S
        return self._give_up(request, now) if is_late else []

    def _let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """The node beside the current attempt's holds nothing any more."""
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
        """The target's attempt becomes the current one."""
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
        """The move will not be: to be told once."""
        move = _move_of(request)
        self._live.ledger.let_go(request.request_id, move.target)
        is_refused = move.stage is MoveStage.RESERVING
        outcome = MoveOutcome.REFUSED if is_refused else MoveOutcome.FAILED
        return [move_ended(request, move, outcome, now)]


def keep(request: TrackedRequest) -> Instruction:
    """Tells the node of the current attempt that the answer is its own."""
    about = fleet_pb2.Attempt(request_id=request.request_id, epoch=request.attempt.epoch)
    return Send(request.attempt.decode, fleet_pb2.NodeCommand(keep=fleet_pb2.Keep(attempt=about), attempt=about))


def _num_tokens_needed(request: TrackedRequest) -> int:
    """Of room on the target: for what is known, and for what the source writes meanwhile."""
    return len(request.prompt) + len(request.output) + _num_tokens_ahead(request)


def _is_whole(request: TrackedRequest) -> bool:
    """Whether all blocks of an answer are to travel, whatever its target holds."""
    makers = request.attempt.decode.makers
    return request.moves_whole or not all(maker == GRAFT or tells_bits(maker) for maker in makers)


def _marks_shared(request: TrackedRequest, move: Move) -> Sequence[int]:
    """Of the blocks that the target may hold for other requests too."""
    return () if move.is_whole else request.prompt.marks_shared(move.target.block_size)


def _num_tokens_ahead(request: TrackedRequest) -> int:
    return min(NUM_TOKENS_AHEAD, request.num_tokens_left)


def _move_of(request: TrackedRequest) -> Move:
    assert request.move is not None
    return request.move


def _source_attempt(request: TrackedRequest) -> fleet_pb2.Attempt:
    return fleet_pb2.Attempt(request_id=request.request_id, epoch=_move_of(request).source_epoch)
