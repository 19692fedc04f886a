"""Define the messages between a request's node and a KV holder: each request has one reply.

OPEN(key, tile request, most tiles)     ->  OPENED(tiles), none where there is no room
PUT(layer, KV)                          ->  PUT, once for each layer
QUERY(layer, query)                     ->  PARTIALS, one for each tile
CARRY(layer, queries, partials so far)  ->  PARTIALS, one for each row; the first remote KV gets none

Instead of a reply, or while no request is open, REVOKED may come: the holder needs its blocks, and closes.
"""

import socket
import struct
import time
import zlib
from enum import IntEnum
from typing import Final, NamedTuple

from kv_transfer.results import RemoteKVRevoked, TransferError

KEY_BYTES: Final = 32
MAX_BYTES: Final = 2**30  # in the payload of one message
LEAST_S: Final = 0.001  # to read what has already arrived
_TILE_REQUEST: Final = struct.Struct("<Q?I")  # follows the key; seconds in thousandths
_MOST_MS: Final = 2**32 - 1
TILE_REQUEST_BYTES: Final = _TILE_REQUEST.size
_FIELDS: Final = struct.Struct("<4sIIQ")  # magic with the kind, layer, a number, payload bytes
_CHECKSUM: Final = struct.Struct("<I")  # follows the fields; covers fields and payload
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size
_MAGIC: Final = b"SSB"


class Kind(IntEnum):
    """The kinds of messages; the comment of this module says what each does."""

    OPEN = 1
    OPENED = 2
    PUT = 3
    QUERY = 4
    PARTIALS = 5
    CARRY = 6
    REVOKED = 7


class TileRequest(NamedTuple):
    """Describes the request for which tiles are to be held; the holder decides by it whether there is room."""

    age: int  # of the request; the lowest is the oldest request
    is_again: bool = False  # no node had room at the last attempt
    step_s: float = 0.0  # duration of one of its steps, in which it does not ask

    def pack(self) -> bytes:
        return _TILE_REQUEST.pack(self.age, self.is_again, min(round(self.step_s * 1000), _MOST_MS))

    @staticmethod
    def unpack(data: bytes) -> "TileRequest":
        age, is_again, step_ms = _TILE_REQUEST.unpack(data)
        return TileRequest(age, is_again, step_ms / 1000)


class Header(NamedTuple):
    """The first part of a message: what the message is, and the size of the payload that follows."""

    kind: Kind
    layer: int
    number: int
    num_bytes: int
    own_checksum: int
    checksum: int  # of the header and the payload


def send_message(
    connection: socket.socket, kind: Kind, payload: bytes | memoryview = b"", *, layer: int = 0, number: int = 0
) -> None:
    """Send one message of this kind, layer, number and payload.

    Raises OSError if the other end does not take it in time.
    """
    view = memoryview(payload).cast("B")
    fields = _FIELDS.pack(_MAGIC + bytes([kind]), layer, number, len(view))
    connection.sendall(fields + _CHECKSUM.pack(zlib.crc32(view, zlib.crc32(fields))))
    if len(view):
        connection.sendall(view)


def receive_header(connection: socket.socket) -> Header | None:
    """Receive the header of the next message; return None if the other end has closed.

    Raises TransferError if it is not valid, OSError if it does not arrive in time.
    """
    data = _receive(connection, HEADER_BYTES, may_end=True)
    if not data:
        return None
    fields = data[: _FIELDS.size]
    magic, layer, number, num_bytes = _FIELDS.unpack(fields)
    if magic[:3] != _MAGIC or magic[3] not in list(Kind):
        raise TransferError("a message of remote KV begins with something else")
    if num_bytes > MAX_BYTES:
        raise TransferError(f"a message of remote KV has {num_bytes} bytes, the limit is {MAX_BYTES}")
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    return Header(Kind(magic[3]), layer, number, num_bytes, zlib.crc32(fields), checksum)


def receive_payload(connection: socket.socket, header: Header, num_bytes: int) -> bytearray:
    """Receive the payload that follows a header, which must have `num_bytes` bytes.

    Raises TransferError if it has another size or fails its checksum, OSError if it does not arrive in time.
    """
    if header.num_bytes != num_bytes:
        raise TransferError(f"a message of remote KV has {header.num_bytes} bytes instead of {num_bytes}")
    payload = _receive(connection, num_bytes)
    if zlib.crc32(payload, header.own_checksum) != header.checksum:
        raise TransferError("a message of remote KV is damaged")
    return payload


def receive_reply(
    connection: socket.socket, kind: Kind, num_bytes: int = 0, *, layer: int = 0
) -> tuple[Header, bytearray]:
    """Receive a reply, which must have this kind and layer and num_bytes of payload; return its header and payload.

    Raises OSError or TransferError; RemoteKVRevoked if the holder has revoked its blocks.
    """
    header = receive_header(connection)
    if header is None:
        raise TransferError("the node that holds remote KV has hung up")
    if header.kind is Kind.REVOKED:
        raise RemoteKVRevoked("the node that holds remote KV needs its blocks for an older request")
    if header.kind is not kind:
        raise TransferError(f"remote KV replies {header.kind.name} instead of {kind.name}")
    if header.layer != layer:
        raise TransferError(f"remote KV replies for layer {header.layer} instead of {layer}")
    return header, receive_payload(connection, header, num_bytes)


def _receive(connection: socket.socket, num_bytes: int, *, may_end: bool = False) -> bytearray:
    """Return exactly `num_bytes` bytes within the connection's timeout, which otherwise counts for each piece."""
    limit_s = connection.gettimeout()
    assert limit_s, "no wait without a deadline"
    data, ends_s = bytearray(num_bytes), time.monotonic() + limit_s
    view, at = memoryview(data), 0
    try:
        while at < num_bytes:
            connection.settimeout(max(ends_s - time.monotonic(), LEAST_S))
            if not (num_new := connection.recv_into(view[at:])):
                if may_end and not at:
                    return bytearray()
                raise TransferError("remote KV's connection ended within a message")
            at += num_new
    finally:
        connection.settimeout(limit_s)
    return data
