"""Prompts of which embeddings are wanted: read as others are, in chunks beside others, and then gone."""

import pytest

from serving_core.requests import LAST, MEAN, Pooling
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_SIZE, EMBEDDING, STEP_S, Node, prompt_of


@pytest.mark.parametrize("role", ["prefill", "mixed", "decode"])
def test_a_prompt_is_read_in_chunks_and_nothing_is_left_of_it(role):
    node = Node(budget=8, role=role)
    node.prefill("a", 13, pooling=Pooling(MEAN))
    node.step()
    assert node.words("a") == []
    node.steps()
    assert node.words("a") == ["embedded"]
    told = node.event("a", "embedded")
    assert (told.embedding, told.prefill_s, told.num_cached_tokens) == (EMBEDDING, 2 * STEP_S, 0)
    node.check_empty()


@pytest.mark.parametrize(("kind", "num_cached"), [(LAST, 2 * BLOCK_SIZE), (MEAN, 0)])
def test_the_last_tokens_embedding_needs_the_rest_alone_and_a_mean_all_of_it(kind, num_cached):
    node = Node()
    for name in ("first", "again"):
        node.prefill(name, prompt_of(3 * BLOCK_SIZE), salt="same", pooling=Pooling(kind))
        node.steps()
    assert node.event("first", "embedded").num_cached_tokens == 0
    assert node.event("again", "embedded").num_cached_tokens == num_cached
    node.check_empty()


def test_beside_an_answer_and_a_prompt_for_another_node():
    node = Node()
    node.local("answered", 5, max_tokens=3)
    node.prefill("embedded", 9, pooling=Pooling(LAST))
    request = node.prefill("handed over", 6)
    node.steps()
    assert node.tokens("answered") == answer_of(prompt_of(5), 3)
    assert node.words("embedded") == ["embedded"]
    assert node.words("handed over") == ["first_token"]
    node.cancel(request)
    node.check_empty()


def test_one_that_is_cancelled_says_nothing_else():
    node = Node(budget=4)
    request = node.prefill("a", 10, pooling=Pooling(MEAN))
    node.step()
    node.cancel(request)
    assert node.words("a") == ["cancelled"]
    node.check_empty()
    request = node.prefill("b", 3, pooling=Pooling(MEAN))
    node.begin()
    node.cancel(request)
    node.end()
    assert node.words("b") == ["cancelled"]
    node.check_empty()


def test_more_than_the_pool_holds_take_turns():
    node = Node(num_blocks=4, budget=6)
    for index in range(6):
        node.prefill(f"{index}", prompt_of(4 * BLOCK_SIZE, first=index), pooling=Pooling(MEAN))
    node.steps()
    assert [node.words(f"{index}") for index in range(6)] == [["embedded"]] * 6
    node.check_empty()


def test_a_prompt_that_no_pool_could_hold_is_refused():
    node = Node(num_blocks=2)
    node.prefill("a", 2 * BLOCK_SIZE + 1, pooling=Pooling(LAST))
    assert node.event("a", "failed").reason == "PROMPT_TOO_LONG"
    node.check_empty()
