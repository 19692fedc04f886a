"""Hold tiles of other nodes' requests: a port, and a thread for each connection to it."""

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from kv_transfer.distributed_kv.wire import (
    KEY_BYTES,
    TILE_REQUEST_BYTES,
    Header,
    Kind,
    TileRequest,
    receive_header,
    receive_payload,
    send_message,
)
from kv_transfer.results import TransferError
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout

logger = logging.getLogger(__name__)

MAX_REMOTE_KVS: Final = 64  # at a time; more are refused
MAX_STRANGERS: Final = 64  # connections that have not shown the key; the oldest is closed for a new one
IDLE_S: Final = 600.0  # after which an idle remote KV is closed
MESSAGE_S: Final = 10.0
ACCEPT_PAUSE_S: Final = 0.1  # after a connection that could not be accepted, such as without file descriptors
MAX_ROWS: Final = 1024  # of queries in one message


class Partials(Protocol):
    """Computes partial attention over tiles of KV held for other nodes (engine/attention/distributed.py)."""

    @property
    def row_bytes(self) -> int: ...
    @property
    def partial_bytes(self) -> int: ...

    def partials(self, query: memoryview, layer: int, block_ids: Sequence[int]) -> Any: ...
    def carry(self, queries: memoryview, partials: memoryview, layer: int, block_ids: Sequence[int]) -> Any: ...


class Pool(Protocol):
    """The KV pool into which tiles are written."""

    @property
    def layout(self) -> KVLayout: ...

    def write(self, layer: int, block_ids: Sequence[int], keys: memoryview, values: memoryview) -> None: ...


