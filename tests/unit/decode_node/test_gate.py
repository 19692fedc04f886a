"""When draft tokens are worth their time, by numbers worked out by hand."""

import math

import pytest

from decode_node.speculation import (
    BUDGET_S,
    BUDGET_SHARE,
    FIRST_SHARE,
    FORGET_STEPS,
    LEAST_STEPS,
    MARGIN,
    MOST_GAINED_S,
    NUM_RECENT,
    Budget,
    DraftCosts,
    Record,
)


def gate_with(num_sequences=1, step_s=0.010):
    costs = DraftCosts()
    for _ in range(LEAST_STEPS):
        costs.record_step(num_sequences, 0, step_s)
    return costs


def test_nothing_is_worth_it_before_a_step_was_measured():
    costs = DraftCosts()
    assert costs.least_probability(1) == math.inf
    for _ in range(LEAST_STEPS - 1):
        costs.record_step(1, 0, 0.010)
    assert costs.least_probability(1) == math.inf
    costs.record_step(1, 0, 0.010)
    assert costs.least_probability(1) == FIRST_SHARE
    assert costs.least_probability(2) == math.inf


def test_a_draft_token_is_worth_a_tokens_time():
    """A step of 10 ms that takes 14 ms with 4 draft tokens: 1 ms each. Alone, a token takes 10 ms."""
    costs = gate_with()
    costs.record_step(1, 4, 0.014)
    assert costs.least_probability(1) == pytest.approx(MARGIN * 0.1)


def test_of_many_answers_a_token_takes_less():
    """20 ms for 16 answers are 1.25 ms a token: a draft token that takes 1 ms has to come four times out of five."""
    costs = gate_with(16, 0.020)
    costs.record_step(16, 10, 0.030)
    assert costs.least_probability(16) == pytest.approx(MARGIN * 0.8)


def test_what_was_measured_is_forgotten_where_it_forbids_everything():
    costs = gate_with(16, 0.020)
    for _ in range(NUM_RECENT):
        costs.record_step(16, 10, 0.060)
    assert costs.least_probability(16) > 1
    for _ in range(NUM_RECENT * FORGET_STEPS):
        costs.record_step(16, 0, 0.020)
    assert costs.least_probability(16) == FIRST_SHARE


def test_an_odd_step_tells_little():
    costs = gate_with()
    for step_s in (0.012, 0.012, 0.900, 0.012, 0.012):
        costs.record_step(1, 2, step_s)
    assert costs.least_probability(1) == pytest.approx(MARGIN * 0.1)


def test_the_longer_the_match_the_likelier():
    """Of nothing known: n tokens that match make n / (n + 2)."""
    record = Record()
    assert [record.probability(num) for num in (3, 6, 30)] == pytest.approx([0.6, 0.75, 30 / 32])


def test_what_came_tells_more():
    """Behind 3 tokens, whose say weighs 1.5 at 0.6: after 4 of 4 (4 + 0.9) / 5.5; then none of 4: (3.6 + 0.9) / 6.1."""
    record = Record()
    record.add(4, 4)
    assert record.probability(3) == pytest.approx(4.9 / 5.5)
    record.add(4, 0)
    assert record.probability(3) == pytest.approx(4.5 / 6.1)


def test_how_many_in_a_row_are_worth_it():
    """At 0.75 each, three come with 0.42 and four with 0.32."""
    record = Record()
    assert record.num_worth_it(6, 0.4, 8) == 3
    assert record.num_worth_it(6, 0.3, 8) == 4
    assert record.num_worth_it(6, 0.3, 2) == 2
    assert record.num_worth_it(6, 0.8, 8) == 0
    assert record.num_worth_it(6, 0.75, 8) == 1
    assert record.num_worth_it(6, 0.0, 8) == 8


def test_draft_tokens_that_never_come_end_soon():
    """Where each takes a tenth of a step, a loss of two steps' time is the most until there are none any more."""
    record, num_computed = Record(), 0
    for _ in range(200):
        num = record.num_worth_it(3, MARGIN * 0.1, 8)
        if num:
            record.add(num, 0)
        num_computed += num
    assert num_computed * 0.1 < 2
    assert record.num_worth_it(3, MARGIN * 0.1, 8) == 0
    assert record.num_worth_it(32, MARGIN * 0.1, 8) > 0


def test_a_draft_models_draft_tokens_are_to_be_worth_its_time_too():
    """A step of 10 ms: it takes 2 ms to write a token for one answer, at first as it said itself, and a draft token
    makes the step 1 ms longer."""
    costs = gate_with()
    assert costs.least_probability_of_drafts(1, 0.002) == FIRST_SHARE
    assert costs.least_probability_of_drafts(1, 0.009) == pytest.approx(MARGIN * 0.9)
    costs.record_step(1, 4, 0.014)
    assert costs.least_probability_of_drafts(1, 0.002) == pytest.approx(MARGIN * 0.3)
    costs.drafted(1, 4, 0.012)
    assert costs.least_probability_of_drafts(1, 0.002) == pytest.approx(MARGIN * 0.4)
    assert costs.least_probability(1) == pytest.approx(MARGIN * 0.1)


def test_it_writes_for_many_answers_at_once():
    """20 ms for 16 answers, for which it takes 4 ms together: a fifth of what their tokens take, if all have one."""
    costs = gate_with(16, 0.020)
    costs.record_step(16, 16, 0.024)
    assert costs.least_probability_of_drafts(16, 0.004) == pytest.approx(MARGIN * 0.4)
    costs.drafted(16, 32, 0.016)
    assert costs.least_probability_of_drafts(16, 0.004) == pytest.approx(MARGIN * 0.6)
    for _ in range(FORGET_STEPS):
        costs.record_step(16, 0, 0.020)
    assert costs.least_probability_of_drafts(16, 0.004) == FIRST_SHARE


def test_a_budget_grows_by_the_time_of_steps_and_by_what_was_gained():
    budget = Budget()
    budget.add(-BUDGET_S - 0.1)
    assert not budget.is_open
    budget.record_step(0.1 / BUDGET_SHARE * 0.9)
    assert not budget.is_open
    budget.record_step(0.1 / BUDGET_SHARE * 0.2)
    assert budget.is_open
    budget.record_step(1e6)
    budget.add(-BUDGET_S)
    assert not budget.is_open
    budget.add(1e6)
    budget.record_step(1.0)
    budget.add(-MOST_GAINED_S)
    assert not budget.is_open


def test_what_is_expected_weighs_against_what_came():
    """Of 4 and none, and 0.5 that weighs two draft tokens: (4 + 1) / (4 + 2), then (3.6 + 1) / (3.6 + 1 + 2)."""
    record = Record()
    record.add(4, 4)
    assert record.expected(0.5, 2) == pytest.approx(5 / 6)
    record.add(4, 0)
    assert record.expected(0.5, 2) == pytest.approx(4.6 / 6.6)
    record.forget()
    assert record.expected(0.5, 2) == pytest.approx((0.9 * 3.6 + 1) / (0.9 * 4.6 + 2))
