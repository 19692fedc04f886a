"""Which prompt comes first: the most in time, by brute force, the most important of them, and nobody left behind for
ever."""

import math
from itertools import combinations, permutations
from random import Random

import pytest

from prefill_node import scheduler
from prefill_node.chunk_budget import StepPace
from prefill_node.scheduler import PromptOrder
from serving_core.node.costs import StepCosts
from serving_core.node.requests import RequestState
from serving_core.slo import Due, timely
from tests.unit.serving_node.node_requests_kit import House

TOKEN_S = 0.5


def num_in_time(seconds, dues_s, sequence):
    """Of jobs that are done one after the other in this scheduler."""
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


def are_in_time(seconds, dues_s, places):
    """Whether all of these can be: then they are with the most urgent one first."""
    by_due = sorted(places, key=lambda place: dues_s[place])
    return num_in_time(seconds, dues_s, by_due) == len(by_due)


@pytest.mark.parametrize("seed", range(120))
def test_of_each_priority_as_many_are_in_time_as_there_is_time_for_beside_the_more_important(seed):
    random = Random(seed)
    seconds, dues_s = some_jobs(random)
    priorities = [random.randint(-1, 1) for _ in seconds]
    chosen = timely(seconds, dues_s, priorities)
    assert len(set(chosen)) == num_in_time(seconds, dues_s, chosen) == len(chosen)
    before = []
    for priority in (-1, 0, 1):
        level = [place for place, each in enumerate(priorities) if each == priority]
        sets = [each for size in range(len(level) + 1) for each in combinations(level, size)]
        most = max(len(each) for each in sets if are_in_time(seconds, dues_s, [*before, *each]))
        found = [place for place in chosen if priorities[place] == priority]
        assert len(found) == most
        before += found


@pytest.mark.parametrize("seed", range(40))
def test_nobody_steps_back_for_a_less_important_one(seed):
    random = Random(seed)
    seconds, dues_s = some_jobs(random)
    priorities = [random.randint(-1, 1) for _ in seconds]
    alone = timely(seconds, dues_s, priorities)
    more, dues_more = some_jobs(random)
    beside = timely(seconds + more, dues_s + dues_more, priorities + [2] * len(more))
    assert [place for place in beside if place < len(seconds)] == alone


def test_the_least_important_steps_back_and_of_equals_the_longest():
    assert timely([5, 2, 2], [5, 6, 7], [-1, 0, 0]) == [0, 2]  # 5, then 7; the longest alone would step back else
    assert timely([4, 4], [4, 4], [1, 0]) == [1]
    assert timely([10, 1, 1], [10, 10, 10], [0, 1, 1]) == [0]  # though without it two could be
    assert timely([10, 1, 1], [11, 10, 10], [0, 1, 1]) == [1, 0]
    assert timely([9, 2, 2], [10, 8, 8], [0, 1, 1]) == [0]  # two step back at once
    assert timely([5, 10, 3], [5, 12, 12], [1, 0, 0]) == [0, 2]  # nobody is late for one that steps back itself


class Prompts:
    """Prompts of 4 tokens, 2 s each, on one node."""

    def __init__(self):
        self.house = House(100)
        self.order = PromptOrder(StepCosts(1 / TOKEN_S))
        self.by_name = {}
        self.pace = StepPace(0.0, 1000, 1.0)

    def add(self, name, first_s=None, *, length=4, stage=RequestState.WAITING, **fields):
        node_request = self.house.add(name, len(self.by_name), stage, length, only_prefills=True, **fields)
        node_request.due = None if first_s is None else Due(first_s)
        self.by_name[name] = node_request
        return node_request

    def names(self, now=0.0):
        return [each.request.request_id for each in self.ordered(now)]

    def ordered(self, now=0.0):
        prompts = [each for each in self.by_name.values() if each.num_to_compute]
        return self.order.of(prompts, now, lambda: self.pace)

    def read(self, node_request, num_tokens=4):
        """A step computes so much of it."""
        if node_request.lease is None:
            assert self.house.leases.take(node_request, 4, num_cacheable=0, num_spare=0)
        self.order.record_plan([node_request.work(num_tokens)])


