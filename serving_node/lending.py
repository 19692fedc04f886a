"""Blocks that this node holds of prompts which other nodes read. Pure.

What an answer has written, and what was read here, stays in the pool until it is needed for others. Another node that
is to read a prompt which begins so gets copies: the blocks are leased until they have left, so nobody can have them for
other tokens meanwhile, and are what they were afterwards. What lies in the second tier is read back first.
"""

from collections.abc import Mapping
from functools import partial
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from kv_transfer.results import Sent, TransferError, TransferFailed
from kv_transfer.ticket import Ticket
from protos import fleet_pb2
from protos.convert import MAX_MADE, to_tail
from serving_core import reasons
from serving_core.blocks import BlockLease
from serving_core.leases import Leases
from serving_core.prefix import BlockNames, root_name
from serving_node.decisions import CancelTransfer, Lend
from serving_node.endings import Endings
from serving_node.second_tier import SecondTier

MAX_LENT: Final = 64  # at a time


class _Asked(NamedTuple):
    """What another node has room for."""

    lend: fleet_pb2.Lend
    ticket: Ticket
    names: BlockNames
    token_ids: list[int]  # of the blocks that there is room for


class Lending:
    """The loans of one node."""

    def __init__(self, leases: Leases, tier: SecondTier, endings: Endings, fingerprint: Mapping[str, str]) -> None:
        self._leases = leases
        self._tier = tier
        self._endings = endings
        self._fingerprint = fingerprint
        self._awaited: dict[int, _Asked] = {}  # by epoch: blocks are being read back for these
        self._under_way: dict[int, tuple[fleet_pb2.Attempt, BlockLease]] = {}  # by epoch

    def __contains__(self, epoch: int) -> bool:
        """Whether the transfer of this epoch is one of these."""
        return epoch in self._under_way

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that other nodes fetch, by epoch."""
        return {epoch: lease for epoch, (_, lease) in self._under_way.items()}

    def lend(self, lend: fleet_pb2.Lend, num_spare: int, now: float) -> None:
        """Another node has room for blocks: its ticket. What is read back for it leaves num_spare blocks free."""
        epoch = lend.attempt.epoch
        if epoch in self._under_way or epoch in self._awaited:
            return
        try:
            asked = self._asked(lend)
        except TransferError as error:
            self._fail(lend.attempt, str(error))
            return
        self._awaited[epoch] = asked
        num_known, on_end = asked.ticket.num_cached_blocks, partial(self._send, asked)
        if not self._tier.fetch(asked.names, asked.token_ids, num_known, num_spare, now, on_end):
            self._send(asked)

    def sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        """A transfer is over."""
        attempt, lease = self._under_way.pop(epoch)
        lease.release()
        if isinstance(result, TransferFailed):
            self._fail(attempt, result.message)

    def detached(self) -> None:
        """The coordinator is gone."""
        self._awaited.clear()
        for epoch in self._under_way:
            self._endings.decide(CancelTransfer(epoch))

    def _asked(self, lend: fleet_pb2.Lend) -> _Asked:
        """Raises TransferError where nothing can be lent."""
        if len(self._under_way) + len(self._awaited) >= MAX_LENT:
            raise TransferError(f"{MAX_LENT} loans are under way, the limit")
        ticket, epoch, block_size = Ticket.decode(lend.ticket), lend.attempt.epoch, self._leases.block_size
        if ticket.epoch != epoch:
            raise TransferError(f"the ticket is for epoch {ticket.epoch}, and the loan's is {epoch}")
        names = BlockNames(root_name(self._fingerprint, lend.cache_salt, lend.adapter), block_size)
        token_ids = list(lend.token_ids[: ticket.num_blocks * block_size])
        return _Asked(lend, ticket, names, token_ids)

    def _send(self, asked: _Asked) -> None:
        """All that can be had is in the pool."""
        epoch = asked.lend.attempt.epoch
        if self._awaited.get(epoch) is not asked:
            return  # the coordinator has gone meanwhile
        del self._awaited[epoch]
        lease, makers = self._leases.lend(asked.names, asked.token_ids)
        makers = _tellable(makers)
        if len(makers) <= asked.ticket.num_cached_blocks:
            lease.release()
            self._fail(asked.lend.attempt, "the node holds no more of the tokens than the other one")
            return
        self._under_way[epoch] = asked.lend.attempt, lease
        self._endings.decide(Lend(epoch, asked.lend.ticket, lease.block_ids[: len(makers)], to_tail([], makers)))

    def _fail(self, attempt: fleet_pb2.Attempt, message: str) -> None:
        self._endings.tell(failed=fleet_pb2.Failed(attempt=attempt, reason=reasons.TRANSFER_FAILED, message=message))


def _tellable(makers: list[bytes]) -> list[bytes]:
    """As many of the first ones as a tail tells of."""
    runs = list(accumulate(len(list(run)) for _, run in groupby(makers)))
    return makers[: runs[MAX_MADE - 1]] if len(runs) > MAX_MADE else makers
