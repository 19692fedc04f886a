"""Tells the coordinator which full blocks the node holds, in its pool or in its second tier, as changes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from protos import fleet_pb2
from serving_core.blocks import BlockAllocator
from serving_core.prefix import hint_of
from serving_core.tiers import TierIndex

MAX_HINTS: Final = 2**16  # of either kind in one message


class CacheReport:
    """What the coordinator has been told, and what has changed since. Pure."""

    def __init__(
        self, allocator: BlockAllocator, tier: TierIndex, makers: Sequence[bytes], tell: Callable[..., None]
    ) -> None:
        """`makers` are those that the pool's blocks may be of, in the order in which they are looked for."""
        self._allocator = allocator
        self._tier = tier
        self._makers = makers
        self._tell = tell
        self._is_known = False  # whether the coordinator knows what was told before

    def forget(self) -> None:
        """The coordinator is another one, or has lost sight of this node: it knows nothing."""
        self._is_known = False

    def _names(self) -> list[bytes]:
        return list(dict.fromkeys([*self._allocator.take_names(), *self._tier.take_names()]))

    def _changes(self) -> tuple[list[bytes], list[bytes]]:
        """Of both together: a block that goes from the one to the other is held all the time."""
        (stored, removed), (put, dropped) = self._allocator.take_changes(), self._tier.take_changes()
        if not (stored or removed or put or dropped):
            return [], []
        is_held = {name: self._is_held(name) for name in (*stored, *put, *removed, *dropped)}
        new = [name for name in dict.fromkeys([*stored, *put]) if is_held[name]]
        return new, [name for name in dict.fromkeys([*removed, *dropped]) if not is_held[name]]

    def _is_held(self, name: bytes) -> bool:
        return name in self._allocator.blocks_by_name or name in self._tier

    def tell(self) -> None:
        """Tells what has changed, or everything to one who knows nothing."""
        stored, removed = self._changes() if self._is_known else (self._names(), [])
        self._is_known = True
        removals, additions = list(_parts(removed)), list(_parts(stored))
        together = [(removals.pop(), additions.pop(0))] if removals and additions else []
        for gone, new in (*((part, []) for part in removals), *together, *(([], part) for part in additions)):
            self._tell(cache_changed=fleet_pb2.CacheChanged(removed=gone, stored=new, makers=self._makers))


def _parts(names: list[bytes]) -> Iterator[list[int]]:
    for first in range(0, len(names), MAX_HINTS):
        yield list(map(hint_of, names[first : first + MAX_HINTS]))