@pytest.fixture
def prompts():
    return Prompts()


def test_without_limits_the_oldest_is_first(prompts):
    for name in "abc":
        prompts.add(name)
    assert prompts.names() == ["a", "b", "c"]


def test_without_limits_the_lowest_priority_value_is_first_and_of_equals_the_oldest(prompts):
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        prompts.add(name, priority=priority)
    assert prompts.names() == ["c", "e", "a", "d", "b"]


def test_those_in_time_come_before_the_more_important_ones_that_need_not_be_or_cannot(prompts):
    prompts.add("unimportant", 9.0, priority=1)
    prompts.add("free", priority=0)
    prompts.add("late", 1.9, priority=-1)
    prompts.add("urgent", 3.0, priority=0)
    prompts.add("freer", priority=-1)
    assert prompts.names() == ["urgent", "unimportant", "late", "freer", "free"]
    prompts.add("long", 9.0, length=14, priority=-1)  # 7 s, so that there is no time for all
    assert prompts.names() == ["urgent", "long", "late", "freer", "free", "unimportant"]


def test_those_in_time_come_before_those_without_a_limit_and_those_that_are_late(prompts):
    for name, first_s in (("free", None), ("relaxed", 9.0), ("late", 1.9), ("urgent", 3.0), ("other", None)):
        prompts.add(name, first_s)
    assert prompts.names() == ["urgent", "relaxed", "free", "late", "other"]
    assert prompts.names(now=1.5) == ["relaxed", "free", "late", "urgent", "other"]


def test_what_is_computed_already_does_not_count(prompts):
    prompts.add("begun", 1.0, length=10, stage=RequestState.PREFILLING, num_computed=8)
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
    assert counts["waits"] / counts["timely"] == pytest.approx(scheduler.FLOOR, rel=0.05)


def test_the_oldest_that_others_are_read_before_gets_a_share_of_all_of_them(prompts):
    """Whatever its priority, and whether the others come first by theirs or by a limit."""
    prompts.add("oldest", priority=9)
    prompts.add("older", priority=8)
    urgent, important = prompts.add("urgent", 1e9), prompts.add("important", priority=-1)
    for _ in range(2):
        for each in (urgent, important) * 10:
            assert prompts.names() == ["urgent", "important", "older", "oldest"]
            prompts.read(each)
        prompts.read(important, 1)  # 81 tokens, of which 4 are a share
        assert prompts.names() == ["oldest", "urgent", "important", "older"]
        prompts.read(prompts.by_name["oldest"])


def test_nobody_is_owed_more_than_a_prompt(prompts):
    """However long one that comes first has to wait for blocks or a running slot."""
    oldest, urgent = prompts.add("oldest"), prompts.add("urgent", 1e9)
    prompts.add("older")
    for _ in range(50):
        prompts.names()
        prompts.read(urgent, 40)
    assert prompts.names() == ["oldest", "urgent", "older"]
    prompts.read(oldest)
    del prompts.by_name["oldest"]
    assert prompts.names() == ["urgent", "older"]


def test_what_the_oldest_gets_while_nobody_comes_before_it_is_its_share_too(prompts):
    prompts.add("oldest")
    urgent = prompts.add("urgent", 1e9)
    for _ in range(3):
        prompts.names()
        prompts.read(urgent, 60)
        assert prompts.names() == ["urgent", "oldest"]
        urgent.due = None
        assert prompts.names() == ["oldest", "urgent"]
        prompts.read(prompts.by_name["oldest"])
        urgent.due = Due(1e9)


def test_those_behind_older_ones_alone_earn_nothing(prompts):
    first = prompts.add("first", priority=-1)
    prompts.add("second")
    for _ in range(100):
        assert prompts.names() == ["first", "second"]
        prompts.read(first)


def test_nothing_is_earned_while_nobody_waits(prompts):
    timely_one = prompts.add("timely", 1e9)
    for _ in range(100):
        prompts.ordered()
        prompts.read(timely_one)
    prompts.add("late", -1.0)
    assert prompts.names() == ["timely", "late"]
