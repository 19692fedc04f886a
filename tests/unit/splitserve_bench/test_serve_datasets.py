"""Random loads, and what is cut to the length of the model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.datasets import Shape, fit, ordinary_ids, plan, random_load
from splitserve_bench.serve.traces import TracedRequest, trace_load


def test_fixed_lengths_and_equal_seeds():
    load = random_load(5, 7, 3, 0.0, 100, random.Random(1))
    assert [(len(shape.prompt), shape.output_tokens) for shape in load] == [(7, 3)] * 5
    assert load == random_load(5, 7, 3, 0.0, 100, random.Random(1))
    assert len({shape.prompt for shape in load}) == 5
    assert load != random_load(5, 7, 3, 0.0, 100, random.Random(2))


def test_a_shared_beginning_comes_before_what_each_prompt_has_of_its_own():
    load = random_load(20, 7, 3, 0.4, 5000, random.Random(1), prefix_tokens=30)
    (prefix,) = {shape.prompt[:30] for shape in load}
    assert {len(shape.prompt) for shape in load} <= set(range(30 + 4, 30 + 11))
    assert len({shape.prompt[30] for shape in load}) > 15
    assert len(set(prefix)) > 25
    assert load != random_load(20, 7, 3, 0.4, 5000, random.Random(2), prefix_tokens=30)


def test_lengths_are_spread_over_the_whole_range():
    load = random_load(3000, 10, 5, 0.25, 50, random.Random(3))
    prompts = [len(shape.prompt) for shape in load]
    answers = [shape.output_tokens for shape in load]
    assert set(prompts) == set(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert set(answers) == set(range(3, 8))  # floor(3.75) to ceil(6.25)
    assert all(abs(prompts.count(length) - 3000 / 7) < 100 for length in range(7, 14))


def test_no_length_is_0():
    load = random_load(200, 1, 1, 0.9, 50, random.Random(4))
    assert {len(shape.prompt) for shape in load} == {shape.output_tokens for shape in load} == {1, 2}


def test_prompts_share_their_ids():
    """An int of its own for each token would take four times the rest of a prompt."""
    ids = {id(each) for each in ordinary_ids(50_000)}
    drawn = random_load(4, 500, 1, 0.0, 50_000, random.Random(0))
    traced = trace_load([TracedRequest(0.0, 300, 1), TracedRequest(0.0, 300, 1, hash_ids=(1, 2))], 50_000, 0)
    assert {id(token) for shape in (*drawn, *traced) for token in shape.prompt} <= ids


def test_ids_keep_away_from_both_ends():
    assert ordinary_ids(128_256) == tuple(range(1024, 127_232))  # Llama 3: special from 128,000 on
    assert ordinary_ids(151_936) == tuple(range(1024, 150_912))  # Qwen: special from 151,643 on
    assert ordinary_ids(260) == tuple(range(32, 228))
    assert ordinary_ids(1) == tuple(range(1))
    ids = {each for shape in random_load(200, 100, 1, 0.0, 260, random.Random(5)) for each in shape.prompt}
    assert ids == set(range(32, 228))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"range_ratio": 1.0}, r"in \[0, 1\), not 1"),
        ({"range_ratio": -0.1}, r"in \[0, 1\), not -0.1"),
        ({"input_tokens": 0}, "at least 1 token, not 0"),
        ({"output_tokens": -3}, "at least 1 token, not -3"),
        ({"vocab_size": 0}, "has 1 to 4194304 tokens, not 0"),
        ({"vocab_size": 2**40}, "has 1 to 4194304 tokens, not 1099511627776"),
    ],
)
def test_what_cannot_be_a_load(change, message):
    usual = {"num_requests": 1, "input_tokens": 4, "output_tokens": 4, "range_ratio": 0.5, "vocab_size": 9}
    with pytest.raises(BenchError, match=message):
        random_load(**(usual | change), rng=random.Random())


@pytest.mark.parametrize(
    ("prompt", "answer", "fitted"),
    [
        (6, 4, (6, 4)),
        (90, 4, (6, 4)),  # a short answer stays as it is
        (3, 90, (3, 7)),  # and so does a short prompt
        (90, 90, (5, 5)),
        (9, 2, (8, 2)),
    ],
)
def test_what_is_too_long_is_cut_to_the_limit(prompt, answer, fitted):
    shape = Shape(tuple(range(prompt)), answer)
    load = fit([shape], 10)
    assert load.shapes == (Shape(tuple(range(fitted[0])), fitted[1]),)
    assert load.num_clipped == (fitted != (prompt, answer))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20), st.integers(2, 60))
def test_fitted_loads_fit_and_keep_what_fits(lengths, max_model_len):
    shapes = [Shape(tuple(range(prompt)), answer) for prompt, answer in lengths]
    load = fit(iter(shapes), max_model_len)
    too_long = [len(shape.prompt) + shape.output_tokens > max_model_len for shape in shapes]
    assert load.num_clipped == sum(too_long)
    for before, after, was_long in zip(shapes, load.shapes, too_long, strict=True):
        assert min(len(after.prompt), after.output_tokens) >= 1
        assert after.prompt == before.prompt[: len(after.prompt)]
        assert len(after.prompt) + after.output_tokens == max_model_len if was_long else after == before


def test_a_model_without_room():
    with pytest.raises(BenchError, match="1 tokens has no room"):
        fit([], 1)


def test_a_plan_gives_each_shape_its_time():
    shapes = [Shape((1, 2), 3), Shape((4,), 5)]
    first, second = plan(shapes, [0.5, 1.5])
    assert (first.index, first.send_at_s, first.prompt, first.output_tokens) == (0, 0.5, (1, 2), 3)
    assert (second.index, second.send_at_s, second.prompt, second.output_tokens) == (1, 1.5, (4,), 5)
    with pytest.raises(ValueError, match="shorter"):
        plan(shapes, [0.5])
