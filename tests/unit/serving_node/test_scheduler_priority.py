"""What priorities and deadlines of requests mean for a node: whose prompt it reads first, how long the least important
waits at most, and when a token is due."""

import math
from itertools import count

import pytest

from prefill_node.scheduler import FLOOR
from protos import fleet_pb2
from serving_core.node.requests import RequestState
from tests.unit.serving_node.scheduler_kit import BLOCK_SIZE, Node
from tests.unit.serving_node.slack_kit import ExactCosts

BUDGET = 8
PROMPT = 12


def test_the_lower_value_is_read_first_and_of_equals_the_older():
    node = Node(budget=6)
    for name, priority in (("middle", 0), ("last", 3), ("first", -2), ("second", -2)):
        node.prefill(name, 6, priority=priority)
    assert [name for ((name, _, _),) in node.steps()] == ["first", "second", "middle", "last"]


def test_what_is_being_read_waits_for_a_more_important_one_and_keeps_its_blocks():
    node = Node(num_blocks=7, budget=BUDGET)
    node.prefill("begun", 14)
    assert node.step() == [("begun", 0, 8)]
    node.prefill("important", BUDGET, priority=-1)
    node.prefill("too large", 9, priority=-1)
    assert node.step() == [("important", 0, 8)]
    assert node.step() == [("begun", 8, 6)]


def test_who_gives_way_goes_by_age_whatever_the_priority():
    """Two answers that grow until there is room for one of them."""
    node = Node(num_blocks=6, budget=16)
    node.local("old", 4, max_tokens=12, priority=5)
    node.local("young", 4, max_tokens=12, priority=-5)
    node.steps()
    assert node.load.num_preemptions > 0
    lasts = [token.attempt.request_id for token in all_step_tokens(node) if token.finish_reason]
    assert lasts == ["old", "young"]


def all_step_tokens(node):
    return [token for event in node.events for token in event.step_tokens.tokens]


@pytest.mark.parametrize("num_blocks", [200, 6], ids=["room for all", "room for two or three"])
@pytest.mark.parametrize("kind", ["prefill", "local"])
def test_how_long_the_least_important_waits_for_others_without_end(kind, num_blocks):
    """Until the floor has earned it its prompt; beyond that a step before and one after, and what others have blocks
    for."""
    node, num_others, numbers = Node(num_blocks, budget=BUDGET, slots=20), 0, count()
    ask = getattr(node, kind)
    ask("important", BUDGET, priority=-1, max_tokens=3)
    ask("least", PROMPT, priority=100, max_tokens=3)
    while "first_token" not in node.words("least"):
        while node.load.num_waiting < 5:
            ask(f"important {next(numbers)}", BUDGET, priority=-1, max_tokens=3)
        shares = node.step()
        num_others += sum(tokens for name, start, tokens in shares if name != "least" and start < BUDGET)
        for request in [each.request for each in node.scheduler.node_requests if each.state is RequestState.PREFILLED]:
            node.deliver(request)
            node.sent(request)
        assert num_others <= PROMPT / FLOOR + 2 * BUDGET + num_in_pool(num_blocks)
    assert num_others >= PROMPT / FLOOR


def num_in_pool(num_blocks):
    """Tokens at most that others have blocks for when one comes first that has none."""
    return num_blocks * BLOCK_SIZE if num_blocks < 10 else 0


# ---- deadlines ----


def due_of(node, name):
    (node_request,) = [each for each in node.scheduler.node_requests if each.request.request_id == name]
    return node_request.due


def a_due(**fields):
    return fleet_pb2.Due(**fields)


def test_without_limits_nothing_is_due():
    node = Node()
    node.local("a", 5)
    assert due_of(node, "a") is None


def test_what_is_left_counts_from_when_the_command_comes():
    node = Node()
    node.tick(100.0)
    node.prefill("late", 5, due=a_due(ttft_left_s=-1.0, tpot_s=0.5))
    node.reserve("goes on", 9, num_prompt_tokens=5, due=a_due(tpot_s=0.5, since_first_s=3.0))
    assert (due_of(node, "late").first_s, due_of(node, "late").token_s(1)) == (99.0, math.inf)
    assert due_of(node, "goes on").token_s(4) == pytest.approx(99.0)


def test_a_node_that_gives_the_first_token_counts_from_there():
    node = Node()
    node.local("a", 5, max_tokens=9, due=a_due(tpot_s=2.0))
    node.step()
    assert due_of(node, "a").token_s(3) == node.now + 6.0
    node.step()
    assert due_of(node, "a").began_s == node.now - 0.5  # one step ago


def test_another_attempt_counts_from_the_first_token_of_the_one_before():
    node = Node()
    node.tick(50.0)
    node.local("a", 9, num_prompt_tokens=5, max_tokens=20, due=a_due(tpot_s=2.0, since_first_s=10.0))
    node.step()
    assert due_of(node, "a").began_s == 40.0


TOKEN_S = 0.1  # as is expected; steps of the kit take half a second


def refusing_node(**settings):
    return Node(budget=BUDGET, costs=ExactCosts([0.0, 0.0, 0.0, 0.0, TOKEN_S, 0.0, 0.0]), **settings)


def refusing(ttft_left_s, **fields):
    return a_due(ttft_left_s=ttft_left_s, refuses_late=True, **fields)


