"""Numbers of messages: in order they pass, and whatever else comes is noticed at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import fleet_pb2
from serving_core.net.numbering import MessageLost, Numbering


def events(number):
    numbering = Numbering()
    sent = [fleet_pb2.NodeEvent() for _ in range(number)]
    for event in sent:
        numbering.stamp(event)
    return sent


@given(st.permutations(range(6)), st.integers(0, 6), st.booleans())
def test_the_first_message_that_does_not_follow_the_one_before_is_noticed(order, num_came, is_doubled):
    sent = events(6)
    came = [sent[index] for index in order[:num_came]]
    came += came[-1:] if is_doubled else []
    numbers = [event.number for event in came]
    num_right = next((index for index, number in enumerate(numbers) if number != index + 1), len(numbers))
    other = Numbering()
    for event in came[:num_right]:
        other.check(event)
    if num_right < len(came):
        with pytest.raises(MessageLost):
            other.check(came[num_right])


def test_the_error_names_what_is_missing():
    _, *later = events(5)
    with pytest.raises(MessageLost, match="messages 1 to 3 were lost on the way"):
        Numbering().check(later[2])
    numbering = Numbering()
    numbering.check(events(1)[0])
    with pytest.raises(MessageLost, match="message 1 came after message 1"):
        numbering.check(events(1)[0])
