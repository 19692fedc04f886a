"""Which tokens of which prompt a step computes."""

import pytest

from prefill_node import chunk_budget as chunk_budget
from prefill_node.scheduler import MAX_SCORED_TOKENS, PrefillScheduler, num_cacheable
from serving_core.node.costs import StepCosts
from serving_core.node.requests import RequestEvent, RequestState
from serving_core.requests import SampledToken, SamplingParams
from serving_core.slo import PRIOR_FACTOR, Due
from tests.unit.serving_node.node_requests_kit import House


def make(num_blocks=32, tokens_per_s=0.0):
    house = House(num_blocks)
    return house, PrefillScheduler(house.node_requests, house.leases, StepCosts(tokens_per_s), max_num_queued=100)


def plan(house, reading, budget, *, slots=(), start=None):
    """Names of those that ask for a running slot and do not get one: `running slots` lacks them."""
    asked = []

    def has_slot(node_request):
        return node_request.only_prefills or node_request.request.request_id in slots

    def begin(node_request):
        asked.append(node_request.request.request_id)
        return (start is None or node_request.request.request_id in start) and reading.start(node_request, num_spare=0)

    works = reading.plan(budget, has_slot, begin, (), 0.0)
    return [(work.request.request_id, work.start, work.num_tokens) for work in works], asked


def test_the_budget_is_spent_in_order_of_age():
    house, reading = make()
    house.add("c", 3, RequestState.WAITING, 5, only_prefills=True)
    house.add("a", 1, RequestState.WAITING, 5, only_prefills=True)
    house.add("b", 2, RequestState.PREFILLING, 9, num_computed=4, only_prefills=True)
    assert plan(house, reading, 12) == ([("a", 0, 5), ("b", 4, 5), ("c", 0, 2)], ["a", "c"])


def test_nobody_is_started_without_budget():
    house, reading = make()
    house.add("a", 1, RequestState.PREFILLING, 8, only_prefills=True)
    house.add("b", 2, RequestState.WAITING, 8, only_prefills=True)
    assert plan(house, reading, 8) == ([("a", 0, 8)], [])
    assert plan(house, reading, 0) == ([], [])


def test_one_that_may_not_start_holds_up_those_without_blocks_alone():
    house, reading = make()
    house.add("may not", 1, RequestState.WAITING, 5, only_prefills=True)
    house.add("could", 2, RequestState.WAITING, 5, only_prefills=True)
    house.add("has begun", 3, RequestState.PREFILLING, 5, only_prefills=True)
    assert plan(house, reading, 64, start={"could"}) == ([("has begun", 0, 5)], ["may not"])


def test_one_without_a_slot_is_passed_over():
    house, reading = make()
    house.add("no running slot", 1, RequestState.WAITING, 5)
    house.add("slot", 2, RequestState.WAITING, 5)
    assert plan(house, reading, 64, slots={"slot"}) == ([("slot", 0, 5)], ["slot"])


def limited(*dues_s, nums_tokens=(20, 20, 20)):
    """What the first step computes of prompts that are due so, at one token a second."""
    house, reading = make(100, tokens_per_s=1.0)
    for age, due_s in enumerate(dues_s):
        house.add("abcd"[age], age, RequestState.WAITING, nums_tokens[age], only_prefills=True).due = due_s and Due(
            due_s
        )
    return plan(house, reading, 60)[0]


def test_a_step_takes_on_nothing_that_makes_a_prompt_late_which_ends_in_it():
    margin = PRIOR_FACTOR  # of a node that has computed nothing yet
    assert limited(25.0 * margin, 100.0) == [("a", 0, 20)]
    assert limited(40.0 * margin, 100.0) == [("a", 0, 20), ("b", 0, 20)]  # at its end, both
    assert limited(20.0 * margin, 39.0 * margin, 70.0 * margin) == [("a", 0, 20)]
    assert limited(90.0 * margin, 25.0 * margin) == [("b", 0, 20)]  # the most urgent comes first


