"""Limits of a comparison: fixed ones, and multiples of what a request takes alone."""

import random

import pytest

from splitserve_bench.compare.slo import (
    REPEATS,
    Scales,
    Slo,
    Unloaded,
    fit_unloaded,
    judge,
    parse_scales,
    sample,
)
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import Outcome, PlannedRequest

UNLOADED = Unloaded(ttft_base_s=0.010, ttft_s_per_token=0.001, tpot_s=0.020)


def planned(num_tokens, output_tokens=11):
    return PlannedRequest(0, 0.0, tuple(range(num_tokens)), output_tokens)


def outcome(ttft_s, tpot_s, num_tokens=11, **others):
    arrivals = tuple(ttft_s + tpot_s * i for i in range(num_tokens))
    return Outcome(0, 0.0, 0.0, 1, num_tokens, arrivals, (1,) * num_tokens, arrivals[-1], **others)


def test_a_longer_prompt_may_take_longer_to_its_first_token():
    slo = Slo(Scales(ttft=6, tpot=1.5, e2el=2), UNLOADED)
    short, long = slo.limits_of(planned(10)), slo.limits_of(planned(90))
    assert (short.ttft_s, long.ttft_s) == pytest.approx((6 * 0.020, 6 * 0.100))
    assert short.tpot_s == long.tpot_s == pytest.approx(0.030)
    assert short.e2el_s == pytest.approx(2 * (0.020 + 10 * 0.020))


def test_only_scales_that_are_given_limit():
    limits = Slo(Scales(tpot=2.5), UNLOADED).limits_of(planned(10))
    assert (limits.ttft_s, limits.e2el_s) == (None, None)
    assert limits.tpot_s == pytest.approx(0.05)


def test_each_request_is_judged_by_its_own_limits():
    slo = Slo(Scales(ttft=2, tpot=2), UNLOADED)
    pairs = [
        (planned(90), outcome(0.15, 0.01)),
        (planned(10), outcome(0.15, 0.01)),  # as late as the one above, but a short prompt
        (planned(90), outcome(0.15, 0.05)),
        (planned(90), outcome(0.15, 0.01, error="the node was lost")),
        (planned(90), outcome(0.15, 0.01, error="full", is_refused=True)),
    ]
    judgement = judge(slo, pairs)
    assert (judgement.num_good, judgement.num_offered) == (1, 5)
    misses = judgement.misses
    assert (misses.ttft, misses.tpot, misses.e2el, misses.failed, misses.refused) == (1, 1, 0, 1, 1)


def test_fixed_limits_are_the_same_for_all():
    slo = Slo(Limits(ttft_s=0.5, tpot_s=0.03))
    assert slo.limits_of(planned(1)) == slo.limits_of(planned(1000))
    assert judge(slo, [(planned(1), outcome(0.5, 0.03 - 1e-9)), (planned(1), outcome(0.51, 0.01))]).num_good == 1


def test_they_say_what_they_are():
    assert str(Slo(Limits(ttft_s=0.5, tpot_s=0.03))) == "TTFT ≤ 500 ms, TPOT ≤ 30 ms"
    assert str(Slo(Scales(ttft=6, tpot=1.5), UNLOADED)) == (
        "TTFT ≤ 6 x unloaded (10 ms + 1 ms a prompt token), TPOT ≤ 1.5 x unloaded (20 ms)"
    )


def test_scales_are_read_from_words():
    assert parse_scales(["ttft:6 tpot:1.5"]) == parse_scales(["ttft:6", "tpot:1.5"]) == Scales(ttft=6, tpot=1.5)
    assert parse_scales(["e2el:3", "e2el:4"]) == Scales(e2el=4)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "itl:3", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "ttft=6"])
def test_what_is_no_scale_is_refused(word):
    with pytest.raises(BenchError, match=word):
        parse_scales([word])


# ---- what a request takes alone ----


def requests(lengths, output_tokens=8):
    return [PlannedRequest(i, i * 1.0, tuple(range(n)), output_tokens) for i, n in enumerate(lengths)]


def test_points_on_a_line_give_the_line():
    unloaded = fit_unloaded([(n, 0.02 + 0.001 * n) for n in (10, 100, 400)], [0.03, 0.01, 0.02])
    assert unloaded.ttft_base_s == pytest.approx(0.02)
    assert unloaded.ttft_s_per_token == pytest.approx(0.001)
    assert unloaded.tpot_s == 0.02
    assert unloaded.ttft_s(200) == pytest.approx(0.22)
    assert unloaded.answer_s(requests([200], 11)[0]) == pytest.approx(0.22 + 10 * 0.02)


def test_short_prompts_count_as_much_as_long_ones():
    noise = random.Random(0)
    points = [(n, (0.005 + 0.001 * n) * noise.uniform(0.95, 1.05)) for n in [8, 512] * 20]
    unloaded = fit_unloaded(points, [])
    assert unloaded.ttft_s(8) == pytest.approx(0.013, rel=0.05)
    assert unloaded.ttft_s(512) == pytest.approx(0.517, rel=0.05)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(64, 0.2), (64, 0.2)], (0.2, 0.0)),  # one length: nothing is known of others
        ([(10, 0.1), (100, 0.1)], (0.1, 0.0)),
        ([(100, 0.1), (200, 0.4)], (0.0, 0.0012)),  # steeper than proportional
    ],
)
def test_the_line_stays_possible(points, expected):
    unloaded = fit_unloaded(points, [])
    assert (unloaded.ttft_base_s, unloaded.ttft_s_per_token) == pytest.approx(expected)
    assert unloaded.tpot_s == 0


def test_shorter_prompts_that_took_longer_make_no_falling_line():
    unloaded = fit_unloaded([(10, 0.2), (100, 0.1)], [])
    assert unloaded.ttft_s_per_token == 0
    assert 0.1 < unloaded.ttft_base_s < 0.2


def test_a_sample_spans_the_lengths_with_different_prompts():
    chosen = sample(requests(range(1, 101)))
    lengths = [len(each.prompt) for each in chosen]
    assert lengths[:REPEATS] == [1, 2, 3]
    assert lengths[-REPEATS:] == [98, 99, 100]
    assert len(set(lengths)) == len(lengths) == 4 * REPEATS
    assert [each.index for each in chosen] == list(range(len(chosen)))
    assert {each.send_at_s for each in chosen} == {0.0}


def test_a_sample_of_few_requests_takes_each_once():
    assert [len(each.prompt) for each in sample(requests([5, 3]))] == [3, 5]


def test_a_sample_prefers_answers_that_have_a_tpot():
    planned = requests([1, 2, 3], output_tokens=1) + requests([4, 5, 6], output_tokens=2)
    assert [len(each.prompt) for each in sample(planned)] == [4, 5, 6]
    assert len(sample(requests([1, 2, 3], output_tokens=1))) == 3
