"""Encode and decode the messages of KV transfers: a checksummed msgpack header, beside frames of raw bytes.

A message is a header; in a Data message the bytes of the blocks follow. For each segment these bytes are the keys of
its blocks in order, then their values. A header is a CRC-32 of four bytes, big-endian, then msgpack.

Sender to receiver:

- Data: blocks;
- Finish: every block is sent; asks for a reply and may be repeated;
- Abort: the sender has given up.

Receiver to sender:

- Committed: every block is verified; the reply to every later Finish too;
- Missing: ranges that never arrived or failed their checksum;
- Refused: a message was not accepted, and the transfer is over for the sender.
"""

import math
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from kv_transfer.results import TransferError

TRANSFER_ID_BYTES = 16
MAX_EPOCH = 2**32 - 1
MAX_LAYERS = 1024  # of a model
MAX_BLOCKS = 2**20  # of one transfer
MAX_ITEMS = 1024  # in one list; bounds what the decoder allocates before it sees the items


def pack(fields: list[Any]) -> bytes:
    """Return the fields as msgpack."""
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)
    return packed


def unpack(packed: bytes | memoryview, max_bytes: int) -> list[Any]:
    """Return the fields of one list that `pack` packed.

    Raises TransferError if `packed` exceeds `max_bytes` or is not one msgpack list.
    """
    if len(packed) > max_bytes:
        raise TransferError(f"{len(packed)} bytes where at most {max_bytes} are allowed")
    try:
        fields = msgpack.unpackb(packed, max_array_len=MAX_ITEMS, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise TransferError("not the msgpack that was expected") from error
    if not isinstance(fields, list):
        raise TransferError("not a msgpack list")
    return fields


def pack_checked(fields: list[Any]) -> bytes:
    """Return a CRC-32 of four bytes, big-endian, and the fields as msgpack behind it."""
    packed = pack(fields)
    return zlib.crc32(packed).to_bytes(4, "big") + packed


def unpack_checked(packed: bytes | memoryview, max_bytes: int) -> list[Any]:
    """Return the fields that `pack_checked` packed.

    `max_bytes` does not count the CRC. Raises TransferError if the CRC differs or the rest is not valid.
    """
    if len(packed) < 4 or zlib.crc32(packed[4:]) != int.from_bytes(packed[:4], "big"):
        raise TransferError("a header that fails its checksum")
    return unpack(packed[4:], max_bytes)


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise TransferError, which names `name`, unless `value` is an int (no bool) from `low` to `high`.

    Both are included.
    """
    if type(value) is not int or not low <= value <= high:
        raise TransferError(f"{name} must be a whole number from {low} to {high}")


def check_seconds(name: str, value: object, high: float) -> None:
    """Raise TransferError, which names `name`, unless `value` is a finite float above 0 and at most `high`."""
    if type(value) is not float or not math.isfinite(value) or not 0 < value <= high:
        raise TransferError(f"{name} must be a number of seconds above 0 and at most {high:g}")


def check_bytes(name: str, value: object, low: int, high: int) -> None:
    """Raise TransferError, which names `name`, unless `value` is bytes of `low` to `high` length, both included."""
    if type(value) is not bytes or not low <= len(value) <= high:
        raise TransferError(f"{name} must be {low} to {high} bytes")


def check_text(name: str, value: object, max_bytes: int) -> None:
    """Raise TransferError, which names `name`, unless `value` is printable text of 1 to `max_bytes` bytes in UTF-8."""
    if type(value) is not str or not value.isprintable() or not 1 <= len(value.encode()) <= max_bytes:
        raise TransferError(f"{name} must be 1 to {max_bytes} bytes of printable characters")


MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 16 * 2**20
MAX_TAIL_BYTES = 4096
MAX_SEGMENTS = 256  # in one Data
MAX_DATA_BLOCKS = 4096  # in one Data, over all its segments
MAX_RANGES = MAX_ITEMS  # in one Missing; further ranges follow after the next Finish
MAX_ROUNDS = 255
MAX_CORRUPT = 2**32 - 1
MAX_CHECKSUM = 2**64 - 1


class Refusal(StrEnum):
    """Why a receiver refused a message."""

    UNKNOWN_TRANSFER = "unknown_transfer"
    WRONG_EPOCH = "wrong_epoch"
    MALFORMED = "malformed"
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    EXPIRED = "expired"


_REFUSALS = {refusal.value: refusal for refusal in Refusal}


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Some consecutive blocks of one layer: first, first + 1, ..., by their position in the request's block table."""

    layer: int
    first: int
    num_blocks: int

    def __post_init__(self) -> None:
        _check_range(self.layer, self.first, self.num_blocks)

    @property
    def stop(self) -> int:
        return self.first + self.num_blocks


@dataclass(frozen=True, slots=True)
class Segment:
    """A block range of a Data message, with the checksum of its bytes by the transport's Payload."""

    layer: int
    first: int
    num_blocks: int
    checksum: int

    def __post_init__(self) -> None:
        _check_range(self.layer, self.first, self.num_blocks)
        check_int("checksum", self.checksum, 0, MAX_CHECKSUM)

    @property
    def stop(self) -> int:
        return self.first + self.num_blocks


@dataclass(frozen=True, slots=True)
class _Message:
    transfer_id: bytes
    epoch: int

    def __post_init__(self) -> None:
        check_bytes("transfer_id", self.transfer_id, TRANSFER_ID_BYTES, TRANSFER_ID_BYTES)
        check_int("epoch", self.epoch, 0, MAX_EPOCH)
        self._check()

    def _check(self) -> None:
        """Check the fields that only this kind of message has."""


@dataclass(frozen=True, slots=True)
class Data(_Message):
    """Sender to receiver: the blocks of these segments, whose bytes follow the header."""

    segments: tuple[Segment, ...]

    def _check(self) -> None:
        check_int("number of segments", len(self.segments), 1, MAX_SEGMENTS)
        check_int("number of blocks in a message", self.num_blocks, 1, MAX_DATA_BLOCKS)

    @property
    def num_blocks(self) -> int:
        return sum(segment.num_blocks for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Finish(_Message):
    """Sender to receiver: every block is sent. Asks for a reply and may be repeated."""

    round: int  # grows with each retransmission; a Missing of an older round is stale
    num_blocks: int
    tail: bytes

    def _check(self) -> None:
        check_int("round", self.round, 0, MAX_ROUNDS)
        check_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        check_bytes("tail", self.tail, 0, MAX_TAIL_BYTES)


@dataclass(frozen=True, slots=True)
class Abort(_Message):
    """Sender to receiver: the sender has given up."""


@dataclass(frozen=True, slots=True)
class Committed(_Message):
    """Receiver to sender: every block is verified."""


@dataclass(frozen=True, slots=True)
class Missing(_Message):
    """Receiver to sender: the blocks of these ranges never arrived or failed their checksum."""

    round: int  # of the Finish to which this is the reply
    num_corrupt: int  # blocks of this transfer in all segments that failed their checksum
    ranges: tuple[BlockRange, ...]

    def _check(self) -> None:
        check_int("round", self.round, 0, MAX_ROUNDS)
        check_int("num_corrupt", self.num_corrupt, 0, MAX_CORRUPT)
        check_int("number of ranges", len(self.ranges), 1, MAX_RANGES)


@dataclass(frozen=True, slots=True)
class Refused(_Message):
    """Receiver to sender: a message was not accepted, and the transfer is over for the sender."""

    refusal: Refusal


Message = Data | Finish | Abort | Committed | Missing | Refused


def encode(message: Message) -> bytes:
    """Return the header of a message as bytes, which `decode` reads."""
    return pack_checked(_fields(message))


def decode(header: bytes | memoryview) -> Message:
    """Return the message whose header `encode` packed. Raises TransferError for all other bytes."""
    return _message(unpack_checked(header, MAX_HEADER_BYTES))


def _fields(message: Message) -> list[Any]:
    names = [message.transfer_id, message.epoch]
    match message:
        case Data(segments=segments):
            return ["data", *names, [[s.layer, s.first, s.num_blocks, s.checksum] for s in segments]]
        case Finish(round=round_, num_blocks=num_blocks, tail=tail):
            return ["finish", *names, round_, num_blocks, tail]
        case Abort():
            return ["abort", *names]
        case Committed():
            return ["committed", *names]
        case Missing(round=round_, num_corrupt=num_corrupt, ranges=ranges):
            return ["missing", *names, round_, num_corrupt, [[r.layer, r.first, r.num_blocks] for r in ranges]]
        case Refused(refusal=refusal):
            return ["refused", *names, refusal.value]


def _message(fields: list[Any]) -> Message:
    match fields:
        case ["data", transfer_id, epoch, [*segments]]:
            return Data(transfer_id, epoch, tuple(_segment(segment) for segment in segments))
        case ["finish", transfer_id, epoch, round_, num_blocks, tail]:
            return Finish(transfer_id, epoch, round_, num_blocks, tail)
        case ["abort", transfer_id, epoch]:
            return Abort(transfer_id, epoch)
        case ["committed", transfer_id, epoch]:
            return Committed(transfer_id, epoch)
        case ["missing", transfer_id, epoch, round_, num_corrupt, [*ranges]]:
            return Missing(transfer_id, epoch, round_, num_corrupt, tuple(_range(range_) for range_ in ranges))
        case ["refused", transfer_id, epoch, str(word)] if word in _REFUSALS:
            return Refused(transfer_id, epoch, _REFUSALS[word])
        case _:
            raise TransferError("a message of unknown kind or shape")


def _segment(fields: object) -> Segment:
    match fields:
        case [int(layer), int(first), int(num_blocks), int(checksum)]:
            return Segment(layer, first, num_blocks, checksum)
        case _:
            raise TransferError("a segment of unknown shape")


def _range(fields: object) -> BlockRange:
    match fields:
        case [int(layer), int(first), int(num_blocks)]:
            return BlockRange(layer, first, num_blocks)
        case _:
            raise TransferError("a block range of unknown shape")


def _check_range(layer: int, first: int, num_blocks: int) -> None:
    check_int("layer", layer, 0, MAX_LAYERS - 1)
    check_int("first block", first, 0, MAX_BLOCKS - 1)
    check_int("number of blocks", num_blocks, 1, MAX_BLOCKS - first)
