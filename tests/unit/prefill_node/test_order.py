"""Which prompt comes first: the most in time, by brute force, and nobody left behind for ever."""

import math
from itertools import permutations
from random import Random

import pytest

from prefill_node import order
from prefill_node.order import Order, timely
from serving_core.costs import StepCosts
from serving_core.due import Due
from serving_core.residents import Stage
from tests.unit.serving_node.residents_kit import House

TOKEN_S = 0.5


def num_in_time(seconds, dues_s, sequence):
    """Of jobs that are done one after the other in this order."""
    passed_s = found = 0
    for index in sequence:
        passed_s += seconds[index]
        found += passed_s <= dues_s[index]
    return found


def some_jobs(random):
    count = random.randint(1, 8 if random.random() < 0.2 else 6)
    seconds = [random.randint(1, 9) for _ in range(count)]
    return seconds, [random.randint(-2, random.choice([9, 40])) for _ in range(count)]


@pytest.mark.parametrize("seed", range(60))
def test_no_order_has_more_in_time(seed):
    seconds, dues_s = some_jobs(Random(seed))
    chosen = timely(seconds, dues_s)
    assert len(set(chosen)) == num_in_time(seconds, dues_s, chosen) == len(chosen)
    most = max(num_in_time(seconds, dues_s, each) for each in permutations(range(len(seconds))))
    assert len(chosen) == most


def test_the_most_urgent_is_first_and_of_equals_the_first():
    assert timely([1, 1, 1, 1], [9, 3, 9, 5]) == [1, 3, 0, 2]
    assert timely([], []) == []


def test_the_longest_steps_back_where_not_all_can_be_in_time():
    assert timely([5, 2, 2], [5, 6, 7]) == [1, 2]
    assert timely([4, 4], [4, 4]) == [0]  # of equals the last
    assert timely([1.0], [0.5]) == []


class Prompts:
    """Prompts of 4 tokens, 2 s each, on one node."""

    def __init__(self):
        self.house = House(100)
        self.order = Order(StepCosts(1 / TOKEN_S))
        self.by_name = {}

    def add(self, name, first_s=None, *, length=4, stage=Stage.QUEUED, **fields):
        due = None if first_s is None else Due(first_s)
        resident = self.house.add(name, len(self.by_name), stage, length, hands_over=True, **fields)
        resident.due = due
        self.by_name[name] = resident
        return resident

    def names(self, now=0.0):
        return [each.request.request_id for each in self.ordered(now)]

    def ordered(self, now=0.0):
        prompts = [each for each in self.by_name.values() if each.num_to_compute]
        return self.order.of(prompts, now)

    def read(self, resident, num_tokens=4):
        """A step computes so much of it."""
        if resident.lease is None:
            assert self.house.leases.take(resident, 4, num_cacheable=0, num_spare=0)
        self.order.took([resident.work(num_tokens)])


@pytest.fixture
def prompts():
    return Prompts()


def test_without_limits_the_oldest_is_first(prompts):
    for name in "abc":
        prompts.add(name)
    assert prompts.names() == ["a", "b", "c"]


def test_those_in_time_come_before_those_without_a_limit_and_those_that_are_late(prompts):
    for name, first_s in (("free", None), ("relaxed", 9.0), ("late", 1.9), ("urgent", 3.0), ("other", None)):
        prompts.add(name, first_s)
    assert prompts.names() == ["urgent", "relaxed", "free", "late", "other"]
    assert prompts.names(now=1.5) == ["relaxed", "free", "late", "urgent", "other"]


def test_what_is_computed_already_does_not_count(prompts):
    prompts.add("begun", 1.0, length=10, stage=Stage.READING, num_computed=8)
    assert prompts.names() == ["begun"]
    prompts.add("free")
    prompts.add("new", 3.0)
    assert prompts.names() == ["begun", "new", "free"]
    assert prompts.names(now=0.5) == ["new", "begun", "free"]


def test_one_whose_answer_has_begun_is_as_urgent_as_its_next_token(prompts):
    prompts.add("first", 50.0)
    again = prompts.add("again", 0.0)
    again.due = Due(0.0, 3.0, began_s=10.0)
    again.request.num_prompt_tokens -= 2  # tokens of the answer, which are read again
    assert again.due.token_s(2) == 16.0
    assert prompts.names(now=13.0) == ["again", "first"]
    assert prompts.names(now=15.0) == ["first", "again"]


def test_those_that_stepped_back_get_a_share(prompts):
    prompts.add("waits")
    prompts.add("late", -1.0)
    counts = {"waits": 0, "timely": 0}
    timely_one = prompts.add("timely", math.inf)
    for step in range(2000):
        timely_one.due = Due(step + 10.0)  # ever another one
        first = prompts.ordered(float(step))[0]
        prompts.read(first)
        counts[first.request.request_id] += 1
    assert counts["waits"] / counts["timely"] == pytest.approx(order.FLOOR, rel=0.05)


def test_nothing_is_earned_while_nobody_waits(prompts):
    timely_one = prompts.add("timely", 1e9)
    for _ in range(100):
        prompts.ordered()
        prompts.read(timely_one)
    prompts.add("late", -1.0)
    assert prompts.names() == ["timely", "late"]
