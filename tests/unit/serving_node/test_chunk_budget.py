"""Chunks of prompts beside answers with limits: by example, and over thousands of seeded schedules."""

from random import Random

import pytest

from prefill_node import chunk_budget as chunk_budget
from serving_core import slo
from serving_core.node.costs import StepCosts
from tests.effort import effort, few
from tests.unit.serving_node.slack_kit import BUDGET, Asked, Clocked, ExactCosts

# Of a step, an answer, a token before it, the first chunk, a token of a prompt, a pair: a small model on one core.
WEIGHTS = (0.0065, 0.0015, 1e-6, 0.0034, 0.00105, 2e-8, 0.0)
SLOTS = 8
SLOWEST_S = 0.0065 + SLOTS * (0.0015 + 2000 * 1e-6)  # a step of answers alone, of whatever is asked here
ROUNDING_S = 1e-9


def some_load(random, tpot_s, *, most=14):
    """Prompts of any length that come in bursts; `tpot_s` draws the limits."""
    load, at_s = [], 0.0
    for _ in range(random.randint(4, most)):
        at_s += random.choice((0.0, random.expovariate(5.0)))
        num_prompt_tokens = min(1200, int(random.lognormvariate(4.5, 1.0)) + 1)
        load.append(Asked(at_s, num_prompt_tokens, random.randint(1, 40), tpot_s()))
    return load


def clocked(costs=None, **options):
    return Clocked(WEIGHTS, costs or ExactCosts(WEIGHTS), slots=SLOTS, **options)


def chunks(steps):
    return [step.num_prompt_tokens for step in steps]


def one_beside(tpot_s, *, num_tokens=300, num_prompt_tokens=1000):
    """The chunks of a prompt that comes when an answer has been written for a while, and the two."""
    node = clocked()
    answer, prompt = Asked(0.0, 10, num_tokens, tpot_s), Asked(0.2, num_prompt_tokens, 1)
    return [each for each in chunks(node.run([answer, prompt])) if each][1:], answer, prompt


def test_without_limits_chunks_are_as_long_as_the_budget():
    found, _, _ = one_beside(None)
    assert found == [BUDGET - 1, 1000 - BUDGET + 1]


def test_a_loose_limit_leaves_the_budget_as_it_is():
    found, answer, _ = one_beside(5.0)
    assert found == [BUDGET - 1, 1000 - BUDGET + 1]
    assert answer.spent_s < answer.allowed_s


def test_a_tight_limit_makes_chunks_as_long_as_what_is_in_the_bank():
    found, answer, prompt = one_beside(0.016)
    assert answer.spent_s <= answer.allowed_s
    assert len(prompt.times_s) == 1
    assert sum(found) == 1000
    assert max(found) < 300
    assert min(found[:-1]) >= chunk_budget.LEAST_TOKENS
    banked_s = (0.2 / 0.008 - 1) * (0.016 - 0.008)  # by some 24 tokens, each half of its time ahead
    assert found[0] == pytest.approx(banked_s / slo.PRIOR_FACTOR / 0.00105, rel=0.15)


def test_where_every_chunk_costs_much_chunks_are_long():
    """A device that takes as long for one token as for hundreds."""
    weights = (0.02, 0.001, 0.0, 0.048, 0.0001, 0.0, 0.0)
    node = Clocked(weights, ExactCosts(weights))
    answer, prompt = Asked(0.0, 10, 300, 0.04), Asked(0.2, 1500, 1)
    found = [each for each in chunks(node.run([answer, prompt])) if each][1:]
    assert answer.spent_s <= answer.allowed_s
    assert sum(found) == 1500
    assert min(found[:-1]) >= 480


def test_an_answer_that_is_lost_holds_nobody_up():
    found, answer, _ = one_beside(0.004)  # half of what a step takes
    assert found == [BUDGET - 1, 1000 - BUDGET + 1]
    assert answer.spent_s > answer.allowed_s


