"""Profiles: files, their numbers, and the noise that is drawn by them."""

import json
from dataclasses import replace
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import SettingsError
from splitserve_bench.serve.metrics import ttft_s
from splitserve_bench.simulate.costs import Draws, Noise, ProfileCosts, StepLoad
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import NUM_FACTORS, Grid, Spread, equal_shares, read_profile
from tests.unit.splitserve_bench.simulate_kit import PROFILE, request

GRID = Grid((1, 2, 4), (10, 30), tuple(tuple(row + column / 10 for column in (10, 30)) for row in (1, 2, 4)))


@given(row=st.floats(1, 20), column=st.floats(10, 200))
def test_a_plane_is_a_plane_between_its_places_and_beyond(row, column):
    assert GRID.at(row, column) == pytest.approx(row + column / 10)


def test_before_the_first_place_it_is_as_at_the_first():
    assert GRID.at(0.1, 20) == GRID.at(1, 20) == 3
    assert GRID.at(2, 1) == GRID.at(2, 10) == 3


def test_what_falls_towards_the_end_falls_no_further():
    falling = Grid((1, 2), (0, 1), ((3.0, 3.0), (2.0, 1.0)))
    assert falling.at(9, 0) == 2
    assert falling.at(9, 9) == 1
    assert falling.at(1.5, 0) == 2.5


def test_one_place_is_everywhere():
    assert Grid((8,), (100,), ((0.5,),)).at(3, 1000) == 0.5


# A step takes 10 ms for the weights, or 0.1 ms a token where that is more, and 0.02 ms for each token that is sampled;
# 0.001 ms for each token before an answer, and a thousandth of that for each such pair of a prompt.
WEIGHTS_S, TOKEN_S, HEAD_S, CACHED_S, PAIR_S = 10e-3, 1e-4, 2e-5, 1e-6, 1e-9
PLACES, CONTEXTS = (*range(1, 256, 5), *range(256, 513, 64)), (0, 4096)


def products_s(num_tokens, num_sampled):
    return max(WEIGHTS_S, TOKEN_S * num_tokens) + HEAD_S * num_sampled


@pytest.mark.parametrize("beside", [1.0, 1.5])
@pytest.mark.parametrize("num_sequences", [1, 31, 128, 256])
@pytest.mark.parametrize("num_tokens", [2, 96, 256])
@pytest.mark.parametrize("context", [0, 700])
def test_a_step_of_both_has_the_products_of_all_its_tokens_and_both_attentions(
    num_sequences, num_tokens, context, beside
):
    answers = [[products_s(num, num) + CACHED_S * num * each for each in CONTEXTS] for num in PLACES]
    prompts = [[products_s(num, 1) + PAIR_S * num * (num / 2 + each) for each in CONTEXTS] for num in PLACES]
    grids = {
        name: Grid(PLACES, CONTEXTS, tuple(map(tuple, seconds)))
        for name, seconds in (("answers", answers), ("prompts", prompts))
    }
    steps = replace(PROFILE.steps, **grids, attention_beside_factor=beside)
    load = StepLoad(num_sequences, num_sequences * context, num_tokens, num_before=300 * num_tokens)
    attention_s = CACHED_S * num_sequences * context * beside + PAIR_S * num_tokens * (num_tokens / 2 + 300)
    both_s = products_s(num_sequences + num_tokens, num_sequences + 1) + attention_s
    assert ProfileCosts(replace(PROFILE, steps=steps)).step_s(load) == pytest.approx(both_s, rel=0.01)


def test_a_prompt_is_free_for_no_answer_even_where_answers_take_less_than_its_tokens():
    """As where a prompt was measured with what comes before its first token."""
    answers = Grid((1, 8), (0, 1000), ((0.010, 0.011), (0.011, 0.019)))
    costs = ProfileCosts(
        replace(PROFILE, steps=replace(PROFILE.steps, answers=answers, prompts=Grid((1,), (0,), ((0.05,),))))
    )
    assert costs.step_s(StepLoad(8, 8000, 64)) == pytest.approx(0.05 + 0.019 - 0.011)


def test_a_profile_is_read_as_it_was_saved(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == PROFILE


def test_a_profile_may_say_with_which_flags_it_was_measured(tmp_path):
    flags = {"quantization": "w8a8", "weights_memory_bytes": 5, "batch_invariant": True}
    replace(PROFILE, flags=flags).save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").flags == flags
    replace(PROFILE, flags={"dtype": [1]}).save(tmp_path / "profile.json")
    with pytest.raises(SettingsError, match="dtype of flags must be a text, a whole number, true or false"):
        read_profile(tmp_path / "profile.json")


def test_a_profile_may_say_what_nodes_take_from_each_other(tmp_path):
    path, steps = tmp_path / "profile.json", replace(PROFILE.steps, answers_alone_factor=0.9, prompts_alone_factor=0.7)
    replace(PROFILE, steps=steps).save(path)
    assert read_profile(path).steps == steps
    fields = json.loads(path.read_text())
    del fields["steps"]["answers_alone_factor"], fields["steps"]["prompts_alone_factor"]
    path.write_text(json.dumps(fields))  # as one of before
    assert read_profile(path) == PROFILE
    assert not PROFILE.steps.knows_neighbours


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), 2, "format"),
        (("model",), None, "model"),
        (("node",), [], "node"),
        (("node", "num_blocks"), 0, "num_blocks"),
        (("node", "overlap_min_tokens"), -1, "overlap_min_tokens"),
        (("steps", "attention_beside_factor"), 0, "attention_beside_factor"),
        (("steps", "overhead_s"), "1", "overhead_s"),
        (("steps", "answers_alone_factor"), 1.01, "answers_alone_factor.*at most 1"),
        (("steps", "prompts_alone_factor"), 0, "prompts_alone_factor"),
        (("steps", "answers", "rows"), [2, 1], "ascending"),
        (("steps", "answers", "columns"), [], "columns"),
        (("steps", "answers", "seconds"), [[0.1], [0.1, 0.2]], "a list of 1 numbers"),
        (("steps", "prompts", "seconds"), [[0.1]], "2 lists"),
        (("kv_transfer", "bytes_per_s"), 0, "bytes_per_s"),
        (("control", "message_s"), -0.1, "message_s"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_by_name(tmp_path, place, value, words):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    fields = json.loads(path.read_text())
    within = fields
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value
    path.write_text(json.dumps(fields))
    with pytest.raises(SettingsError, match=words):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}'])
def test_what_is_no_profile_at_all(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="--profile"):
        read_profile(path)


FLEET = FleetSize(2, 2)
SHARES = (0.05, 0.5, 0.95)
WIDE = Spread(SHARES, (0.6, 1.0, 3.0))
ANSWER, PROMPT = StepLoad(num_sequences=1), StepLoad(num_prompt_tokens=8)


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
    return simulate(profile, size, planned, max_concurrency=None, request_timeout_s=100.0, seed=seed).outcomes


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
    assert noise.step(5, PROMPT) == again.step(5, replace(PROMPT, num_sequences=3)) != noise.step(5, ANSWER)


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
