"""What the corridor sees of a node's KV pool."""

from collections.abc import Sequence
from typing import Protocol

from engine.layout import KVLayout


class KVStore(Protocol):
    """The KV blocks of one node, as bytes."""

    @property
    def layout(self) -> KVLayout: ...

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The K planes of these blocks in order, then their V planes; no buffer ends within a plane."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], planes: memoryview) -> None:
        """The inverse of read, from one buffer."""
        ...
