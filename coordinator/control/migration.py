"""Migrate running requests to another node, with their KV: choose request and target, and follow the migration. Pure.

    begin        Reserve to the target, under an epoch of its own, for the tokens known and some more
    Reserved     Migrate, with the transfer descriptor, to the source, which decodes on while blocks travel, then stops
    Committed    the target decodes on; Cancel to the source, whose tokens before the target's first one still count
    else         Cancel to the target, and after its reply Keep to the source, which decodes on

Blocks that the target has cached do not travel: its descriptor names the last one. A source that has decoded the
sequence beside others reports PAIRING_MISMATCH, and the next migration sends all blocks.

The coordinator alone decides which node continues. A source that has stopped waits for Cancel or Keep whatever has
failed, and a Committed that crosses the Cancel to its target is ignored. Until Committed the request belongs to the
source: its end, the loss of the source and its failures are handled as if there were no migration.

A drained node: prompts without a token restart on other nodes, KV transfers under way finish, and running requests
migrate, MAX_DRAIN_MIGRATIONS at a time, to the node with most room. A request that no other node has room for stays
until one has. A node that stops decoding only keeps its prompts.

A full node: where a prefilled prompt has waited for blocks for WAIT_S, the youngest running request migrates.

A late node: a request whose SLO on TPOT is shorter than a step of its node falls further behind with each token. Where
its slack does not last until its end, it migrates to the node with most room on which it is in time and makes no other
late. It goes to the node that placement spares for prompts to come (placement/slo_forecast.py) only if fewer of those
would be late than sequences are here. The request that is least behind goes first.

From a full or late node one request migrates at a time, and no request twice within REST_S.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.control.instructions import (
    Instruction,
    MigrationOutcome,
    Releases,
    Send,
    describe_sender,
    job_of,
    keep,
    migration_ended,
)
from coordinator.control.load import Arrivals, Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import PARTS, Node, does, fitting, has_path
from coordinator.control.placement.costs import Wanted
from coordinator.control.placement.slo_forecast import SloForecast, spared_node, step_s
from coordinator.control.request import IN_MIGRATION, ON_NODES, Migration, Request, State, Transition
from protos import fleet_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.node.prefix import MIXED_NUMERICS, determines_bits
from serving_core.shapes import DECODE, PREFILL
from serving_core.slo import Due

NUM_TOKENS_AHEAD: Final = 128  # decoded by the source meanwhile: ample even while the KV of a long sequence travels
MIN_TOKENS_LEFT: Final = 8  # a request that is about to end finishes sooner where it is
RESERVE_TIMEOUT_S: Final = 5.0  # for the target's blocks, while the source decodes on


def may_migrate(request: Request, now: float, *, rest_s: float) -> bool:
    """Return whether the request is decoding, not about to end, and last migrated at least `rest_s` seconds ago.

    True for a decoding request that has never migrated.
    """
    if request.state is not State.DECODING or request.num_tokens_left < MIN_TOKENS_LEFT:
        return False
    if request.attempt.decode.hello.keeps_sequences:
        return False
    return request.migrated_s is None or now - request.migrated_s >= rest_s


def roomiest(request: Request, nodes: Iterable[Node], ledger: Ledger) -> Node | None:
    """Return the node with most free KV cache that can take a running request; None where no node can.

    A target must be ready, take KV transfers, have a running slot and blocks free now, and hold the whole request.
    Blocks that it shares with others there take no room. The first by name is chosen among equals.
    """
    num_needed, max_tokens, is_whole = _num_tokens_needed(request), request.max_tokens, _is_whole(request)

    def free(node: Node) -> int:
        num_shared = 0 if is_whole else ledger.tokens_shared(node, request.prompt)
        return node.pool_tokens - ledger.tokens_taken(node) + num_shared

    def has_room(node: Node) -> bool:
        has_slot = ledger.of(node).num_sequences < node.usable.slots and not node.hello.keeps_sequences
        return node.usable.accepts_transfers and has_slot and free(node) >= num_needed

    able = [node for node in fitting(nodes, DECODE, max_tokens) if max_tokens <= node.pool_tokens and has_room(node)]
    return min(able, key=lambda node: (-free(node), node.name), default=None)


class Migrations:
    """Carry out migrations, from the choice of a target to the end; methods return the instructions to carry out."""

    def __init__(self, ledger: Ledger, metrics: Metrics, releases: Releases) -> None:
        self._ledger, self._metrics, self._releases = ledger, metrics, releases

    def begin(self, request: Request, target: Node, now: float) -> list[Instruction]:
        """Start the migration of a request for which `may_migrate` is true, and return the Reserve for its target."""
        attempt, epoch = request.attempt, self._releases.next_epoch(request)
        migration = Migration(epoch, attempt.decode, attempt.epoch, target, now, is_whole=_is_whole(request))
        request.migration = migration
        request.enter(State.RESERVING_TARGET, now)
        hashes = _hashes_shared(request, migration)
        self._ledger.decode(request.request_id, target, _num_tokens_needed(request), hashes)
        reserve = fleet_pb2.Reserve(
            job=job_of(request, migration.epoch, request.known, now),
            num_tokens_ahead=_num_tokens_ahead(request),
            is_whole=migration.is_whole,
        )
        describe_sender(reserve, migration.source)
        return [Send(target, fleet_pb2.NodeCommand(reserve=reserve, attempt=reserve.job.attempt))]

    def target_reserved(self, request: Request, node: Node, event: fleet_pb2.Reserved, now: float) -> list[Instruction]:
        """Return the Migrate command for the source, since the target has reserved blocks.

        The request enters MIGRATING.
        """
        migration = _migration_of(request)
        request.enter(State.MIGRATING, now)
        about = fleet_pb2.Attempt(request_id=request.request_id, epoch=migration.source_epoch)
        migrate = fleet_pb2.Migrate(attempt=about, descriptor=event.descriptor)
        return [Send(migration.source, fleet_pb2.NodeCommand(migrate=migrate, attempt=about))]

    def target_committed(
        self, request: Request, node: Node, event: fleet_pb2.Committed, now: float
    ) -> list[Instruction]:
        """Make the target's attempt the current one, since the target has all KV and decodes on.

        Returns the Cancels for the nodes of the attempt before, and the record of the migration. The request enters
        MIGRATED.
        """
        migration, ledger, request_id = _migration_of(request), self._ledger, request.request_id
        cancels = self._releases.cancel_attempt(request, now)
        request.attempt = replace(
            request.attempt, epoch=migration.epoch, decode=migration.target, has_kv=True, has_counted_kv=True
        )
        request.attempt.holders = [migration.target]
        migration.next_index = event.next_index
        request.timeline.placed(now, request.attempt.prefill.name, migration.target.name)
        request.enter(State.MIGRATED, now)
        ledger.release(request_id, migration.source)
        ledger.release(request_id, request.attempt.prefill)
        ledger.decode(request_id, migration.target, len(request.known), _hashes_shared(request, migration))
        request.num_migrations += 1
        request.num_kv_bytes += event.num_bytes
        request.num_kv_bytes_saved += event.num_bytes_saved
        request.num_migrated_kv_bytes += event.num_bytes
        self._metrics.kv_transferred(event.num_bytes, event.num_bytes_saved)
        return [*cancels, migration_ended(request, migration, MigrationOutcome.MIGRATED, now, event.num_bytes)]

    def target_revoked(self, request: Request, node: Node, event: object, now: float) -> list[Instruction]:
        """Abandon a migration before the commit; return the Cancel for the target. The source decodes on afterwards."""
        return self._give_up(request, now)

    def check_target(self, request: Request, node: Node, event: None, now: float) -> list[Instruction]:
        """Abandon a migration whose target has not reserved blocks within RESERVE_TIMEOUT_S.

        Returns the Cancel for the target then, and nothing before.
        """
        is_overdue = now - _migration_of(request).started_s >= RESERVE_TIMEOUT_S
        return self._give_up(request, now) if is_overdue else []

    def source_failed(
        self, request: Request, node: Node, event: fleet_pb2.MigrationFailed, now: float
    ) -> list[Instruction]:
        """Abandon a migration that the source cannot carry out; return the Cancel for the target.

        The source may have stopped decoding, and then waits for Keep or Cancel. After PAIRING_MISMATCH, the next
        migration of the request sends all blocks.
        """
        request.migrates_whole |= event.reason == reasons.PAIRING_MISMATCH
        return self._give_up(request, now) if request.state is State.MIGRATING else []

    def _give_up(self, request: Request, now: float) -> list[Instruction]:
        migration = _migration_of(request)
        cancel = self._releases.cancel(request, migration.target, migration.epoch, now)
        instructions = [cancel, self._abandoned(request, now)]
        if request.state is State.MIGRATING:
            request.enter(State.ABORTING_MIGRATION, now)
        else:
            self._ended(request, now)
        return instructions

    def target_gone(self, request: Request, node: Node, event: object, now: float) -> list[Instruction]:
        """End a migration whose target has released its part, or is lost; the request enters DECODING on the source.

        Returns the record of the migration, if it has not been returned before, and Keep for a source that may have
        stopped.
        """
        was_aborting, is_stopped = (
            request.state is State.ABORTING_MIGRATION,
            request.state is not State.RESERVING_TARGET,
        )
        instructions = [] if was_aborting else [self._abandoned(request, now)]
        self._ended(request, now)
        return [*instructions, keep(request)] if is_stopped else instructions

    def source_released(self, request: Request, now: float) -> None:
        """Record that the source has sent all its tokens and holds nothing of a MIGRATED request any more."""
        _migration_of(request).is_source_released = True
        self._settle(request, now)

    def tokens_came(self, request: Request, first_index: int, last_index: int, gap_s: float, now: float) -> None:
        """Record the pause of a MIGRATED request once: `gap_s`, the gap before the first token of the target.

        The tokens that came have the indices from `first_index` to `last_index`.
        """
        migration = _migration_of(request)
        if migration.has_resumed or last_index < migration.next_index:
            return
        migration.has_resumed = True
        pause_s = gap_s if first_index == migration.next_index else 0.0
        request.migration_pause_s += pause_s
        self._metrics.migration_pause.observe(pause_s)
        self._settle(request, now)

    def drop(self, request: Request, now: float) -> list[Instruction]:
        """Drop the migration of a request that ends or restarts; return the Cancel for its target and the record.

        Returns nothing if the target has committed, or is already being canceled.
        """
        migration, request.migration = _migration_of(request), None
        if request.state not in (State.RESERVING_TARGET, State.MIGRATING):
            return []
        cancel = self._releases.cancel(request, migration.target, migration.epoch, now)
        return [cancel, migration_ended(request, migration, MigrationOutcome.ENDED, now)]

    def _settle(self, request: Request, now: float) -> None:
        """End a migration once the source holds nothing and the target has sent a token."""
        migration = _migration_of(request)
        if migration.has_resumed and migration.is_source_released:
            self._ended(request, now)

    def _ended(self, request: Request, now: float) -> None:
        request.migration, request.migrated_s = None, now
        request.enter(State.DECODING, now)

    def _abandoned(self, request: Request, now: float) -> Instruction:
        """Return the record that the migration does not happen."""
        migration = _migration_of(request)
        self._ledger.release(request.request_id, migration.target)
        is_refused = request.state is State.RESERVING_TARGET
        outcome = MigrationOutcome.REFUSED if is_refused else MigrationOutcome.FAILED
        return migration_ended(request, migration, outcome, now)


# The events of migrations, but for the loss of a source after the commit, which may restart the request.
TRANSITIONS: Final = (
    Transition((State.RESERVING_TARGET,), "peer_reserved", Migrations.target_reserved, (State.MIGRATING,)),
    Transition((State.RESERVING_TARGET,), "peer_revoked", Migrations.target_revoked, (State.DECODING,)),
    Transition((State.RESERVING_TARGET,), "tick", Migrations.check_target, (State.DECODING,)),
    Transition((State.MIGRATING,), "peer_committed", Migrations.target_committed, (State.MIGRATED,)),
    Transition((State.MIGRATING,), "peer_revoked", Migrations.target_revoked, (State.ABORTING_MIGRATION,)),
    Transition((State.MIGRATING,), "migration_failed", Migrations.source_failed, (State.ABORTING_MIGRATION,)),
    Transition(ON_NODES - {State.MIGRATING}, "migration_failed", Migrations.source_failed),
    *(
        Transition(IN_MIGRATION - {State.MIGRATED}, f"peer_{what}", Migrations.target_gone, (State.DECODING,))
        for what in ("failed", "cancelled", "lost")
    ),
)


def _num_tokens_needed(request: Request) -> int:
    """Return the tokens of room needed on the target: those known, and those that the source decodes meanwhile."""
    return len(request.prompt) + len(request.output) + _num_tokens_ahead(request)


def _is_whole(request: Request) -> bool:
    """Return whether all blocks of a request travel, whatever its target has cached."""
    numerics_ids = request.attempt.decode.numerics_ids
    return request.migrates_whole or not all(
        numerics_id == MIXED_NUMERICS or determines_bits(numerics_id) for numerics_id in numerics_ids
    )


def _hashes_shared(request: Request, migration: Migration) -> Sequence[int]:
    """Return the hashes of the blocks that the target may share between this request and others."""
    return () if migration.is_whole else request.prompt.hashes_shared(migration.target.block_size)


def _num_tokens_ahead(request: Request) -> int:
    return min(NUM_TOKENS_AHEAD, request.num_tokens_left)


def _migration_of(request: Request) -> Migration:
    assert request.migration is not None
    return request.migration


MAX_DRAIN_MIGRATIONS: Final = 4  # migrations under way from one node to another
RETRY_S: Final = 1.0  # between two migrations of one request


def check_target(node: Node, nodes: Collection[Node], *, embeds: bool = False) -> None:
    """Raise RequestError when a node may not be drained, since the other nodes could not serve requests without it.

    With `embeds`, the requests are for embeddings, which need a prefill node alone.
    """
    others = [other for other in nodes if other is not node]
    if not has_path(others, embeds=embeds):
        missing = [PARTS[role][0] for role in ((PREFILL,) if embeds else PARTS) if not fitting(others, role, 0)]
        what = f"no other node {' or '.join(missing)}" if missing else "the others take no KV transfers"
        raise RequestError(reasons.NO_OTHER_NODE, f"node {node.name} cannot drain: {what}")


def num_left(node: Node, requests: Iterable[Request], releases: Releases) -> int:
    """Return the number of requests that the node still computes, or holds blocks for.

    All requests of other nodes whose distributed KV it holds count as one.
    """
    is_holder = node.load.num_remote_kv_blocks > 0
    return sum(_has_part(node, request) for request in requests) + releases.count(node) + is_holder


def prompts_to_restart(requests: Iterable[Request], nodes: Collection[Node]) -> Iterator[Request]:
    """Yield the requests without a token that have blocks or work on a draining node, to be restarted on others."""
    if all(node.is_ready for node in nodes):
        return
    for request in requests:
        if request.may_restart_unseen and not all(node.is_ready for node in request.attempt.holders):
            yield request


def leaving_drained(
    requests: Iterable[Request], nodes: Collection[Node], ledger: Ledger, now: float
) -> Iterator[tuple[Request, Node]]:
    """Yield the running requests to migrate now from nodes that drain or decode no more, each with its target.

    The caller must start each migration before the next one is yielded.
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


