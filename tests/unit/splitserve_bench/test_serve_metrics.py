"""Latencies, limits and attainment, worked out by hand from streams of tokens; and the intervals that chance leaves."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.compare.search import Counted, Goal, RateSearch, settle
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.metrics import (
    Distribution,
    Limits,
    effective_size,
    interval,
    is_good,
    missed,
    parse_goodput,
    summarize,
)
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, timeline

LIMITS = Limits(ttft_s=0.5, tpot_s=0.25)


def values_of(outcome, name):
    return list(summarize([outcome], Limits()).latencies_s[name].values)


def test_latencies_of_one_stream():
    outcome = answered(scheduled_s=1.0, sent_s=1.5, arrivals_s=(2.0, 2.25, 3.0, 3.5), ended_s=4.0)
    assert values_of(outcome, "ttft") == [0.5]  # from the send, not from when it was to be sent
    assert values_of(outcome, "tpot") == [0.5]  # (3.5 - 2.0) / 3
    assert values_of(outcome, "itl") == [0.25, 0.75, 0.5]
    assert values_of(outcome, "ttst") == [0.25]
    assert values_of(outcome, "e2el") == [2.5]
    assert values_of(outcome, "client_queue_time") == [0.5]
    assert values_of(outcome, "e2el_including_client_queue") == [3.0]


def test_tokens_that_come_together():
    outcome = answered(arrivals_s=(1.0, 2.0), tokens=(2, 3))
    assert values_of(outcome, "tpot") == [0.25]  # 1 s for the 4 tokens after the first
    assert values_of(outcome, "itl") == [1.0]
    assert values_of(outcome, "ttst") == [0.0]


def test_the_servers_count_of_tokens_is_the_one_that_counts():
    assert values_of(answered(arrivals_s=(1.0, 2.0), num_tokens=5), "tpot") == [0.25]


def test_an_answer_of_one_token_has_no_tpot_and_meets_its_limit():
    outcome = answered(arrivals_s=(0.5,))
    assert [values_of(outcome, name) for name in ("ttft", "tpot", "itl", "ttst")] == [[0.5], [], [], []]
    assert is_good(outcome, Limits(tpot_s=0.0))


@pytest.mark.parametrize(
    ("arrivals", "names"),
    [
        ((0.5, 0.75), ()),  # both limits exactly
        ((0.51, 0.75), ("ttft",)),
        ((0.5, 0.76), ("tpot",)),
        ((0.51, 0.77), ("ttft", "tpot")),
    ],
)
def test_a_good_request_meets_all_limits(arrivals, names):
    outcome = answered(arrivals_s=arrivals)
    assert missed(outcome, LIMITS) == names
    assert is_good(outcome, LIMITS) is (not names)


def test_what_has_an_error_is_a_miss_whatever_came():
    quick = answered(arrivals_s=(0.1, 0.2), error="cut off")
    assert not is_good(quick, LIMITS)
    assert not is_good(quick, Limits())
    assert not is_good(failed(is_refused=True), Limits())


def test_other_limits():
    assert missed(answered(arrivals_s=(0.1, 2.0), ended_s=3.0), Limits(e2el_s=2.9)) == ("e2el",)
    assert missed(answered(arrivals_s=()), Limits(ttft_s=9.0, tpot_s=0.0)) == ("ttft",)


def test_a_summary_by_hand():
    outcomes = [
        answered(0, 0.0, (0.5, 0.75, 1.0)),  # good
        answered(1, 1.0, (2.0, 2.25), scheduled_s=0.75),  # TTFT 1.0
        answered(2, 1.0, (1.25, 1.75)),  # TPOT 0.5
        answered(3, 3.0, (3.25,), ended_s=3.5),  # one token: good
        failed(4, 2.0, 5.0),
        failed(5, 2.0, 2.0, is_refused=True),
        failed(6, 2.0, 2.0, is_refused=True),
        answered(7, 4.0, (6.0, 7.0), ended_s=8.0),  # both
    ]
    summary = summarize(outcomes, LIMITS)
    assert (summary.num_offered, summary.num_completed, summary.num_failed, summary.num_refused) == (8, 5, 3, 2)
    assert (summary.num_good, summary.attainment) == (2, 0.25)
    assert (summary.attainment_of("ttft"), summary.attainment_of("tpot")) == (3 / 8, 3 / 8)
    assert summary.attainment_interval == pytest.approx((0.0715, 0.5907), abs=1e-4)  # Wilson's for 2 of 8
    assert summary.duration_s == 8.0
    assert summary.request_goodput_per_s == 0.25
    assert (summary.total_input_tokens, summary.total_output_tokens) == (50, 10)
    assert summary.per_s(summary.total_output_tokens) == 1.25
    assert summary.latencies_s["ttft"].values == (0.5, 1.0, 0.25, 0.25, 2.0)
    assert summary.latencies_s["tpot"].values == (0.25, 0.25, 0.5, 1.0)
    assert summary.send_lag_s.values == (0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    misses = summary.misses
    assert (misses.ttft, misses.tpot, misses.e2el, misses.failed, misses.refused) == (2, 2, 0, 1, 2)
    assert summarize(outcomes, LIMITS, duration_s=4.0).request_goodput_per_s == 0.5


def test_peaks_by_hand():
    outcomes = [
        answered(0, 10.0, (10.5, 10.9, 11.1), tokens=(1, 2, 4)),
        answered(1, 10.5, (11.0, 11.9), ended_s=12.0),
        answered(2, 11.1, (12.5,), ended_s=12.5),  # sent as the first ends: two at once, not three
        failed(3, 13.0, 13.0),
    ]
    summary = summarize(outcomes, Limits())
    assert summary.max_concurrent_requests == 2
    assert summary.max_output_tokens_per_s == 6.0  # from 11 to 12: 4 + 1 + 1; from 10 to 11: 3


def test_failed_requests_are_under_way_too():
    assert summarize([failed(0, 0.0, 9.0), answered(1, 1.0, (2.0,))], Limits()).max_concurrent_requests == 2


def test_without_limits_and_without_requests():
    summary = summarize([answered(0), failed(1)], Limits())
    assert (summary.attainment, summary.attainment_of("ttft"), summary.attainment_of("tpot")) == (0.5, None, None)
    nothing = summarize([], LIMITS)
    assert (nothing.attainment, nothing.attainment_interval, nothing.request_goodput_per_s) == (0.0, (0.0, 1.0), 0.0)
    assert (nothing.latencies_s["ttft"].mean, nothing.send_lag_s.max, nothing.phases_s) == (None, None, {})


def test_phases_are_means_of_the_complete_requests_that_tell():
    outcomes = [
        answered(0, timeline=timeline(0.25, 0.5, 0.0, 0.125, 0.0, 2.0)),
        answered(1, timeline=timeline(0.75, 0.5, 0.0, 0.125, 0.0, 1.0) | {"e2e_s": 7.0}),
        answered(2),
        failed(3, timeline=timeline(100.0)),
    ]
    assert summarize(outcomes, LIMITS).phases_s == timeline(0.5, 0.5, 0.0, 0.125, 0.0, 1.5)


def test_the_phase_behind_a_miss_is_the_one_furthest_beyond_the_good_ones():
    outcomes = [
        answered(0, timeline=timeline(0.1, 0.3, 0.0, 0.1, 0.0, 0.4)),
        answered(1, timeline=timeline(0.2, 0.3, 0.0, 0.1, 0.0, 0.4)),
        answered(2, timeline=timeline(0.3, 0.3, 0.0, 0.1, 0.0, 0.4)),
        answered(3, 0.0, (0.9, 1.0), timeline=timeline(0.4, 0.5, 0.0, 0.1)),  # 0.2 and 0.2 beyond: the first of them
        answered(4, 0.0, (0.9, 1.0), timeline=timeline(0.3, 0.6, 9.0)),  # only what comes before the first token
        answered(5, 0.0, (0.9, 1.0), timeline=timeline(0.1, 0.8)),
        answered(6, 0.0, (0.9, 1.0)),  # tells nothing
    ]
    summary = summarize(outcomes, LIMITS)
    assert summary.misses.ttft == 4
    assert list(summary.misses.ttft_phases.items()) == [("prefill_s", 2), ("prefill_queue_s", 1)]


def test_phases_of_a_tpot_miss_are_taken_a_token():
    good = [answered(i, timeline=timeline(0, 0.5, 0, 0.1, 0, 0.4)) for i in range(3)]  # a token: 0.05 and 0.2
    long = answered(3, 0.0, (0.5, 10.5), num_tokens=11, timeline=timeline(0, 0.5, 0, 6.0, 0, 4.0))  # 0.6 and 0.4
    slow = answered(4, 0.0, (0.5, 10.5), num_tokens=11, timeline=timeline(0, 0.5, 0, 1.0, 0, 9.0))  # 0.1 and 0.9
    misses = summarize([*good, long, slow], LIMITS).misses
    assert misses.tpot == 2
    assert misses.tpot_phases == {"kv_transfer_s": 1, "decode_s": 1}
    assert misses.ttft_phases == {}


def test_without_a_good_request_the_longest_phase_is_the_one():
    outcome = answered(0, 0.0, (0.9, 1.0), timeline=timeline(0.2, 0.7))
    assert summarize([outcome], LIMITS).misses.ttft_phases == {"prefill_s": 1}


def test_goodput_in_milliseconds():
    assert parse_goodput(["ttft:500", "tpot:30"]) == Limits(0.5, 0.03, None)
    assert parse_goodput(["ttft:500 tpot:30"]) == Limits(0.5, 0.03, None)
    assert parse_goodput(["e2el:1.5", "e2el:2.5"]) == Limits(None, None, 0.0025)
    assert parse_goodput([]) == Limits()
    assert Limits(0.5, None, 2.0).by_name() == {"ttft": 0.5, "e2el": 2.0}


@pytest.mark.parametrize(
    "word", ["itl:3", "ttft", "500", "ttft=500", "ttft:", "ttft:x", "tpot:-1", "tpot:nan", "tpot:1:2"]
)
def test_bad_goodput(word):
    with pytest.raises(BenchError, match=word):
        parse_goodput(["e2el:5", word])


def test_misses_that_come_together_say_less_than_as_many_apart():
    def interval_of(late):
        return summarize(
            [answered(i, float(i), (i + (1.0 if i in late else 0.5),)) for i in range(100)], LIMITS
        ).attainment_interval

    together, apart = interval_of(range(40, 60)), interval_of(range(0, 100, 5))
    assert together[0] < apart[0] < 0.8 < apart[1] < together[1]
    outcomes = [answered(i, float(i), (i + (1.0 if i in range(40, 60) else 0.5),)) for i in range(100)]
    random.Random(0).shuffle(outcomes)
    assert summarize(outcomes, LIMITS).attainment_interval == together


def test_a_distribution_by_hand():
    values = Distribution((4.0, 1.0, 2.0, 3.0))
    assert (values.mean, values.median, values.max) == (2.5, 2.5, 4.0)
    assert values.std == pytest.approx(math.sqrt(1.25))  # of all, not of a sample
    assert [values.percentile(each) for each in (0, 50, 90, 100)] == pytest.approx([1.0, 2.5, 3.7, 4.0])
    nothing = Distribution(())
    assert (nothing.mean, nothing.median, nothing.std, nothing.max, nothing.percentile(99)) == (None,) * 5


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_a_summary_holds_together(seed, num_requests):
    rng = random.Random(seed)
    outcomes = [_random_outcome(rng, index) for index in range(num_requests)]
    summary = summarize(outcomes, LIMITS)
    counts = summary.misses
    assert summary.num_completed + counts.failed + counts.refused == summary.num_offered
    assert summary.num_good <= min(summary.num_completed - counts.ttft, summary.num_completed - counts.tpot)
    assert summary.num_good >= summary.num_completed - counts.ttft - counts.tpot
    if outcomes:
        assert summary.attainment_of("ttft") == (summary.num_completed - counts.ttft) / num_requests
        assert summary.attainment <= min(summary.attainment_of("ttft"), summary.attainment_of("tpot"))
    assert sum(counts.ttft_phases.values()) == counts.ttft
    assert sum(counts.tpot_phases.values()) == counts.tpot
    assert summary.max_concurrent_requests == _most_at_once(outcomes)


def _random_outcome(rng, index):
    sent_s = rng.uniform(0, 3)
    if rng.random() < 0.3:
        return failed(index, sent_s, sent_s + rng.uniform(0.1, 1), is_refused=rng.random() < 0.5)
    arrivals = np.cumsum([sent_s + rng.uniform(0.1, 0.9), *(rng.uniform(0.1, 0.4) for _ in range(rng.randrange(4)))])
    return answered(index, sent_s, tuple(map(float, arrivals)), timeline=timeline(*(rng.random() for _ in range(6))))


def _most_at_once(outcomes):
    return max((sum(one.sent_s <= each.sent_s < one.ended_s for one in outcomes) for each in outcomes), default=0)


# ---- intervals ----


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
