"""Message headers and payloads: what goes in comes out, and nothing odd gets through."""

import zlib

import msgpack
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import payload
from kv_transfer.payload import HOST
from kv_transfer.results import TransferError
from kv_transfer.transports.tensor_payload import TensorPayload
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
from serving_core.layout import KVLayout, Widths
from tests.unit.kv_transfer.transfer_kit import LAYOUT, ByteStore

ID = bytes(range(16))

ids = st.binary(min_size=16, max_size=16)
epochs = st.integers(0, 2**32 - 1)
layers, firsts = st.integers(0, 1023), st.integers(0, 2**20 - 100)
counts = st.integers(0, 2**32 - 1)
segments = st.builds(Segment, layers, firsts, st.integers(1, 100), st.integers(0, 2**64 - 1))
ranges = st.builds(BlockRange, layers, firsts, st.integers(1, 100))
rounds = st.integers(0, 255)
messages = st.one_of(
    st.builds(Data, ids, epochs, st.lists(segments, min_size=1, max_size=10).map(tuple)),
    st.builds(Finish, ids, epochs, rounds, st.integers(1, 2**20), st.binary(max_size=4096)),
    st.builds(Abort, ids, epochs),
    st.builds(Committed, ids, epochs),
    st.builds(Missing, ids, epochs, rounds, counts, st.lists(ranges, min_size=1, max_size=20).map(tuple)),
    st.builds(Refused, ids, epochs, st.sampled_from(Refusal)),
)


@given(messages)
def test_a_message_survives_the_journey(message):
    assert decode(memoryview(encode(message))) == message


def test_the_longest_messages_that_are_allowed_fit():
    decode(encode(Missing(ID, 1, 0, 0, tuple(BlockRange(1023, 2**20 - 1, 1) for _ in range(MAX_RANGES)))))
    decode(encode(Data(ID, 1, tuple(Segment(1023, 2**20 - 16, 16, 2**64 - 1) for _ in range(256)))))


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


@pytest.mark.parametrize(
    "fields",
    [
        ["data", ID, 1, []],
        ["data", ID, 1, [[0, 0, 0, 5]]],
        ["data", ID, 1, [[0, 0, 1]]],
        ["data", ID, 1, [[0, 0, 1, 5, 5]]],
        ["data", ID, 1, [[0, 0, 1, -1]]],
        ["data", ID, 1, [[0, 0, 1, b"checksum"]]],
        ["data", ID, 1, [[0, 0, 1, 1.0]]],
        ["data", ID, 1, [[0, 0, True, 5]]],
        ["data", ID, 1, [[1024, 0, 1, 5]]],
        ["data", ID, 1, [[-1, 0, 1, 5]]],
        ["data", ID, 1, [[True, 0, 1, 5]]],
        ["data", ID, 1, [[0, 2**20, 1, 5]]],
        ["data", ID, 1, [[0, 2**20 - 1, 2, 5]]],
        ["data", ID, 1, [[0, 0, 1, 5]] * 257],
        ["data", ID, 1, [[0, 0, 4097, 5]]],
        ["data", ID, 1, [[0, 0, 4000, 5], [1, 0, 97, 5]]],
        ["data", ID, 2**32, [[0, 0, 1, 5]]],
        ["data", ID[:15], 1, [[0, 0, 1, 5]]],
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
        ["Data", ID, 1, [[0, 0, 1, 5]]],
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


@given(st.lists(st.integers(0, 30), max_size=8), st.randoms(use_true_random=False))
def test_cut_gives_the_bytes_back_whatever_the_frames(sizes, rng):
    sizes = [3, *sizes]
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
    views = [memoryview(text) for text in (b"a", b"bcd", b"efgh", b"", b"i", b"jklmn", b"", b"opqr", b"s", b"")]
    frames = HOST.gather(views)
    assert [bytes(frame) for frame in frames] == [b"abcd", b"efgh", b"i", b"jklmn", b"opqr", b"s"]
    assert all(any(frame is view for view in views) for frame in frames if len(frame) > 4)


def test_the_checksum_is_xxh3_of_the_v_caches_seeded_with_that_of_the_k_caches():
    keys, values = ByteStore(LAYOUT, 8, seed=1).read(2, [7, 2, 0, 5])
    seed = xxhash.xxh3_64(bytes(keys)).intdigest()
    assert HOST.checksum(keys, values) == xxhash.xxh3_64(bytes(values), seed=seed).intdigest()


@given(st.binary(min_size=1, max_size=300), st.binary(min_size=1, max_size=300), st.data())
def test_a_changed_bit_and_swapped_caches_change_the_checksum(keys, values, data):
    checksum = HOST.checksum(memoryview(keys), memoryview(values))
    spoilt = bytearray(keys + values)
    spoilt[data.draw(st.integers(0, len(spoilt) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    caches = memoryview(spoilt)
    assert HOST.checksum(caches[: len(keys)], caches[len(keys) :]) != checksum
    assert keys == values or HOST.checksum(memoryview(values), memoryview(keys)) != checksum


def test_empty_views_make_no_frames():
    assert HOST.gather([memoryview(b"")] * 2) == []
    assert [bytes(frame) for frame in HOST.gather([memoryview(b"keys"), memoryview(b"")])] == [b"keys"]


def test_messages_are_as_long_as_the_largest_layer_allows():
    small, large = Widths(1, 0), Widths(512, 512)
    of_large = payload.blocks_per_message(KVLayout.uniform(1, 8, 512, 16, "bfloat16"))
    assert payload.blocks_per_message(KVLayout(3, (small, large, small), 8, 16, "bfloat16")) == of_large == 12


def test_messages_between_devices_are_as_long_as_the_wire_allows():
    layout = KVLayout.uniform(1, 8, 512, 16, "bfloat16")
    lengths = [payload.blocks_per_message(layout, TensorPayload(torch.device(name))) for name in ("cpu", "cuda")]
    assert lengths == [12, 64]


def test_a_layout_whose_blocks_are_too_large_to_send_is_refused():
    assert payload.blocks_per_message(KVLayout.uniform(1, 32, 128, 1024, "bfloat16")) == 1
    with pytest.raises(TransferError, match="at most 16777216 can be sent"):
        payload.blocks_per_message(KVLayout.uniform(1, 32, 128, 1024, "float32"))
    with pytest.raises(TransferError, match="takes 16908288 bytes in a layer; at most 16777216 can be sent"):
        payload.blocks_per_message(KVLayout(0, (Widths(1, 1), Widths(129, 129)), 32, 1024, "bfloat16"))
