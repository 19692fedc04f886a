import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.compare.search import Counted, Goal, RateSearch, settle
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.spread import effective_size, interval, mean_interval, student


def chain(num, stay, rng):
    """A series that keeps its value with this probability, else draws it anew: its autocorrelation is stay**lag."""
    values = [rng.random() < 0.9]
    while len(values) < num:
        values.append(values[-1] if rng.random() < stay else rng.random() < 0.9)
    return values


@pytest.mark.parametrize("stay", [0.0, 0.5, 0.8])
def test_clusters_count_as_fewer_requests(stay):
    expected = (1 - stay) / (1 + stay)  # of independent ones, by the sum of a geometric series
    sizes = [effective_size(chain(3000, stay, random.Random(seed))) / 3000 for seed in range(30)]
    assert sum(sizes) / len(sizes) == pytest.approx(expected, rel=0.12)


def test_the_knee_of_a_queue_lies_in_the_interval_as_often_as_it_says():
    """One server of 0.2 s a request: at 2.4834 requests/s 90 % of them are done within 0.5 s (M/D/1, Erlang)."""
    num_covered, num_naive = 0, 0
    for seed in range(60):
        search, naive = RateSearch(Goal(1.0)), []
        while probe := search.next_probe():
            are_good = queue(probe.rate, 300, random.Random(f"{seed} {probe.rate} {probe.seed}"))
            search.record(Counted(probe.rate, sum(are_good), 300, effective_size(are_good)))
            naive.append(Counted(probe.rate, sum(are_good), 300, 300))
        result = search.result()
        num_covered += result.knee_low <= 2.4834 <= result.knee_high
        unpooled = settle(sorted(naive, key=lambda each: each.rate), Goal(1.0), len(naive))
        num_naive += unpooled.knee_low <= 2.4834 <= unpooled.knee_high
    assert num_covered >= 0.95 * 60
    assert num_naive < 0.9 * 60  # as if requests were independent


def queue(rate, num, rng):
    free_s, are_good = 0.0, []
    for sent_s in send_times_s(num, rate, 1.0, rng):
        free_s = max(free_s, sent_s) + 0.2
        are_good.append(free_s - sent_s <= 0.5)
    return are_good


def by_definition(series):
    """num over the design effect, each autocorrelation summed up as it is defined."""
    num = len(series)
    mean = Fraction(sum(series), num)
    values = [each - mean for each in series]

    def product(lag):
        return sum(a * b for a, b in zip(values, values[lag:], strict=False))

    total = -product(0)
    for lag in range(0, num - 1, 2):
        if (pair := product(lag) + product(lag + 1)) <= 0:
            break
        total += 2 * pair
    return float(num / min(max(Fraction(1), total / product(0)), Fraction(num, 2)))


@given(st.lists(st.integers(-1, 1), min_size=3, max_size=80).filter(lambda series: len(set(series)) > 1))
def test_the_size_is_what_its_definition_says(series):
    assert effective_size(series) == pytest.approx(by_definition(series), rel=1e-12)


def test_a_long_load_with_one_cluster_says_as_little_as_a_short_one():
    """Thousands of lags count, each of which has thousands of products."""
    num = 40_000
    series = [index > 0.4 * num for index in range(num)]
    assert effective_size(series) == pytest.approx(effective_size(series[::100]), rel=0.01)


def test_one_long_cluster_says_little():
    assert effective_size([True] * 80 + [False] * 20) < 10


def test_where_all_are_alike_nothing_tells_how_they_cluster():
    assert effective_size([True] * 50) == effective_size([False] * 50) == 50
    assert effective_size([True]) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_size_is_possible(are_good):
    assert min(2, len(are_good)) <= effective_size(are_good) <= len(are_good)
    assert effective_size([not each for each in are_good]) == pytest.approx(effective_size(are_good))


@pytest.mark.parametrize(
    ("good", "total", "low", "high"),
    [(90, 100, 0.82563, 0.94477), (0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (1, 2, 0.09453, 0.90547)],
)
def test_the_interval_of_independent_requests_is_wilsons_as_tables_have_it(good, total, low, high):
    assert interval(good / total, total) == pytest.approx((low, high), abs=1e-5)


@given(st.integers(1, 5000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_the_ends_are_where_the_share_is_z_deviations_away(counts):
    good, total = counts
    low, high = interval(good / total, total)
    assert 0 <= low <= good / total <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            deviation = math.sqrt(end * (1 - end) / total)
            assert abs(good / total - end) == pytest.approx(1.959964 * deviation, rel=1e-5, abs=1e-9)
    assert interval((total - good) / total, total) == pytest.approx((1 - high, 1 - low))


def test_nothing_is_known_of_no_requests():
    assert effective_size([]) == 0
    assert interval(0.0, 0) == (0.0, 1.0)


def test_it_is_wider_the_fewer_there_are():
    assert interval(0.9, 10)[0] < interval(0.9, 100)[0] < 0.9 < interval(0.9, 100)[1] < interval(0.9, 10)[1]


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (19, 2.093), (99, 1.984)]
)
def test_few_samples_have_students_t_as_tables_have_it(degrees, quantile):
    assert student(degrees) == pytest.approx(quantile, rel=0.002)


def test_of_many_samples_it_is_the_normal_quantile():
    assert student(10**9) == pytest.approx(1.959964, rel=1e-6)
    wider = [student(degrees) for degrees in range(1, 200)]
    assert wider == sorted(wider, reverse=True)


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [
        ((0.0, 0.02), 0.01, 0.12706),  # deviation 0.01 x sqrt(2), over sqrt(2)
        ((0.1, 0.2, 0.3), 0.2, 0.24843),  # deviation 0.1: 4.303 x 0.1 / sqrt(3)
        ((0.1, 0.1, 0.1, 0.3, 0.3, 0.3), 0.2, 0.11498),  # variance 0.06 / 5: 2.571 x sqrt(0.012 / 6)
    ],
)
def test_the_interval_of_a_mean_by_hand(values, mean, half):
    low, high = mean_interval(values)
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=0.002, abs=1e-12)


def test_the_interval_of_a_mean_is_one_of_differences_of_shares():
    assert mean_interval([-0.2, 0.2]) == (-1.0, 1.0)  # 12.706 x 0.2 on either side of 0
    assert mean_interval([0.9, 1.0, 0.95])[1] == 1.0


@pytest.mark.parametrize("values", [(), (0.4,), (0.0, 0.0), (0.04,) * 5, (0.9 - 0.8, 0.8 - 0.7)])
def test_samples_that_do_not_differ_have_no_interval(values):
    """Two seeds of five requests that agree are not known to the last digit."""
    assert mean_interval(values) is None
