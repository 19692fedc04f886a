"""Pack and unpack one list of scalars, bytes, strings and lists as strict msgpack, for descriptors and headers."""

import math
import zlib
from typing import Any

import msgpack

from kv_transfer.results import TransferError

MAX_ITEMS = 1024  # in one list; bounds what the decoder allocates before it sees the items


def pack(fields: list[Any]) -> bytes:
    """Return the fields as msgpack."""
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)
    return packed


def unpack(packed: bytes | memoryview, max_bytes: int) -> list[Any]:
    """Return the fields of one packed list.

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
    """Return the fields as msgpack behind a CRC-32 of four bytes, big-endian."""
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
    """Raise TransferError unless `value` is an int (not a bool) from `low` to `high`, both included."""
    if type(value) is not int or not low <= value <= high:
        raise TransferError(f"{name} must be a whole number from {low} to {high}")


def check_seconds(name: str, value: object, high: float) -> None:
    """Raise TransferError unless `value` is a finite float above 0 and at most `high`."""
    if type(value) is not float or not math.isfinite(value) or not 0 < value <= high:
        raise TransferError(f"{name} must be a number of seconds above 0 and at most {high:g}")


def check_bytes(name: str, value: object, low: int, high: int) -> None:
    """Raise TransferError unless `value` is bytes with a length from `low` to `high`, both included."""
    if type(value) is not bytes or not low <= len(value) <= high:
        raise TransferError(f"{name} must be {low} to {high} bytes")


def check_text(name: str, value: object, max_bytes: int) -> None:
    """Raise TransferError unless `value` is printable text of 1 to `max_bytes` bytes in UTF-8."""
    if type(value) is not str or not value.isprintable() or not 1 <= len(value.encode()) <= max_bytes:
        raise TransferError(f"{name} must be 1 to {max_bytes} bytes of printable characters")
