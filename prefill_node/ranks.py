"""All ranks of a prefill node as one, led by rank 0; and a follower's side of it."""

from collections.abc import Sequence
from functools import partial

from kv_transfer.ends.rank_results import RankResults, failure_from_wire, to_wire
from kv_transfer.ends.sender import KVSender
from kv_transfer.results import Sent, TransferFailed
from prefill_node.rank import OnEnded, PrefillRank
from protos import ranks_pb2
from protos.ranks import Followers, Leader
from serving_core.layout import KVLayout
from serving_core.requests import OnLayer, Share, Work


class PrefillRanks:
    """What rank 0's node asks of its ranks. `on_ended` hears of a transfer when it has ended on all of them."""

    def __init__(
        self, layout: KVLayout, sender: KVSender, followers: Followers, overlap_min_tokens: int, on_ended: OnEnded
    ) -> None:
        self._followers = followers
        self._results: RankResults[Sent] = RankResults(1 + len(followers), self.cancel, on_ended)
        self._own = PrefillRank(layout, sender, overlap_min_tokens, partial(self._end, 0))
        followers.on_event = self._take

    def announce(self, works: Sequence[Work]) -> None:
        """Lets the followers begin the step that this rank computes next."""
        self._followers.announce(works)

    def on_layer(self, works: Sequence[Work]) -> OnLayer | None:
        """What the step is to report to, if to anything."""
        return self._own.on_layer([work.request.epoch for work in works], [work.share for work in works])

    def send(self, epoch: int, ticket: bytes, block_ids: Sequence[int]) -> None:
        """Begins a transfer, of which these leading blocks are final."""
        self._results.begin(epoch)
        if self._followers:
            self._followers.send(send=ranks_pb2.Send(epoch=epoch, ticket=ticket, block_ids=block_ids))
        self._own.send(epoch, ticket)
        self._own.ready(epoch, block_ids)

    def finish(self, epoch: int, block_ids: Sequence[int], tail: bytes) -> None:
        """These are all blocks, and they are final."""
        if self._followers:
            self._followers.send(finish_send=ranks_pb2.FinishSend(epoch=epoch, block_ids=block_ids, tail=tail))
        self._own.finish(epoch, block_ids, tail)

    def cancel(self, epoch: int) -> None:
        self._followers.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=epoch))
        self._own.cancel(epoch)

    def _end(self, rank: int, epoch: int, result: Sent | TransferFailed) -> None:
        self._results.end(epoch, rank, result)

    def _take(self, rank: int, event: ranks_pb2.RankEvent) -> None:
        ended = event.transfer_ended
        self._end(rank, ended.epoch, Sent(ended.num_bytes) if ended.ok else failure_from_wire(ended))


class PrefillFollower:
    """A FollowerRank (protos/follower.py)."""

    def __init__(self, layout: KVLayout, sender: KVSender, leader: Leader, overlap_min_tokens: int) -> None:
        self._leader = leader
        self._own = PrefillRank(layout, sender, overlap_min_tokens, self._ended)

    def handle(self, command: ranks_pb2.RankCommand) -> None:
        if command.HasField("send"):
            self._own.send(command.send.epoch, command.send.ticket)
        elif command.HasField("cancel_transfer"):
            self._own.cancel(command.cancel_transfer.epoch)

    def after_step(self, command: ranks_pb2.RankCommand) -> None:
        if command.HasField("send"):
            self._own.ready(command.send.epoch, command.send.block_ids)
        elif command.HasField("finish_send"):
            finish = command.finish_send
            self._own.finish(finish.epoch, finish.block_ids, finish.tail)

    def on_layer(self, epochs: Sequence[int], shares: Sequence[Share]) -> OnLayer | None:
        return self._own.on_layer(epochs, shares)

    def _ended(self, epoch: int, result: Sent | TransferFailed) -> None:
        self._leader.send(transfer_ended=to_wire(epoch, result))
