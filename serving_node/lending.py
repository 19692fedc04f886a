"""Blocks that this node holds of prompts which other nodes read. Pure.

What an answer has written, and what was read here, stays in the pool until it is needed for others. Another node that
is to read a prompt which begins so gets copies: the blocks are leased until they have left, so nobody can have them for
other tokens meanwhile, and are what they were afterwards.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate, groupby
from typing import Final

from kv_transfer.errors import TransferError
from kv_transfer.results import Sent, TransferFailed
from kv_transfer.ticket import Ticket
from protos import fleet_pb2
from protos.convert import MAX_MADE, to_tail
from serving_core import reasons
from serving_core.blocks import BlockLease
from serving_core.leases import Leases
from serving_core.prefix import BlockNames, root_name
from serving_node.decisions import CancelTransfer, Lend
from serving_node.endings import Endings

MAX_LENT: Final = 64  # at a time


class Lending:
    """The loans of one node."""

    def __init__(self, leases: Leases, endings: Endings, fingerprint: Mapping[str, str]) -> None:
        self._leases = leases
        self._endings = endings
        self._fingerprint = fingerprint
        self._under_way: dict[int, tuple[fleet_pb2.Attempt, BlockLease]] = {}  # by epoch

    def __contains__(self, epoch: int) -> bool:
        """Whether the transfer of this epoch is one of these."""
        return epoch in self._under_way

    @property
    def held(self) -> Iterable[BlockLease]:
        """Of blocks that are lent."""
        return [lease for _, lease in self._under_way.values()]

    def lend(self, lend: fleet_pb2.Lend) -> None:
        """Another node has room for blocks: its ticket."""
        if lend.attempt.epoch in self._under_way:
            return
        try:
            self._begin(lend, Ticket.decode(lend.ticket))
        except TransferError as error:
            self._fail(lend.attempt, str(error))

    def sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        """A transfer is over."""
        attempt, lease = self._under_way.pop(epoch)
        lease.release()
        if isinstance(result, TransferFailed):
            self._fail(attempt, result.message)

    def detached(self) -> None:
        """The coordinator is gone."""
        for epoch in self._under_way:
            self._endings.decide(CancelTransfer(epoch))

    def _begin(self, lend: fleet_pb2.Lend, ticket: Ticket) -> None:
        """Raises TransferError where nothing can be lent."""
        if len(self._under_way) >= MAX_LENT:
            raise TransferError(f"{MAX_LENT} loans are under way, the limit")
        epoch, token_ids = lend.attempt.epoch, list(lend.token_ids)
        if ticket.epoch != epoch:
            raise TransferError(f"the ticket is for epoch {ticket.epoch}, and the loan's is {epoch}")
        root = root_name(self._fingerprint, lend.cache_salt, lend.adapter)
        lease, makers = self._leases.lend(BlockNames(root, self._leases.block_size), token_ids)
        makers = _tellable(makers[: ticket.num_blocks])
        if len(makers) <= ticket.num_cached_blocks:
            lease.release()
            raise TransferError("the node holds no more of the tokens than the other one")
        self._under_way[epoch] = lend.attempt, lease
        self._endings.decide(Lend(epoch, lend.ticket, lease.block_ids[: len(makers)], to_tail([], makers)))

    def _fail(self, attempt: fleet_pb2.Attempt, message: str) -> None:
        self._endings.tell(failed=fleet_pb2.Failed(attempt=attempt, reason=reasons.TRANSFER_FAILED, message=message))


def _tellable(makers: list[bytes]) -> list[bytes]:
    """As many of the first ones as a tail tells of."""
    runs = list(accumulate(len(list(run)) for _, run in groupby(makers)))
    return makers[: runs[MAX_MADE - 1]] if len(runs) > MAX_MADE else makers
