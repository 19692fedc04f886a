"""Descriptors: what goes in comes out, and nothing odd gets through."""

import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.descriptor import MAX_TOKENS, MAX_TP, Channel, ChannelEnd, TransferDescriptor
from kv_transfer.plan import KVCopy
from kv_transfer.results import TransferError
from kv_transfer.wire import MAX_EPOCH
from serving_core.layout import DTYPE_BYTES, KVLayout, Widths

LAYOUT = KVLayout.uniform(30, 3, 64, 16, "bfloat16")
ADDRESS = "tcp://127.0.0.1:5600"
ENDS = tuple(ChannelEnd(bytes([number] * 16), ADDRESS) for number in range(2))
FIELDS = {
    "epoch": 7,
    "layout": LAYOUT,
    "prefill_tp": 1,
    "decode_tp": 2,
    "num_blocks": 32,
    "num_cached_blocks": 0,
    "num_tokens": 500,
    "ttl_s": 30.0,
    "ends": ENDS,
}

sizes = st.integers(1, 1000)
tp_sizes = st.integers(1, 5)
num_heads, dtypes = st.integers(1, 20), st.sampled_from(sorted(DTYPE_BYTES))
uneven_widths = st.lists(st.builds(Widths, st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=24).map(tuple)
layouts = st.one_of(
    st.builds(KVLayout.uniform, sizes, num_heads, sizes, sizes, dtypes),
    st.builds(KVLayout, sizes, uneven_widths, num_heads, sizes, dtypes),
)
addresses = st.text("abcdefgh:/.*0123456789é", min_size=1, max_size=128)


@st.composite
def drawn_descriptors(draw):
    layout, decode_tp = draw(layouts), draw(tp_sizes)
    prefill_pp, decode_pp = (draw(st.integers(1, min(3, layout.num_layers))) for _ in range(2))
    num_ranks = decode_tp * decode_pp
    return TransferDescriptor.draw(
        epoch=draw(st.integers(0, MAX_EPOCH)),
        layout=layout,
        prefill_tp=draw(tp_sizes),
        decode_tp=decode_tp,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        addresses=draw(st.lists(addresses, min_size=num_ranks, max_size=num_ranks)),
        num_blocks=draw(st.integers(500, 2**20)),
        num_cached_blocks=draw(st.integers(0, 500)),
        num_tokens=draw(st.integers(0, MAX_TOKENS)),
        ttl_s=draw(st.floats(0.001, 86400.0)),
        behind=draw(st.binary(max_size=32)),
    )


descriptors = drawn_descriptors()


@given(descriptors)
def test_a_descriptor_survives_the_journey(descriptor):
    assert TransferDescriptor.decode(descriptor.encode()) == descriptor


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("epoch", 2**32),
        ("epoch", True),
        ("epoch", 1.0),
        ("prefill_tp", 0),
        ("prefill_tp", 65),
        ("prefill_tp", True),
        ("decode_tp", 0),
        ("decode_tp", 65),
        ("decode_tp", 1),
        ("decode_tp", 3),
        ("prefill_pp", 0),
        ("prefill_pp", 31),  # stages for 30 layers
        ("prefill_pp", True),
        ("decode_pp", 2),
        ("decode_pp", None),
        ("ends", ()),
        ("ends", ENDS[:1]),
        ("ends", (*ENDS, ChannelEnd(b"?" * 16, ADDRESS))),
        ("ends", (ENDS[0], ENDS[0])),
        ("num_blocks", 0),
        ("num_blocks", 2**20 + 1),
        ("num_cached_blocks", -1),
        ("num_cached_blocks", 33),
        ("num_tokens", -1),
        ("num_tokens", 2**32),
        ("num_tokens", 1.0),
        ("ttl_s", 0.0),
        ("ttl_s", -1.0),
        ("ttl_s", math.nan),
        ("ttl_s", math.inf),
        ("ttl_s", 30),
        ("behind", bytes(33)),
        ("behind", None),
        ("layout", KVLayout.uniform(0, 3, 64, 16, "bfloat16")),
        ("layout", KVLayout.uniform(30, 2**17, 64, 16, "bfloat16")),
        ("layout", KVLayout.uniform(30, 3, -64, 16, "bfloat16")),
        ("layout", KVLayout.uniform(30, 3, 64, None, "bfloat16")),
        ("layout", KVLayout.uniform(30, 3, 64, 16, "int3")),
        ("layout", KVLayout.uniform(30, 3, 64, 16, [])),
        ("layout", KVLayout.uniform(1025, 3, 64, 16, "bfloat16")),
        ("layout", KVLayout(-1, (Widths(64, 64),), 3, 16, "bfloat16")),
        ("layout", KVLayout(True, (Widths(64, 64),), 3, 16, "bfloat16")),
        ("layout", KVLayout(1024, (Widths(64, 64),), 3, 16, "bfloat16")),
        ("layout", KVLayout(1023, (Widths(64, 64),) * 2, 3, 16, "bfloat16")),
        ("layout", KVLayout(0, (Widths(0, 64),), 3, 16, "bfloat16")),
        ("layout", KVLayout(0, (Widths(64, -1),), 3, 16, "bfloat16")),
        ("layout", KVLayout(0, (Widths(64, 2**16 + 1),), 3, 16, "bfloat16")),
        ("layout", KVLayout(0, (Widths(1, 1), Widths(True, 1.0)), 3, 16, "bfloat16")),
    ],
)
def test_an_odd_field_is_refused(name, value):
    with pytest.raises(TransferError):
        TransferDescriptor(**{**FIELDS, name: value})


