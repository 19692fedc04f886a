"""Deadlines of tokens, and their way to another machine."""

import math

import pytest

from protos import fleet_pb2
from protos.convert import due_from_wire, due_to_wire
from serving_core.slo import Due


def test_tokens_are_due_one_limit_after_the_other_from_the_first():
    due = Due(first_s=10.0, tpot_s=0.5)
    assert (due.token_s(0), due.token_s(1)) == (10.0, math.inf)
    due.began_s = 8.0
    assert [due.token_s(index) for index in (0, 1, 2, 10)] == [10.0, 8.5, 9.0, 13.0]


def test_what_has_no_limit_is_never_due():
    assert [Due(began_s=1.0).token_s(index) for index in (0, 1, 9)] == [math.inf] * 3


@pytest.mark.parametrize("tpot_s", [0.5, math.inf])
@pytest.mark.parametrize(("first_s", "began_s"), [(103.0, None), (99.0, None), (103.0, 98.0), (math.inf, 98.0)])
@pytest.mark.parametrize("travel_s", [0.0, 0.25])
def test_another_clock_has_the_same_deadlines_later_by_the_message(tpot_s, first_s, began_s, travel_s):
    here = Due(first_s, tpot_s, began_s)
    message = due_to_wire(here, 100.0).SerializeToString()
    offset = 5000.0  # between the clocks
    there = due_from_wire(fleet_pb2.Due.FromString(message), 100.0 + offset + travel_s)
    indices = (0, 1, 7) if began_s is None else (1, 7)
    for index in indices:
        assert there.token_s(index) == pytest.approx(here.token_s(index) + offset + travel_s)