def test_prompts_are_held_back_but_never_starved(monkeypatch):
    """Where the answer has nothing to give, prompts get their share of the time all the same."""
    monkeypatch.setattr(slo.Margin, "factor", 1e3)
    found, _, prompt = one_beside(0.016, num_tokens=8000, num_prompt_tokens=200)
    chunks_s = len(found) * WEIGHTS[3] + 200 * WEIGHTS[4]
    waited_s = prompt.times_s[0] - prompt.at_s
    assert chunks_s / waited_s == pytest.approx(chunk_budget.PROMPT_TIME_SHARE, rel=0.1)


def test_one_that_would_catch_up_is_let():
    """What is late after a long pause is in time again after some tokens, unless chunks keep it late."""
    node = clocked()
    answer, prompt = Asked(0.0, 10, 60, 0.012), Asked(0.05, 400, 1)
    steps = node.run([answer, prompt])
    next(steps)
    (node_request,) = node.scheduler.node_requests
    node_request.due.began_s -= 0.02  # its KV was on its way so long
    late_s = [step.ended_s - step.due_s[0] for step in steps if step.due_s]
    assert late_s[0] > 0
    assert late_s[-1] <= 0
    assert len(prompt.times_s) == 1


def check_step(step):
    """No token that could have been in time without the chunks is late."""
    for due_s in step.due_s:
        assert step.bare_end_s > due_s + ROUNDING_S or step.ended_s <= due_s + ROUNDING_S, step


def exact_schedule(seed, monkeypatch):
    monkeypatch.setattr(chunk_budget, "PROMPT_TIME_SHARE", 0.0)
    random = Random(seed)
    node = clocked()

    def any_limit():
        return random.choice((None, random.uniform(0.2, 4.0) * SLOWEST_S))

    for step in node.run(some_load(random, any_limit)):
        check_step(step)
    assert all(len(each.times_s) == each.num_tokens for each in node.asked)


def kept_schedule(seed, monkeypatch):
    monkeypatch.setattr(chunk_budget, "PROMPT_TIME_SHARE", 0.0)
    random = Random(seed)
    node = clocked()
    for _ in node.run(some_load(random, lambda: random.uniform(1.001, 3.0) * SLOWEST_S)):
        pass
    for each in node.asked:
        assert each.spent_s <= each.allowed_s + ROUNDING_S


some_seeds = pytest.mark.parametrize("first_seed", few(range(0, 4000, 25)))


@some_seeds
def test_with_exact_costs_no_token_is_late_because_of_a_chunk(first_seed, monkeypatch):
    for seed in range(first_seed, first_seed + 25):
        exact_schedule(seed, monkeypatch)


@some_seeds
def test_with_exact_costs_every_limit_that_steps_alone_would_keep_is_kept(first_seed, monkeypatch):
    for seed in range(first_seed, first_seed + 25):
        kept_schedule(seed, monkeypatch)


def noisy_misses(seed, costs):
    """Answers with limits, and those of them that chunks have made late."""
    random = Random(seed)
    node = clocked(costs, noise=lambda: random.uniform(0.8, 1.2))
    for _ in node.run(some_load(random, lambda: random.uniform(1.0, 3.0) * SLOWEST_S)):
        pass
    judged = [each for each in node.asked if each.num_tokens > 1]
    late = [each for each in judged if each.allowed_s < each.spent_s <= each.allowed_s + each.spared_s]
    return len(judged), len(late)


def learnt():
    """By a node that has served for a while."""
    costs, random = StepCosts(), Random(0)
    node = clocked(costs, noise=lambda: random.uniform(0.8, 1.2))
    for _ in node.run(some_load(random, lambda: None)):
        pass
    return costs


@pytest.mark.parametrize("model", [lambda: ExactCosts(WEIGHTS), learnt], ids=["known", "learnt"])
def test_where_steps_take_a_fifth_more_or_less_chunks_make_next_to_nobody_late(model):
    num_judged = num_late = 0
    for seed in range(effort(60, 100, 300)):
        found = noisy_misses(seed, model())
        num_judged, num_late = num_judged + found[0], num_late + found[1]
    assert num_late / num_judged <= 0.01, (num_late, num_judged)
