"""When a split pays: the model's arithmetic, by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.doctor.split_model import (
    CorridorCost,
    NodeCosts,
    PrefillCost,
    compare,
    fit_corridor,
    fit_prefill,
    pays_between,
    prompt_tokens_per_output_token,
    smoother_from,
)
from splitserve_bench.simulate.profile import Grid

# A prompt takes 10 ms + 1 ms a token, a step 20 ms for 4 answers and 30 ms for 8, a hand-over 2 ms + 10 µs a token.
STEPS = {4: 0.02, 8: 0.03}
COSTS = NodeCosts(
    PrefillCost(base_s=0.01, token_s=0.001, pair_s=0.0),
    Grid((4, 8), (100,), ((0.02,), (0.03,))),
    CorridorCost(latency_s=0.002, bytes_per_s=1e6),
    token_bytes=10,
)


def test_both_ways_by_hand():
    found = compare(COSTS, running=4, prompt_tokens=100, output_tokens=50)
    assert found.colocated_requests_per_s == pytest.approx(2 / (0.11 + 50 * 0.02 / 4))
    assert found.colocated_tpot_s == pytest.approx(0.02 + 3 * 0.11 / 50)  # three others begin while it runs
    assert found.split_requests_per_s == pytest.approx(1 / (50 * 0.03 / 8 + 0.003))
    assert found.split_tpot_s == pytest.approx(0.03 + 8 * 0.003 / 50)
    assert found.prefill_nodes == pytest.approx(0.113 / 0.1905)


@pytest.mark.parametrize(
    ("prompt_tokens", "requests", "pace", "verdict", "why"),
    [
        (10, (0.02 + 0.25) / 2 / 0.1896, 0.0212 / 0.030336, "colocated", "the prefill node idles"),
        (100, 0.36 / 2 / 0.1905, 0.0266 / 0.03048, "colocated", "two small batches step faster"),
        (170, 0.43 / 2 / 0.1912, 0.0308 / 0.030592, "split", "one large batch of answers, more requests"),
        (200, 0.46 / 2 / 0.214, 0.0326 / 0.03064, "even", "within a tenth"),
        (220, 0.48 / 2 / 0.2342, 0.0338 / 0.030672, "split", "no prompt stalls an answer"),
        (300, 0.56 / 2 / 0.315, 0.0386 / 0.0308, "colocated", "the prefill node is the bottleneck"),
    ],
)
def test_verdicts(prompt_tokens, requests, pace, verdict, why):
    found = compare(COSTS, 4, prompt_tokens, 50)
    assert found.requests_ratio == pytest.approx(requests)
    assert found.pace_ratio == pytest.approx(pace)
    assert (found.verdict, found.why) == (verdict, why)


def test_the_range_in_which_the_split_pays():
    least, most = pays_between(COSTS, 4, 50, 1000)
    # (n + 260) / 2 over 189.5 + 0.01 n, the decode node's ms, is 1.1 at 160.4; over 12 + 1.01 n, the prefill node's,
    # it falls below 1.1 at 191.2, from where on the pace decides, and below 1 / 1.1 at 284.8.
    assert 160.4 <= least <= 160.4 * 1.05
    assert 284.8 / 1.05 <= most <= 284.8
    assert 191.2 / 1.05 <= pays_between(COSTS, 4, 50, 200)[1] <= 191.2
    assert pays_between(COSTS, 4, 1, 1000) is None


def test_from_where_on_answers_are_smoother():
    # 0.02 + 3 (0.01 + n / 1000) / 50 is 1.1 times 0.03 + 8 (0.002 + n / 100000) / 50 at n = 219.0.
    assert 218.9 <= smoother_from(COSTS, 4, 50, 1000) <= 218.9 * 1.05
    assert smoother_from(COSTS, 4, 50, 200) is None
    assert smoother_from(COSTS, 1, 50, 1000) is None  # an answer alone on its node is stalled by none


def cached(cached_token_s, factor=1.0):
    """Steps that take so much longer for each token in a cache."""
    rows = [
        [factor * (step_s + batch * each * cached_token_s) for each in (0, 1000)] for batch, step_s in STEPS.items()
    ]
    return Grid(tuple(STEPS), (100, 1100), tuple(map(tuple, rows)))


def test_a_longer_context_makes_steps_longer():
    decode = cached(1e-6)
    assert decode.at(4, 350) == pytest.approx(0.02 + 4 * 250e-6)
    found = compare(replace(COSTS, decode=decode), 4, 300, 100)  # 350 tokens in the middle of an answer
    assert found.split_tpot_s == pytest.approx(0.03 + 8 * 250e-6 + 8 * 0.005 / 100)


def test_the_balance_of_prompt_and_output_tokens():
    """Whatever a prompt's tokens take, alone or in pairs, in balance prompts take the node that reads as long as their
    answers take the one that writes."""
    for prefill in (PrefillCost(0.01, 0.001, 0.0), PrefillCost(0.1, 0.0, 2e-6), PrefillCost(0.1, 0.0, 0.0)):
        costs = replace(COSTS, prefill=prefill)
        output_tokens = 200 / prompt_tokens_per_output_token(costs, 4, 200)
        assert prefill.prefill_s(200) == pytest.approx(output_tokens * 0.03 / 8)


@given(st.floats(0, 1), st.floats(1e-6, 1), st.floats(0, 1e-3))
def test_a_prompts_costs_are_found_again(base_s, token_s, pair_s):
    cost = PrefillCost(base_s, token_s, pair_s)
    lengths = (64, 256, 512, 1024, 2048)
    found = fit_prefill([(length, cost.prefill_s(length)) for length in lengths])
    for length in (100, 1500):
        assert found.prefill_s(length) == pytest.approx(cost.prefill_s(length), rel=1e-3)
    assert min(found.base_s, found.token_s, found.pair_s) >= 0


def test_costs_are_never_below_zero():
    found = fit_prefill([(100, 0.1), (200, 0.15), (400, 0.2)])  # bends down: a square would be negative
    assert found.pair_s == 0
    assert min(found.base_s, found.token_s) > 0
    assert fit_prefill([(100, 0.5)]).prefill_s(100) == pytest.approx(0.5)


def test_the_corridor_from_two_transfers():
    found = fit_corridor([(1000, 0.003), (5000, 0.5), (11_000, 0.013)])  # the one in between does not count
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(0.002), pytest.approx(1e6))
    assert found.hand_over_s(3000) == pytest.approx(0.005)
    faster_when_larger = fit_corridor([(1000, 0.004), (2000, 0.002)])
    assert (faster_when_larger.latency_s, faster_when_larger.bytes_per_s) == (pytest.approx(0.003), pytest.approx(1e6))


@given(
    st.integers(1, 64),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.floats(1e-3, 1e3),
    st.floats(1e-6, 1e-2),
)
def test_a_machine_that_is_faster_in_all_judges_alike(running, prompt_tokens, output_tokens, factor, cached_token_s):
    slower = NodeCosts(
        PrefillCost(0.01 * factor, 0.001 * factor, 0.0),
        cached(cached_token_s, factor),
        CorridorCost(0.002 * factor, 1e6 / factor),
        10,
    )
    one = compare(replace(COSTS, decode=cached(cached_token_s)), running, prompt_tokens, output_tokens)
    other = compare(slower, running, prompt_tokens, output_tokens)
    assert other.requests_ratio == pytest.approx(one.requests_ratio)
    assert other.pace_ratio == pytest.approx(one.pace_ratio)
    assert math.isclose(other.split_requests_per_s * factor, one.split_requests_per_s)