@pytest.mark.parametrize("kind", ["prefill", "local"])
def test_a_prompt_that_cannot_be_in_time_any_more_is_refused_where_the_coordinator_says_so(kind):
    node = refusing_node()
    getattr(node, kind)("hopeless", PROMPT, due=refusing(TOKEN_S * PROMPT - 0.01))
    getattr(node, kind)("can be", PROMPT, due=refusing(TOKEN_S * PROMPT + 0.01))
    getattr(node, kind)("is served", PROMPT, due=a_due(ttft_left_s=TOKEN_S * PROMPT - 0.01))
    assert node.step() == [("can be", 0, BUDGET)]
    failed = node.event("hopeless", "failed")
    assert (failed.reason, failed.message) == ("WOULD_BE_LATE", "the prompt cannot be read before its deadline")
    assert node.words("hopeless") == ["failed"]
    assert node.load.num_waiting + node.load.num_running == 2
    node.steps()
    assert "first_token" in node.words("can be")
    assert "first_token" in node.words("is served")


def test_a_prompt_that_is_late_for_others_is_refused_when_it_would_be_late_alone():
    node = refusing_node()
    node.local("first", 2 * BUDGET, max_tokens=1, due=refusing(2.0))
    node.local("second", BUDGET, max_tokens=1, due=refusing(1.0))
    node.local("third", BUDGET, max_tokens=1, due=refusing(1.4))
    assert node.step() == [("second", 0, BUDGET)], "beside 1.6 s for the first both others would be late"
    assert node.words("first") == []
    assert node.step() == [("third", 0, BUDGET)], "0.8 s from 0.5 s on are in time"
    assert node.words("first") == ["failed"], "1.6 s from 0.5 s on are not"
    assert node.step() == []


@pytest.mark.parametrize(("num_tokens", "is_refused"), [(2 * BUDGET, False), (2 * BUDGET + 1, True)])
def test_a_prompt_of_which_half_is_computed_is_read_to_the_end(num_tokens, is_refused):
    node = refusing_node()
    node.local("begun", num_tokens, max_tokens=1, due=refusing(TOKEN_S * num_tokens + 0.01))
    assert node.step() == [("begun", 0, BUDGET)]
    node.tick(10.0)
    assert node.step() == ([] if is_refused else [("begun", BUDGET, BUDGET)])
    assert node.words("begun") == ["failed" if is_refused else "first_token"]
    assert [num_left for num_left, _ in node.progress("begun")] == [num_tokens - BUDGET]
    node.check_empty()


def test_what_a_refused_prompt_held_goes_to_the_next_at_once():
    """Nothing wakes a node that has planned no step."""
    node = refusing_node(num_blocks=6)
    node.local("hopeless", 20, max_tokens=1, due=refusing(20 * TOKEN_S + 0.01))
    assert node.step() == [("hopeless", 0, BUDGET)]
    node.local("next", BUDGET, max_tokens=1)
    node.tick(10.0)
    assert node.step() == [("next", 0, BUDGET)]


@pytest.mark.parametrize(
    "weights",
    [
        (0.018, 0.002, 0.0, 0.0, 0.0, 2e-5, 0.0),
        (0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0),
        (9.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0),
    ],
    ids=["tokens cost nothing", "nor do they beside a chunk", "all costs more than there is time"],
)
def test_a_prompt_that_is_alone_is_read_whatever_its_node_believes_of_costs(weights):
    node = Node(budget=BUDGET, costs=ExactCosts(weights))
    for index in range(3):  # as short steps are to be kept for those that come
        node.local(f"{index}", PROMPT, max_tokens=1, due=a_due(ttft_left_s=0.4))
        node.steps()
        assert "first_token" in node.words(f"{index}")


def test_an_answer_that_goes_on_is_refused_nowhere():
    node = refusing_node()
    node.local(
        "again", 9, num_prompt_tokens=5, max_tokens=20, due=a_due(tpot_s=0.01, since_first_s=10.0, refuses_late=True)
    )
    node.steps()
    assert set(node.words("again")) == {"first_token", "step_tokens"}


def test_what_is_in_the_cache_is_not_to_be_read_and_makes_nobody_late():
    """Of 13 tokens 12 are there."""
    node = refusing_node()
    node.local("before", 13, salt="alike", max_tokens=1)
    node.steps()
    node.local("after", 13, salt="alike", max_tokens=1, due=refusing(3 * TOKEN_S))
    assert node.step() == [("after", 12, 1)]
    assert node.words("after") == ["first_token"]


@pytest.mark.parametrize("comes_first", ["the word", "the KV"])
def test_a_node_that_only_writes_counts_from_the_first_it_hears_of_the_first_token(comes_first):
    """Which the coordinator tells, and the KV shows: no step is to hold the answer up before both are there."""
    node = Node()
    request = node.reserve("a", 5, max_tokens=9, due=a_due(ttft_left_s=4.0, tpot_s=2.0))
    assert due_of(node, "a").token_s(1) == math.inf
    for now, what in enumerate(["the word", "the KV"] if comes_first == "the word" else ["the KV", "the word"], 7):
        node.tick(float(now))
        if what == "the word":
            node.begun(request)
        else:
            node.arrive(request)
        assert due_of(node, "a").token_s(1) == 9.0


def test_a_word_about_an_answer_that_is_gone_or_has_no_limit_does_nothing():
    node = Node()
    request = node.writes("a", 5, max_tokens=2)
    node.begun(request)
    node.steps()
    node.check_empty()
    told = len(node.events)
    node.begun(request)
    assert len(node.events) == told
