"""The soak itself; and that its slopes are slopes."""

import pytest

from tests.effort import effort
from tests.system.soak import LEAST_S, WARM_UP_S, Life, report_of, soak_of


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_long_time_of_faults_leaves_nothing_wrong(tmp_path):
    soak = soak_of(tmp_path, seconds=effort(30.0, 30.0, 1200.0))
    _, wrong = report_of(soak)
    assert not wrong
    assert soak.tally.num_whole > 100
    assert soak.tally.faults


def test_a_slope_is_of_a_process_that_is_warm():
    times_s = [2.0 * index for index in range(100)]
    life = Life("p", 0.0, times_s, [50.0 if at_s < WARM_UP_S else 100 + at_s / 60 for at_s in times_s])
    assert life.slope(life.mib) == pytest.approx(1.0)
    short = Life("p", 0.0, [at_s for at_s in times_s if at_s < WARM_UP_S + LEAST_S - 2])
    assert short.slope([1.0] * len(short.times_s)) is None
