"""Message headers and payloads: what goes in comes out, and nothing odd gets through."""

import struct
import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import KVLayout
from kv_transfer import payload
from kv_transfer.errors import TransferError
from kv_transfer.payload import HOST
from kv_transfer.wire import (
    MAX_RANGES,
    Abort,
    BlockRange,
    Committed,
    Data,
    Finish,
    Missing,
    Refusal,
    Refused,
    Segment,
    decode,
    encode,
)
from tests.unit.transfer_kit import LAYOUT, ByteStore

ID = bytes(range(16))

ids = st.binary(min_size=16, max_size=16)
epochs = st.integers(0, 2**32 - 1)
layers, firsts = st.integers(0, 1023), st.integers(0, 2**20 - 100)
crcs = st.integers(0, 2**32 - 1)
segments = st.builds(Segment, layers, firsts, st.lists(crcs, min_size=1, max_size=20).map(tuple))
ranges = st.builds(BlockRange, layers, firsts, st.integers(1, 100))
rounds = st.integers(0, 255)
messages = st.one_of(
    st.builds(Data, ids, epochs, st.lists(segments, min_size=1, max_size=10).map(tuple)),
    st.builds(Finish, ids, epochs, rounds, st.integers(1, 2**20), st.binary(max_size=4096)),
    st.builds(Abort, ids, epochs),
    st.builds(Committed, ids, epochs),
    st.builds(Missing, ids, epochs, rounds, crcs, st.lists(ranges, min_size=1, max_size=20).map(tuple)),
    st.builds(Refused, ids, epochs, st.sampled_from(Refusal)),
)


@given(messages)
def test_a_message_survives_the_journey(message):
    assert decode(memoryview(encode(message))) == message


def test_the_longest_messages_that_are_allowed_fit():
    decode(encode(Missing(ID, 1, 0, 0, tuple(BlockRange(1023, 2**20 - 1, 1) for _ in range(MAX_RANGES)))))
    decode(encode(Data(ID, 1, tuple(Segment(1023, 2**20 - 16, (2**32 - 1,) * 16) for _ in range(256)))))


@given(messages, st.data())
def test_no_flipped_bit_and_no_cut_gets_past_the_checksum(message, data):
    header = bytearray(encode(message))
    if data.draw(st.booleans()):
        header[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del header[data.draw(st.integers(0, len(header) - 1)) :]
    with pytest.raises(TransferError):
        decode(bytes(header))


def sealed(body):
    return zlib.crc32(body).to_bytes(4, "big") + body


def refuses_or_decodes(header):
    try:
        message = decode(header)
    except TransferError:
        return
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_transfer_error(data):
    refuses_or_decodes(data)
    refuses_or_decodes(sealed(data))


KINDS = ["data", "finish", "abort", "committed", "missing", "refused", "pickle"]
nonsense = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=9) | st.binary(max_size=17),
    lambda inner: st.lists(inner, max_size=6),
)


@given(st.sampled_from(KINDS), ids | nonsense, epochs | nonsense, st.lists(nonsense, max_size=4))
def test_well_formed_nonsense_raises_nothing_but_transfer_error(kind, transfer_id, epoch, rest):
    refuses_or_decodes(sealed(msgpack.packb([kind, transfer_id, epoch, *rest])))


CRC = struct.pack(">I", 5)


