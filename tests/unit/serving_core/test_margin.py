"""The factor from predictions to what they rarely exceed, against the samples themselves."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.slo import MAX_FACTOR, NUM_PRIOR, PRIOR_FACTOR, QUANTILE, WINDOW, Margin

RATIOS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=3 * WINDOW)


def learnt(ratios, predicted_s=1.0):
    margin = Margin()
    for ratio in ratios:
        margin.note(predicted_s, ratio * predicted_s)
    return margin


@given(RATIOS)
def test_few_of_the_latest_predictions_were_exceeded_by_more(ratios):
    """And no factor is larger than the errors are."""
    latest = [*[PRIOR_FACTOR] * NUM_PRIOR, *ratios][-WINDOW:]
    factor = learnt(ratios).factor
    if factor < MAX_FACTOR:
        assert sum(each > factor for each in latest) <= (1 - Fraction(str(QUANTILE))) * len(latest)
    assert 1 <= factor <= min(MAX_FACTOR, max(1.0, *latest))


@given(RATIOS, st.randoms())
def test_neither_their_order_counts_nor_what_has_left_the_window(ratios, rng):
    latest = (ratios * WINDOW)[-WINDOW:]
    shuffled = rng.sample(latest, WINDOW)
    assert learnt([50.0, *shuffled]).factor == learnt(latest).factor


@given(RATIOS, st.integers(-8, 8))
def test_it_is_of_errors_however_long_what_is_predicted(ratios, power):
    assert learnt(ratios, 2.0**power).factor == learnt(ratios).factor


def test_what_is_always_over_sooner_than_predicted_needs_no_margin():
    assert learnt([0.5] * WINDOW).factor == 1.0


@given(st.floats(1.0, MAX_FACTOR / 2))
def test_it_widens_within_a_few_samples_and_narrows_with_the_window(ratio):
    margin = learnt([ratio] * WINDOW)
    assert margin.factor == ratio
    for _ in range(3):
        margin.note(1.0, 2 * ratio)
    assert margin.factor == 2 * ratio
    for _ in range(WINDOW):
        margin.note(1.0, ratio)
    assert margin.factor == ratio


def test_one_outlier_of_many_changes_nothing():
    assert learnt([*[1.2] * WINDOW, 100.0]).factor == 1.2


@pytest.mark.parametrize("prior", [None, 1.0, 1.5])
def test_what_is_assumed_before_the_first_sample_leaves_the_window_with_it(prior):
    margin = Margin() if prior is None else Margin(prior_factor=prior)
    assert margin.factor == (prior or PRIOR_FACTOR)
    margin.note(1.0, 0.9)
    assert margin.factor == (prior or PRIOR_FACTOR), "one sample says less than what is assumed"
    for _ in range(WINDOW):
        margin.note(1.0, 0.9)
    assert margin.factor == 1.0


def test_of_the_first_samples_a_rare_one_is_known_as_such():
    assert learnt([1.0, 5.0, 1.0]).factor == PRIOR_FACTOR


@pytest.mark.parametrize("predicted_s", [0.0, -1.0])
def test_a_prediction_of_no_time_says_nothing(predicted_s):
    margin = learnt([1.3] * WINDOW)
    for _ in range(WINDOW):
        margin.note(predicted_s, 5.0)
    assert margin.factor == 1.3
