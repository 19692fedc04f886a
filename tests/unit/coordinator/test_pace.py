"""How often something happens, by hand."""

import pytest

from coordinator.control.pace import MAX_SAMPLES, Pace


def test_times_a_second_are_those_since_the_first_that_is_remembered():
    pace = Pace()
    assert pace.per_s(0.0) == 0.0
    pace.happened(10.0)
    assert pace.per_s(10.0) == 0.0
    pace.happened(10.0)
    assert pace.per_s(10.0) == 0.0  # nobody can say yet
    pace.happened(11.0)
    assert pace.per_s(11.0) == pytest.approx(2.0)
    assert pace.per_s(30.0) == pytest.approx(0.1)  # nobody has come for long
    pace.happened(32.0, 0.5)
    assert pace.per_s(32.0) == pytest.approx(2.5 / 22)
    for index in range(MAX_SAMPLES):
        pace.happened(40.0 + index / 4)
    assert pace.per_s(40.0 + (MAX_SAMPLES - 1) / 4) == pytest.approx(4.0)
