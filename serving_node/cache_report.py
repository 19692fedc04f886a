"""Tells the coordinator which full blocks the node holds, as changes."""

from collections.abc import Callable
from typing import Final

from protos import fleet_pb2
from serving_core.blocks import BlockAllocator
from serving_core.prefix import hint_of

MAX_HINTS: Final = 2**16  # in one message


class CacheReport:
    """What the coordinator has been told, and what has changed since. Pure."""

    def __init__(self, allocator: BlockAllocator, tell: Callable[..., None]) -> None:
        self._allocator = allocator
        self._tell = tell
        self._is_known = False  # whether the coordinator knows what was told before

    def forget(self) -> None:
        """The coordinator is another one, or has lost sight of this node: it knows nothing."""
        self._is_known = False

    def tell(self) -> None:
        """Tells what has changed, or everything to one who knows nothing."""
        stored, removed = self._allocator.take_changes() if self._is_known else (self._allocator.take_names(), [])
        self._is_known = True
        for change in _changes("removed", removed) + _changes("stored", stored):
            self._tell(cache_changed=change)


def _changes(kind: str, names: list[bytes]) -> list[fleet_pb2.CacheChanged]:
    parts = (names[first : first + MAX_HINTS] for first in range(0, len(names), MAX_HINTS))
    return [fleet_pb2.CacheChanged(**{kind: map(hint_of, part)}) for part in parts]
