"""Migrate running sequences from this node to another one. Pure.

The sequence keeps decoding while its full blocks are sent (`Send`, `SendMore`). It freezes between two steps when all
full blocks have left, or before it needs more blocks than the other node has reserved. The rest follows with the tokens
that the other node does not know (`FinishSend`). The other node computes the KV of the last token. Blocks that the
descriptor names as cached are compared by hash and are not sent.

The coordinator decides which node continues a migrating sequence: a frozen sequence waits for Cancel or Keep whatever
the result of the transfer, since the report of a success may be lost. After Keep a sequence decodes at once, although
the transport may still hold blocks of a cancelled transfer. Full blocks never change. The last block does, but its
checksum was taken before (SendingTransfer), so no receiver accepts the changed bytes. Also, the coordinator cancels the
other node's attempt before it sends Keep, and ignores that epoch from then on.
"""

from functools import partial
from typing import Final

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.results import Sent, TransferError, TransferFailed
from protos import fleet_pb2
from protos.convert import attempt_of
from serving_core import reasons
from serving_core.node.leases import Leases
from serving_core.node.requests import (
    Migration,
    NodeRequest,
    NodeRequests,
    Outgoing,
    RequestEvent,
    RequestState,
    drop_outgoing,
    outgoing_of,
)
from serving_node.decisions import CancelTransfer, SendMore
from serving_node.transfers import Endings, OutgoingTransfers, Transfer, Transfers

MAX_TAIL_TOKENS: Final = 512  # of 5 bytes each at most; leaves room for the numerics ids in a tail


