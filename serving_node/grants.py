"""Let other nodes write to reserved blocks: draw a transfer descriptor, and release it once every rank is ready."""

from collections.abc import Callable, Sequence

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.results import TransferError, TransferFailed
from serving_core import reasons
from serving_core.layout import KVLayout
from serving_node.decisions import CancelTransfer, FetchPrefix, FinishSend, Receive, Send, SendMore
from serving_node.ranks.transfers import NodeTransfers


class Grants:
    """Hold drawn descriptors that are not yet open on every rank, by epoch."""

    def __init__(
        self,
        layout: KVLayout,
        transfers: NodeTransfers,
        on_received: Callable[[int, TransferFailed], None],
        *,
        tp_size: int,
        pp_size: int,
        ttl_s: float,
    ) -> None:
        """Create an empty holder.

        `layout` covers the whole model. `on_received` is called with an epoch for which no descriptor can be drawn.
        """
        self._layout = layout
        self._transfers = transfers
        self._on_received = on_received
        self._tp_size, self._pp_size = tp_size, pp_size
        self._ttl_s = ttl_s
        self._descriptors: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Return the number of descriptors that are not yet open on every rank."""
        return len(self._descriptors)

    def carry_out(self, decision: Receive | FetchPrefix | Send | SendMore | FinishSend | CancelTransfer) -> None:
        """Carry out a decision about KV transfers."""
        match decision:
            case Receive():
                self.receive(decision)
            case FetchPrefix():
                self.fetch_prefix(decision)
            case _:
                self._transfers.carry_out(decision)

    def receive(self, decision: Receive) -> None:
        """Open the reserved blocks of a request to the node that has its KV."""
        node_request, incoming = decision.node_request, decision.node_request.incoming
        assert node_request.lease is not None
        assert incoming is not None
        self._open(
            node_request.request.epoch,
            incoming.source_tp,
            incoming.source_pp,
            node_request.lease.block_ids[: decision.num_blocks],
            node_request.num_cached_blocks,
            len(node_request.request.token_ids),
            node_request.behind,
        )

    def fetch_prefix(self, decision: FetchPrefix) -> None:
        """Open blocks for a remote prefix fetch."""
        offer = decision.offer
        self._open(
            offer.epoch, offer.source_tp, offer.source_pp, decision.block_ids, decision.num_cached, offer.num_tokens
        )

    def take(self, epoch: int) -> bytes:
        """Remove and return the descriptor of an epoch, for which every rank is ready."""
        return self._descriptors.pop(epoch)

    def forget(self, epoch: int) -> None:
        """Drop the descriptor of an ended transfer, if it is still held."""
        self._descriptors.pop(epoch, None)

    def _open(
        self,
        epoch: int,
        source_tp: int,
        source_pp: int,
        block_ids: Sequence[int],
        num_cached: int,
        num_tokens: int,
        behind: bytes = b"",
    ) -> None:
        """Let a node with this parallelism write to these blocks, except the leading cached ones."""
        try:
            descriptor = TransferDescriptor.draw(
                epoch=epoch,
                layout=self._layout,
                prefill_tp=source_tp,
                prefill_pp=source_pp,
                decode_tp=self._tp_size,
                decode_pp=self._pp_size,
                addresses=self._transfers.addresses,
                num_blocks=len(block_ids),
                num_cached_blocks=num_cached,
                num_tokens=num_tokens,
                behind=behind,
                ttl_s=self._ttl_s,
            )
        except TransferError as error:
            self._on_received(epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))
            return
        self._descriptors[epoch] = packed = descriptor.encode()
        self._transfers.receive(descriptor, packed, block_ids)
