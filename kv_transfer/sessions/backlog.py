"""The blocks of one lane that are ready and have yet to leave. Pure."""

from collections import deque
from collections.abc import Iterable

from kv_transfer.ticket import Lane
from kv_transfer.wire import MAX_SEGMENTS, BlockRange


class Backlog:
    """What is to be sent, in the order in which it became ready."""

    def __init__(self, lane: Lane, blocks_per_message: int) -> None:
        self.num_ready = lane.num_cached_blocks  # in all layers
        self._lane = lane
        self._blocks_per_message = blocks_per_message
        self._num_growing = 0  # blocks that are ready in some layers; 0 when there are none
        self._num_layers = 0  # in which they are
        self._queue: deque[BlockRange] = deque()

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._queue)

    def grow(self, num_blocks: int, num_layers: int) -> None:
        """The leading blocks are ready in the leading layers. Of new ones all layers become ready before any further
        block does."""
        lane = self._lane
        num_new = num_blocks - self.num_ready
        if num_new > 0:
            assert self._num_growing in (0, num_blocks), "blocks became ready before earlier ones in all layers"
            layers = lane.layout.layers[self._num_layers : num_layers]
            self._queue.extend(BlockRange(layer, self.num_ready, num_new) for layer in layers)
            self._num_growing, self._num_layers = num_blocks, max(self._num_layers, num_layers)
        if self._num_layers == lane.layout.num_layers:
            self.num_ready, self._num_growing, self._num_layers = num_blocks, 0, 0

    def has_had(self, blocks: BlockRange) -> bool:
        """Whether these were to be sent at any time."""
        is_layer = blocks.layer in self._lane.layout.layers
        return is_layer and self._lane.num_cached_blocks <= blocks.first and blocks.stop <= self.num_ready

    def add_again(self, ranges: Iterable[BlockRange]) -> None:
        """These have left, and did not arrive."""
        self._queue.extend(ranges)

    def take_message(self) -> tuple[BlockRange, ...]:
        """The blocks of one message, which leave. Only a range that is too long for any message is cut, into parts of
        about equal length."""
        room = self._blocks_per_message
        first = self._queue[0]
        if first.num_blocks > room:
            num_parts = -(-first.num_blocks // room)
            part = -(-first.num_blocks // num_parts)
            self._queue[0] = BlockRange(first.layer, first.first + part, first.num_blocks - part)
            return (BlockRange(first.layer, first.first, part),)
        ranges: list[BlockRange] = []
        while self._queue and self._queue[0].num_blocks <= room and len(ranges) < MAX_SEGMENTS:
            ranges.append(self._queue.popleft())
            room -= ranges[-1].num_blocks
        return tuple(ranges)

    def clear(self) -> None:
        """Nothing of it is to be sent any more."""
        self._queue.clear()