@pytest.mark.parametrize(
    ("transfer_id", "address"),
    [
        (b"short", ADDRESS),
        ("0123456789abcdef", ADDRESS),
        (bytes(16), ""),
        (bytes(16), "a" * 257),
        (bytes(16), "é" * 129),
        (bytes(16), b"tcp://127.0.0.1:1"),
        (bytes(16), "tcp://\n"),
        (bytes(16), "tcp://\ud800"),
    ],
)
def test_an_odd_channel_end_is_refused(transfer_id, address):
    with pytest.raises(TransferError):
        ChannelEnd(transfer_id, address)


def packed(*fields):
    return msgpack.packb(list(fields))


GOOD_ENDS = [[bytes(16), ADDRESS], [b"1" * 16, ADDRESS]]
GOOD = [8, 7, [0, [[30, 64, 64]], 3, 16, "bfloat16"], [1, 1], [2, 1], 32, 0, 500, b"", 30.0, GOOD_ENDS]


def test_the_form_that_the_odd_ones_below_depart_from():
    assert TransferDescriptor.decode(packed(*GOOD)).layout == LAYOUT
    assert msgpack.unpackb(TransferDescriptor(**FIELDS).encode())[:-1] == GOOD[:-1]


def with_layout(*fields):
    return packed(*GOOD[:2], [*fields], *GOOD[3:])


def test_neighbouring_layers_of_equal_widths_travel_together():
    layout = KVLayout(5, (Widths(64, 64), Widths(64, 64), Widths(576, 0)), 1, 16, "int8")
    descriptor = TransferDescriptor(**{**FIELDS, "layout": layout})
    assert msgpack.unpackb(descriptor.encode())[2] == [5, [[2, 64, 64], [1, 576, 0]], 1, 16, "int8"]
    assert TransferDescriptor.decode(descriptor.encode()).layout == layout


def test_a_descriptor_of_as_many_unlike_layers_as_there_can_be_is_read():
    layout = KVLayout(0, (Widths(2**16, 0), Widths(2**16, 2**16)) * 512, 3, 16, "bfloat16")
    descriptor = TransferDescriptor(**{**FIELDS, "layout": layout})
    assert TransferDescriptor.decode(descriptor.encode()) == descriptor


