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
migrate, MAX_DRAIN_MIGRATIONS at a time, to the node with most room. A request that no other node has room for stays
until one has. A node that stops decoding only keeps its prompts.

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

from coordinator.control.instructions import Instruction, MigrationOutcome, Send
from coordinator.control.live import LiveAnswers, migration_ended
from coordinator.control.load import Ledger
from coordinator.control.nodes import PARTS, Node, does, fitting, has_path
from coordinator.control.placement.lateness import Lateness, spared, step_s
from coordinator.control.placement.policy import Coming, Wanted
from coordinator.control.request import Migration, MigrationStage, Releases, TrackedRequest, tell_sender
from coordinator.control.timeline import Phase
from protos import fleet_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.node.prefix import MIXED_NUMERICS, tells_bits
from serving_core.shapes import DECODE, PREFILL
from serving_core.slo import Due

NUM_TOKENS_AHEAD: Final = 128  # decoded by the source meanwhile: ample even while the KV of a long sequence travels
MIN_TOKENS_LEFT: Final = 8  # a request that is about to end finishes sooner where it is
RESERVE_TIMEOUT_S: Final = 5.0  # for the target's blocks, while the source decodes on


def may_migrate(request: TrackedRequest, now: float, *, rest_s: float) -> bool:
    """Return whether the request is decoding and its last migration ended at least `rest_s` seconds ago."""
    if request.timeline.phase is not Phase.DECODE or request.num_tokens_left < MIN_TOKENS_LEFT:
        return False
    return request.migration is None and (request.migrated_s is None or now - request.migrated_s >= rest_s)


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