def test_what_is_left_of_a_step_goes_to_a_prompt_that_a_step_of_its_own_would_not_hold():
    """A step holds SHORT_TOKENS at least, as long as they take."""
    margin = PRIOR_FACTOR
    longest = chunk_budget.SHORT_TOKENS
    assert limited(38.5 * margin, None, nums_tokens=(20, longest + 1)) == [("a", 0, 20), ("b", 0, 18)]
    assert limited(38.5 * margin, None, nums_tokens=(20, longest)) == [("a", 0, 20)]


@pytest.mark.parametrize(
    ("dues_s", "num_tokens"),
    [
        ((None,), 280),  # nobody waits for its end
        ((400.0,), 80),  # a quarter of 400 s in all
        ((400.0, 1000.0), 60),
        ((100.0,), chunk_budget.SHORT_TOKENS - 20),  # and not shorter than that, however urgent
    ],
)
def test_steps_are_short_while_prompts_come_with_limits(dues_s, num_tokens):
    """Beside prompts of 20 s: the one with the least time counts, of so few. A token takes a second."""
    house, reading = make(200, tokens_per_s=1.0)
    for age, due_s in enumerate(dues_s):
        house.add(f"limited {age}", age, RequestState.WAITING, 20, only_prefills=True).due = due_s and Due(due_s)
    house.add("long", 9, RequestState.WAITING, 500, only_prefills=True)
    works, _ = plan(house, reading, 300)
    assert works[-1] == ("long", 0, num_tokens)
    assert len(works) == len(dues_s) + 1


def test_who_has_no_limit_or_is_late_anyway_lets_others_share_its_step():
    all_of_them = [("a", 0, 20), ("b", 0, 20), ("c", 0, 20)]
    assert limited(None, None, None) == limited(19.0, None, None) == limited(19.0, 19.0, 19.0) == all_of_them


def test_what_is_ending_or_has_all_it_needs_is_left_out():
    house, reading = make()
    house.add("ends", 1, RequestState.WAITING, 5, only_prefills=True, ending={})
    house.add("ends too", 2, RequestState.PREFILLING, 5, only_prefills=True, ending={})
    house.add("done", 3, RequestState.PREFILLING, 5, num_computed=5, only_prefills=True)
    assert plan(house, reading, 64) == ([], [])


def test_a_prompt_that_is_answered_here_gets_room_for_its_first_token():
    house, reading = make()
    here = house.add("here", 1, RequestState.WAITING, 8)
    there = house.add("there", 2, RequestState.WAITING, 8, only_prefills=True)
    again = house.add("again", 3, RequestState.WAITING, 8, has_first_token=True)
    assert [reading.tokens_to_hold(each) for each in (here, there, again)] == [9, 8, 8]
    assert [reading.num_needed(each) for each in (here, there, again)] == [3, 2, 2]


def test_the_last_token_is_computed_where_its_logits_are_wanted():
    house, _ = make()
    assert num_cacheable(house.add("here", 1, RequestState.WAITING, 8)) == 7
    assert num_cacheable(house.add("there", 2, RequestState.WAITING, 8, only_prefills=True)) == 7
    evicted = house.add("evicted", 3, RequestState.WAITING, 8, only_prefills=True, has_first_token=True)
    evicted.request.token_ids.append(1)
    assert num_cacheable(evicted) == 8


def scored(house, name, age, num_tokens):
    """A prompt of which nothing may be left out."""
    node_request = house.add(name, age, RequestState.WAITING, num_tokens, only_prefills=True)
    node_request.request.sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    return node_request


def test_what_is_to_be_scored_is_computed_as_far_as_it_has_no_scores():
    house, _ = make()
    node_request = scored(house, "a", 1, 8)
    assert num_cacheable(node_request) == 0
    node_request.request.scores = [SampledToken(1, -1.0)] * 5  # before it was preempted
    assert num_cacheable(node_request) == 5
    node_request.has_first_token = True
    node_request.request.token_ids.append(1)  # and with it they have gone out
    assert num_cacheable(node_request) == 8


