"""Tells the coordinator which full blocks the node holds, as changes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from protos import fleet_pb2
from serving_core.blocks import BlockAllocator
from serving_core.prefix import hint_of

MAX_HINTS: Final = 2**16  # of either kind in one message


class CacheReport:
    """What the coordinator has been told, and what has changed since. Pure."""

    def __init__(self, allocator: BlockAllocator, makers: Sequence[bytes], tell: Callable[..., None]) -> None:
        """`makers` are those that the pool's blocks may be of, in the order in which they are looked for."""
        self._allocator = allocator
        self._makers = makers
        self._tell = tell
        self._is_known = False  # whether the coordinator knows what was told before

    def forget(self) -> None:
        """The coordinator is another one, or has lost sight of this node: it knows nothing."""
        self._is_known = False

    def tell(self) -> None:
        """Tells what has changed, or everything to one who knows nothing."""
        stored, removed = self._allocator.take_changes() if self._is_known else (self._allocator.take_names(), [])
        self._is_known = True
        removals, additions = list(_parts(removed)), list(_parts(stored))
        together = [(removals.pop(), additions.pop(0))] if removals and additions else []
        for gone, new in (*((part, []) for part in removals), *together, *(([], part) for part in additions)):
            self._tell(cache_changed=fleet_pb2.CacheChanged(removed=gone, stored=new, makers=self._makers))


def _parts(names: list[bytes]) -> Iterator[list[int]]:
    for first in range(0, len(names), MAX_HINTS):
        yield list(map(hint_of, names[first : first + MAX_HINTS]))
