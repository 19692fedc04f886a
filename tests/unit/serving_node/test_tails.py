"""What goes with the last block of an answer that another node writes on."""

import pytest

from kv_transfer.wire import MAX_TAIL_BYTES
from protos import convert, fleet_pb2
from serving_node.moves import MAX_TAIL_TOKENS


@pytest.mark.parametrize("token_ids", [[], [0], [1, 49151, 2**32 - 1]])
def test_tokens_travel_in_the_tail(token_ids):
    assert convert.from_tail(convert.to_tail(token_ids, [])) == (token_ids, [])


def test_the_longest_tail_fits_a_message():
    makers = [b"origin: c", b"origin: s"] * (convert.MAX_MADE // 2)
    tail = convert.to_tail([2**32 - 1] * MAX_TAIL_TOKENS, makers)
    assert len(convert.from_tail(tail)[1]) == convert.MAX_MADE
    assert len(tail) <= MAX_TAIL_BYTES


def test_a_tail_tells_who_made_the_blocks_unless_they_are_too_many():
    read, written = b"origin: c", b"origin: s"
    tail = convert.to_tail([5], [read, read, written, read])
    assert convert.from_tail(tail) == ([5], [(read, 2), (written, 1), (read, 1)])
    makers = [read, written] * convert.MAX_MADE
    for num_blocks, num_told in ((convert.MAX_MADE, convert.MAX_MADE), (convert.MAX_MADE + 1, 0)):
        tail = convert.to_tail([5], makers[:num_blocks])
        assert convert.from_tail(tail) == ([5], [(maker, 1) for maker in makers[:num_told]])


@pytest.mark.parametrize("tail", [b"abc", fleet_pb2.Tail(made=[fleet_pb2.Made(maker=b"short")]).SerializeToString()])
def test_an_odd_tail_tells_nothing(tail):
    with pytest.raises(ValueError, match="a tail"):
        convert.from_tail(tail)
