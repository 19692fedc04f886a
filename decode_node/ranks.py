"""All ranks of a decode node as one, led by rank 0; and a follower's side of it.

Each rank grants the blocks of its own pool to the lanes that end at it. A ticket leaves the node only when every rank
has granted, and a request decodes only when every rank has received.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.ends.rank_results import RankResults, failure_from_wire, to_wire
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.errors import TransferError
from kv_transfer.results import Received, TransferFailed
from kv_transfer.ticket import Ticket
from protos import ranks_pb2
from protos.ranks import Followers, Leader
from serving_core import reasons
from serving_core.requests import OnLayer, Share, Work

OnEnded = Callable[[int, Received | TransferFailed], None]
"""Takes an epoch and how its transfer has ended."""


class DecodeRanks:
    """What rank 0's node asks of its ranks. `on_ended` hears of a transfer when it has ended on all of them."""

    def __init__(
        self, receiver: KVReceiver, followers: Followers, on_granted: Callable[[int], None], on_ended: OnEnded
    ) -> None:
        self._receiver = receiver
        self._followers = followers
        self._on_granted = on_granted
        self._results: RankResults[Received] = RankResults(1 + len(followers), self.cancel, on_ended)
        self._ungranted: dict[int, int] = {}  # how many ranks have yet to grant, by epoch
        followers.on_event = self._take

    @property
    def addresses(self) -> list[str]:
        """Where each rank receives, in order."""
        others = self._followers.kv_addresses
        return [self._receiver.address, *(others[rank] for rank in sorted(others))]

    def announce(self, works: Sequence[Work]) -> None:
        """Lets the followers begin the step that this rank computes next."""
        self._followers.announce(works)

    def grant(self, ticket: Ticket, block_ids: Sequence[int]) -> None:
        """Grants these blocks on every rank; on_granted is called when all have, perhaps at once."""
        epoch = ticket.epoch
        self._results.begin(epoch)
        self._ungranted[epoch] = 1 + len(self._followers)
        if self._followers:
            self._followers.send(grant=ranks_pb2.Grant(epoch=epoch, ticket=ticket.encode(), block_ids=block_ids))
        try:
            self._receiver.expect(ticket, block_ids, partial(self._end, epoch, 0))
        except TransferError as error:
            self._end(epoch, 0, TransferFailed(reasons.TRANSFER_FAILED, str(error)))
        else:
            self._granted(epoch)

    def cancel(self, epoch: int) -> None:
        self._followers.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=epoch))
        self._receiver.cancel(epoch)

    def _granted(self, epoch: int) -> None:
        if epoch in self._ungranted:
            self._ungranted[epoch] -= 1
            if self._ungranted[epoch] == 0:
                del self._ungranted[epoch]
                self._on_granted(epoch)

    def _end(self, epoch: int, rank: int, result: Received | TransferFailed) -> None:
        self._ungranted.pop(epoch, None)
        self._results.end(epoch, rank, result)

    def _take(self, rank: int, event: ranks_pb2.RankEvent) -> None:
        if event.HasField("granted"):
            self._granted(event.granted.epoch)
        else:
            ended = event.transfer_ended
            result = Received(ended.tail, ended.num_bytes) if ended.ok else failure_from_wire(ended)
            self._end(ended.epoch, rank, result)


class DecodeFollower:
    """A FollowerRank (protos/follower.py)."""

    def __init__(self, receiver: KVReceiver, leader: Leader) -> None:
        self._receiver = receiver
        self._leader = leader

    def handle(self, command: ranks_pb2.RankCommand) -> None:
        if command.HasField("grant"):
            self._grant(command.grant)
        elif command.HasField("cancel_transfer"):
            self._receiver.cancel(command.cancel_transfer.epoch)

    def after_step(self, command: ranks_pb2.RankCommand) -> None:
        """Nothing here waits for steps."""

    def on_layer(self, epochs: Sequence[int], shares: Sequence[Share]) -> OnLayer | None:
        """Nothing leaves this node while it computes."""
        return None

    def _grant(self, grant: ranks_pb2.Grant) -> None:
        try:
            self._receiver.expect(Ticket.decode(grant.ticket), grant.block_ids, partial(self._ended, grant.epoch))
        except TransferError as error:
            self._ended(grant.epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))
        else:
            self._leader.send(granted=ranks_pb2.Granted(epoch=grant.epoch))

    def _ended(self, epoch: int, result: Received | TransferFailed) -> None:
        self._leader.send(transfer_ended=to_wire(epoch, result))
