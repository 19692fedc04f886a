"""Combine the transfers of all ranks of a node, led by rank 0; and run a follower's part of them.

Each rank sends its own heads, and opens the blocks of its own pool to the channels that end at it. A descriptor leaves
the node only once every rank has opened its blocks, and a request continues only once every rank is done.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.receiver import KVReceiver
from kv_transfer.results import Received, Sent, TransferError, TransferFailed, combined
from kv_transfer.sender import KVSender, SendingTransfer
from prefill_node.outgoing import final_blocks, overlapped
from protos import ranks_pb2
from serving_core import reasons
from serving_core.layout import KVLayout
from serving_core.node.requests import NodeRequest
from serving_core.process.failpoints import reach
from serving_core.requests import OnLayer, Share, Work
from serving_node.decisions import CancelTransfer, FetchPrefix, FinishSend, Receive, Send, SendMore
from serving_node.ranks.leading import Followers, Leader


class TransferEvents(Protocol):
    """Takes the events of transfers, by epoch, each when it is complete on all ranks."""

    def credited(self, epoch: int, descriptor: bytes) -> None: ...
    def receiving(self, epoch: int) -> None: ...
    def received(self, epoch: int, result: Received | TransferFailed) -> None: ...
    def caught_up(self, epoch: int) -> None: ...
    def sent(self, epoch: int, result: Sent | TransferFailed) -> None: ...


Done = TypeVar("Done", Sent, Received)


@dataclass(slots=True)
class _Parts(Generic[Done]):
    missing: set[int]  # ranks
    results: list[Done | TransferFailed] = field(default_factory=list)  # in order of arrival


class RankResults(Generic[Done]):
    """Combines the results of each transfer over all ranks, by epoch."""

    def __init__(
        self, tp_size: int, cancel: Callable[[int], None], on_ended: Callable[[int, Done | TransferFailed], None]
    ) -> None:
        """Create an empty tracker.

        `cancel` ends the rest of a transfer on every rank. `on_ended` receives the result of the whole transfer once no
        rank touches its blocks: the first failure if there is one.
        """
        self._tp_size = tp_size
        self._cancel = cancel
        self._on_ended: Callable[[int, Done | TransferFailed], None] = on_ended
        self._open: dict[int, _Parts[Done]] = {}

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._open

    def __len__(self) -> int:
        """Return the number of transfers that are not over on every rank."""
        return len(self._open)

    def begin(self, epoch: int) -> None:
        assert epoch not in self._open, "an epoch was used twice"
        self._open[epoch] = _Parts(set(range(self._tp_size)))

    def end(self, epoch: int, rank: int, result: Done | TransferFailed) -> None:
        """Record the result of one rank's part; `on_ended` follows the last part, `cancel` the first failure."""
        parts = self._open[epoch]
        parts.missing.remove(rank)
        is_first_failure = isinstance(result, TransferFailed) and not any(
            isinstance(each, TransferFailed) for each in parts.results
        )
        parts.results.append(result)
        if not parts.missing:
            del self._open[epoch]
            self._on_ended(epoch, combined(parts.results))
        elif is_first_failure:
            self._cancel(epoch)