def _has_part(node: Node, request: Request) -> bool:
    migration = request.migration if request.state in (State.RESERVING_TARGET, State.MIGRATING) else None
    is_target = migration is not None and migration.target is node
    return is_target or node in request.attempt.holders


WAIT_S: Final = 0.5
REST_S: Final = 10.0


def leaving_full(
    requests: Iterable[Request], nodes: Collection[Node], ledger: Ledger, now: float
) -> Iterator[tuple[Request, Node]]:
    """Yield the running requests to migrate from nodes without free blocks now, each with its target.

    A node is full if a prefilled prompt has waited there for WAIT_S. The caller must start each migration before the
    next one is yielded.
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


def migrating(requests: Iterable[Request]) -> set[Node]:
    """Return the nodes that are source or target of a migration under way."""
    return {
        node
        for request in requests
        if request.migration
        for node in (request.migration.source, request.migration.target)
    }


def _waits(request: Request, now: float) -> bool:
    return request.state is State.WAITING_FOR_BLOCKS and now - request.entered_s >= WAIT_S


def leaving_late(
    requests: Iterable[Request], nodes: Collection[Node], ledger: Ledger, now: float, arrivals: Arrivals
) -> Iterator[tuple[Request, Node]]:
    """Yield the running requests to migrate now from nodes on which they would miss their SLO, each with its target.

    The caller must start each migration before the next one is yielded. `arrivals` are the requests that are expected,
    whose SLOs the target should not violate.
    """
    if not ledger.has_limits or len(nodes) < 2:
        return
    requests = list(requests)
    busy = migrating(requests)
    for source in nodes:
        if source in busy:
            continue
        look = _Look(ledger, now, arrivals, spared_node(nodes, ledger, now))
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
    arrivals: Arrivals
    spared: Node | None

    def late(self, requests: Iterable[Request], source: Node) -> list[Request]:
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

    def relief(self, request: Request, num_late: int, free: list[Node]) -> Node | None:
        """Return a node on which the request, one of `num_late` late ones, would be in time and make no other late."""
        due, known = request.due, request.known
        assert due is not None
        num_output = len(request.output)
        wanted = Wanted(known, request.max_tokens, due=due, num_output=num_output, arrivals=self.arrivals)
        forecast = SloForecast(self.ledger, wanted, self.now)

        def relieves(node: Node) -> bool:
            then_s, there = step_s(node, self.ledger, num_more=1, num_more_cached=len(known)), forecast.on(node)
            num_lost = there.num_lost(len(free)) if node is self.spared else 0
            return self._is_in_time(request, due, then_s) and there.late_by_decode(0.0) <= 0 and num_lost < num_late

        able = [node for node in free if relieves(node)]
        return roomiest(request, able, self.ledger)

    def _is_in_time(self, request: Request, due: Due, each_s: float) -> bool:
        """Return whether the last token could be in time if each step takes `each_s`."""
        last = request.sampling.max_tokens - 1
        return self.now + request.num_tokens_left * each_s <= due.token_s(last)
