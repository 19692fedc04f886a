"""What a guard reads of strangers, beside a public implementation of HTTP/2; and what strangers may send."""

import struct

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.guard import MAX_PEERS, Allowances
from coordinator.api.http2_heads import EMPTY_SETTINGS, MAX_HEAD_BYTES, MAX_OPEN_CALLS, PREFACE, BadHead, HeadReader
from tests.strangers import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, frame, greeting, head

PATH = "/splitserve.v1.Inference/Generate"
USUAL = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "h"), ("te", "trailers")]
VALUES = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60), max_size=3)
PADDED, WITH_PRIORITY = 0x8, 0x20


def sent_by_h2(calls):
    """What a client sends: what is first, its word that it has the guard's settings, and calls with these values of
    `authorization` each, with data, pings and resets between them."""
    client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    sent = client.data_to_send()
    client.receive_data(EMPTY_SETTINGS)
    acknowledgement = client.data_to_send()
    for values, is_whole in calls:
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, [*USUAL, *(("authorization", value) for value in values), ("x-id", str(stream))])
        client.send_data(stream, b"x" * 100)
        client.ping(b"12345678")
        client.end_stream(stream) if is_whole else client.reset_stream(stream)
    return sent, acknowledgement, client.data_to_send()


@given(calls=st.lists(st.tuples(VALUES, st.booleans()), max_size=4), sizes=st.lists(st.integers(1, 400), min_size=1))
def test_every_key_is_read_however_the_bytes_arrive(calls, sizes):
    first, acknowledgement, others = sent_by_h2(calls)
    reader, data, found, passed = HeadReader(), first + acknowledgement + others, [], b""
    while data:
        for size in sizes:
            read = reader.feed(data[:size])
            data = data[size:]
            found += read.authorizations
            passed += read.passed
    assert found == [value for values, _ in calls for value in values]
    assert (reader.num_heads, reader.has_preface, reader.is_between_calls) == (len(calls), True, True)
    assert reader.has_acknowledged
    assert passed == first + others


@given(calls=st.lists(st.tuples(VALUES, st.booleans()), max_size=3), size=st.integers(1, 400), is_late=st.booleans())
def test_who_is_trusted_sends_all_but_the_acknowledgement(calls, size, is_late):
    first, acknowledgement, others = sent_by_h2(calls)
    reader, data, passed = HeadReader(), others + acknowledgement if is_late else acknowledgement + others, b""
    passed += reader.feed(first).passed
    reader.trust()
    while data and not reader.has_acknowledged:
        read, data = reader.feed(data[:size]), data[size:]
        passed += read.passed
        assert not read.authorizations
    assert passed + reader.rest() + data == first + others


def test_padding_and_priority_are_no_part_of_a_head():
    payload = b"\x04" + struct.pack("!IB", 0, 16) + head(PATH, ("authorization", "Bearer k")) + b"\0" * 4
    flags = END_HEADERS | END_STREAM | PADDED | WITH_PRIORITY
    assert HeadReader().feed(greeting() + frame(HEADERS, flags, 1, payload)).authorizations == ["Bearer k"]


def test_a_head_in_parts_is_one_head():
    whole, reader = head(PATH, ("authorization", "Bearer k")), HeadReader()
    assert reader.feed(greeting() + frame(HEADERS, END_STREAM, 1, whole[:20])).authorizations == []
    assert not reader.is_between_calls
    assert reader.feed(frame(CONTINUATION, 0, 1, whole[20:30])).authorizations == []
    assert reader.feed(frame(CONTINUATION, END_HEADERS, 1, whole[30:])).authorizations == ["Bearer k"]
    assert reader.is_between_calls


@pytest.mark.parametrize(
    "sent",
    [b"\0", frame(DATA, 0, 1, b"x")[:8], frame(DATA, 0, 1, b"x")[:9], frame(HEADERS, END_HEADERS, 1, head(PATH))],
    ids=["part of a frame's header", "nearly a frame's header", "a frame without its payload", "a call without end"],
)
def test_what_has_begun_is_owed(sent):
    reader = HeadReader()
    reader.feed(greeting())
    assert reader.is_between_calls
    reader.feed(sent)
    assert not reader.is_between_calls


MANY_OPEN = b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, head(PATH)) for number in range(MAX_OPEN_CALLS + 1))
BAD = {
    "another protocol": b"GET / HTTP/1.1\r\n",
    "nearly the preface": PREFACE[:-1] + b"x",
    "a long head": greeting() + frame(HEADERS, 0, 1, b"\0" * (MAX_HEAD_BYTES + 1)),
    "a head that is long to read": greeting() + frame(HEADERS, END_HEADERS, 1, b"\x82" * MAX_HEAD_BYTES),
    "a head without end": greeting() + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 100) * 40,
    "empty parts": greeting() + frame(HEADERS, 0, 1, head(PATH)) + frame(CONTINUATION, 0, 1),
    "a part of no head": greeting() + frame(CONTINUATION, 0, 1, b"x"),
    "something within a head": greeting() + frame(HEADERS, 0, 1, head(PATH)) + frame(DATA, 0, 1),
    "no compressed head": greeting() + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
    "too much padding": greeting() + frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff\0"),
    "nothing but padding's length": greeting() + frame(HEADERS, END_HEADERS | PADDED | WITH_PRIORITY, 1, b"\0"),
    "many calls without end": greeting() + MANY_OPEN,
}


@pytest.mark.parametrize("sent", BAD.values(), ids=BAD.keys())
def test_what_is_beyond_a_limit_is_refused_before_it_is_kept(sent):
    with pytest.raises(BadHead):
        HeadReader().feed(sent)


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(data):
    reader = HeadReader()
    reader.feed(greeting())
    try:
        reader.feed(data)
    except BadHead:
        return


def test_an_allowance_is_used_up_and_fills_again():
    allowances = Allowances(100, 10)
    assert allowances.take("a", 60, 0.0)
    assert not allowances.take("a", 60, 0.0)  # of 40, which stay: who comes again and again has its turn
    assert allowances.take("b", 100, 0.0)
    assert not allowances.take("a", 60, 1.0)  # of 50
    assert allowances.take("a", 60, 2.0)
    assert not allowances.take("a", 101, 1000.0)  # never more than all of it


def test_the_peers_that_sent_something_last_are_remembered():
    allowances = Allowances(100, 10)
    for number in range(MAX_PEERS + 1):
        assert allowances.take(str(number), 100, 0.0)
    assert not allowances.take("1", 1, 0.0)
    assert allowances.take("0", 100, 0.0)  # as if it were new
