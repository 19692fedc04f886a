import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.compare.paired import paired_sentences, pairs_of
from splitserve_bench.compare.search import Probe
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.spread import effective_size, paired_interval

TWO, FOUR = Probe(2.0, 0), Probe(4.0, 0)


def queue(send_at_s, service_s):
    free_s, are_good = 0.0, []
    for sent_s in send_at_s:
        free_s = max(free_s, sent_s) + service_s
        are_good.append(free_s - sent_s <= 0.5)
    return are_good


def differences(seed):
    """Of two servers with one queue each, 0.2 s and 0.18 s a request, under the same 300 arrivals."""
    send_at_s = send_times_s(300, 3.5, 1.0, random.Random(seed))
    return [one - other for one, other in zip(queue(send_at_s, 0.2), queue(send_at_s, 0.18), strict=True)]


def interval_of(series, size):
    return paired_interval(series.count(1) / len(series), series.count(-1) / len(series), size)


def test_the_difference_of_two_queues_lies_in_the_interval_as_often_as_it_says():
    runs = [differences(seed) for seed in range(1000, 1400)]
    truth = sum(map(sum, runs)) / (300 * len(runs))
    num_covered = num_naive = 0
    for seed in range(200):
        series = differences(seed)
        low, high = interval_of(series, effective_size(series))
        num_covered += low <= truth <= high
        low, high = interval_of(series, 300)
        num_naive += low <= truth <= high
    assert num_covered >= 0.92 * 200
    assert num_naive < 0.88 * 200  # as if requests were independent


def test_the_same_requests_tell_more_than_as_many_others():
    """Wald's interval of two shares of different requests is wider."""
    low, high = paired_interval(20 / 300, 5 / 300, 300)
    unpaired = 2 * 1.959964 * math.sqrt(0.75 * 0.25 / 300 + 0.70 * 0.30 / 300)  # 225 and 210 of 300 were good
    assert high - low < 0.5 * unpaired
    assert low > 0


def test_one_more_request_of_either_kind_is_added_to_walds_interval():
    half = 1.959964 * math.sqrt((13 + 5 - (13 - 5) ** 2 / 102) / 102**2)
    assert paired_interval(0.12, 0.04, 100) == pytest.approx((8 / 102 - half, 8 / 102 + half), rel=1e-6)
    assert paired_interval(0.0, 0.0, 0) == (-1.0, 1.0)


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=60))
def test_the_difference_is_in_its_interval(series):
    low, high = interval_of(series, effective_size(series))
    assert -1 <= low <= sum(series) / len(series) <= high <= 1
    mirrored = interval_of([-each for each in series], effective_size(series))
    assert mirrored == pytest.approx((-high, -low))


def kept(*numbers, of=100):
    return [index in numbers for index in range(of)]


def test_every_two_are_paired_request_by_request_where_both_had_the_same():
    everybody = {
        "a": {TWO: kept(*range(90)), FOUR: kept(*range(10))},
        "b": {TWO: kept(*range(5, 92)), Probe(2.0, 1): kept(1)},
        "c": {TWO: kept(*range(90))},
    }
    pairs = pairs_of(everybody)
    assert [(pair.one, pair.other, pair.rate) for pair in pairs] == [("a", "b", 2.0), ("a", "c", 2.0), ("b", "c", 2.0)]
    ab, ac, bc = pairs
    assert (ab.num_total, ab.num_one_alone, ab.num_other_alone) == (100, 5, 2)
    assert ab.difference == pytest.approx(0.03)
    assert (ac.num_one_alone, ac.num_other_alone, ac.difference) == (0, 0, 0)
    assert (bc.num_one_alone, bc.num_other_alone, bc.num_effective) == (2, 5, pytest.approx(ab.num_effective))
    assert (bc.difference, *bc.interval) == pytest.approx((-0.03, -ab.interval[1], -ab.interval[0]))
    assert (ab.reversed.one, ab.reversed.other, ab.reversed.difference) == ("b", "a", bc.difference)


def test_probes_of_one_rate_are_pooled():
    seeds = [Probe(2.0, number) for number in range(3)]
    one = {probe: kept(*range(50)) for probe in seeds}
    other = {probe: kept(*range(number)) for number, probe in enumerate(seeds)}
    (pair,) = pairs_of({"one": one, "other": other})
    assert (pair.num_total, pair.num_one_alone, pair.num_other_alone) == (300, 150 - 3, 0)


def test_at_each_rate_the_best_stands_beside_the_others():
    everybody = {
        "slow": {TWO: kept(*range(90)), FOUR: kept(*range(0, 100, 2))},
        "auto": {TWO: kept(*range(91)), FOUR: kept()},
        "peer": {TWO: kept(), FOUR: kept()},
    }
    at_two, at_four = paired_sentences(pairs_of(everybody))
    assert at_two.startswith(
        "At 2 req/s, of the same 100 requests, auto keeps not surely more than slow by 1.0 points ("
    )
    assert ", more than peer by 91.0 points (+" in at_two
    assert at_four.startswith("At 4 req/s, of the same 100 requests, slow keeps more than auto by 50.0 points (+")
    assert list(paired_sentences([])) == []