class KVHolder:
    """Serves KV tiles of other nodes' requests: holds them in the pool, and computes their part of attention.

    `lease` takes the number of a connection, the most tiles wanted and the TileRequest, and returns the blocks of as
    many tiles as there is room for; `release` takes the number and frees them. Threads of this object call both.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        pool: Pool,
        partials: Partials,
        lease: Callable[[int, int, TileRequest], list[int]],
        release: Callable[[int], None],
        tile_tokens: int,
    ) -> None:
        """Begin to listen at `address` and `port`; port 0 is any free one.

        `key` must be shown by every client; tile_tokens is the number of tokens of a tile. Raises SettingsError if it
        cannot listen.
        """
        self._pool, self._partials, self._key = pool, partials, key
        self._lease, self._release = lease, release
        self._layout = pool.layout
        self._blocks_each = tile_tokens // self._layout.block_size
        self._computes = threading.Lock()  # one computation at a time, beside the node's own steps
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._strangers: dict[int, socket.socket] = {}  # of the connections, oldest first
        self._revoked: set[int] = set()  # numbers of the connections
        self._num_known = 0
        self._num_opened = 0
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address.strip("[]"), port), family=family)
        except OSError as error:
            raise SettingsError(
                f"cannot listen for remote KV on {address}:{port}: {error.strerror or error}"
            ) from error
        self.address: Final = f"{address}:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []  # of the connections; used by the acceptor only
        self._acceptor = threading.Thread(target=self._accept, name="remote_kvs", daemon=True)
        self._acceptor.start()

    def revoke(self, number: int) -> None:
        """End the remote KV of connection `number`, whose blocks are needed here; its client is informed.

        Does nothing if the connection has ended. `release` is called as soon as no thread uses the blocks.
        """
        with self._lock:
            if (connection := self._connections.get(number)) is not None:
                self._revoked.add(number)
                _shut(connection, socket.SHUT_RD)

    def close(self) -> None:
        """Stop listening, end all remote KV, and wait for the threads."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
        for connection in (self._listener, *connections):
            _shut(connection)
        self._acceptor.join(MESSAGE_S)  # afterwards no thread is started
        for thread in self._threads:
            thread.join(MESSAGE_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("a connection for remote KV was not accepted: %s", error)
                time.sleep(ACCEPT_PAUSE_S)
                continue
            with self._lock:
                if self._is_closed:
                    connection.close()
                    continue
                if len(self._strangers) >= MAX_STRANGERS:
                    _shut(self._strangers.pop(next(iter(self._strangers))))
                self._num_opened += 1
                number = self._num_opened
                self._connections[number] = self._strangers[number] = connection
            thread = threading.Thread(
                target=self._serve, args=(number, connection), name=f"remote KV-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("there is no thread for remote KV: %s", error)
                self._forget(number, connection)
                continue
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _serve(self, number: int, connection: socket.socket) -> None:
        try:
            connection.settimeout(MESSAGE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._hold(number, connection)
        except (OSError, TransferError, RuntimeError) as error:
            if not self._is_closed and number not in self._revoked:
                logger.warning("remote KV is given up: %s", error or type(error).__name__)
        finally:
            self._release(number)
            if number in self._revoked:
                _take_leave(connection)
            self._forget(number, connection)

    def _forget(self, number: int, connection: socket.socket) -> None:
        with self._lock:
            connection.close()
            del self._connections[number]
            self._strangers.pop(number, None)
            self._revoked.discard(number)

    def _hold(self, number: int, connection: socket.socket) -> None:
        header = receive_header(connection)
        if header is None:
            return
        if header.kind is not Kind.OPEN:
            raise TransferError("the first message opens no remote KV")
        payload = bytes(receive_payload(connection, header, KEY_BYTES + TILE_REQUEST_BYTES))
        if not hmac.compare_digest(payload[:KEY_BYTES], self._key):
            raise TransferError("it was asked for with another key")
        tile_request = TileRequest.unpack(payload[KEY_BYTES:])
        with self._known(number):
            self._hold_for(number, self._lease(number, header.number, tile_request), connection)

    @contextlib.contextmanager
    def _known(self, number: int) -> Iterator[None]:
        """Count remote KV that has shown the key. Raises TransferError above MAX_REMOTE_KVS."""
        with self._lock:
            if self._num_known >= MAX_REMOTE_KVS:
                raise TransferError(f"there are {MAX_REMOTE_KVS} remote KV here, the most of a node")
            self._strangers.pop(number, None)
            self._num_known += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_known -= 1

    def _hold_for(self, number: int, block_ids: list[int], connection: socket.socket) -> None:
        num_tiles = len(block_ids) // self._blocks_each
        send_message(connection, Kind.OPENED, number=num_tiles)
        missing = set(self._layout.layers)
        while num_tiles and (header := self._next(connection)) is not None and number not in self._revoked:
            if header.kind is Kind.PUT and header.layer in missing:
                self._put(connection, header, block_ids)
                missing.discard(header.layer)
            elif not missing and header.layer in self._layout.layers and header.kind in (Kind.QUERY, Kind.CARRY):
                (self._answer if header.kind is Kind.QUERY else self._carry)(connection, header, block_ids)
            else:
                raise TransferError(f"{header.kind.name} of layer {header.layer} is not to come now")

    def _next(self, connection: socket.socket) -> Header | None:
        connection.settimeout(IDLE_S)
        header = receive_header(connection)
        connection.settimeout(MESSAGE_S)
        return header

    def _put(self, connection: socket.socket, header: Header, block_ids: list[int]) -> None:
        num_bytes = self._layout.cache_bytes(header.layer)
        sizes = [each * len(block_ids) for each in num_bytes]
        payload = memoryview(receive_payload(connection, header, sum(sizes)))
        self._pool.write(header.layer, block_ids, payload[: sizes[0]], payload[sizes[0] :])
        send_message(connection, Kind.PUT, layer=header.layer)

    def _answer(self, connection: socket.socket, header: Header, block_ids: list[int]) -> None:
        query = receive_payload(connection, header, self._partials.row_bytes)
        with self._computes:
            partials = self._partials.partials(memoryview(query), header.layer, block_ids)
        send_message(connection, Kind.PARTIALS, partials.data, layer=header.layer)

    def _carry(self, connection: socket.socket, header: Header, block_ids: list[int]) -> None:
        if not 0 < header.number <= MAX_ROWS:
            raise TransferError(f"{header.number} rows come in one message, the limit is {MAX_ROWS}")
        row_bytes, partial_bytes = self._partials.row_bytes, self._partials.partial_bytes
        num_bytes = header.number * row_bytes
        is_first = header.num_bytes == num_bytes
        payload = memoryview(
            receive_payload(connection, header, num_bytes if is_first else num_bytes + header.number * partial_bytes)
        )
        with self._computes:
            partials = self._partials.carry(payload[:num_bytes], payload[num_bytes:], header.layer, block_ids)
        send_message(connection, Kind.PARTIALS, partials.data, layer=header.layer)


def _take_leave(connection: socket.socket) -> None:
    """Tell the other end that its blocks were revoked."""
    with contextlib.suppress(OSError):  # the other end is gone
        connection.settimeout(MESSAGE_S)
        send_message(connection, Kind.REVOKED)


def _shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a connection down, which wakes every thread that waits for it."""
    with contextlib.suppress(OSError):  # the connection is gone already
        connection.shutdown(how)
