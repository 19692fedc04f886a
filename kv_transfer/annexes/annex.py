"""One annex, seen from the node whose request it is."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kv_transfer.annexes.wire import LEAST_S, MAX_BYTES, Asker, Kind, hear, hear_answer, tell
from kv_transfer.results import AnnexRecalled, TransferError
from serving_core.layout import KVLayout

ROOM_S: Final = 3.0  # to connect, and to hear whether there is room
PUT_S: Final = 10.0  # for each layer's tiles
ANSWER_S: Final = 2.5  # for partials, for which a step waits; a node whose step takes 3 s counts as stuck


class Annex:
    """Whole tiles of a request in another node's pool. Used by one thread at a time, closed by any. What fails raises
    OSError, and closes it."""

    def __init__(
        self, address: str, connection: socket.socket, num_tiles: int, *, row_bytes: int, partial_bytes: int
    ) -> None:
        self.address: Final = address
        self.num_tiles: Final = num_tiles
        self.is_silent = False  # it has not answered in time
        self.is_recalled = False  # its node needs the blocks, and is well otherwise
        self._connection = connection
        self._row_bytes, self._partial_bytes = row_bytes, partial_bytes

    def ask(self, layer: int, query: memoryview) -> None:
        """Asks for the partials of this row."""
        with self._closed_by_errors():
            tell(self._connection, Kind.ASK, query, layer=layer)

    def answer(self, layer: int) -> memoryview:
        """The partials [num_tiles] of the row that was asked for, in this layer."""
        num_bytes = self.num_tiles * self._partial_bytes
        with self._closed_by_errors():
            _, payload = hear_answer(self._connection, Kind.PARTIALS, num_bytes, layer=layer)
        return memoryview(payload)

    def carry(self, layer: int, queries: memoryview, partials: memoryview) -> memoryview:
        """The partials [rows] of these rows over all keys up to the last one there, from those over the keys before."""
        num_rows = len(queries) // self._row_bytes
        with self._closed_by_errors():
            tell(self._connection, Kind.CARRY, b"".join((queries, partials)), layer=layer, number=num_rows)
            _, payload = hear_answer(self._connection, Kind.PARTIALS, num_rows * self._partial_bytes, layer=layer)
        return memoryview(payload)

    def close(self) -> None:
        """The other node's blocks are free."""
        with contextlib.suppress(OSError):  # it is gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """An answer that did not come in time must not be taken for the next one."""
        try:
            yield
        except OSError as error:
            self.is_silent = isinstance(error, TimeoutError)
            self.is_recalled |= not self.is_silent and _has_recalled(self._connection)
            self.close()
            raise
        except TransferError as error:
            self.is_recalled |= isinstance(error, AnnexRecalled)
            self.close()
            raise ConnectionError(str(error)) from error


def _has_recalled(connection: socket.socket) -> bool:
    """Whether that was the last word of the other end, which has hung up before it could be asked."""
    try:
        connection.settimeout(LEAST_S)
        header = hear(connection)
    except (OSError, TransferError):
        return False
    return header is not None and header.kind is Kind.RECALLED


def most_tiles_of(layout: KVLayout, tile_tokens: int) -> int:
    """Of one annex: each layer's tiles are put there in one message."""
    tile_bytes = max(sum(layout.plane_bytes(layer)) for layer in layout.layers) * (tile_tokens // layout.block_size)
    return MAX_BYTES // tile_bytes


def open_annex(
    address: str,
    key: bytes,
    most_tiles: int,
    layers: Iterable[int],
    read: Callable[[int, int], tuple[memoryview, memoryview]],
    *,
    asker: Asker,
    row_bytes: int,
    partial_bytes: int,
) -> Annex | None:
    """Puts as many of these tiles there as the node has room for; None where it has none. `read` gives the keys and
    values of a layer's leading tiles, so many. Raises OSError or TransferError."""
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
    return Annex(address, connection, header.number, row_bytes=row_bytes, partial_bytes=partial_bytes)
