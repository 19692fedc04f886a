"""How many requests a second come, by hand."""

import pytest

from coordinator.control.arrivals import MAX_SAMPLES, Arrivals


def test_requests_a_second_are_those_since_the_first_that_is_remembered():
    arrivals = Arrivals()
    assert arrivals.per_s(0.0) == 0.0
    arrivals.came(10.0)
    assert arrivals.per_s(10.0) == 0.0
    arrivals.came(10.0)
    assert arrivals.per_s(10.0) == 0.0  # nobody can say yet
    arrivals.came(11.0)
    assert arrivals.per_s(11.0) == pytest.approx(2.0)
    assert arrivals.per_s(30.0) == pytest.approx(0.1)  # nobody has come for long
    for index in range(MAX_SAMPLES):
        arrivals.came(40.0 + index / 4)
    assert arrivals.per_s(40.0 + (MAX_SAMPLES - 1) / 4) == pytest.approx(4.0)
