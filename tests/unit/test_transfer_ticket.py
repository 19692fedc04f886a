"""Tickets: what goes in comes out, and nothing odd gets through."""

import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import DTYPE_BYTES, KVLayout
from kv_transfer.errors import TransferError
from kv_transfer.ticket import MAX_EPOCH, Ticket

LAYOUT = KVLayout(30, 3, 64, 16, "bfloat16")
FIELDS = {
    "transfer_id": bytes(range(16)),
    "epoch": 7,
    "address": "tcp://127.0.0.1:5600",
    "layout": LAYOUT,
    "num_blocks": 32,
    "num_cached_blocks": 0,
    "ttl_s": 30.0,
}

sizes = st.integers(1, 1000)
layouts = st.builds(KVLayout, sizes, sizes, sizes, sizes, st.sampled_from(sorted(DTYPE_BYTES)))
tickets = st.builds(
    Ticket,
    st.binary(min_size=16, max_size=16),
    st.integers(0, MAX_EPOCH),
    st.text("abcdefgh:/.*0123456789", min_size=1, max_size=256),
    layouts,
    st.integers(500, 2**20),
    st.integers(0, 500),
    st.floats(0.001, 86400.0),
)


@given(tickets)
def test_a_ticket_survives_the_journey(ticket):
    assert Ticket.decode(ticket.encode()) == ticket


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transfer_id", b"short"),
        ("transfer_id", "0123456789abcdef"),
        ("epoch", -1),
        ("epoch", 2**32),
        ("epoch", True),
        ("epoch", 1.0),
        ("address", ""),
        ("address", "a" * 257),
        ("address", b"tcp://127.0.0.1:1"),
        ("address", "tcp://\n"),
        ("num_blocks", 0),
        ("num_blocks", 2**20 + 1),
        ("num_cached_blocks", -1),
        ("num_cached_blocks", 33),
        ("ttl_s", 0.0),
        ("ttl_s", -1.0),
        ("ttl_s", math.nan),
        ("ttl_s", math.inf),
        ("ttl_s", 30),
        ("layout", KVLayout(0, 3, 64, 16, "bfloat16")),
        ("layout", KVLayout(30, 2**17, 64, 16, "bfloat16")),
        ("layout", KVLayout(30, 3, -64, 16, "bfloat16")),
        ("layout", KVLayout(30, 3, 64, None, "bfloat16")),
        ("layout", KVLayout(30, 3, 64, 16, "int3")),
        ("layout", KVLayout(30, 3, 64, 16, [])),
    ],
)
def test_an_odd_field_is_refused(name, value):
    with pytest.raises(TransferError):
        Ticket(**{**FIELDS, name: value})


def packed(*fields):
    return msgpack.packb(list(fields))


GOOD = [1, bytes(16), 7, "tcp://127.0.0.1:5600", [30, 3, 64, 16, "bfloat16"], 32, 0, 30.0]


def test_the_form_that_the_odd_ones_below_depart_from():
    assert Ticket.decode(packed(*GOOD)).layout == LAYOUT


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\xc1",
        packed(),
        packed(*GOOD[:-1]),
        packed(*GOOD, 0),
        packed(2, *GOOD[1:]),
        packed(*GOOD) + b"\x00",
        packed(*GOOD)[:-1],
        msgpack.packb({"transfer_id": bytes(16)}),
        msgpack.packb("a ticket"),
        packed(*GOOD[:4], [30, 3, 64, 16], *GOOD[5:]),
        packed(*GOOD[:4], {"num_layers": 30}, *GOOD[5:]),
        packed(*GOOD[:4], [30, 3, 64, 16, msgpack.Timestamp(1)], *GOOD[5:]),
        packed(*GOOD[:3], "x" * 1000, *GOOD[4:]),
        b"\x91" * 400 + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_anything_else_is_refused(odd):
    with pytest.raises(TransferError):
        Ticket.decode(odd)


def decodes_or_refuses(data):
    try:
        ticket = Ticket.decode(data)
    except TransferError:
        return
    assert Ticket.decode(ticket.encode()) == ticket


@given(st.binary(max_size=600))
def test_random_bytes_raise_nothing_but_transfer_error(data):
    decodes_or_refuses(data)


@given(tickets, st.data())
def test_damaged_tickets_raise_nothing_but_transfer_error(ticket, data):
    damaged = bytearray(ticket.encode())
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@given(
    st.recursive(st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text() | st.binary(), st.lists)
)
def test_well_formed_nonsense_raises_nothing_but_transfer_error(value):
    decodes_or_refuses(msgpack.packb(value))
