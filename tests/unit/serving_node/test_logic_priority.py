"""Whose prompt a node reads first where some are more important, and how long the least important waits at most."""

from itertools import count

import pytest

from prefill_node.order import FLOOR
from serving_core.residents import Stage
from tests.unit.serving_node.logic_kit import BLOCK_SIZE, Node

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
    node, num_others, numbers = Node(num_blocks, budget=BUDGET, seats=20), 0, count()
    ask = getattr(node, kind)
    ask("important", BUDGET, priority=-1, max_tokens=3)
    ask("least", PROMPT, priority=100, max_tokens=3)
    while "first_token" not in node.words("least"):
        while node.load.num_waiting < 5:
            ask(f"important {next(numbers)}", BUDGET, priority=-1, max_tokens=3)
        shares = node.step()
        num_others += sum(tokens for name, start, tokens in shares if name != "least" and start < BUDGET)
        for request in [each.request for each in node.logic.residents if each.stage is Stage.READ]:
            node.deliver(request)
            node.sent(request)
        assert num_others <= PROMPT / FLOOR + 2 * BUDGET + num_in_pool(num_blocks)
    assert num_others >= PROMPT / FLOOR


def num_in_pool(num_blocks):
    """Tokens at most that others have blocks for when one comes first that has none."""
    return num_blocks * BLOCK_SIZE if num_blocks < 10 else 0
