"""Profiles: files and their numbers."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import SettingsError
from splitserve_bench.simulate.costs import ProfileCosts, StepLoad
from splitserve_bench.simulate.profile import Grid, read_profile
from tests.unit.splitserve_bench.simulate_kit import PROFILE

PLANE = Grid((1, 2, 4), (10, 30), tuple(tuple(row + column / 10 for column in (10, 30)) for row in (1, 2, 4)))


@given(row=st.floats(1, 20), column=st.floats(10, 200))
def test_a_plane_is_a_plane_between_its_places_and_beyond(row, column):
    assert PLANE.at(row, column) == pytest.approx(row + column / 10)


def test_before_the_first_place_it_is_as_at_the_first():
    assert PLANE.at(0.1, 20) == PLANE.at(1, 20) == 3
    assert PLANE.at(2, 1) == PLANE.at(2, 10) == 3


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
@pytest.mark.parametrize("num_answers", [1, 31, 128, 256])
@pytest.mark.parametrize("num_tokens", [2, 96, 256])
@pytest.mark.parametrize("context", [0, 700])
def test_a_step_of_both_has_the_products_of_all_its_tokens_and_both_attentions(
    num_answers, num_tokens, context, beside
):
    answers = [[products_s(num, num) + CACHED_S * num * each for each in CONTEXTS] for num in PLACES]
    prompts = [[products_s(num, 1) + PAIR_S * num * (num / 2 + each) for each in CONTEXTS] for num in PLACES]
    grids = {
        name: Grid(PLACES, CONTEXTS, tuple(map(tuple, seconds)))
        for name, seconds in (("answers", answers), ("prompts", prompts))
    }
    steps = replace(PROFILE.steps, **grids, attention_beside_factor=beside)
    load = StepLoad(num_answers, num_answers * context, num_tokens, num_before=300 * num_tokens)
    attention_s = CACHED_S * num_answers * context * beside + PAIR_S * num_tokens * (num_tokens / 2 + 300)
    both_s = products_s(num_answers + num_tokens, num_answers + 1) + attention_s
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
        (("corridor", "bytes_per_s"), 0, "bytes_per_s"),
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
