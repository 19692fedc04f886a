"""Checksum the bytes of KV blocks, gather them into frames, and cut frames into blocks again.

The transport chooses the kind of buffer: memoryviews in host memory, or another kind that its Payload handles. The KV
stores on both sides read and write buffers of the same kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from kv_transfer.results import TransferError
from kv_transfer.wire import MAX_DATA_BLOCKS, MAX_PAYLOAD_BYTES
from serving_core.layout import KVLayout

MESSAGE_BYTES = 3 * 2**20  # of blocks in one message
MIN_FRAME_BYTES = 256 * 1024  # below this a copy costs less than a separate ZeroMQ frame

Buffer = Any
"""Raw bytes, flat, whose len() is their number: a memoryview for the host's Payload. A frame is a buffer too."""


def blocks_per_message(layout: KVLayout, payload: "Payload | None" = None) -> int:
    """Return how many blocks of one layer fit in a message, for every layer of `layout`; at least 1.

    A message has the `message_bytes` of its payload, MESSAGE_BYTES without one. Raises TransferError if a single block
    exceeds MAX_PAYLOAD_BYTES.
    """
    layer_bytes = layout.largest_layer_bytes
    if layer_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"a KV block takes {layer_bytes} bytes in a layer; at most {MAX_PAYLOAD_BYTES} can be sent")
    message_bytes = MESSAGE_BYTES if payload is None else payload.message_bytes
    return min(MAX_DATA_BLOCKS, max(1, message_bytes // layer_bytes))


class Payload(ABC):
    """Handles one kind of buffer for KV transfers: checksums, joins and cuts it."""

    @property
    def message_bytes(self) -> int:
        """Return the bytes of blocks in one message, at most MAX_PAYLOAD_BYTES. A larger block goes by itself."""
        return MESSAGE_BYTES

    @abstractmethod
    def checksum(self, keys: Buffer, values: Buffer) -> int:
        """Return a checksum, at most 64 bits, of the keys and values of at least one block; `values` may be empty."""

    def checksums(self, caches: Sequence[Buffer]) -> list[int]:
        """Return the checksum of each pair in `caches`, which alternates keys and values of several blocks."""
        return [self.checksum(keys, values) for keys, values in zip(caches[::2], caches[1::2], strict=True)]

    @abstractmethod
    def joined(self, views: Sequence[Buffer]) -> Buffer:
        """Return one new buffer that holds all views, one behind the other."""

    def gather(self, views: Sequence[Buffer]) -> list[Buffer]:
        """Return the bytes of `views`, in order, as non-empty frames.

        Views of at least MIN_FRAME_BYTES become frames without a copy; shorter neighbors are copied together.
        """
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
        """Cut the concatenated frames into pieces of these sizes; the first size is not 0.

        Returns None if the frames and the sizes do not add up to the same number of bytes. A piece is a view if it lies
        within one frame and a copy if it spans several frames.
        """
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
    """Handles memoryviews of single bytes in host memory.

    The checksum is XXH3 with 64 bits; the checksum of the keys is the seed for the values. Accidental corruption passes
    about once in 2**63 times. The checksum does not protect against forgery.
    """

    def checksum(self, keys: memoryview, values: memoryview) -> int:
        return xxh3_64_intdigest(values, xxh3_64_intdigest(keys))

    def joined(self, views: Sequence[memoryview]) -> memoryview:
        return memoryview(b"".join(views))


HOST: Payload = HostPayload()


class KVStore(Protocol):
    """Gives access to the KV blocks of one rank, as buffers of the kind that the transport's Payload handles."""

    @property
    def layout(self) -> KVLayout:
        """Return the layout of the heads and layers in this store."""
        ...

    def heads(self, heads: range) -> "KVStore":
        """Return a store of the same blocks restricted to `heads`, which counts from this store's first head.

        Returns the store itself if `heads` covers all of its heads.
        """
        ...

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[Buffer, Buffer]:
        """Return keys and values of these blocks, in this order, for one layer (its number in the model)."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], keys: Buffer, values: Buffer) -> None:
        """Write keys and values, as `read` returns them, into these blocks of one layer."""
        ...
