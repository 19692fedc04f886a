"""Simulate KV transfers: blocks between nodes, and the messages by which both ends learn about a transfer.

The blocks of one sender leave one after the other, in the order in which they become ready. Blocks that a step computes
may leave layer by layer while the step runs; its last layer cannot.
"""

import itertools
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from kv_transfer.descriptor import ChannelEnd, TransferDescriptor
from kv_transfer.results import Received, Sent, TransferFailed
from kv_transfer.wire import TRANSFER_ID_BYTES
from serving_core import reasons
from serving_node.decisions import CancelTransfer, FetchPrefix, FinishSend, Receive, Send, SendMore
from serving_node.worker import Worker
from splitserve_bench.simulate.costs import Costs
from splitserve_bench.simulate.events import Agenda
from splitserve_bench.simulate.profile import NodeSizes

TTL_S: Final = 600.0
ADDRESS: Final = "simulated"


class End(Protocol):
    """A node, as its transfers know it."""

    name: str
    costs: Costs
    worker: Worker
    is_lost: bool


class State(Enum):
    """The state of a transfer."""

    OPEN = auto()
    COMMITTED = auto()
    REVOKED = auto()  # by the receiver
    ABORTED = auto()  # by the sender
    LOST = auto()  # with one of its ends


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer, from granted blocks to the last message about it."""

    receiver: End
    epoch: int  # of the receiver's attempt
    num_blocks: int
    num_ready: int  # blocks that have left, or wait for those before them; the cached ones need not
    sender: End | None = None
    sent_epoch: int = -1  # of the sender's attempt, another one where an answer moves
    num_sent: int = 0  # blocks that travelled
    left_s: float = 0.0  # when those that are ready have left
    is_finished: bool = False
    state: State = State.OPEN
    tail: bytes = b""


class Transfers:
    """All transfers between the nodes of a fleet."""

    def __init__(self, agenda: Agenda, sizes: NodeSizes) -> None:
        self._agenda = agenda
        self._layout = sizes.layout
        self._block_bytes = sizes.block_bytes  # those that really travel, unlike the layout's
        self._ids = itertools.count()
        self._by_descriptor: dict[bytes, Transfer] = {}
        self._receiving: dict[tuple[End, int], Transfer] = {}
        self._sending: dict[tuple[End, int], Transfer] = {}
        self._free_s: dict[End, float] = {}  # when a sender's blocks have left

    def carry_out(
        self, node: End, decision: Receive | FetchPrefix | Send | SendMore | FinishSend | CancelTransfer
    ) -> None:
        """Carry out a node's decision about a transfer."""
        match decision:
            case Receive(node_request=to, num_blocks=num_blocks):
                known, num_cached = len(to.request.token_ids), to.num_cached_blocks
                self._open(node, to.request.epoch, num_blocks, num_cached, known, to.behind)
            case FetchPrefix(offer=offer, block_ids=block_ids, num_cached=num_cached):
                self._open(node, offer.epoch, len(block_ids), num_cached, offer.num_tokens)
            case Send(epoch=epoch, descriptor=descriptor, block_ids=block_ids):
                self._send(node, epoch, descriptor, len(block_ids))
            case SendMore(epoch=epoch, block_ids=block_ids):
                self.ready(node, epoch, len(block_ids), since_s=self._agenda.now)
            case FinishSend(epoch=epoch, block_ids=block_ids, tail=tail):
                self._finish(node, epoch, len(block_ids), tail)
            case CancelTransfer(epoch=epoch):
                self._cancel(node, epoch)

    def _open(
        self, receiver: End, epoch: int, num_blocks: int, num_cached: int, num_tokens: int, behind: bytes = b""
    ) -> None:
        """Make a transfer descriptor by which these blocks can be written, and give it to the receiver."""
        end = ChannelEnd(next(self._ids).to_bytes(TRANSFER_ID_BYTES, "big"), ADDRESS)
        sizes = (num_blocks, num_cached, num_tokens)
        descriptor = TransferDescriptor(epoch, self._layout, 1, 1, *sizes, TTL_S, (end,), behind=behind).encode()
        transfer = Transfer(receiver, epoch, num_blocks, num_cached)
        self._by_descriptor[descriptor] = self._receiving[receiver, epoch] = transfer
        receiver.worker.credited(epoch, descriptor)

    def _send(self, sender: End, epoch: int, descriptor: bytes, num_blocks: int) -> None:
        """Begin a transfer of which so many leading blocks are final."""
        transfer = self._by_descriptor.pop(descriptor)
        transfer.sender, transfer.sent_epoch = sender, epoch
        self._sending[sender, epoch] = transfer
        if transfer.state is not State.OPEN:
            self._agenda.after(sender.costs.latency_s(), lambda: self._tell_sender(transfer))
        else:
            self.ready(sender, epoch, num_blocks, since_s=self._agenda.now)
            self._agenda.at(transfer.left_s, lambda: self._watch(transfer))

    def ready(self, sender: End, epoch: int, num_blocks: int, *, since_s: float) -> None:
        """Record that `num_blocks` leading blocks are final now; new ones became so layer by layer from `since_s` on.

        They leave after the sender's other blocks. Without an open transfer of this epoch nothing happens.
        """
        transfer = self._sending.get((sender, epoch))
        if transfer is None or transfer.state is not State.OPEN:
            return
        num_new = max(0, min(num_blocks, transfer.num_blocks) - transfer.num_ready)
        if num_new and not transfer.num_sent:
            transfer.receiver.worker.receiving(transfer.epoch)
        transfer.num_ready += num_new
        transfer.num_sent += num_new
        now, bytes_s = self._agenda.now, self.bytes_s(sender, transfer.receiver, num_new * self._block_bytes)
        start_s = max(since_s, self._free_s.get(sender, 0.0))
        left_s = max(start_s + bytes_s, now + (bytes_s / self._layout.num_layers if since_s < now else 0.0))
        self._free_s[sender] = transfer.left_s = left_s

    def bytes_s(self, sender: End, receiver: End, num_bytes: int) -> float:
        """Return the seconds that so many bytes take from the sender to the receiver."""
        return sender.costs.bytes_s(num_bytes)

    def _finish(self, sender: End, epoch: int, num_blocks: int, tail: bytes) -> None:
        """Record that all blocks are final, and send the tail after the last one."""
        self.ready(sender, epoch, num_blocks, since_s=self._agenda.now)
        if (transfer := self._sending.get((sender, epoch))) and transfer.state is State.OPEN:
            transfer.tail, transfer.is_finished = tail, True
            arrived_s = transfer.left_s + sender.costs.latency_s()
            self._agenda.at(arrived_s, lambda: self._end(transfer, State.COMMITTED, by=transfer.receiver))

    def _cancel(self, node: End, epoch: int) -> None:
        """End the transfers that the node receives or sends in this epoch."""
        if transfer := self._receiving.get((node, epoch)):
            self._end(transfer, State.REVOKED, by=node)
        if transfer := self._sending.get((node, epoch)):
            self._end(transfer, State.ABORTED, by=node)

    def lose(self, node: End) -> None:
        """End all transfers of a node that is gone; their other ends are notified."""
        for transfer in [*self._receiving.values(), *self._sending.values()]:
            if node in (transfer.receiver, transfer.sender):
                self._end(transfer, State.LOST, by=node)

    def _watch(self, transfer: Transfer) -> None:
        """Notify the sender once when all ready blocks have left, unless the transfer is finished by then."""
        assert transfer.sender is not None
        if transfer.state is not State.OPEN or transfer.is_finished:
            return
        if transfer.left_s <= self._agenda.now:
            transfer.sender.worker.caught_up(transfer.sent_epoch)
        else:
            self._agenda.at(transfer.left_s, lambda: self._watch(transfer))

    def _end(self, transfer: Transfer, state: State, *, by: End) -> None:
        """End an open transfer in this state. The end `by` learns of it at once, the other one after the latency."""
        if transfer.state is not State.OPEN:
            return
        transfer.state = state
        latency_s = transfer.receiver.costs.latency_s()
        self._agenda.after(0.0 if by is transfer.receiver else latency_s, lambda: self._tell_receiver(transfer))
        if transfer.sender is not None:
            self._agenda.after(0.0 if by is transfer.sender else latency_s, lambda: self._tell_sender(transfer))

    def _tell_receiver(self, transfer: Transfer) -> None:
        del self._receiving[transfer.receiver, transfer.epoch]
        if transfer.receiver.is_lost:
            return
        num_bytes, worker = transfer.num_sent * self._block_bytes, transfer.receiver.worker
        if transfer.state is State.COMMITTED:
            worker.received(transfer.epoch, Received(transfer.tail, num_bytes))
        else:
            reason = reasons.TRANSFER_ABORTED if transfer.state is State.ABORTED else reasons.TRANSFER_FAILED
            worker.received(transfer.epoch, _failed(transfer, reason))

    def _tell_sender(self, transfer: Transfer) -> None:
        assert transfer.sender is not None
        del self._sending[transfer.sender, transfer.sent_epoch]
        if transfer.sender.is_lost:
            return
        if transfer.state is State.COMMITTED:
            transfer.sender.worker.sent(transfer.sent_epoch, Sent(transfer.num_sent * self._block_bytes))
        else:
            reason = reasons.TRANSFER_REVOKED if transfer.state is State.REVOKED else reasons.TRANSFER_FAILED
            transfer.sender.worker.sent(transfer.sent_epoch, _failed(transfer, reason))


def _failed(transfer: Transfer, reason: str) -> TransferFailed:
    return TransferFailed(reason, f"the transfer was {transfer.state.name.lower()}")
