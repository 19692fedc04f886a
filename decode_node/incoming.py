"""Receive one rank's heads of the KV blocks that other nodes send.

Rank 0 calls these methods on its own rank and, as commands, on the followers: serving_node/ranks/transfers.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.receiver import KVReceiver
from kv_transfer.results import Received, TransferError, TransferFailed
from serving_core import reasons

OnEnded = Callable[[int, Received | TransferFailed], None]
"""Takes an epoch and how the transfer has ended on this rank."""


class Incoming:
    """Track the transfers that end at one rank."""

    def __init__(
        self,
        receiver: KVReceiver,
        on_granted: Callable[[int], None],
        on_ended: OnEnded,
        on_coming: Callable[[int], None] | None = None,
    ) -> None:
        self._receiver = receiver
        self._on_granted = on_granted
        self._on_coming = on_coming
        self._on_ended = on_ended

    @property
    def address(self) -> str:
        """Return the address at which the rank receives."""
        return self._receiver.address

    def expect(self, descriptor: TransferDescriptor, block_ids: Sequence[int]) -> None:
        """Let the sender of `descriptor` write to these blocks.

        on_granted is called at once, or on_ended if the descriptor cannot be used; on_coming is called when the first
        blocks arrive.
        """
        epoch = descriptor.epoch
        on_coming = None if self._on_coming is None else partial(self._on_coming, epoch)
        try:
            self._receiver.expect(descriptor, block_ids, partial(self._on_ended, epoch), on_coming)
        except TransferError as error:
            self._on_ended(epoch, TransferFailed(reasons.TRANSFER_FAILED, str(error)))
        else:
            self._on_granted(epoch)

    def cancel(self, epoch: int) -> None:
        self._receiver.cancel(epoch)
