import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.bench.compare.search import Counted, Goal, RateSearch, settle
from splitserve.bench.compare.spread import effective_size, interval
from splitserve.bench.serve.arrivals import send_times_s
from splitserve.bench.serve.metrics import wilson


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


def test_one_long_cluster_says_little():
    assert effective_size([True] * 80 + [False] * 20) < 10


def test_where_all_are_alike_nothing_tells_how_they_cluster():
    assert effective_size([True] * 50) == effective_size([False] * 50) == 50
    assert effective_size([True]) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_size_is_possible(are_good):
    assert min(2, len(are_good)) <= effective_size(are_good) <= len(are_good)
    assert effective_size([not each for each in are_good]) == pytest.approx(effective_size(are_good))


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_interval_of_independent_requests_is_wilsons(total, share):
    good = round(share * total)
    assert interval(good / total, total) == pytest.approx(wilson(good, total))


def test_it_is_wider_the_fewer_there_are():
    assert interval(0.9, 10)[0] < interval(0.9, 100)[0] < 0.9 < interval(0.9, 100)[1] < interval(0.9, 10)[1]
