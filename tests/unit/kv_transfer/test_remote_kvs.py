"""Both ends of remote KV over a real socket, with a toy in the place of attention."""

import socket
import threading
import time

import numpy as np
import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.distributed_kv.holder import MAX_ROWS, MAX_STRANGERS, KVHolder
from kv_transfer.distributed_kv.remote_kv import RemoteKV, most_tiles_of, open_remote_kv
from kv_transfer.distributed_kv.wire import HEADER_BYTES, KEY_BYTES, Kind, TileRequest, receive_reply, send_message
from kv_transfer.results import RemoteKVRevoked, TransferError
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator
from serving_node.distributed_kv.holder import HeldKV

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype="float32")
KEY = bytes(range(KEY_BYTES))
TILE = 32  # tokens, four blocks
SIZES = {"row_bytes": 8, "partial_bytes": 12}
TILE_REQUEST = TileRequest(2**40 + 7, is_again=True, step_s=5.25)
CPU = torch.device("cpu")


class Toy:
    """Says of a row and a tile: the row's number, the layer, and what the tile's first block has for its first key. Of
    rows that come with partials it says these plus one."""

    row_bytes, partial_bytes = SIZES["row_bytes"], SIZES["partial_bytes"]

    def __init__(self, pool):
        self._pool = pool

    def partials(self, query, layer, block_ids):
        [row] = np.frombuffer(query, np.float64)
        firsts = [float(self._pool.keys(layer)[block].flatten()[0]) for block in block_ids[:: TILE // 8]]
        return np.array([[row, layer, first] for first in firsts], np.float32)

    def carry(self, queries, partials, layer, block_ids):
        if partials:
            return np.frombuffer(partials, np.float32) + 1
        return np.concatenate([self.partials(row, layer, block_ids[:1]) for row in np.frombuffer(queries, np.float64)])


@pytest.fixture
def held_kv():
    return HeldKV(BlockAllocator(16), LAYOUT.block_size, TILE)  # three tiles of its four are for others


@pytest.fixture
def holder(held_kv):
    pool = PagedKVPool(LAYOUT, 16, CPU)
    holder = KVHolder("127.0.0.1", 0, KEY, pool, Toy(pool), _lease(held_kv), held_kv.release, TILE)
    yield holder
    holder.close()
    assert held_kv.num_blocks == 0


def _lease(held_kv):
    def lease(number, most_tiles, tile_request):
        assert tile_request == TILE_REQUEST
        return held_kv.lease(number, most_tiles, tile_request.age)

    return lease


def _open(holder, pool, num_tiles, key=KEY):
    def read(layer, num):
        return pool.read(layer, list(range(num * TILE // LAYOUT.block_size)))

    return open_remote_kv(holder.address, key, num_tiles, LAYOUT.layers, read, tile_request=TILE_REQUEST, **SIZES)


def _filled():
    pool = PagedKVPool(LAYOUT, 16, CPU)
    for layer in LAYOUT.layers:
        for block in range(16):
            pool.keys(layer)[block] = 100 * layer + block
    return pool


def _wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_put_there_is_asked_for_and_let_go(holder, held_kv):
    remote_kv = _open(holder, _filled(), 2)
    assert (remote_kv.num_tiles, held_kv.num_blocks) == (2, 8)
    for layer in LAYOUT.layers:
        remote_kv.send_query(layer, memoryview(np.array([7.0])).cast("B"))
        answer = np.frombuffer(remote_kv.receive_partials(layer), np.float32).reshape(2, 3).tolist()
        assert answer == [[7, layer, 100 * layer], [7, layer, 100 * layer + 4]]
        queries = memoryview(np.array([7.0, 8.0])).cast("B")
        begun = remote_kv.carry(layer, queries, memoryview(b""))
        assert np.frombuffer(begun, np.float32).tolist() == [7, layer, 100 * layer, 8, layer, 100 * layer]
        ended = remote_kv.carry(layer, queries, begun)
        assert np.frombuffer(ended, np.float32).tolist() == [
            8,
            layer + 1,
            100 * layer + 1,
            9,
            layer + 1,
            100 * layer + 1,
        ]
    remote_kv.close()
    _wait(lambda: held_kv.num_blocks == 0)


def test_there_is_room_for_so_many_tiles_alone(holder, held_kv):
    first = _open(holder, _filled(), 2)
    second = _open(holder, _filled(), 2)
    assert (second.num_tiles, held_kv.num_blocks) == (1, 12)
    assert _open(holder, _filled(), 1) is None
    first.close()
    _wait(lambda: held_kv.num_blocks == 4)
    third = _open(holder, _filled(), 1)
    assert third.num_tiles == 1
    second.close()
    third.close()


def test_an_remote_kv_is_put_there_in_messages_within_the_limit():
    wide = KVLayout.uniform(num_layers=2, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    assert most_tiles_of(wide, 256) == 2**30 // (2 * 256 * 8 * 128 * 2)  # keys and values, of two bytes


def test_who_has_no_key_gets_nothing(holder, held_kv):
    with pytest.raises((TransferError, OSError)):
        _open(holder, _filled(), 1, key=bytes(KEY_BYTES))
    assert held_kv.num_blocks == 0


@pytest.mark.parametrize(
    ("kind", "layer", "number", "payload"),
    [
        (Kind.QUERY, 0, 0, b"8 bytes."),  # before anything was put there
        (Kind.CARRY, 0, 1, b"8 bytes."),
        (Kind.PUT, 0, 0, b"too short"),
        (Kind.PUT, 5, 0, b""),  # there is no such layer
        (Kind.OPENED, 0, 0, b""),
    ],
)
def test_what_is_not_to_come_ends_the_remote_kv(holder, held_kv, kind, layer, number, payload):
    with _connect(holder) as connection:
        send_message(connection, kind, payload, layer=layer, number=number)
        with pytest.raises((TransferError, OSError)):
            receive_reply(connection, Kind.PUT)
    _wait(lambda: held_kv.num_blocks == 0)


@pytest.mark.parametrize(
    "asks",
    [
        lambda remote_kv: _ask(remote_kv, num_rows=2),
        lambda remote_kv: _carry(remote_kv, num_rows=0),
        lambda remote_kv: _carry(remote_kv, num_rows=MAX_ROWS + 1),
        lambda remote_kv: _carry(remote_kv, num_rows=2, num_partials=1),
    ],
)
def test_rows_that_are_not_as_announced_end_the_remote_kv(holder, held_kv, asks):
    remote_kv = _open(holder, _filled(), 1)
    with pytest.raises(OSError, match=r"hung up|reset|pipe"):
        asks(remote_kv)
    _wait(lambda: held_kv.num_blocks == 0)
    with pytest.raises(OSError, match="descriptor"):  # closed by the first failure, and asked no more
        _carry(remote_kv, num_rows=1)
    with pytest.raises(OSError, match="descriptor"):
        _ask(remote_kv)


def test_strangers_keep_nobody_out(holder, held_kv):
    name, _, port = holder.address.rpartition(":")
    strangers = [socket.create_connection((name, int(port)), 10) for _ in range(MAX_STRANGERS + 3)]
    remote_kv = _open(holder, _filled(), 1)
    assert remote_kv.num_tiles == 1
    for stranger in strangers[:3]:  # the oldest make room
        assert stranger.recv(1) == b""
    remote_kv.close()
    for stranger in strangers:
        stranger.close()


def test_a_flipped_layer_is_noticed_on_either_way(holder, held_kv):
    """Else the partials of another layer would be taken for those that were asked for."""
    with pytest.raises(OSError, match=r"damaged|hung up"):
        _ask(_flipping(holder, send=True))
    with pytest.raises(OSError, match=r"damaged|layer"):
        _ask(_flipping(holder, send=False))


def test_an_answer_for_another_layer_is_refused(holder, held_kv):
    remote_kv = _open(holder, _filled(), 1)
    remote_kv.send_query(1, memoryview(bytes(8)))
    with pytest.raises(OSError, match="replies for layer 1 instead of 0"):
        remote_kv.receive_partials(0)


def _flipping(holder, *, send):
    """Return remote KV of one tile, over a connection on which a bit of the next header's layer flips one way."""
    connection = _connect(holder)
    for layer in LAYOUT.layers:
        send_message(
            connection, Kind.PUT, bytes(sum(LAYOUT.cache_bytes(layer)) * TILE // LAYOUT.block_size), layer=layer
        )
        receive_reply(connection, Kind.PUT, layer=layer)
    return RemoteKV(holder.address, _FlippingConnection(connection, send=send), 1, **SIZES)


def _connect(holder):
    """Open remote KV of one tile and return its connection, before any layer is sent."""
    name, _, port = holder.address.rpartition(":")
    connection = socket.create_connection((name, int(port)), 60)
    send_message(connection, Kind.OPEN, KEY + TILE_REQUEST.pack(), number=1)
    assert receive_reply(connection, Kind.OPENED)[0].number == 1
    return connection


class _FlippingConnection:
    LAYER_AT = 4

    def __init__(self, connection, *, send):
        self._connection, self._sends, self._is_over = connection, send, False

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendall(self, data):
        self._connection.sendall(self._flipped(data) if self._sends else data)

    def recv_into(self, view):
        num_bytes = self._connection.recv_into(view)
        if not self._sends and num_bytes > self.LAYER_AT:
            view[:num_bytes] = self._flipped(view[:num_bytes])
        return num_bytes

    def _flipped(self, data):
        if self._is_over:
            return data
        self._is_over = True
        changed = bytearray(data)
        changed[self.LAYER_AT] ^= 1
        return changed


def test_damaged_bytes_are_noticed(holder, held_kv):
    sizes = [each * 4 for each in LAYOUT.cache_bytes(0)]
    with _connect(holder) as connection:
        taken, kept = socket.socketpair()
        with taken, kept:
            send_message(taken, Kind.PUT, bytes(sum(sizes)), layer=0)
            message = _all(kept, sum(sizes))
        message[-1] ^= 1
        connection.sendall(message)
        with pytest.raises((TransferError, OSError)):
            receive_reply(connection, Kind.PUT)
    _wait(lambda: held_kv.num_blocks == 0)


def _all(connection, num_bytes):
    """A message with so many bytes behind its header."""
    message = bytearray()
    while len(message) < HEADER_BYTES + num_bytes:
        message += connection.recv(10**6)
    return message


def _ask(remote_kv, num_rows=1):
    remote_kv.send_query(0, memoryview(bytes(num_rows * SIZES["row_bytes"])))
    remote_kv.receive_partials(0)


def _carry(remote_kv, num_rows, num_partials=0):
    queries, partials = num_rows * SIZES["row_bytes"], num_partials * SIZES["partial_bytes"]
    remote_kv.carry(0, memoryview(bytes(queries)), memoryview(bytes(partials)))


def test_a_host_that_ends(held_kv):
    pool = PagedKVPool(LAYOUT, 16, CPU)
    holder = KVHolder("127.0.0.1", 0, KEY, pool, Toy(pool), _lease(held_kv), held_kv.release, TILE)
    remote_kv = _open(holder, _filled(), 1)
    holder.close()
    with pytest.raises(ConnectionError):
        _ask(remote_kv)
    assert not remote_kv.is_revoked
    remote_kv.close()
    assert held_kv.num_blocks == 0


@pytest.mark.parametrize("asks", [lambda remote_kv: _ask(remote_kv), lambda remote_kv: _carry(remote_kv, num_rows=2)])
def test_blocks_that_are_revoked_are_free_before_anything_is_asked_and_whoever_asks_learns_why(holder, held_kv, asks):
    remote_kv = _open(holder, _filled(), 2)
    _ask(remote_kv)
    holder.revoke(1)
    _wait(lambda: held_kv.num_blocks == 0)
    _wait(lambda: not _host_threads())  # or it would be in time to receive_header the question
    for _ in range(2):
        with pytest.raises(OSError, match=r"older request|reset|pipe|descriptor"):
            asks(remote_kv)
        assert remote_kv.is_revoked
    assert not remote_kv.is_silent
    holder.revoke(1)  # which is gone
    again = _open(holder, _filled(), 3)
    assert again.num_tiles == 3
    again.close()


def _host_threads():
    """Return the threads that serve connections to holders; a connection is closed when its thread ends."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("remote KV-")]


def test_what_is_revoked_while_it_computes_is_answered_first(holder, held_kv, monkeypatch):
    remote_kv, begun, goes_on = _open(holder, _filled(), 1), threading.Event(), threading.Event()

    def partials(*arguments, partials=Toy.partials):
        begun.set()
        assert goes_on.wait(60)
        return partials(*arguments)

    monkeypatch.setattr(Toy, "partials", partials)
    remote_kv.send_query(0, memoryview(bytes(8)))
    assert begun.wait(60)
    holder.revoke(1)
    assert held_kv.num_blocks == 4  # they are being read
    goes_on.set()
    assert len(remote_kv.receive_partials(0)) == SIZES["partial_bytes"]
    _wait(lambda: held_kv.num_blocks == 0)
    with pytest.raises(OSError, match=r"older request|reset|pipe"):
        _ask(remote_kv)
    assert remote_kv.is_revoked


def test_what_is_revoked_before_all_tiles_are_there_is_not_opened(holder, held_kv):
    def read(layer, num):
        if layer:
            holder.revoke(1)
        return _filled().read(layer, list(range(num * TILE // LAYOUT.block_size)))

    with pytest.raises((RemoteKVRevoked, ConnectionError)):
        open_remote_kv(holder.address, KEY, 1, LAYOUT.layers, read, tile_request=TILE_REQUEST, **SIZES)
    _wait(lambda: held_kv.num_blocks == 0)


def test_a_tile_request_is_unpacked_as_it_was_packed():
    for step_s in (0.0, 0.001, 5.25, 1e9):
        assert TileRequest.unpack(TileRequest(3, step_s=step_s).pack()) == TileRequest(
            3, step_s=min(step_s, (2**32 - 1) / 1000)
        )


def test_a_port_that_another_one_has(holder, held_kv):
    pool = PagedKVPool(LAYOUT, 16, CPU)
    port = int(holder.address.rpartition(":")[2])
    with pytest.raises(
        SettingsError, match=rf"^cannot listen for remote KV on 127\.0\.0\.1:{port}: Address already in use"
    ):
        KVHolder("127.0.0.1", port, KEY, pool, Toy(pool), _lease(held_kv), held_kv.release, TILE)


def test_an_answer_that_comes_byte_by_byte_is_late_all_the_same():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.3)
        is_over = threading.Event()

        def trickle():
            while not is_over.wait(0.2):
                theirs.sendall(b"S")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(TimeoutError):  # HEADER_BYTES would have come after five seconds
                receive_reply(ours, Kind.PARTIALS)
            assert ours.gettimeout() == 0.3
        finally:
            is_over.set()
            thread.join()


def test_an_remote_kv_that_is_not_answered_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        connection = socket.create_connection(frozen.getsockname(), 0.1)
        remote_kv = RemoteKV("frozen", connection, 1, **SIZES)
        with pytest.raises(TimeoutError):
            _ask(remote_kv)
    assert remote_kv.is_silent