class Migrations:
    """Start migrations and follow each one to its end."""

    def __init__(self, live: LiveAnswers) -> None:
        self._live = live

    def begin(self, request: TrackedRequest, target: Node, now: float) -> list[Instruction]:
        """Start the migration of a request for which `may_migrate` is true."""
        attempt = request.attempt
        migration = Migration(
            self._live.next_epoch(), attempt.decode, attempt.epoch, target, now, is_whole=_is_whole(request)
        )
        request.migration = migration
        self._live.ledger.write(
            request.request_id, target, _num_tokens_needed(request), _marks_shared(request, migration)
        )
        reserve = fleet_pb2.Reserve(
            job=request.job(migration.epoch, request.known, now),
            num_tokens_ahead=_num_tokens_ahead(request),
            is_whole=migration.is_whole,
        )
        tell_sender(reserve, migration.source)
        return [Send(target, fleet_pb2.NodeCommand(reserve=reserve, attempt=reserve.job.attempt))]

    def find(self, node: Node, attempt: fleet_pb2.Attempt) -> TrackedRequest | None:
        """Return the request in whose migration this attempt of the node takes part, beside the current attempt."""
        request = self._live.find(attempt.request_id)
        migration = request.migration if request is not None else None
        if migration is None:
            return None
        other = (
            (migration.source, migration.source_epoch)
            if migration.stage is MigrationStage.MIGRATED
            else (migration.target, migration.epoch)
        )
        return request if other == (node, attempt.epoch) else None

    def handle(self, request: TrackedRequest, kind: str, event: object, now: float) -> list[Instruction]:
        """Handle an event about a request that `find` has returned."""
        migration = _migration_of(request)
        match kind, migration.stage:
            case (("failed" | "cancelled"), _):
                return self._let_go(request, now)
            case "reserved", MigrationStage.RESERVING:
                assert isinstance(event, fleet_pb2.Reserved)
                migration.stage = MigrationStage.MOVING
                about = _source_attempt(request)
                migrate = fleet_pb2.Migrate(attempt=about, descriptor=event.descriptor)
                return [Send(migration.source, fleet_pb2.NodeCommand(migrate=migrate, attempt=about))]
            case "committed", MigrationStage.MOVING:
                assert isinstance(event, fleet_pb2.Committed)
                return self._switch(request, event, now)
            case "revoked", _ if migration.is_under_way:
                return self._give_up(request, now)
            case _:
                return []

    def find_told_before(self, node: Node, token: fleet_pb2.SampledToken) -> TrackedRequest | None:
        """Return the request of a token that the source sampled before the request migrated away from it."""
        request = self._live.find(token.attempt.request_id)
        migration = request.migration if request is not None else None
        if migration is None or migration.stage is not MigrationStage.MIGRATED or token.index >= migration.next_index:
            return None
        return request if (node, token.attempt.epoch) == (migration.source, migration.source_epoch) else None

    def on_source_failed(
        self, request: TrackedRequest, event: fleet_pb2.MigrationFailed, now: float
    ) -> list[Instruction]:
        """Handle that the source cannot send. It may have stopped decoding, and then waits for Keep or Cancel."""
        request.migrations_whole |= event.reason == reasons.PAIRING_MISMATCH
        is_migrating = request.migration is not None and request.migration.stage is MigrationStage.MOVING
        return self._give_up(request, now) if is_migrating else []

    def _give_up(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Abandon a migration: the target drops its part, and then the source is told to go on."""
        migration = _migration_of(request)
        instructions = [self._live.cancel(request, migration.target, migration.epoch, now), *self._off(request, now)]
        if migration.stage is MigrationStage.MOVING:
            migration.stage = MigrationStage.ABANDONED
        else:
            request.end_migration(now)
        return instructions

    def lose(self, request: TrackedRequest, node: Node, now: float) -> list[Instruction]:
        """Handle the loss of a node that may have a part in the migration, beside its part in the current attempt."""
        migration = request.migration
        if migration is None:
            return []
        other = migration.source if migration.stage is MigrationStage.MIGRATED else migration.target
        return self._let_go(request, now) if node is other else []

    def tick(self, request: TrackedRequest, migration: Migration, now: float) -> list[Instruction]:
        """Abandon a migration whose target has not reserved blocks within RESERVE_TIMEOUT_S."""
        is_late = migration.stage is MigrationStage.RESERVING and now - migration.started_s >= RESERVE_TIMEOUT_S
        return self._give_up(request, now) if is_late else []

    def _let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Handle that the node beside the current attempt's holds nothing any more."""
        migration = _migration_of(request)
        if migration.stage is MigrationStage.MIGRATED:
            return self._source_let_go(request, now)
        instructions = self._off(request, now) if migration.is_under_way else []
        request.end_migration(now)
        return instructions if migration.stage is MigrationStage.RESERVING else [*instructions, keep(request)]

    def _source_let_go(self, request: TrackedRequest, now: float) -> list[Instruction]:
        migration = _migration_of(request)
        if len(request.output) < migration.next_index:
            error = RequestError(reasons.WORKER_LOST, f"the {migration.source.kind} was lost")
            return self._live.restart(request, migration.source, error, now)
        migration.source_holds = False
        request.settle_migration(now)
        return []

    def _switch(self, request: TrackedRequest, event: fleet_pb2.Committed, now: float) -> list[Instruction]:
        """Make the target's attempt the current one."""
        migration, live = _migration_of(request), self._live
        instructions = live.release(request, now)
        request.attempt = replace(
            request.attempt,
            epoch=migration.epoch,
            decode=migration.target,
            prefill_holds=False,
            decode_holds=True,
            is_committed=True,
            has_counted_kv=True,
        )
        migration.stage, migration.next_index = MigrationStage.MIGRATED, event.next_index
        request.timeline.placed(now, request.attempt.prefill.name, migration.target.name)
        live.ledger.let_go(request.request_id, migration.source)
        live.ledger.let_go(request.request_id, request.attempt.prefill)
        live.ledger.write(request.request_id, migration.target, len(request.known), _marks_shared(request, migration))
        request.num_moves += 1
        request.num_kv_bytes += event.num_bytes
        request.num_kv_bytes_saved += event.num_bytes_saved
        request.num_migrated_kv_bytes += event.num_bytes
        live.metrics.kv_migrated(event.num_bytes, event.num_bytes_saved)
        return [*instructions, migration_ended(request, migration, MigrationOutcome.MIGRATED, now, event.num_bytes)]

    def _off(self, request: TrackedRequest, now: float) -> list[Instruction]:
        """Record, once, that the migration will not happen."""
        migration = _migration_of(request)
        self._live.ledger.let_go(request.request_id, migration.target)
        is_refused = migration.stage is MigrationStage.RESERVING
        outcome = MigrationOutcome.REFUSED if is_refused else MigrationOutcome.FAILED
        return [migration_ended(request, migration, outcome, now)]


def keep(request: TrackedRequest) -> Instruction:
    """Return the command that tells the node of the current attempt to decode the request itself."""
    about = fleet_pb2.Attempt(request_id=request.request_id, epoch=request.attempt.epoch)
    return Send(request.attempt.decode, fleet_pb2.NodeCommand(keep=fleet_pb2.Keep(attempt=about), attempt=about))


def _num_tokens_needed(request: TrackedRequest) -> int:
    """Return the tokens of room needed on the target: those known, and those that the source decodes meanwhile."""
    return len(request.prompt) + len(request.output) + _num_tokens_ahead(request)


def _is_whole(request: TrackedRequest) -> bool:
    """Return whether all blocks of a request travel, whatever its target has cached."""
    numerics_ids = request.attempt.decode.numerics_ids
    return request.migrations_whole or not all(
        numerics_id == MIXED_NUMERICS or tells_bits(numerics_id) for numerics_id in numerics_ids
    )


def _marks_shared(request: TrackedRequest, migration: Migration) -> Sequence[int]:
    """Return the marks of the blocks that the target may share between this request and others."""
    return () if migration.is_whole else request.prompt.marks_shared(migration.target.block_size)


def _num_tokens_ahead(request: TrackedRequest) -> int:
    return min(NUM_TOKENS_AHEAD, request.num_tokens_left)


def _migration_of(request: TrackedRequest) -> Migration:
    assert request.migration is not None
    return request.migration


def _source_attempt(request: TrackedRequest) -> fleet_pb2.Attempt:
    return fleet_pb2.Attempt(request_id=request.request_id, epoch=_migration_of(request).source_epoch)


MAX_DRAIN_MIGRATIONS: Final = 4  # migrations under way from one node to another
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
    under_way = Counter(
        (request.migration.source, request.migration.target) for request in requests if request.migration
    )
    for request in requests:
        source = request.attempt.decode
        if source not in leaves or not may_migrate(request, now, rest_s=RETRY_S):
            continue
        free = [node for node in nodes if node is not source and under_way[source, node] < MAX_DRAIN_MIGRATIONS]
        target = roomiest(request, free, ledger)
        if target is not None:
            under_way[source, target] += 1
            yield request, target


def _has_part(node: Node, request: TrackedRequest) -> bool:
    migration = request.migration
    is_target = migration is not None and migration.is_under_way and migration.target is node
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
    busy = migrating(requests)
    for source in [node for node in nodes if node in full and node not in busy]:
        running = [each for each in requests if each.attempt.decode is source and may_migrate(each, now, rest_s=REST_S)]
        youngest = max(running, key=lambda each: each.age, default=None)
        if youngest is None:
            continue
        others = [node for node in nodes if node not in full and node not in busy]
        target = roomiest(youngest, others, ledger)
        if target is not None:
            busy |= {source, target}
            yield youngest, target


def migrating(requests: Iterable[TrackedRequest]) -> set[Node]:
    """Return the sources and targets of all migrations under way."""
    return {
        node
        for request in requests
        if request.migration
        for node in (request.migration.source, request.migration.target)
    }


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
    busy = migrating(requests)
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
            if may_migrate(each, self.now, rest_s=REST_S)
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