@pytest.mark.parametrize(
    "fields",
    [
        ["data", ID, 1, []],
        ["data", ID, 1, [[0, 0, b""]]],
        ["data", ID, 1, [[0, 0, CRC + b"x"]]],
        ["data", ID, 1, [[0, 0, 5]]],
        ["data", ID, 1, [[1024, 0, CRC]]],
        ["data", ID, 1, [[-1, 0, CRC]]],
        ["data", ID, 1, [[True, 0, CRC]]],
        ["data", ID, 1, [[0, 2**20, CRC]]],
        ["data", ID, 1, [[0, 2**20 - 1, CRC * 2]]],
        ["data", ID, 1, [[0, 0, CRC]] * 257],
        ["data", ID, 1, [[0, 0, CRC * 4097]]],
        ["data", ID, 2**32, [[0, 0, CRC]]],
        ["data", ID[:15], 1, [[0, 0, CRC]]],
        ["finish", ID, 1, 0, 0, b""],
        ["finish", ID, 1, 256, 1, b""],
        ["finish", ID, 1, 0, 1, b"x" * 4097],
        ["finish", ID, 1, 0, 1, "tail"],
        ["abort", ID, 1, 0],
        ["missing", ID, 1, 0, 0, []],
        ["missing", ID, 1, 0, 0, [[0, 0, 0]]],
        ["missing", ID, 1, 0, 0, [[0, 0, 1]] * (MAX_RANGES + 1)],
        ["refused", ID, 1, "because"],
        ["refused", ID, 1, ["expired"]],
        ["Data", ID, 1, [[0, 0, CRC]]],
        [],
    ],
)
def test_an_odd_header_is_refused(fields):
    with pytest.raises(TransferError):
        decode(sealed(msgpack.packb(fields)))


def test_an_over_long_header_is_refused_before_it_is_unpacked():
    with pytest.raises(TransferError, match="at most 65536"):
        decode(sealed(bytes(65537)))


# ---- payloads ----


@given(st.lists(st.integers(1, 30), max_size=8), st.randoms(use_true_random=False))
def test_cut_gives_the_bytes_back_whatever_the_frames(sizes, rng):
    data = rng.randbytes(sum(sizes))
    places = sorted(rng.choices(range(len(data) + 1), k=4))
    frames = [memoryview(data)[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]
    pieces = HOST.cut(frames, sizes)
    assert [len(piece) for piece in pieces] == sizes
    assert b"".join(pieces) == data


@pytest.mark.parametrize("sizes", [[3, 3], [3, 5], [], [7, 1]])
def test_cut_wants_every_byte_accounted_for(sizes):
    assert HOST.cut([memoryview(b"abc"), memoryview(b"defg")], sizes) is None


def test_gather_copies_short_views_and_leaves_long_ones(monkeypatch):
    monkeypatch.setattr(payload, "MIN_FRAME_BYTES", 4)
    views = [memoryview(text) for text in (b"a", b"bcd", b"efgh", b"i", b"jklmn", b"opqr", b"s")]
    frames = HOST.gather(views)
    assert [bytes(frame) for frame in frames] == [b"abcd", b"efgh", b"i", b"jklmn", b"opqr", b"s"]
    assert all(any(frame is view for view in views) for frame in frames if len(frame) > 4)


@pytest.mark.parametrize("block_ids", [[0], [3, 4, 5], [5, 3, 4], [7, 2, 0, 5]])
def test_checksums_cover_the_k_plane_then_the_v_plane(block_ids):
    store, size = ByteStore(LAYOUT, 8, seed=1), LAYOUT.plane_bytes
    expected = []
    for block_id in block_ids:
        k_plane, v_plane = store.read(2, [block_id])
        expected.append(zlib.crc32(bytes(k_plane) + bytes(v_plane)))
    assert HOST.checksums(store.read(2, block_ids), size) == tuple(expected)
    assert HOST.checksums([memoryview(b"".join(store.read(2, block_ids)))], size) == tuple(expected)


def test_some_blocks_takes_both_planes_of_each():
    assert bytes(HOST.some_blocks(memoryview(b"aabbccAABBCC"), range(1, 3), 2)) == b"bbccBBCC"
    whole = memoryview(b"aaAA")
    assert HOST.some_blocks(whole, range(1), 2) is whole


def test_a_layout_whose_blocks_are_too_large_to_send_is_refused():
    assert payload.blocks_per_message(KVLayout(1, 32, 128, 1024, "bfloat16")) == 1
    with pytest.raises(TransferError, match="at most 16777216 can be sent"):
        payload.blocks_per_message(KVLayout(1, 32, 128, 1024, "float32"))