class RankTransfers(ABC):
    """Sends and receives one rank's heads of KV blocks, by epoch. Calls for an unknown or ended epoch do nothing."""

    def __init__(self, sender: KVSender, receiver: KVReceiver, overlap_min_tokens: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._overlap_min_tokens = overlap_min_tokens
        self._sending: dict[int, SendingTransfer] = {}

    # ---- reports, by epoch ----

    @abstractmethod
    def _opened(self, epoch: int) -> None:
        """Note that the sender of a transfer to this rank may write."""

    @abstractmethod
    def _receiving(self, epoch: int) -> None:
        """Note that the first blocks of a transfer to this rank arrive."""

    @abstractmethod
    def _received(self, epoch: int, result: Received | TransferFailed) -> None:
        """Note how a transfer to this rank has ended."""

    @abstractmethod
    def _caught_up(self, epoch: int) -> None:
        """Note that this rank has sent all that was ready."""

    @abstractmethod
    def _sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        """Note how a transfer from this rank has ended."""

    # ---- the rank's part of a transfer ----

    def _expect(self, descriptor: TransferDescriptor, block_ids: Sequence[int]) -> None:
        """Let the sender of `descriptor` write to these blocks."""
        epoch = descriptor.epoch
        received, receiving = partial(self._received, epoch), partial(self._receiving, epoch)
        try:
            self._receiver.expect(descriptor, block_ids, received, receiving)
        except TransferError as error:
            received(TransferFailed(reasons.TRANSFER_FAILED, str(error)))
        else:
            self._opened(epoch)

    def _start(self, epoch: int, descriptor: bytes) -> None:
        """Begin to send. The descriptor of a migration has an epoch of its own."""
        ended = partial(self._end_sending, epoch)
        try:
            self._sending[epoch] = self._sender.start(descriptor, ended, partial(self._caught_up, epoch))
        except TransferError as error:
            self._sent(epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))

    def _end_sending(self, epoch: int, result: Sent | TransferFailed) -> None:
        del self._sending[epoch]
        self._sent(epoch, result)

    def _ready(self, epoch: int, block_ids: Sequence[int], num_layers: int | None = None) -> None:
        """Report the leading blocks that are final in the leading `num_layers` layers of this rank; None: in all."""
        if transfer := self._sending.get(epoch):
            transfer.blocks_ready(block_ids, num_layers)

    def _finish(self, epoch: int, block_ids: Sequence[int], tail: bytes) -> None:
        if transfer := self._sending.get(epoch):
            transfer.finish(block_ids, tail)

    def _cancel_sending(self, epoch: int) -> None:
        if transfer := self._sending.get(epoch):
            transfer.cancel()

    def _while_computed(self, parts: Iterable[tuple[int, Share]]) -> OnLayer | None:
        """Return the callback of a step that sends the blocks of these parts while it computes, or None."""
        sent = overlapped(parts, self._overlap_min_tokens)
        return partial(self._layers_ready, sent) if sent else None

    def _layers_ready(self, parts: Sequence[tuple[int, Share]], num_layers: int) -> None:
        for epoch, share in parts:
            self._ready(epoch, final_blocks(share, self._sender.store.layout), num_layers)


