import random

import pytest

from splitserve_bench.compare.unloaded import REPEATS, fit_unloaded, sample
from splitserve_bench.serve.records import PlannedRequest


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
