"""What the corridor sees of a rank's KV pool."""

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.payload import Buffer
from serving_core.layout import KVLayout


class KVStore(Protocol):
    """The KV blocks of one rank, as buffers of the kind that the transport's Payload handles."""

    @property
    def layout(self) -> KVLayout:
        """Of the heads and layers in this store."""
        ...

    def heads(self, heads: range) -> "KVStore":
        """The same blocks, but only these heads, counted from the store's own first; all of them: the store itself."""
        ...

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[Buffer, Buffer]:
        """The K planes of these blocks in order, and their V planes, in one layer of the model that the store holds."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], keys: Buffer, values: Buffer) -> None:
        """The inverse of read."""
        ...
