"""When a node takes the tokens of an answer to be due."""

import math

import pytest

from protos import fleet_pb2
from tests.unit.serving_node.logic_kit import Node


def due_of(node, name):
    (resident,) = [each for each in node.logic.residents if each.request.request_id == name]
    return resident.due


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
