"""Use one run of tiles on a KV holder, from the node that owns the request."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kv_transfer.distributed_kv.wire import LEAST_S, MAX_BYTES, Asker, Kind, hear, hear_answer, tell
from kv_transfer.results import RemoteKVRevoked, TransferError
from serving_core.layout import KVLayout

ROOM_S: Final = 3.0  # to connect and to learn whether there is room
PUT_S: Final = 10.0  # to send the tiles of one layer
ANSWER_S: Final = 2.5  # for partials, for which a step waits; less than a step may take before it counts as stuck


class RemoteKV:
    """Hold whole tiles of a request in another node's pool.

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

    def ask(self, layer: int, query: memoryview) -> None:
        """Send a query row of a layer to the holder, which computes its attention over the holder's tiles. `answer`
        returns the partials. Raises ConnectionError if the holder is lost."""
        with self._closed_by_errors():
            tell(self._connection, Kind.ASK, query, layer=layer)

    def answer(self, layer: int) -> memoryview:
        """Return the partials of the query row that `ask` sent. Raises ConnectionError if the holder is lost or has
        revoked its blocks."""
        num_bytes = self.num_tiles * self._partial_bytes
        with self._closed_by_errors():
            _, payload = hear_answer(self._connection, Kind.PARTIALS, num_bytes, layer=layer)
        return memoryview(payload)

    def carry(self, layer: int, queries: memoryview, partials: memoryview) -> memoryview:
        """Return the partials [rows] of these query rows over all keys up to the holder's last one.

        `partials` are those over the keys before; the first remote KV gets none.
        """
        num_rows = len(queries) // self._row_bytes
        with self._closed_by_errors():
            tell(self._connection, Kind.CARRY, b"".join((queries, partials)), layer=layer, number=num_rows)
            _, payload = hear_answer(self._connection, Kind.PARTIALS, num_rows * self._partial_bytes, layer=layer)
        return memoryview(payload)

    def close(self) -> None:
        """Close the connection, which frees the holder's blocks."""
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
        header = hear(connection)
    except (OSError, TransferError):
        return False
    return header is not None and header.kind is Kind.REVOKED


def most_tiles_of(layout: KVLayout, tile_tokens: int) -> int:
    """Return the most tiles of one remote KV, since the tiles of each layer are sent in one message."""
    tile_bytes = max(sum(layout.cache_bytes(layer)) for layer in layout.layers) * (tile_tokens // layout.block_size)
    return MAX_BYTES // tile_bytes


def open_remote_kv(
    address: str,
    key: bytes,
    most_tiles: int,
    layers: Iterable[int],
    read: Callable[[int, int], tuple[memoryview, memoryview]],
    *,
    asker: Asker,
    row_bytes: int,
    partial_bytes: int,
) -> RemoteKV | None:
    """Send as many tiles as the node has room for, at most `most_tiles`; return None without room.

    `read` returns keys and values of a layer's leading tiles. Raises OSError or TransferError.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), ROOM_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tell(connection, Kind.OPEN, key + asker.pack(), number=most_tiles)
        header, _ = hear_answer(connection, Kind.OPENED)
        if not 0 < header.number <= most_tiles:
            connection.close()
            return None
        connection.settimeout(PUT_S)
        for layer in layers:
            keys, values = read(layer, header.number)
            tell(connection, Kind.PUT, b"".join((keys, values)), layer=layer)
            hear_answer(connection, Kind.PUT, layer=layer)
        connection.settimeout(ANSWER_S)
    except BaseException:
        connection.close()
        raise
    return RemoteKV(address, connection, header.number, row_bytes=row_bytes, partial_bytes=partial_bytes)
