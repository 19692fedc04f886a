"""The bytes of blocks in transfer: checksummed, gathered into frames, and cut out of frames again.

Which kind of buffer holds them is the transport's choice: memoryviews on the host, or something else for a transport
whose Payload knows how to handle it. The stores on both sides then read and write buffers of that kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from kv_transfer.results import TransferError
from kv_transfer.wire import MAX_DATA_BLOCKS, MAX_PAYLOAD_BYTES
from serving_core.layout import KVLayout

MESSAGE_BYTES = 3 * 2**20  # of blocks in one message: about half a millisecond of work at either end
MIN_FRAME_BYTES = 256 * 1024  # below this a copy costs less than what ZeroMQ does for a frame of its own

Buffer = Any
"""Raw bytes, flat, whose len() is their number: a memoryview for the host's Payload. A frame is a buffer too."""


def blocks_per_message(layout: KVLayout) -> int:
    """Blocks of one layer, whichever it is, that make a message. Raises TransferError when not even one fits."""
    layer_bytes = layout.largest_layer_bytes
    if layer_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"a KV block takes {layer_bytes} bytes in a layer; at most {MAX_PAYLOAD_BYTES} can be sent")
    return min(MAX_DATA_BLOCKS, max(1, MESSAGE_BYTES // layer_bytes))


class Payload(ABC):
    """What the corridor does with one kind of buffer."""

    @abstractmethod
    def checksum(self, keys: Buffer, values: Buffer) -> int:
        """Of the K planes and the V planes of some blocks, at least one; at most 64 bits. The latter may be empty."""

    def checksums(self, planes: Sequence[Buffer]) -> list[int]:
        """Of the planes of several blocks each, K and V in turn."""
        return [self.checksum(keys, values) for keys, values in zip(planes[::2], planes[1::2], strict=True)]

    @abstractmethod
    def joined(self, views: Sequence[Buffer]) -> Buffer:
        """A copy of them all in one buffer."""

    def gather(self, views: Sequence[Buffer]) -> list[Buffer]:
        """The same bytes in frames, none of them empty: long views as they are, short neighbours copied together."""
        frames: list[Buffer] = []
        short: list[Buffer] = []
        for view in filter(len, views):
            if len(view) < MIN_FRAME_BYTES:
                short.append(view)
            else:
                frames += [*self._one(short), view]
                short = []
        return frames + self._one(short)

    def cut(self, frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer] | None:
        """The concatenated frames cut into pieces of these sizes, the first of which is not 0; None when they do not
        add up. A piece is a view where it lies within one frame and a copy where it spans several."""
        if sum(map(len, frames)) != sum(sizes):
            return None
        remaining = (frame for frame in frames if len(frame))
        frame: Buffer = b""
        pieces = []
        for size in sizes:
            parts: list[Buffer] = []
            while size:
                frame = frame if len(frame) else next(remaining)
                parts.append(frame[:size])
                frame = frame[size:]
                size -= len(parts[-1])
            pieces += self._one(parts) or [frame[:0]]
        return pieces

    def _one(self, views: list[Buffer]) -> list[Buffer]:
        return [self.joined(views)] if len(views) > 1 else views


class HostPayload(Payload):
    """Memoryviews of single bytes. The checksum is XXH3 of 64 bits, that of the K planes being the seed for the V
    planes: what was changed by accident passes once in 2**63 times, and what was forged whenever its forger likes."""

    def checksum(self, keys: memoryview, values: memoryview) -> int:
        return xxh3_64_intdigest(values, xxh3_64_intdigest(keys))

    def joined(self, views: Sequence[memoryview]) -> memoryview:
        return memoryview(b"".join(views))


HOST: Payload = HostPayload()


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
