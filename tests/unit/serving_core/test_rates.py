"""Rates over recent steps, by numbers worked out by hand."""

import pytest

from serving_core.node.costs import StepRates


def test_nothing_is_known_before_the_first_step():
    rates = StepRates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)
    rates.add(0, 0, 0.0)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)


def test_the_rate_at_start_holds_until_steps_outweigh_it():
    rates = StepRates(start_tokens_per_s=1000.0)
    assert rates.prefill_tokens_per_s == 1000.0
    rates.add(100, 0, 0.05)  # 2000 a second, and less than the 256 tokens of the start
    assert rates.prefill_tokens_per_s == 1000.0
    rates.add(200, 0, 0.1)
    assert rates.prefill_tokens_per_s == pytest.approx(2000.0)


def test_the_median_is_weighted_by_tokens():
    rates = StepRates()
    for _ in range(3):
        rates.add(20, 0, 0.2)  # 100 a second, 60 tokens together
    rates.add(100, 0, 0.1)  # 1000 a second
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)


def test_a_mixed_step_is_rid_of_the_usual_time_of_its_decoding_requests():
    rates = StepRates()
    rates.add(90, 4, 0.13)
    assert rates.prefill_tokens_per_s == pytest.approx(90 / 0.13)  # no better is known
    for step_s in (0.02, 0.04, 0.9):
        rates.add(0, 4, step_s)
    rates.add(0, 9, 0.08)
    assert rates.prefill_tokens_per_s == pytest.approx(90 / (0.13 - 0.04))
    rates.add(900, 8, 0.98)  # nearest to 8 are the steps of 9
    assert rates.prefill_tokens_per_s == pytest.approx(900 / (0.98 - 0.08))


def test_of_numbers_equally_near_both_count():
    rates = StepRates()
    rates.add(0, 2, 0.02)
    rates.add(0, 4, 0.04)
    rates.add(100, 3, 0.13)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)  # 0.03 s are the usual time of 3


def test_steps_of_few_prompt_tokens_count_only_alone():
    rates = StepRates()
    rates.add(15, 0, 0.15)
    assert rates.prefill_tokens_per_s == pytest.approx(100.0)
    rates.add(16, 0, 0.016)
    for _ in range(200):
        rates.add(15, 0, 0.15)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)


def test_what_took_no_longer_than_decoding_tells_nothing():
    rates = StepRates()
    rates.add(0, 1, 0.1)
    rates.add(50, 1, 0.1)
    rates.add(50, 1, 0.09)
    assert rates.prefill_tokens_per_s == 0.0
    rates.add(50, 0, 0.5)
    assert rates.prefill_tokens_per_s == pytest.approx(100.0)


def test_old_steps_are_forgotten():
    rates = StepRates(start_tokens_per_s=1.0)
    for _ in range(64):
        rates.add(100, 0, 0.1)
        rates.add(0, 1, 0.2)
    for _ in range(64):
        rates.add(100, 0, 0.05)
        rates.add(0, 1, 0.3)
    assert rates.prefill_tokens_per_s == pytest.approx(2000.0)
    assert rates.decode_step_s == pytest.approx(0.3)


def test_the_step_of_one_request_alone_is_remembered_however_busy_the_node_is():
    rates = StepRates()
    assert rates.lone_step_s == 0.0
    rates.add(0, 3, 0.05)
    rates.add(0, 5, 0.07)
    assert rates.lone_step_s == 0.05  # the nearest to 1 that there was
    for step_s in (0.01, 0.03, 0.02):
        rates.add(0, 1, step_s)
    rates.add(100, 1, 1.0)
    for _ in range(200):
        rates.add(0, 8, 0.09)
    assert rates.lone_step_s == pytest.approx(0.02)


def test_the_decode_step_is_the_median_of_those_that_only_decode():
    rates = StepRates()
    for step_s in (0.01, 0.03, 0.02):
        rates.add(0, 2, step_s)
        rates.add(500, 2, 1.0)
        rates.add(1, 2, 1.0)
    assert rates.decode_step_s == pytest.approx(0.02)
