"""The blocks of reservations, shared by name."""

from decode_node.reservation import Reservation
from serving_core.blocks import BlockAllocator
from serving_core.layout import KVLayout


class Leases:
    """Takes, publishes and gives back the leases of one decode node's reservations."""

    def __init__(self, allocator: BlockAllocator, layout: KVLayout) -> None:
        self._allocator = allocator
        self._layout = layout

    def take(self, reservation: Reservation, num_tokens: int, *, num_cacheable: int, num_spare: int) -> bool:
        """Leases blocks for num_tokens tokens, if that leaves num_spare free; of the leading num_cacheable tokens, full
        blocks that the pool holds. Tells whether it did."""
        num_blocks = self._layout.num_blocks_for(num_tokens)
        names = self._names(reservation, num_cacheable)
        if self._allocator.num_needed(num_blocks, names) + num_spare > self._allocator.num_free:
            return False
        reservation.lease = self._allocator.allocate(num_blocks, names)
        return True

    def renew(self, reservation: Reservation, *, num_cacheable: int) -> None:
        """As many blocks as before, nothing of which is computed yet, with those among them that the pool holds by
        now. What is given back is free, so it always can be had."""
        assert reservation.lease is not None
        names = self._names(reservation, num_cacheable)
        if self._allocator.num_held(names) > reservation.lease.num_cached:
            num_blocks = len(reservation.lease.block_ids)
            reservation.lease.release()
            reservation.lease = self._allocator.allocate(num_blocks, names)

    def grow(self, reservation: Reservation, num_tokens: int) -> bool:
        """Makes room for num_tokens tokens in all. Tells whether there was any."""
        assert reservation.lease is not None
        missing = self._layout.num_blocks_for(num_tokens) - len(reservation.lease.block_ids)
        if missing > self._allocator.num_free:
            return False
        reservation.lease.grow(max(missing, 0))
        return True

    def publish(self, reservation: Reservation) -> None:
        """Lets others use the blocks that are full of computed KV."""
        assert reservation.lease is not None
        if reservation.num_computed // self._layout.block_size > reservation.lease.num_published:
            reservation.lease.publish(self._names(reservation, reservation.num_computed))

    def give_back(self, reservation: Reservation) -> None:
        """Frees the reservation's blocks, if it has any."""
        if reservation.lease is not None:
            reservation.lease.release()
            reservation.lease = None

    def num_held_tokens(self, reservation: Reservation, num_cacheable: int) -> int:
        """Of the leading num_cacheable tokens, those in full blocks that the pool holds."""
        return self._allocator.num_held(self._names(reservation, num_cacheable)) * self._layout.block_size

    def _names(self, reservation: Reservation, num_tokens: int) -> list[bytes]:
        """Names of the full blocks of the leading num_tokens tokens."""
        if not self._allocator.caching:
            return []
        return reservation.names.names_of(reservation.request.token_ids)[: num_tokens // self._layout.block_size]