class NodeTransfers(RankTransfers):
    """Runs the transfers of a node on all of its ranks, by epoch."""

    def __init__(
        self,
        layout: KVLayout,
        sender: KVSender,
        receiver: KVReceiver,
        followers: Followers,
        events: TransferEvents,
        *,
        pp_size: int,
        overlap_min_tokens: int,
        ttl_s: float,
    ) -> None:
        """Create the transfers of a node.

        `layout` covers the whole model. Blocks stay open to their sender for `ttl_s` seconds.
        """
        super().__init__(sender, receiver, overlap_min_tokens)
        self._num_ranks = num_ranks = 1 + len(followers)
        self._layout, self._ttl_s = layout, ttl_s
        self._tp_size, self._pp_size = num_ranks // pp_size, pp_size
        self._followers = followers
        self._events = events
        self._sent_by: RankResults[Sent] = RankResults(num_ranks, self.cancel, self._sent_by_all)
        self._received_by: RankResults[Received] = RankResults(num_ranks, self.cancel, events.received)
        self._descriptors: dict[int, bytes] = {}  # not yet open on every rank, by epoch
        self._unopened: dict[int, int] = {}  # ranks that have not opened their blocks, by epoch
        self._behind: dict[int, int] = {}  # ranks that have not sent their ready blocks, by epoch
        followers.on_event = self._take

    @property
    def num_open(self) -> int:
        """Return the number of transfers, in either direction, that are not over on every rank."""
        return len(self._sent_by) + len(self._received_by)

    @property
    def num_unopened(self) -> int:
        """Return the number of transfers to this node whose blocks are not open on every rank yet."""
        return len(self._unopened)

    @property
    def addresses(self) -> list[str]:
        """Return the address at which each rank receives, in rank order."""
        others = self._followers.kv_addresses
        return [self._receiver.address, *(others[rank] for rank in sorted(others))]

    @property
    def keys(self) -> list[bytes]:
        """Return the public keys of the ranks as senders, in rank order; empty if the transport has no keys."""
        others = self._followers.kv_keys
        return [key for key in (self._sender.transport.key, *(others[rank] for rank in sorted(others))) if key]

    def admit(self, keys: Sequence[bytes]) -> None:
        """Allow senders with these public keys to dial every rank."""
        if keys and (new := self._receiver.transport.allow(keys)) and self._followers:
            self._followers.send(admit=ranks_pb2.Admit(keys=new))

    def carry_out(self, decision: Receive | FetchPrefix | Send | SendMore | FinishSend | CancelTransfer) -> None:
        """Carry out a decision about transfers on all ranks, without waiting for its end."""
        match decision:
            case Receive(node_request=node_request, num_blocks=num_blocks):
                self._receive(node_request, num_blocks)
            case FetchPrefix(offer=offer, block_ids=block_ids, num_cached=num_cached):
                sizes = num_cached, offer.num_tokens
                self._draw(offer.epoch, block_ids, *sizes, prefill_tp=offer.source_tp, prefill_pp=offer.source_pp)
            case Send(epoch=epoch, descriptor=descriptor, block_ids=block_ids):
                self.send(epoch, descriptor, block_ids)
            case SendMore(epoch=epoch, block_ids=block_ids):
                self.send_more(epoch, block_ids)
            case FinishSend(epoch=epoch, block_ids=block_ids, tail=tail):
                self.finish(epoch, block_ids, tail)
            case CancelTransfer(epoch=epoch):
                self.cancel(epoch)

    def _receive(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Open the reserved blocks of a request to the node that has its KV."""
        request, incoming = node_request.request, node_request.incoming
        assert node_request.lease is not None
        assert incoming is not None
        self._draw(
            request.epoch,
            node_request.lease.block_ids[:num_blocks],
            node_request.num_cached_blocks,
            len(request.token_ids),
            prefill_tp=incoming.source_tp,
            prefill_pp=incoming.source_pp,
            behind=node_request.behind,
        )

    def _draw(
        self,
        epoch: int,
        block_ids: Sequence[int],
        num_cached: int,
        num_tokens: int,
        *,
        prefill_tp: int,
        prefill_pp: int,
        behind: bytes = b"",
    ) -> None:
        """Let a node with this parallelism write to these blocks, except the leading cached ones."""
        try:
            descriptor = TransferDescriptor.draw(
                epoch=epoch,
                layout=self._layout,
                prefill_tp=prefill_tp,
                prefill_pp=prefill_pp,
                decode_tp=self._tp_size,
                decode_pp=self._pp_size,
                addresses=self.addresses,
                num_blocks=len(block_ids),
                num_cached_blocks=num_cached,
                num_tokens=num_tokens,
                behind=behind,
                ttl_s=self._ttl_s,
            )
        except TransferError as error:
            self._events.received(epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))
        else:
            self.open(descriptor, block_ids)

    def open(self, descriptor: TransferDescriptor, block_ids: Sequence[int]) -> None:
        """Open these blocks on every rank to the sender of `descriptor`.

        `credited` is reported once all ranks have, perhaps at once; `receiving` when this rank's first block arrives.
        """
        epoch, packed = descriptor.epoch, descriptor.encode()
        self._received_by.begin(epoch)
        self._descriptors[epoch], self._unopened[epoch] = packed, self._num_ranks
        if self._followers:
            self._followers.send(credit=ranks_pb2.Credit(epoch=epoch, descriptor=packed, block_ids=block_ids))
        self._expect(descriptor, block_ids)

    def send(self, epoch: int, descriptor: bytes, block_ids: Sequence[int]) -> None:
        """Begin to send, on all ranks, by this encoded descriptor; these leading blocks are final.

        `caught_up` is reported at most once, when every rank has sent all ready blocks, perhaps before `finish`.
        """
        self._sent_by.begin(epoch)
        self._behind[epoch] = self._num_ranks
        if self._followers:
            self._followers.send(send=ranks_pb2.Send(epoch=epoch, descriptor=descriptor, block_ids=block_ids))
        self._start(epoch, descriptor)
        self._ready(epoch, block_ids)

    def send_more(self, epoch: int, block_ids: Sequence[int]) -> None:
        """Send more blocks of a transfer on all ranks: `block_ids` are all that are final, from the first one."""
        if self._followers:
            self._followers.send(send_more=ranks_pb2.SendMore(epoch=epoch, block_ids=block_ids))
        self._ready(epoch, block_ids)

    def finish(self, epoch: int, block_ids: Sequence[int], tail: bytes) -> None:
        """Send the rest of a transfer on all ranks, then commit.

        `block_ids` are all its blocks, and all are final. `tail` is what follows the last block, packed by `to_tail`.
        """
        if self._followers:
            self._followers.send(finish_send=ranks_pb2.FinishSend(epoch=epoch, block_ids=block_ids, tail=tail))
        self._finish(epoch, block_ids, tail)

    def on_layer(self, works: Sequence[Work]) -> OnLayer | None:
        """Return a callback for the engine that sends the blocks of `works` while their step computes.

        None if all of them are sent at the end.
        """
        return self._while_computed((work.request.epoch, work.share) for work in works)

    def cancel(self, epoch: int) -> None:
        """End a transfer in either direction on all ranks; epochs are unique over both."""
        self._followers.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=epoch))
        self._cancel_sending(epoch)
        self._receiver.cancel(epoch)

    def _opened(self, epoch: int) -> None:
        if _is_last(self._unopened, epoch):
            self._events.credited(epoch, self._descriptors.pop(epoch))

    def _caught_up(self, epoch: int) -> None:
        if _is_last(self._behind, epoch):
            self._events.caught_up(epoch)

    def _receiving(self, epoch: int) -> None:
        self._events.receiving(epoch)

    def _received(self, epoch: int, result: Received | TransferFailed) -> None:
        self._end_received(0, epoch, result)

    def _sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        self._end_sent(0, epoch, result)

    def _end_received(self, rank: int, epoch: int, result: Received | TransferFailed) -> None:
        self._unopened.pop(epoch, None)
        self._descriptors.pop(epoch, None)
        self._received_by.end(epoch, rank, result)

    def _end_sent(self, rank: int, epoch: int, result: Sent | TransferFailed) -> None:
        self._behind.pop(epoch, None)
        self._sent_by.end(epoch, rank, result)

    def _sent_by_all(self, epoch: int, result: Sent | TransferFailed) -> None:
        reach("release")
        self._events.sent(epoch, result)

    def _take(self, rank: int, event: ranks_pb2.RankEvent) -> None:
        if event.HasField("credited"):
            self._opened(event.credited.epoch)
        elif event.HasField("caught_up"):
            self._caught_up(event.caught_up.epoch)
        else:
            self._take_end(rank, event.transfer_ended)

    def _take_end(self, rank: int, ended: ranks_pb2.TransferEnded) -> None:
        if ended.epoch in self._sent_by:
            self._end_sent(rank, ended.epoch, Sent(ended.num_bytes) if ended.ok else _failure(ended))
        else:
            result = Received(ended.tail, ended.num_bytes) if ended.ok else _failure(ended)
            self._end_received(rank, ended.epoch, result)


def _is_last(counts: dict[int, int], epoch: int) -> bool:
    """Decrement the count of an epoch. Return whether no rank is left."""
    if epoch in counts:
        counts[epoch] -= 1
        if counts[epoch] == 0:
            del counts[epoch]
            return True
    return False


class FollowerTransfers(RankTransfers):
    """Runs a follower's part of the node's transfers, as rank 0 commands."""

    def __init__(
        self,
        sender: KVSender,
        receiver: KVReceiver,
        leader: Leader,
        overlap_min_tokens: int,
        *,
        may_lag: bool,
    ) -> None:
        """Create the follower's part.

        With `may_lag` (a later pipeline stage) rank 0 may have finished a step that this rank still computes, and then
        reserves blocks to which that step still writes.
        """
        super().__init__(sender, receiver, overlap_min_tokens)
        self._leader = leader
        self._may_lag = may_lag
        self._early: Counter[int] = Counter()  # Sends that began before earlier announced steps have run, by epoch

    def handle(self, command: ranks_pb2.RankCommand) -> None:
        """Carry out what must be done at once of a command other than a step."""
        match command.WhichOneof("command"):
            case "send":
                self._early[command.send.epoch] += 1
                self._start(command.send.epoch, command.send.descriptor)
            case "admit":
                self._receiver.transport.allow(command.admit.keys)
            case "cancel_transfer":
                self._cancel_sending(command.cancel_transfer.epoch)
        if not self._may_lag:
            self._take(command)

    def after_step(self, command: ranks_pb2.RankCommand) -> None:
        """Carry out what must wait of a command, until the steps announced before it have run."""
        if self._may_lag:
            self._take(command)
        match command.WhichOneof("command"):
            case "send":
                self._early -= Counter([command.send.epoch])
                self._ready(command.send.epoch, command.send.block_ids)
            case "send_more":
                self._ready(command.send_more.epoch, command.send_more.block_ids)
            case "finish_send":
                finish = command.finish_send
                if finish.epoch not in self._early:
                    self._finish(finish.epoch, finish.block_ids, finish.tail)

    def _take(self, command: ranks_pb2.RankCommand) -> None:
        match command.WhichOneof("command"):
            case "credit":
                credit = command.credit
                self._expect(TransferDescriptor.decode(credit.descriptor), credit.block_ids)
            case "cancel_transfer":
                self._receiver.cancel(command.cancel_transfer.epoch)

    def _ready(self, epoch: int, block_ids: Sequence[int], num_layers: int | None = None) -> None:
        """Report ready blocks, unless a newer transfer has taken the epoch: its blocks come with its own Send.

        The share of a step that was announced before may belong to an earlier state of the request.
        """
        if epoch not in self._early:
            super()._ready(epoch, block_ids, num_layers)

    def on_layer(self, epochs: Sequence[int], shares: Sequence[Share]) -> OnLayer | None:
        """Return a callback for the engine that sends the blocks of these shares while their step computes.

        `epochs[i]` is the epoch of `shares[i]`. None if all of them are sent at the end.
        """
        return self._while_computed(zip(epochs, shares, strict=True))

    def _opened(self, epoch: int) -> None:
        self._leader.send(credited=ranks_pb2.Credited(epoch=epoch))

    def _caught_up(self, epoch: int) -> None:
        self._leader.send(caught_up=ranks_pb2.CaughtUp(epoch=epoch))

    def _receiving(self, epoch: int) -> None:
        """Do nothing: rank 0 hears from the sender itself."""

    def _received(self, epoch: int, result: Received | TransferFailed) -> None:
        self._leader.send(transfer_ended=_ended(epoch, result))

    def _sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        self._leader.send(transfer_ended=_ended(epoch, result))


def _ended(epoch: int, result: Sent | Received | TransferFailed) -> ranks_pb2.TransferEnded:
    """Return the message by which a follower reports the result of its part."""
    match result:
        case Sent(num_bytes):
            return ranks_pb2.TransferEnded(epoch=epoch, ok=True, num_bytes=num_bytes)
        case Received(tail, num_bytes):
            return ranks_pb2.TransferEnded(epoch=epoch, ok=True, num_bytes=num_bytes, tail=tail)
        case TransferFailed(reason, message):
            return ranks_pb2.TransferEnded(epoch=epoch, reason=reason, message=message)


def _failure(wire: ranks_pb2.TransferEnded) -> TransferFailed:
    return TransferFailed(wire.reason, wire.message)