class Migrations:
    """Migrates running sequences of one node to other nodes."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        endings: Endings,
        transfers: Transfers,
        outgoing: OutgoingTransfers,
    ) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._endings, self._decisions = endings, endings.decisions
        self._transfers = transfers
        self._outgoing = outgoing

    def migrate(self, migrate: fleet_pb2.Migrate) -> None:
        """Begin the migration that the coordinator commands, by the descriptor of the node that has reserved blocks.

        A sequence that cannot migrate is reported as such; an unknown one as failed.
        """
        node_request = self._find(migrate.attempt)
        if node_request is None:
            return
        try:
            descriptor = TransferDescriptor.decode(migrate.descriptor)
            migration = self._migration(node_request, descriptor)
        except TransferError as error:
            self._fail_migration(node_request, reasons.TRANSFER_FAILED, str(error))
            return
        if not _is_behind(node_request, descriptor):
            message = "the other node's cached blocks have other bits than those that the sequence continued from"
            self._fail_migration(node_request, reasons.PAIRING_MISMATCH, message)
            return
        node_request.outgoing = Outgoing(migration=migration)
        transfer = Transfer(
            on_caught_up=partial(self._caught_up, node_request), on_sent=partial(self._migration_sent, node_request)
        )
        self._outgoing.send(node_request, migrate.descriptor, transfer)
        self._freeze_if_due(node_request)

    def keep(self, keep: fleet_pb2.Keep) -> None:
        """Carry out the coordinator's command to continue a request on this node.

        Its migration is cancelled, or its prompt, prefilled for another node, is decoded here. A request that waits for
        KV of another node fails.
        """
        node_request = self._find(keep.attempt)
        if node_request is None:
            return
        if node_request.only_prefills:
            self._outgoing.keep(node_request)
        elif node_request.incoming is not None:
            self._endings.fail(node_request, reasons.PAIRING_MISMATCH, "what another node has the KV of cannot be kept")
        else:
            self._give_up_migration(node_request)

    def note_decoded(self, node_request: NodeRequest) -> None:
        """Send the block that a finished step has filled of a migrating sequence, or freeze it if that is due.

        The tokens of the step are reported already.
        """
        if node_request.is_ending:
            return
        self._freeze_if_due(node_request)
        if node_request.state is RequestState.RUNNING and node_request.num_computed % self._leases.block_size == 0:
            self._decisions.add(SendMore(node_request.request.epoch, self._leases.final_blocks(node_request)))

    def _find(self, attempt: fleet_pb2.Attempt) -> NodeRequest | None:
        """Return the request of an attempt unless it is ending; an unknown attempt is reported as failed."""
        node_request = self._node_requests.find(attempt)
        if node_request is None:
            message = "the node has nothing of this attempt"
            failed = fleet_pb2.Failed(attempt=attempt, reason=reasons.TRANSFER_FAILED, message=message)
            self._decisions.report(failed=failed)
        return None if node_request is None or node_request.is_ending else node_request

    def _migration(self, node_request: NodeRequest, descriptor: TransferDescriptor) -> Migration:
        """Return the state of a new migration. Raises TransferError if the sequence cannot migrate."""
        if node_request.state is not RequestState.RUNNING:
            raise TransferError("the sequence is not decoding now")
        if node_request.distributed is not None:
            raise TransferError("the sequence is longer than a pool, and cannot migrate")
        if node_request.is_sending:
            raise TransferError("the transfer before this one has not ended")
        num_tokens = len(node_request.request.token_ids) + max(0, node_request.num_in_step - 1)
        if not 0 <= num_tokens - descriptor.num_tokens < MAX_TAIL_TOKENS:
            raise TransferError(f"the descriptor knows {descriptor.num_tokens} tokens of {num_tokens}")
        num_blocks = self._leases.blocks_for(node_request.num_computed + node_request.num_in_step)
        if num_blocks > descriptor.num_blocks:
            raise TransferError(f"the sequence has {num_blocks} blocks now, and {descriptor.num_blocks} were reserved")
        return Migration(descriptor.num_blocks, descriptor.num_tokens)

    def _caught_up(self, node_request: NodeRequest) -> None:
        if node_request.migration is not None and not node_request.is_ending:
            node_request.migration.has_caught_up = True
            self._freeze_if_due(node_request)

    def _freeze_if_due(self, node_request: NodeRequest) -> None:
        migration = node_request.migration
        if migration is None or node_request.in_step or node_request.state is not RequestState.RUNNING:
            return
        if not migration.has_caught_up and not self._is_at_limit(node_request, migration):
            return
        self._node_requests.apply(node_request, RequestEvent.FROZE)
        outgoing_of(node_request).tail = node_request.request.token_ids[migration.num_tokens :]
        self._outgoing.finish(node_request)

    def _is_at_limit(self, node_request: NodeRequest, migration: Migration) -> bool:
        """Return whether the other node could not take one more token."""
        num_blocks = self._leases.blocks_for(node_request.num_computed + 1)
        num_unknown = len(node_request.request.token_ids) - migration.num_tokens
        return num_blocks > migration.num_blocks or num_unknown == MAX_TAIL_TOKENS

    def _migration_sent(self, node_request: NodeRequest, result: Sent | TransferFailed, now: float) -> None:
        outgoing = outgoing_of(node_request)
        migration, outgoing.migration = outgoing.migration, None
        outgoing.is_sending, outgoing.waiting_since_s = False, now
        if node_request.state is not RequestState.FROZEN:
            drop_outgoing(node_request)
        if isinstance(result, Sent):
            self._transfers.num_kv_bytes += result.num_bytes
        elif migration is not None and not node_request.is_ending:
            self._transfers.num_failed += 1
            self._fail_migration(node_request, result.reason, result.message)
        self._endings.settle(node_request)

    def _give_up_migration(self, node_request: NodeRequest) -> None:
        outgoing = node_request.outgoing
        if outgoing is not None and outgoing.migration is not None:
            self._decisions.add(CancelTransfer(node_request.request.epoch))
            outgoing.migration = None
        if node_request.state is RequestState.FROZEN:
            self._node_requests.apply(node_request, RequestEvent.RESUMED)

    def _fail_migration(self, node_request: NodeRequest, reason: str, message: str) -> None:
        wire = attempt_of(node_request.request)
        self._decisions.report(migration_failed=fleet_pb2.MigrationFailed(attempt=wire, reason=reason, message=message))


def _is_behind(node_request: NodeRequest, descriptor: TransferDescriptor) -> bool:
    """Return whether the other node's cached blocks equal the sequence's own blocks bit by bit."""
    num_cached = descriptor.num_cached_blocks
    return not num_cached or node_request.names.names[num_cached - 1 : num_cached] == [descriptor.behind]
