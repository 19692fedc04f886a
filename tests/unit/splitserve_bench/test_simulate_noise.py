"""Steps that spread: what a profile says of it, what a node draws from that, and what it does to requests."""

import json
from dataclasses import replace
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import SettingsError
from splitserve_bench.serve.metrics import ttft_s
from splitserve_bench.simulate.costs import Draws, Noise, StepLoad
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import NUM_FACTORS, Spread, equal_shares, read_profile
from tests.unit.splitserve_bench.simulate_kit import PROFILE, request

FLEET = FleetSize(2, 2)
SHARES = (0.05, 0.5, 0.95)
WIDE = Spread(SHARES, (0.6, 1.0, 3.0))
ANSWER, PROMPT = StepLoad(num_answers=1), StepLoad(num_prompt_tokens=8)


@st.composite
def spreads(draw):
    shares = sorted(draw(st.sets(st.floats(0, 1), min_size=1, max_size=8)))
    factors = sorted(draw(st.lists(st.floats(0.1, 10), min_size=len(shares), max_size=len(shares))))
    return Spread(tuple(shares), tuple(factors))


def spread_by(width):
    """Around 1, so many times as far as WIDE."""
    return Spread(SHARES, tuple(1 + (factor - 1) * width for factor in WIDE.factors))


def profile_of(answers=WIDE, prompts=WIDE, messages=WIDE):
    steps = replace(PROFILE.steps, answers_spread=answers, prompts_spread=prompts)
    return replace(PROFILE, steps=steps, control=replace(PROFILE.control, spread=messages))


def outcomes_of(profile, *, seed=0, size=FLEET, every_s=0.05, num_requests=40):
    planned = [request(index, 100, 12, index * every_s) for index in range(num_requests)]
    return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=100.0, seed=seed)


@given(spreads(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_of_steps_is_below_a_larger_factor(spread, one, other):
    factors = [spread.at(share) for share in sorted((one, other))]
    assert factors[0] <= factors[1] or factors[0] == pytest.approx(factors[1])
    assert spread.factors[0] <= factors[0]
    assert [spread.at(share) for share in spread.shares] == pytest.approx(list(spread.factors))


def test_as_many_steps_are_below_a_quantile_as_it_says():
    factors = equal_shares(WIDE)
    below = [sum(factor < quantile for factor in factors) for quantile in (0.8, 2.0)]
    assert [each / NUM_FACTORS for each in below] == pytest.approx([0.275, 0.725], abs=0.003)


def test_a_step_has_the_factor_of_its_number_and_its_kind_whenever_it_is_asked():
    noise, again = (Noise(WIDE, spread_by(0.5), seed="0 node") for _ in range(2))
    first = [noise.step(number, ANSWER) for number in range(NUM_FACTORS)]
    assert first == [again.step(number, ANSWER) for number in reversed(range(NUM_FACTORS))][::-1]
    assert sorted(first) == list(equal_shares(WIDE))
    assert noise.step(5, PROMPT) == again.step(5, replace(PROMPT, num_answers=3)) != noise.step(5, ANSWER)


def test_nodes_and_the_ways_to_and_from_each_draw_by_themselves():
    one, other = (Noise(WIDE, WIDE, WIDE, seed) for seed in ("one", "other"))
    assert one.commands.factor(3) == Draws(WIDE, "one commands").factor(3)
    draws = [one.commands.factor, one.events.factor, other.commands.factor, lambda number: one.step(number, ANSWER)]
    draws.append(lambda number: other.step(number, ANSWER))
    assert len({tuple(map(draw, range(NUM_FACTORS))) for draw in draws}) == len(draws)


@pytest.mark.parametrize("flat", [Spread(), Spread((0.3,), (1.0,)), Spread((0.1, 0.9), (1.0, 1.0))])
def test_without_a_spread_all_is_as_without_noise(flat):
    without = outcomes_of(PROFILE)
    assert outcomes_of(profile_of(flat, flat, flat), seed=7) == without
    for spreads in ((WIDE, flat, flat), (flat, WIDE, flat), (flat, flat, WIDE)):
        assert outcomes_of(profile_of(*spreads)) != without


def test_a_seed_draws_the_same_noise_again_and_another_one_other_noise():
    assert outcomes_of(profile_of(), seed=3) == outcomes_of(profile_of(), seed=3) != outcomes_of(profile_of(), seed=4)


@pytest.mark.parametrize("every_s", [1.0, 0.13], ids=["each alone", "some wait"])
@pytest.mark.parametrize("seed", range(3))
def test_the_wider_the_spread_the_more_first_tokens_vary(every_s, seed):
    """Each is as much of its mean further out: what waits for others adds up theirs."""
    size, widths = FleetSize(1, 1), (0.0, 0.25, 0.5, 1.0)
    runs = [outcomes_of(profile_of(*[spread_by(width)] * 3), seed=seed, size=size, every_s=every_s) for width in widths]
    variances = [pvariance([ttft_s(outcome) for outcome in run]) for run in runs]
    assert variances == sorted(variances)
    assert variances[-1] > variances[0] + 1e-4


def test_a_profile_is_read_with_its_spread(tmp_path):
    path = tmp_path / "profile.json"
    spreads = WIDE, spread_by(0.5), spread_by(0.25)
    profile_of(*spreads).save(path)
    assert read_profile(path) == profile_of(*spreads)
    fields = json.loads(path.read_text())
    del fields["steps"]["answers_spread"], fields["steps"]["prompts_spread"], fields["control"]["spread"]
    path.write_text(json.dumps(fields))  # as one of before
    assert read_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        ({"shares": [0.5, 1.5], "factors": [1, 2]}, "from 0 to 1"),
        ({"shares": [0.9, 0.5], "factors": [1, 2]}, "ascending"),
        ({"shares": [0.5, 0.9], "factors": [1]}, "a list of 2 numbers"),
        ({"shares": [0.5, 0.9], "factors": [2, 1]}, "is below the one before it"),
        ({"shares": [0.5], "factors": [0]}, "last is above 0"),
        ({"shares": [0.5]}, "factors"),
        ({}, "shares"),
        ([], "an object"),
    ],
)
def test_spreads_that_cannot_be(tmp_path, spread, words):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    fields = json.loads(path.read_text())
    fields["steps"]["prompts_spread"] = spread
    path.write_text(json.dumps(fields))
    with pytest.raises(SettingsError, match=words):
        read_profile(path)
