"""What steps take, learnt from steps that take what a formula says."""

from random import Random

import pytest

from serving_core.node.costs import StepCosts, StepLoad, StepWeights

# Of a step, an answer, a token before it, the first chunk, a token of a prompt, a pair; with several answers.
TRUE = (0.004, 0.0015, 2e-6, 0.003, 0.001, 1e-7, 0.002)


def load_of(num_sequences, num_cached, *chunks):
    load = StepLoad(num_sequences, num_cached)
    for start, num_tokens in chunks:
        load.add_chunk(start, num_tokens)
    return load


def true_s(load):
    return sum(weight * figure for weight, figure in zip(TRUE, load.figures, strict=True))


def some_load(random):
    num_sequences = random.randint(0, 8)
    chunks = [(random.randint(0, 2000), random.randint(1, 512)) for _ in range(random.randint(num_sequences == 0, 2))]
    return load_of(num_sequences, num_sequences * random.randint(10, 2000), *chunks)


def learnt(random, num_steps, noise=0.0, scale=1.0):
    costs = StepCosts()
    for _ in range(num_steps):
        load = some_load(random)
        costs.add(load, scale * true_s(load) * random.uniform(1 - noise, 1 + noise))
    return costs


def test_pairs_are_those_of_every_token_and_one_before_it():
    load = load_of(0, 0, (10, 4), (0, 2))
    counted = sum(10 + place + 0.5 for place in range(4)) + sum(place + 0.5 for place in range(2))
    assert (load.num_prompt_tokens, load.num_pairs) == (6, counted)


@pytest.mark.parametrize("seed", range(5))
def test_the_formula_is_found(seed):
    random = Random(seed)
    costs = learnt(random, 200)
    for _ in range(100):
        load = some_load(random)
        assert costs.step_s(load) == pytest.approx(true_s(load), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_noise_averages_out(seed):
    random = Random(seed)
    costs = learnt(random, 1000, noise=0.2)
    ratios = [costs.step_s(load) / true_s(load) for load in (some_load(random) for _ in range(200))]
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.05)
    assert all(0.7 < ratio < 1.3 for ratio in ratios)


def test_what_a_second_answer_takes_is_not_expected_of_each_further_one():
    """Steps of one to three answers tell what one of eight takes."""
    costs = StepCosts()
    for _ in range(30):
        for num_sequences in (1, 2, 3):
            load = load_of(num_sequences, num_sequences * 300)
            costs.add(load, true_s(load))
    load = load_of(8, 8 * 300)
    assert costs.step_s(load) == pytest.approx(true_s(load), rel=0.02)


@pytest.mark.parametrize(("seconds", "num_sequences"), [(0.009, 0), (0.011, 1), (0.017, 1), (0.0191, 2), (0.0251, 5)])
def test_the_answers_within_a_time_by_hand(seconds, num_sequences):
    """A step takes 8 ms, 2 ms for each answer, and 6 ms more where there are several: 10, 18, 20, 22, 24 ms."""
    assert StepWeights(0.008, 0.002, several_s=0.006).num_sequences_within(seconds, 0) == num_sequences


def test_a_node_that_has_become_slower_is_found_out():
    random = Random(1)
    costs = learnt(random, 300)
    for _ in range(1500):
        load = some_load(random)
        costs.add(load, 3 * true_s(load))
    load = load_of(4, 2000, (100, 200))
    assert costs.step_s(load) == pytest.approx(3 * true_s(load), rel=0.05)


def test_what_is_asked_in_between_changes_nothing():
    asked, unasked = StepCosts(), StepCosts()
    random = Random(2)
    for _ in range(200):
        load = some_load(random)
        for costs in (asked, unasked):
            costs.add(load, true_s(load))
        asked.step_s(load)
    assert list(asked.weights) == list(unasked.weights)


def test_before_the_first_step_prompts_take_what_was_measured_at_start():
    costs = StepCosts(start_tokens_per_s=500.0)
    assert costs.step_s(load_of(3, 900, (0, 100))) == pytest.approx(0.2)
    costs.add(load_of(2, 100), 0.01)  # says nothing of prompts
    assert costs.chunk_s(0, 100, is_first=True) == pytest.approx(0.2, rel=0.01)
    assert costs.step_s(load_of(2, 100)) == pytest.approx(0.01, rel=0.01)
    assert StepCosts().step_s(load_of(3, 900, (0, 100))) == 0.0


def test_no_weight_is_below_0():
    costs = StepCosts()
    for num_sequences, step_s in ((1, 0.02), (8, 0.01)):  # more answers in less time
        costs.add(load_of(num_sequences, 10 * num_sequences), step_s)
    assert all(weight >= 0 for weight in costs.weights)


def test_what_takes_less_for_more_is_explained_by_the_rest():
    """Two answers took less than one: such steps take about what they took, and not more for an answer's own weight."""
    costs = StepCosts()
    for _ in range(20):
        costs.add(load_of(1, 500), 0.020)
        costs.add(load_of(2, 500), 0.016)
    assert costs.step_s(load_of(1, 500)) == pytest.approx(0.018, rel=0.15)
    assert costs.step_s(load_of(2, 500)) == pytest.approx(0.018, rel=0.15)


def test_steps_that_are_alike_tell_of_steps_and_not_of_answers():
    """As long as no step has held more, more is not expected to cost what the step costs, many times over."""
    costs = StepCosts()
    for num_cached in range(400, 420):
        costs.add(load_of(1, num_cached), 0.020)
    assert costs.step_s(load_of(6, 2400)) < 0.024
    for num_sequences in range(1, 7):  # until one has
        costs.add(load_of(num_sequences, 400 * num_sequences), 0.014 + 0.006 * num_sequences)
    assert costs.step_s(load_of(6, 2400)) == pytest.approx(0.050, rel=0.1)


@pytest.mark.parametrize("start", [0, 700])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("seconds", [0.0035, 0.02, 0.3])
def test_the_longest_chunk_within_a_time_takes_just_that(start, is_first, seconds):
    costs = learnt(Random(3), 200)
    most = costs.num_tokens_within(seconds, start, is_first=is_first)
    whole = int(most)
    assert costs.chunk_s(start, whole, is_first=is_first) <= seconds * (1 + 1e-9) or whole == 0
    assert costs.chunk_s(start, whole + 1, is_first=is_first) > seconds


def test_a_chunk_is_worth_it_when_half_of_its_time_is_that_of_its_tokens():
    costs = learnt(Random(4), 200)
    num_tokens = costs.num_tokens_worth_it
    _, _, _, once_s, token_s, _, _ = costs.weights
    assert num_tokens * token_s == pytest.approx(once_s)
    assert StepCosts().num_tokens_worth_it == float("inf")


def test_where_tokens_cost_nothing_any_chunk_is_within_any_time():
    costs = StepCosts()
    assert costs.num_tokens_within(0.01, 5, is_first=True) == float("inf")
    assert costs.num_tokens_within(0.0, 5, is_first=True) == 0.0
