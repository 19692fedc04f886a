import pytest

from splitserve_bench.compare.slo import FixedSlo, RelativeSlo, Scales, judge, parse_scales
from splitserve_bench.compare.unloaded import Unloaded
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
    slo = RelativeSlo(Scales(ttft=6, tpot=1.5, e2el=2), UNLOADED)
    short, long = slo.limits_of(planned(10)), slo.limits_of(planned(90))
    assert (short.ttft_s, long.ttft_s) == pytest.approx((6 * 0.020, 6 * 0.100))
    assert short.tpot_s == long.tpot_s == pytest.approx(0.030)
    assert short.e2el_s == pytest.approx(2 * (0.020 + 10 * 0.020))


def test_only_scales_that_are_given_limit():
    limits = RelativeSlo(Scales(tpot=2.5), UNLOADED).limits_of(planned(10))
    assert (limits.ttft_s, limits.e2el_s) == (None, None)
    assert limits.tpot_s == pytest.approx(0.05)


def test_each_request_is_judged_by_its_own_limits():
    slo = RelativeSlo(Scales(ttft=2, tpot=2), UNLOADED)
    pairs = [
        (planned(90), outcome(0.15, 0.01)),
        (planned(10), outcome(0.15, 0.01)),  # as late as the one above, but a short prompt
        (planned(90), outcome(0.15, 0.05)),
        (planned(90), outcome(0.15, 0.01, error="the node was lost")),
        (planned(90), outcome(0.15, 0.01, error="full", is_refused=True)),
    ]
    judgement = judge(slo, pairs)
    assert (judgement.num_good, judgement.num_total) == (1, 5)
    misses = judgement.misses
    assert (misses.ttft, misses.tpot, misses.e2el, misses.failed, misses.refused) == (1, 1, 0, 1, 1)


def test_fixed_limits_are_the_same_for_all():
    slo = FixedSlo(Limits(ttft_s=0.5, tpot_s=0.03))
    assert slo.limits_of(planned(1)) == slo.limits_of(planned(1000))
    assert judge(slo, [(planned(1), outcome(0.5, 0.03 - 1e-9)), (planned(1), outcome(0.51, 0.01))]).num_good == 1


def test_they_say_what_they_are():
    assert str(FixedSlo(Limits(ttft_s=0.5, tpot_s=0.03))) == "TTFT ≤ 500 ms, TPOT ≤ 30 ms"
    assert str(RelativeSlo(Scales(ttft=6, tpot=1.5), UNLOADED)) == (
        "TTFT ≤ 6 x unloaded (10 ms + 1 ms a prompt token), TPOT ≤ 1.5 x unloaded (20 ms)"
    )


def test_scales_are_read_from_words():
    assert parse_scales(["ttft:6 tpot:1.5"]) == parse_scales(["ttft:6", "tpot:1.5"]) == Scales(ttft=6, tpot=1.5)
    assert parse_scales(["e2el:3", "e2el:4"]) == Scales(e2el=4)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "itl:3", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "ttft=6"])
def test_what_is_no_scale_is_refused(word):
    with pytest.raises(BenchError, match=word):
        parse_scales([word])
