"""Use one run of tiles on a KV holder, from the node that owns the request."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kv_transfer.distributed_kv.wire import (
    LEAST_S,
    MAX_BYTES,
    Kind,
    TileRequest,
    receive_header,
    receive_reply,
    send_message,
)
from kv_transfer.results import RemoteKVRevoked, TransferError
from serving_core.layout import KVLayout

ROOM_S: Final = 3.0  # to connect and to learn whether there is room
PUT_S: Final = 10.0  # to send the tiles of one layer
ANSWER_S: Final = 2.5  # for partials, for which a step waits; less than a step may take before it counts as stuck


class RemoteKV:
    """Client of tiles of one request that a KV holder, another node, keeps in its pool.

    Used by one thread at a time, closed by any thread. Every failure raises OSError and closes the remote KV.
    """

    def __init__(
        self, address: str, connection: socket.socket, num_tiles: int, *, row_bytes: int, partial_bytes: int
    ) -> None:
        self.address: Final = address
        self.num_tiles: Final = num_tiles
        self.is_silent = False  # the holder has not replied in time
        self.is_revoked = False  # the holder needs its blocks and is otherwise healthy
        self._connection = connection
        self._row_bytes, self._partial_bytes = row_bytes, partial_bytes

    def send_query(self, layer: int, query: memoryview) -> None:
        """Send the query of one row in a layer to the holder, which computes its attention over the holder's tiles.

        `receive_partials` returns the result. Raises OSError if the holder is lost.
        """
        with self._closed_by_errors():
            send_message(self._connection, Kind.QUERY, query, layer=layer)

    def receive_partials(self, layer: int) -> memoryview:
        """Wait for the partials of the row that `send_query` sent, as bytes: partial_bytes for each tile.

        Raises OSError if the holder is lost, does not reply in time, or has revoked its blocks.
        """
        num_bytes = self.num_tiles * self._partial_bytes
        with self._closed_by_errors():
            _, payload = receive_reply(self._connection, Kind.PARTIALS, num_bytes, layer=layer)
        return memoryview(payload)

    def carry(self, layer: int, queries: memoryview, partials: memoryview) -> memoryview:
        """Send rows of queries to the holder; return the bytes of their partials over all keys up to its last one.

        `partials` are those over the keys before the holder's; empty for the first remote KV.
        Raises OSError if the holder is lost, does not reply in time, or has revoked its blocks.
        """
        num_rows = len(queries) // self._row_bytes
        with self._closed_by_errors():
            send_message(self._connection, Kind.CARRY, b"".join((queries, partials)), layer=layer, number=num_rows)
            _, payload = receive_reply(self._connection, Kind.PARTIALS, num_rows * self._partial_bytes, layer=layer)
        return memoryview(payload)

    def close(self) -> None:
        """Close the connection, whereupon the holder frees its blocks."""
        with contextlib.suppress(OSError):  # the connection is gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Close the remote KV if the body raises, so that a late reply is not taken for the next one."""
        try:
            yield
        except OSError as error:
            self.is_silent = isinstance(error, TimeoutError)
            self.is_revoked |= not self.is_silent and _has_revoked(self._connection)
            self.close()
            raise
        except TransferError as error:
            self.is_revoked |= isinstance(error, RemoteKVRevoked)
            self.close()
            raise ConnectionError(str(error)) from error


def _has_revoked(connection: socket.socket) -> bool:
    """Return whether the holder's last message was a revocation, sent before it closed the connection."""
    try:
        connection.settimeout(LEAST_S)
        header = receive_header(connection)
    except (OSError, TransferError):
        return False
    return header is not None and header.kind is Kind.REVOKED


def most_tiles_of(layout: KVLayout, tile_tokens: int) -> int:
    """Return the most tiles that one remote KV can have, since the tiles of a layer are sent in one message.

    tile_tokens is the number of tokens of a tile.
    """
    tile_bytes = max(sum(layout.cache_bytes(layer)) for layer in layout.layers) * (tile_tokens // layout.block_size)
    return MAX_BYTES // tile_bytes


def open_remote_kv(
    address: str,
    key: bytes,
    most_tiles: int,
    layers: Iterable[int],
    read: Callable[[int, int], tuple[memoryview, memoryview]],
    *,
    tile_request: TileRequest,
    row_bytes: int,
    partial_bytes: int,
) -> RemoteKV | None:
    """Connect to the KV holder at `address` (HOST:PORT), and send it as many tiles as it has room for.

    Returns the client of the tiles, at most `most_tiles`, or None if there is no room; tile_request is sent for the
    holder's decision. `read(layer, number)` returns keys and values of a layer's leading tiles; `layers` are sent in
    order. row_bytes and partial_bytes are the sizes of a query row and of its partial. Raises OSError or TransferError.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), ROOM_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_message(connection, Kind.OPEN, key + tile_request.pack(), number=most_tiles)
        header, _ = receive_reply(connection, Kind.OPENED)
        if not 0 < header.number <= most_tiles:
            connection.close()
            return None
        connection.settimeout(PUT_S)
        for layer in layers:
            keys, values = read(layer, header.number)
            send_message(connection, Kind.PUT, b"".join((keys, values)), layer=layer)
            receive_reply(connection, Kind.PUT, layer=layer)
        connection.settimeout(ANSWER_S)
    except BaseException:
        connection.close()
        raise
    return RemoteKV(address, connection, header.number, row_bytes=row_bytes, partial_bytes=partial_bytes)