@pytest.mark.parametrize(
    "odd",
    [
        with_layout(0, [[30, 64, 64]], 3, 16),
        with_layout(0, [[30, 64, 64]], 3, 16, "bfloat16", 0),
        with_layout(0, [], 3, 16, "bfloat16"),
        with_layout(0, 30, 3, 16, "bfloat16"),
        with_layout(0, [30, 64, 64], 3, 16, "bfloat16"),
        with_layout(0, [[30, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[30, 64, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[0, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[-1, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[1025, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[2**60, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[600, 64, 64], [600, 64, 0]], 3, 16, "bfloat16"),
        with_layout(0, [[1024, 64, 64]] * 1024, 3, 16, "bfloat16"),
        with_layout(995, [[30, 64, 64]], 3, 16, "bfloat16"),
        with_layout(-1, [[30, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0.0, [[30, 64, 64]], 3, 16, "bfloat16"),
        with_layout(None, [[30, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [["30", 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[1.0, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[True, 64, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[30, 0, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[30, 64, -1]], 3, 16, "bfloat16"),
        with_layout(0, [[30, 64, 2**16 + 1]], 3, 16, "bfloat16"),
        with_layout(0, [[30, 64, []]], 3, 16, "bfloat16"),
        with_layout(0, [[29, 64, 64], [1, 64.0, 64]], 3, 16, "bfloat16"),
        with_layout(0, [[29, 64, 1], [1, 64, True]], 3, 16, "bfloat16"),
    ],
)
def test_an_odd_layout_is_refused(odd):
    with pytest.raises(TransferError):
        TransferDescriptor.decode(odd)


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\xc1",
        packed(),
        packed(*GOOD[:-1]),
        packed(*GOOD, 0),
        packed(1, *GOOD[1:]),
        packed(4, *GOOD[1:]),
        packed(7, *GOOD[1:]),
        packed(9, *GOOD[1:]),
        packed(6, *GOOD[1:3], 1, 2, *GOOD[5:]),
        packed(4, 7, [30, 3, 64, 16, "bfloat16"], *GOOD[3:]),
        packed(*GOOD) + b"\x00",
        packed(*GOOD)[:-1],
        msgpack.packb({"epoch": 7}),
        msgpack.packb("a descriptor"),
        packed(*GOOD[:2], [30, 3, 64, 16], *GOOD[3:]),
        packed(*GOOD[:2], {"num_layers": 30}, *GOOD[3:]),
        with_layout(0, [[30, 64, 64]], 3, 16, msgpack.Timestamp(1)),
        packed(*GOOD[:3], 1, *GOOD[4:]),
        packed(*GOOD[:3], [1], *GOOD[4:]),
        packed(*GOOD[:3], [1, 1, 1], *GOOD[4:]),
        packed(*GOOD[:3], [1.0, 1], *GOOD[4:]),
        packed(*GOOD[:3], [1, True], *GOOD[4:]),
        packed(*GOOD[:3], [1, [1]], *GOOD[4:]),
        packed(*GOOD[:7], *GOOD[8:]),
        packed(*GOOD[:7], "name", *GOOD[8:]),
        packed(*GOOD[:-1], GOOD_ENDS[:1]),
        packed(*GOOD[:-1], [GOOD_ENDS[0], GOOD_ENDS[0]]),
        packed(*GOOD[:-1], [GOOD_ENDS[0], []]),
        packed(*GOOD[:-1], [GOOD_ENDS[0], [b"1" * 16, ADDRESS, 0]]),
        packed(*GOOD[:-1], [GOOD_ENDS[0], [ADDRESS, b"1" * 16]]),
        packed(*GOOD[:-1], [GOOD_ENDS[0], [b"1" * 16, "x" * 1000]]),
        packed(*GOOD[:-1], ADDRESS),
        packed(*GOOD[:-1], [[bytes(16), "x" * 2**16]] * 2),
        b"\x91" * 400 + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_anything_else_is_refused(odd):
    with pytest.raises(TransferError):
        TransferDescriptor.decode(odd)


# ---- channels ----


def test_channels_of_each_rank():
    """Prefill ranks hold heads 0 and 12, decode ranks 0, 1 and 2."""
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(3)]
    sizes = {"num_blocks": 9, "num_cached_blocks": 4, "ttl_s": 5}
    descriptor = TransferDescriptor.draw(
        epoch=7, layout=LAYOUT, prefill_tp=2, decode_tp=3, addresses=addresses, **sizes
    )
    first, second, third = (
        Channel(end.transfer_id, 7, address, LAYOUT.with_heads(1), 9, 4, 5.0)
        for end, address in zip(descriptor.ends, addresses, strict=True)
    )
    assert descriptor.channels_from(0) == [(KVCopy(0, 0, range(30), range(1), range(1)), first)]
    assert descriptor.channels_from(1) == [
        (KVCopy(1, 1, range(30), range(1), range(1)), second),
        (KVCopy(1, 2, range(30), range(1, 2), range(1)), third),
    ]
    assert [descriptor.channels_to(rank) for rank in range(3)] == [
        descriptor.channels_from(0),
        descriptor.channels_from(1)[:1],
        descriptor.channels_from(1)[1:],
    ]


def test_a_channel_carries_the_heads_of_its_copy():
    layout = KVLayout.uniform(2, 8, 64, 16, "int8")
    sizes = {"num_blocks": 1, "num_cached_blocks": 0, "ttl_s": 1.0}
    descriptor = TransferDescriptor.draw(
        epoch=0, layout=layout, prefill_tp=2, decode_tp=1, addresses=[ADDRESS], **sizes
    )
    assert [channel.layout.num_kv_heads for _, channel in descriptor.channels_to(0)] == [4, 4]
    assert sum(channel.layout.block_bytes for _, channel in descriptor.channels_to(0)) == layout.block_bytes


@given(descriptors)
def test_every_channel_begins_and_ends_at_one_rank(descriptor):
    num_senders, num_receivers = (grid.tp * grid.pp for grid in (descriptor.senders, descriptor.receivers))
    begins = [pair for rank in range(num_senders) for pair in descriptor.channels_from(rank)]
    ends = [pair for rank in range(num_receivers) for pair in descriptor.channels_to(rank)]
    assert sorted(begins, key=str) == sorted(ends, key=str)
    assert len(ends) == len(descriptor.ends)
    assert all(descriptor.channels_to(rank) for rank in range(num_receivers))


def test_no_two_descriptors_share_a_transfer_id():
    fields = {"epoch": 1, "layout": LAYOUT, "prefill_tp": 2, "decode_tp": 2, "addresses": [ADDRESS] * 2}
    drawn = [TransferDescriptor.draw(**fields, num_blocks=1, num_cached_blocks=0, ttl_s=1.0) for _ in range(50)]
    assert len({end.transfer_id for descriptor in drawn for end in descriptor.ends}) == 100


@pytest.mark.parametrize(("decode_tp", "addresses"), [(2, [ADDRESS]), (1, []), (1, [ADDRESS] * 2), (0, []), (65, [])])
def test_a_descriptor_needs_an_address_for_each_decode_rank(decode_tp, addresses):
    fields = {"epoch": 1, "layout": LAYOUT, "prefill_tp": 1, "num_blocks": 1, "num_cached_blocks": 0, "ttl_s": 1.0}
    with pytest.raises(TransferError):
        TransferDescriptor.draw(**fields, decode_tp=decode_tp, addresses=addresses)


def test_the_largest_descriptor_of_all_can_be_read():
    layout = KVLayout.uniform(1024, 2**16, 2**16, 2**16, "bfloat16")
    fields = {"epoch": MAX_EPOCH, "layout": layout, "prefill_tp": MAX_TP, "decode_tp": MAX_TP - 1}
    addresses = ["é" * 128] * (MAX_TP - 1)
    descriptor = TransferDescriptor.draw(
        **fields, addresses=addresses, num_blocks=2**20, num_cached_blocks=2**20, ttl_s=86400.0
    )
    assert len(descriptor.ends) == 2 * MAX_TP - 2
    assert TransferDescriptor.decode(descriptor.encode()) == descriptor


def test_no_descriptor_has_more_ranks_or_channels_than_fit_into_one():
    layout = KVLayout.uniform(64, 64, 64, 16, "bfloat16")
    fields = {"epoch": 1, "layout": layout, "num_blocks": 1, "num_cached_blocks": 0, "ttl_s": 1.0}
    with pytest.raises(TransferError, match="number of decode ranks must be a whole number from 1 to 64"):
        TransferDescriptor.draw(**fields, prefill_tp=1, decode_tp=13, decode_pp=5, addresses=[ADDRESS] * 65)
    with pytest.raises(TransferError, match="a plan of 289 channels between two nodes; at most 256 are allowed"):
        TransferDescriptor.draw(**fields, prefill_tp=17, decode_tp=1, decode_pp=17, addresses=[ADDRESS] * 17)
    widest = TransferDescriptor.draw(**fields, prefill_tp=16, decode_tp=1, decode_pp=16, addresses=["é" * 128] * 16)
    assert len(widest.ends) == 256
    assert TransferDescriptor.decode(widest.encode()) == widest


# ---- odd bytes ----


def decodes_or_refuses(data):
    try:
        descriptor = TransferDescriptor.decode(data)
    except TransferError:
        return
    assert TransferDescriptor.decode(descriptor.encode()) == descriptor


@given(st.binary(max_size=600))
def test_random_bytes_raise_nothing_but_transfer_error(data):
    decodes_or_refuses(data)


@given(descriptors, st.data())
def test_damaged_descriptors_raise_nothing_but_transfer_error(descriptor, data):
    damaged = bytearray(descriptor.encode())
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@given(
    st.recursive(st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text() | st.binary(), st.lists)
)
def test_well_formed_nonsense_raises_nothing_but_transfer_error(value):
    decodes_or_refuses(msgpack.packb(value))
