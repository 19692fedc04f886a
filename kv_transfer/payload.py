"""The bytes of blocks on their way: checksummed, gathered into frames, and cut out of frames again.

Which kind of buffer holds them is the transport's choice: memoryviews on the host, or something else for a transport
whose Payload knows how to handle it. The stores on both sides then read and write buffers of that kind.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from engine.layout import KVLayout
from kv_transfer.errors import TransferError
from kv_transfer.wire import MAX_DATA_BLOCKS, MAX_PAYLOAD_BYTES

MESSAGE_BYTES = 5 * 2**18  # of blocks in one message, 1.25 MiB: a quarter of a millisecond of checksum at either end
MIN_FRAME_BYTES = 256 * 1024  # below this a copy costs less than what ZeroMQ does for a frame of its own

Buffer = Any
"""Raw bytes, flat: a memoryview for the host's Payload. A frame is a buffer too."""


def blocks_per_message(layout: KVLayout) -> int:
    """Blocks of one layer that make a message. Raises TransferError when not even one fits."""
    pair_bytes = 2 * layout.plane_bytes
    if pair_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"a KV block takes {pair_bytes} bytes in a layer; at most {MAX_PAYLOAD_BYTES} can be sent")
    return min(MAX_DATA_BLOCKS, max(1, MESSAGE_BYTES // pair_bytes))


class Payload(Protocol):
    """What the corridor does with one kind of buffer."""

    def num_bytes(self, view: Buffer) -> int:
        """Of one buffer."""
        ...

    def checksums(self, views: Sequence[Buffer], plane_bytes: int) -> tuple[int, ...]:
        """The CRC-32 of each block, over its K plane, then its V plane. Views as of KVStore.read."""
        ...

    def gather(self, views: Sequence[Buffer]) -> list[Buffer]:
        """The same bytes in frames: long views as they are, short neighbours copied together."""
        ...

    def cut(self, frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer] | None:
        """The concatenated frames cut into pieces of these sizes, none of them 0; None when they do not add up."""
        ...

    def some_blocks(self, planes: Buffer, blocks: range, plane_bytes: int) -> Buffer:
        """Of the K planes and V planes of some blocks, those of the blocks in this range alone."""
        ...


class HostPayload:
    """Memoryviews of single bytes."""

    def num_bytes(self, view: memoryview) -> int:
        return len(view)

    def checksums(self, views: Sequence[memoryview], plane_bytes: int) -> tuple[int, ...]:
        planes = [view[start : start + plane_bytes] for view in views for start in range(0, len(view), plane_bytes)]
        half = len(planes) // 2
        return tuple(map(zlib.crc32, planes[half:], map(zlib.crc32, planes[:half])))

    def gather(self, views: Sequence[memoryview]) -> list[memoryview]:
        frames: list[memoryview] = []
        short: list[memoryview] = []
        for view in views:
            if len(view) < MIN_FRAME_BYTES:
                short.append(view)
            else:
                frames += _joined(short)
                frames.append(view)
                short = []
        return frames + _joined(short)

    def cut(self, frames: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview] | None:
        """A piece is a view where it lies within one frame and a copy where it spans several."""
        if sum(map(len, frames)) != sum(sizes):
            return None
        remaining = iter(frames)
        frame = memoryview(b"")
        pieces = []
        for size in sizes:
            parts: list[memoryview] = []
            while size:
                while not frame:
                    frame = next(remaining)
                parts.append(frame[:size])
                frame = frame[size:]
                size -= len(parts[-1])
            pieces += parts if len(parts) == 1 else _joined(parts)
        return pieces

    def some_blocks(self, planes: memoryview, blocks: range, plane_bytes: int) -> memoryview:
        half = len(planes) // 2
        start, stop = blocks.start * plane_bytes, blocks.stop * plane_bytes
        if stop - start == half:
            return planes
        return memoryview(bytes(planes[start:stop]) + bytes(planes[half + start : half + stop]))


HOST: Payload = HostPayload()


def _joined(views: list[memoryview]) -> list[memoryview]:
    return [memoryview(b"".join(views))] if views else []