def test_a_step_scores_no_more_tokens_than_logits_of_which_are_held_at_once():
    house, reading = make(400)
    scored(house, "a", 1, 200)
    scored(house, "b", 2, 200)
    house.add("c", 3, RequestState.WAITING, 500, only_prefills=True)
    assert plan(house, reading, 2000)[0] == [("a", 0, 200), ("b", 0, MAX_SCORED_TOKENS - 200), ("c", 0, 500)]


def test_a_prompt_counts_once_however_often_it_begins():
    house, reading = make()
    node_request = house.add("a", 1, RequestState.WAITING, 5, only_prefills=True)
    plan(house, reading, 64)
    house.leases.give_back(node_request)
    house.node_requests.apply(node_request, RequestEvent.PREEMPTED)
    plan(house, reading, 64)
    assert reading.num_prompt_tokens == 5


def alike(house, name, age, num_tokens, *, num_common=24, salt="one", **facts):
    """A prompt whose first tokens others have too."""
    node_request = house.add(name, age, RequestState.WAITING, num_tokens, only_prefills=True, salt=salt, **facts)
    node_request.request.token_ids[num_common:] = [1000 * age + at for at in range(num_common, num_tokens)]
    return node_request


def read_all(house, reading, budget=48):
    """What each step computes until all is read."""
    steps = []
    while any(each.num_to_compute for each in house.node_requests):
        steps.append(plan(house, reading, budget)[0])
        for name, start, num_tokens in steps[-1]:
            (node_request,) = (each for each in house.node_requests if each.request.request_id == name)
            assert node_request.num_computed == start
            node_request.num_computed += num_tokens
            house.leases.publish(node_request)
    return steps


def test_what_prompts_begin_with_alike_is_computed_once():
    house, reading = make(64)
    for age, name in enumerate("abc"):
        alike(house, name, age, 30)
    house.add("other", 4, RequestState.WAITING, 9, only_prefills=True)
    assert read_all(house, reading) == [[("a", 0, 30), ("other", 0, 9)], [("b", 24, 6), ("c", 24, 6)]]
    assert (reading.num_prompt_tokens, reading.num_cached_tokens) == (99, 48)


def test_a_prompt_waits_for_what_it_begins_with_through_all_chunks_and_no_longer():
    house, reading = make(64)
    alike(house, "a", 1, 72, num_common=40)
    alike(house, "b", 2, 44, num_common=40)
    assert read_all(house, reading, 16) == [
        [("a", 0, 16)],
        [("a", 16, 16)],
        [("a", 32, 16)],
        [("a", 48, 16)],
        [("a", 64, 8), ("b", 40, 4)],
    ]


def test_a_prompt_does_not_wait_for_what_it_would_compute_in_any_case_or_for_little():
    house, reading = make(400)
    alike(house, "a", 1, 30)
    alike(house, "scored", 2, 30).request.sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    alike(house, "salted", 3, 30, salt="another")
    alike(house, "adjacent", 4, 30, num_common=7)  # one block and a part, where a step has eight times two blocks
    assert [name for name, *_ in plan(house, reading, 128)[0]] == ["a", "scored", "salted", "adjacent"]


def test_a_prompt_does_not_wait_for_one_that_is_not_computed_or_will_not_be_found():
    house, reading = make(64)
    late = alike(house, "a", 1, 30)
    late.ending = {}
    alike(house, "b", 2, 30)
    assert plan(house, reading, 48)[0] == [("b", 0, 30)]
    for caching in (True, False):
        house, reading = make(64)
        house.allocator.caching = caching
        alike(house, "a", 1, 30)
        alike(house, "b", 2, 30)
        assert len(plan(house, reading, 64)[0]) == (1 if caching else 2)


def test_a_prompt_that_holds_more_than_another_one_computes_does_not_wait():
    house, reading = make(64)
    alike(house, "first", 1, 30)
    read_all(house, reading)  # and stays to be found
    # began before that was there
    again = house.add("again", 2, RequestState.PREFILLING, 30, only_prefills=True, salt="one")
    assert again.num_computed == 0
    alike(house, "b", 3, 30)
    assert plan(house, reading, 64)[0] == [("again", 0, 30), ("b", 24, 6)]
