"""The step that is planned while the one before it runs: what it holds, and where there is none."""

import pytest

from serving_core.requests import NO_TOKEN, SampledToken
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_SIZE, STEP_S, Node, prompt_of

NAMES = "abc"


def three_write(max_tokens=16, **options):
    """Answers of prompts of different lengths, whose next step runs."""
    node = Node(**{"num_blocks": 64, **options})
    for index, name in enumerate(NAMES):
        node.writes(name, prompt_of(5 + index), max_tokens=max_tokens)
    node.begin()
    return node


def ahead(node):
    return node.scheduler.plan_next(node.works)


def follow(node):
    """The running step ends, and what is ahead of it runs; tells whether it does."""
    works, given = node.works, [SampledToken(token_id) for token_id in node.sampled]
    if not (planned := ahead(node)) or node.scheduler.ends_any(works, given):
        return False
    node.kv.verify(works)
    node.now += STEP_S
    node.worker.step_done(works, given, STEP_S, goes_on=True)
    node.works = planned
    node.settle()
    node.sampled = node.kv.step(planned, [work.request for work in planned])
    node.check()
    return True


def test_answers_are_those_that_plan_gives_and_the_last_tokens_step_has_none_ahead():
    node = three_write()
    num_followed = 0
    while follow(node):
        assert all(node_request.in_step for node_request in node.scheduler.node_requests)
        num_followed += 1
    node.end()
    node.steps()
    assert num_followed > 2 * BLOCK_SIZE, "no block was filled on the way"
    for index, name in enumerate(NAMES):
        assert node.tokens(name) == answer_of(prompt_of(5 + index), 16)[1:]
        assert sum(map(bool, node.finish_reasons(name))) == 1
    node.check_empty()


def test_what_is_planned_ahead_is_what_plan_gives_next():
    node = three_write()
    for _ in range(2 * BLOCK_SIZE):
        planned = ahead(node)
        node.end()
        node.begin()
        assert planned == node.works
    node.end()
    node.steps()
    node.check_empty()


def test_there_is_none_beside_a_prompt_one_that_ends_or_one_that_moves():
    node = three_write()
    assert ahead(node)
    node.local("d", prompt_of(9))
    assert not ahead(node), "a prompt waits"
    node.end()
    node.step()
    node.begin()
    assert ahead(node)
    (first, *_) = node.works
    node.cancel(first.request)
    assert not ahead(node), "one is to end"
    node.end()
    node.begin()
    assert len(node.works) == 3
    assert ahead(node)
    node.migrate(node.works[0].request, num_blocks=16)
    assert not ahead(node), "one moves"


def test_an_answer_that_is_cancelled_when_the_next_step_has_begun_ends_behind_that():
    node = three_write()
    cancelled = node.works[0].request
    works, given = node.works, [SampledToken(token_id) for token_id in node.sampled]
    planned = ahead(node)
    assert not node.scheduler.ends_any(works, given)
    node.cancel(cancelled)  # too late for the step behind
    node.now += STEP_S
    node.worker.step_done(works, given, STEP_S, goes_on=True)
    assert len(node.scheduler.node_requests) == 3, "its blocks are in use"
    node.works = planned
    node.settle()
    node.sampled = node.kv.step(planned, [work.request for work in planned])
    node.end()
    assert len(node.scheduler.node_requests) == 2
    node.steps()
    node.check_empty()


def test_without_a_free_block_there_is_none():
    node = Node(num_blocks=2)
    node.writes("a", prompt_of(BLOCK_SIZE), max_tokens=BLOCK_SIZE)
    node.begin()
    assert ahead(node)
    node.end()
    node = Node(num_blocks=2)
    node.writes("a", prompt_of(BLOCK_SIZE - 1), max_tokens=BLOCK_SIZE)
    lease = node.allocator.allocate(node.num_free)
    node.begin()
    assert not ahead(node), "the token after the next one needs a block"
    lease.release()
    assert ahead(node)


@pytest.mark.parametrize(
    ("sampling", "token", "ends"),
    [
        ({"max_tokens": 16}, SampledToken(3), False),
        ({"max_tokens": 16, "stop_token_ids": (3,)}, SampledToken(3), True),
        ({"max_tokens": 2}, SampledToken(3), True),
        ({"max_tokens": 16}, SampledToken(NO_TOKEN, error=ValueError("its grammar goes no further")), True),
    ],
)
def test_a_token_that_ends_its_answer_is_told_before_it_is_taken_in(sampling, token, ends):
    node = Node(num_blocks=64)
    node.writes("a", prompt_of(5), **sampling)
    node.begin()
    assert node.scheduler.ends_any(node.works, [token]) is ends
