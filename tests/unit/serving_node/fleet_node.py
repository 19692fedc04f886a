"""A node of a fleet in memory, and the transfers between two of them."""

from dataclasses import dataclass

from decode_node.preallocation import SHARED_BLOCKS
from kv_transfer.results import Received, Sent, TransferFailed
from serving_core import reasons
from serving_node.decisions import CancelTransfer, Receive, Send
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, Node, Outgoing


@dataclass(eq=False)
class Channel:
    """A transfer from the blocks that are granted to the last word about it at both ends."""

    descriptor: bytes
    epoch: int  # of the receiver's attempt
    receiver: "FleetNode"
    block_ids: list[int]
    num_cached: int
    num_arrived: int  # leading blocks that are there
    is_granted: bool = False
    state: str = "open"  # then committed, revoked (by the receiver), aborted (by the sender) or lost
    receiver_has_heard: bool = False
    sender: "FleetNode | None" = None
    sender_epoch: int = 0  # another one where an answer moves
    has_caught_up: bool = False

    @property
    def outgoing(self):
        return self.sender.sending[self.sender_epoch]

    def end(self, state):
        if self.state == "open":
            self.state = state

    def received(self):
        """How it ends at the receiver."""
        if self.state == "committed":
            return Received(self.tail, self.num_bytes)
        return TransferFailed(reasons.TRANSFER_ABORTED if self.state == "aborted" else "TRANSFER_FAILED", self.state)

    def sent(self):
        """How it ends at the sender."""
        if self.state == "committed":
            return Sent(self.num_bytes)
        return TransferFailed(reasons.TRANSFER_REVOKED if self.state == "revoked" else "TRANSFER_FAILED", self.state)

    @property
    def num_bytes(self):
        return (self.num_arrived - self.num_cached) * BLOCK_BYTES

    def carry(self):
        """What is ready arrives, as it is in the sender's pool now; tells whether that was anything."""
        ready = self.outgoing.block_ids
        assert len(ready) <= len(self.block_ids), "more blocks than were granted"
        new = slice(self.num_arrived, len(ready))
        if not ready[new]:
            return False
        self.receiver.kv.copy_from(self.sender.kv, ready[new], self.block_ids[new])
        self.num_arrived = len(ready)
        return True

    def commit(self):
        """All blocks are there."""
        assert self.num_arrived == max(len(self.outgoing.block_ids), self.num_cached)
        self.tail = self.outgoing.tail
        self.end("committed")


class FleetNode(Node):
    """A node whose transfers run in the fleet's data plane."""

    def __init__(self, fleet, name, *size, **limits):
        super().__init__(*size, name=name, **limits)
        self.fleet = fleet
        self.commands = []  # on their way to it
        self.num_heard = 0  # events that have come to the coordinator
        self.to_share = set()  # requests that ever waited for what another one brings
        self.num_evictions = {}  # of each attempt that was ever here

    def check(self):
        super().check()
        self.num_evictions.update((each.request.epoch, each.num_evictions) for each in self.scheduler.node_requests)
        self.to_share.update(each for each in self.scheduler.node_requests if each.is_to_share)

    def carry_out(self, decision):
        match decision:
            case Receive(node_request=node_request, num_blocks=num_blocks):
                self._open(node_request, num_blocks)
            case Send(epoch=epoch, descriptor=descriptor, block_ids=block_ids):
                assert epoch not in self.sending
                channel = self.fleet.channels[descriptor]
                node_request = next(each for each in self.scheduler.node_requests if each.request.epoch == epoch)
                assert (channel.epoch == epoch) == node_request.only_prefills
                channel.sender, channel.sender_epoch = self, epoch
                self.sending[channel.sender_epoch] = Outgoing(descriptor, list(block_ids))
            case CancelTransfer(epoch=epoch):
                self._cancel(epoch)
            case _:
                super().carry_out(decision)

    def _open(self, node_request, num_blocks):
        self.credits_at_once = False
        super()._open(node_request, num_blocks)
        opened = self.opened[node_request.request.epoch]
        self.fleet.num_shared += node_request in self.to_share and opened.num_cached >= SHARED_BLOCKS
        sizes = (opened.num_cached, opened.num_cached)
        self.fleet.channels[opened.descriptor] = Channel(
            opened.descriptor, node_request.request.epoch, self, opened.block_ids, *sizes
        )

    def _cancel(self, epoch):
        if epoch in self.opened:
            self.fleet.channels[self.opened[epoch].descriptor].end("revoked")
        if epoch in self.sending:
            self.fleet.channels[self.sending[epoch].descriptor].end("aborted")
