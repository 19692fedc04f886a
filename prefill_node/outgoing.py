"""Send one rank's heads of the KV blocks that other nodes continue with.

Rank 0 calls these methods on its own rank and, as commands, on the followers: serving_node/ranks/transfers.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.results import Sent, TransferError, TransferFailed
from kv_transfer.sender import KVSender, SendingTransfer
from serving_core import reasons
from serving_core.layout import KVLayout
from serving_core.requests import OnLayer, Share

OnEnded = Callable[[int, Sent | TransferFailed], None]
"""Takes an epoch and how the transfer has ended on this rank."""

OnCaughtUp = Callable[[int], None]
"""Takes the epoch of a transfer of which this rank has sent all that was ready: KVSender.start's on_caught_up."""


class Outgoing:
    """Track the transfers that leave one rank, by epoch. Calls for an unknown or ended epoch do nothing."""

    def __init__(
        self,
        layout: KVLayout,
        sender: KVSender,
        overlap_min_tokens: int,
        on_caught_up: OnCaughtUp,
        on_ended: OnEnded,
        is_early: Callable[[int], bool] = lambda epoch: False,
    ) -> None:
        """Create an empty tracker.

        `is_early` returns whether a transfer began before the steps announced before it. Such steps report no blocks
        for the transfer, since their share may belong to an earlier state of the request.
        """
        self._layout = layout
        self._overlap_min_tokens = overlap_min_tokens
        self._sender = sender
        self._on_caught_up = on_caught_up
        self._on_ended = on_ended
        self._is_early = is_early
        self._transfers: dict[int, SendingTransfer] = {}

    def send(self, epoch: int, descriptor: bytes) -> None:
        """Begin a transfer.

        on_ended receives the end, also if the descriptor cannot be used.
        """
        try:
            ended, caught_up = partial(self._ended, epoch), partial(self._on_caught_up, epoch)
            self._transfers[epoch] = self._sender.start(descriptor, ended, caught_up)
        except TransferError as error:
            self._on_ended(epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))

    def on_layer(self, epochs: Sequence[int], shares: Sequence[Share]) -> OnLayer | None:
        """Return the callback of a step that sends the blocks of these shares while later layers are computed.

        Returns None if all shares are so short that their blocks are better sent at the end.
        """
        long = [each for each in zip(epochs, shares, strict=True) if not self._is_short(each[1])]
        return partial(self._layers_ready, long) if long else None

    def ready(self, epoch: int, block_ids: Sequence[int]) -> None:
        """Report the leading blocks that are final in all layers."""
        if transfer := self._transfers.get(epoch):
            transfer.blocks_ready(block_ids)

    def finish(self, epoch: int, block_ids: Sequence[int], tail: bytes) -> None:
        """Report that these are all blocks and all are final; `tail` carries the tokens that the other node lacks."""
        if transfer := self._transfers.get(epoch):
            transfer.finish(block_ids, tail)

    def cancel(self, epoch: int) -> None:
        if transfer := self._transfers.get(epoch):
            transfer.cancel()

    def _is_short(self, share: Share) -> bool:
        """Return whether the share is a decode step or the whole of a short prompt."""
        return share.num_tokens == 1 or (share.samples and share.start + share.num_tokens < self._overlap_min_tokens)

    def _layers_ready(self, parts: Sequence[tuple[int, Share]], num_layers: int) -> None:
        for epoch, share in parts:
            if (transfer := self._transfers.get(epoch)) and not self._is_early(epoch):
                transfer.blocks_ready(share.block_ids[: self._num_final_blocks(share)], num_layers)

    def _num_final_blocks(self, share: Share) -> int:
        """Return the number of blocks that no later chunk writes to.

        These are the full blocks, and after the last chunk also the last block. A fixed state comes first and is final
        after the last chunk, so that no block is final before.
        """
        num_tokens = share.start + share.num_tokens
        if share.samples:
            return self._layout.num_blocks_for(num_tokens)
        return 0 if self._layout.state_bytes else num_tokens // self._layout.block_size

    def _ended(self, epoch: int, result: Sent | TransferFailed) -> None:
        del self._transfers[epoch]
        self._on_ended(epoch, result)
