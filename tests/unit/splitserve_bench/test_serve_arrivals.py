"""When an open-loop load is sent."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import EXPONENTIAL, LINEAR, Ramp, ramp_times_s, send_times_s


@given(
    st.integers(1, 200),
    st.floats(0.01, 1e4),
    st.floats(0.05, 1e3) | st.just(math.inf),
    st.integers(0, 2**32),
)
def test_times_are_in_order_and_end_at_n_over_rate(num_requests, rate, burstiness, seed):
    times = send_times_s(num_requests, rate, burstiness, random.Random(seed))
    assert len(times) == num_requests
    assert all(earlier <= later for earlier, later in itertools.pairwise([0.0, *times]))
    assert times[-1] == num_requests / rate
    assert times == send_times_s(num_requests, rate, burstiness, random.Random(seed))


def test_the_gaps_are_drawn_and_scaled_as_written_down():
    class Drawn(random.Random):
        gaps = iter([2.0, 1.0, 5.0])

        def gammavariate(self, alpha, beta):
            assert (alpha, alpha * beta) == (0.25, 1.0)  # shape, and a mean of one before the scaling
            return next(self.gaps)

    assert send_times_s(3, 0.375, 0.25, Drawn()) == [2.0, 3.0, 8.0]  # 3 requests at 0.375/s take 8 s


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_by_one_over_the_root_of_burstiness(burstiness):
    times = send_times_s(20_000, 10.0, burstiness, random.Random(1))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.01)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_poisson_process_has_exponential_gaps():
    times = send_times_s(20_000, 1.0, 1.0, random.Random(2))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    for at in (0.1, 0.5, 1.0, 2.0, 4.0):
        assert sum(gap > at for gap in gaps) / len(gaps) == pytest.approx(math.exp(-at), abs=0.015)


def test_an_infinite_rate_sends_all_at_once_and_an_infinite_burstiness_evenly():
    assert send_times_s(3, math.inf, 1.0, random.Random()) == [0.0, 0.0, 0.0]
    assert send_times_s(4, 2.0, math.inf, random.Random()) == [0.5, 1.0, 1.5, 2.0]
    assert send_times_s(0, 2.0, 1.0, random.Random()) == []


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, -2), (1, math.nan)])
def test_what_cannot_be_a_rate_or_burstiness(rate, burstiness):
    with pytest.raises(BenchError, match="must be above 0"):
        send_times_s(1, rate, burstiness, random.Random())


@pytest.mark.parametrize(
    ("ramp", "gaps"),
    [
        (Ramp(LINEAR, 1, 5), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
        (Ramp(LINEAR, 2, 2), [1 / 2] * 5),
        (Ramp(EXPONENTIAL, 1, 16), [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]),
        (Ramp(EXPONENTIAL, 16, 1), [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]),
    ],
)
def test_a_ramp_goes_from_one_rate_to_the_other(ramp, gaps):
    times = ramp_times_s(5, ramp, math.inf, random.Random())
    assert times == pytest.approx(list(itertools.accumulate(gaps)))
    drawn = ramp_times_s(5, ramp, 1.0, random.Random(1))
    assert drawn[-1] == pytest.approx(sum(gaps))
    assert drawn != pytest.approx(times)


def test_a_ramp_of_equal_rates_is_that_rate():
    flat = ramp_times_s(50, Ramp(LINEAR, 4, 4), 0.5, random.Random(3))
    assert flat == pytest.approx(send_times_s(50, 4, 0.5, random.Random(3)))
    assert ramp_times_s(1, Ramp(LINEAR, 4, 8), 1.0, random.Random(3)) == pytest.approx([0.25])
