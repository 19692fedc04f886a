"""Prompts that a node reads for others: order, chunks, blocks, reuse, refusals, and their way out."""

import pytest

from serving_core import reasons
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_SIZE, STEP_S, Node, prompt_of, token_of


def test_a_long_prompt_goes_in_chunks_and_a_short_one_joins_its_last():
    node = Node(budget=10)
    node.prefill("long", 14)
    node.prefill("short", 3)
    assert node.step() == [("long", 0, 10)]
    assert node.words("long") == []
    assert node.step() == [("long", 10, 4), ("short", 0, 3)]
    assert node.tokens("long") == answer_of(prompt_of(14), 1)
    assert node.tokens("short") == answer_of(prompt_of(3), 1)
    assert node.step() == []


def test_the_older_goes_first_whatever_came_first():
    node = Node(budget=10)
    node.prefill("young", 8, age=7)
    node.prefill("old", 8, age=3)
    assert node.step() == [("old", 0, 8), ("young", 0, 2)]
    node.prefill("oldest", 8, age=1)
    assert node.step() == [("oldest", 0, 8), ("young", 2, 2)]


def test_of_two_attempts_at_one_request_the_earlier_goes_first():
    node = Node(budget=4)
    node.prefill("second", 8, age=7, epoch=9)
    node.prefill("first", 8, age=7, epoch=3)
    assert node.step() == [("first", 0, 4)]


def test_a_prompt_waits_until_the_pool_has_all_its_blocks_and_nobody_overtakes_it():
    node = Node(num_blocks=4, budget=100)
    first = node.prefill("first", 12)  # 3 blocks
    node.prefill("second", 8)  # 2 blocks: one is missing
    node.prefill("third", 4)  # would fit, but is younger
    assert node.step() == [("first", 0, 12)]
    assert node.step() == []
    node.deliver(first)
    node.sent(first)
    assert node.step() == [("second", 0, 8), ("third", 0, 4)]


def test_blocks_stay_held_after_the_prompt_is_read_until_it_is_sent():
    node = Node(num_blocks=8)
    request = node.has_read("a", 8)
    assert node.num_free == 6
    node.deliver(request)
    assert node.num_free == 6
    node.sent(request, num_bytes=77)
    assert node.words("a") == ["first_token", "transferred"]
    assert node.event("a", "transferred").num_bytes == 77
    assert node.load.num_kv_bytes == 77
    node.check_empty()


@pytest.mark.parametrize("moment", ["before", "between chunks", "in the last chunk", "after"])
def test_what_is_sent_grows_with_what_is_read_and_ends_with_the_first_token(moment):
    node = Node(budget=6)
    request = node.prefill("a", 14)
    num_chunks = {"before": 0, "between chunks": 1, "in the last chunk": 2, "after": 3}[moment]
    for _ in range(num_chunks):
        node.step()
    if moment == "in the last chunk":
        node.begin()
    node.deliver(request, b"the descriptor")
    sending = node.sending[request.epoch]
    assert sending.descriptor == b"the descriptor"
    if moment != "after":
        assert len(sending.block_ids) == 6 * num_chunks // BLOCK_SIZE  # the full ones
        assert not sending.is_finished
    node.end()
    node.steps()
    assert sending.is_finished
    assert len(sending.block_ids) == 4
    assert token_of(sending.tail) == answer_of(prompt_of(14), 1)[0]
    node.sent(request)
    node.check_empty()


def test_blocks_may_leave_during_the_step_that_computes_them_only_where_another_node_waits():
    node = Node()
    node.prefill("there", 5)
    node.local("here", 5)
    node.begin()
    assert [work.request.request_id for work in node.scheduler.sends_while(node.works)] == ["there"]


def test_a_second_descriptor_for_one_that_is_sent_changes_nothing():
    node = Node()
    request = node.has_read("a", 5)
    node.deliver(request, b"first")
    node.deliver(request, b"second")
    assert node.sending[request.epoch].descriptor == b"first"
    node.sent(request)
    node.deliver(request, b"third")  # it is gone
    assert node.words("a") == ["first_token", "transferred"]
    node.check_empty()


def test_a_descriptor_for_an_answer_that_is_written_here_is_left_alone():
    node = Node()
    request = node.local("a", 5)
    node.step()
    node.deliver(request)
    assert not node.sending
    node.steps()
    node.check_empty()


def test_an_answer_of_one_token_ends_with_its_first_and_is_not_sent():
    node = Node()
    request = node.prefill("a", 5, max_tokens=1)
    other = node.prefill("b", 5, max_tokens=1)
    node.deliver(other)
    node.step()
    for name in "ab":
        assert node.tokens(name) == answer_of(prompt_of(5), 1)
        assert node.finish_reasons(name) != [0]
    assert node.words("a") == ["first_token"]
    assert request.epoch not in node.sending
    assert node.cancelled == [other.epoch]
    assert not node.scheduler.is_idle  # until nobody reads the blocks any more
    node.send_fails(other)
    node.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_stop_token_may_be_the_first(max_tokens):
    node = Node()
    node.prefill("a", 5, max_tokens=max_tokens, stop_token_ids=tuple(answer_of(prompt_of(5), 1)))
    node.step()
    assert node.words("a") == ["first_token"]
    node.check_empty()


def test_an_answer_begun_elsewhere_goes_on_at_its_next_index():
    node = Node()
    request = node.prefill("a", 7, num_prompt_tokens=5, max_tokens=4, epoch=3)
    node.step()
    assert node.event("a", "first_token").token.index == 2
    assert node.event("a", "first_token").attempt.epoch == 3
    assert node.tokens("a") == answer_of(prompt_of(7), 1)
    node.deliver(request)
    node.sent(request)
    node.check_empty()


def test_the_first_token_is_timed_from_the_first_step_of_its_prompt():
    node = Node(budget=4)
    node.prefill("before", 4)
    node.now = 10.0
    node.prefill("a", 8)
    for _ in range(3):
        node.step()
    assert node.event("before", "first_token").prefill_s == STEP_S
    assert node.event("a", "first_token").prefill_s == 2 * STEP_S


def test_refusals_name_the_limit_and_the_value():
    node = Node(num_blocks=2, max_num_queued=1)
    node.prefill("never", 9)
    failed = node.event("never", "failed")
    assert (failed.reason, failed.message) == (
        reasons.PROMPT_TOO_LONG,
        "the prompt needs 3 KV blocks, the prefill node has 2",
    )
    node.prefill("waits", 8)
    node.prefill("one too many", 4)
    failed = node.event("one too many", "failed")
    assert (failed.reason, failed.message) == (reasons.QUEUE_FULL, "the prefill queue holds its 1 requests")
    node.step()  # what is read waits no more
    node.prefill("another", 4)
    assert node.words("another") == []


# ---- reuse ----


def test_a_prompt_starts_behind_the_blocks_that_an_earlier_one_left():
    node = Node(budget=100)
    first = node.has_read("first", 11, salt="s")
    node.deliver(first)
    node.sent(first)
    node.prefill("second", [*prompt_of(11), 0, 1, 2], salt="s")
    node.prefill("other", 14, salt="another")
    assert node.load.num_waiting_tokens == (14 - 8) + 14
    assert node.begin() == [("second", 8, 6), ("other", 0, 14)]
    assert node.works[0].block_ids[:2] == [0, 1]  # where the first one had its two full blocks
    node.end()
    assert node.event("second", "first_token").num_cached_tokens == 8
    assert node.event("other", "first_token").num_cached_tokens == 0
    assert (node.load.num_prompt_tokens, node.load.num_cached_tokens) == (11 + 14 + 14, 8)


def test_the_last_token_is_always_computed():
    node = Node(budget=100)
    node.has_read("first", 8, salt="s")
    node.prefill("same", 8, salt="s")
    node.prefill("longer by one", 9, salt="s")
    assert node.begin() == [("same", 4, 4), ("longer by one", 8, 1)]
    same, longer = (work.block_ids for work in node.works)
    assert same[0] == longer[0] == 0
    assert same[1] != longer[1] == 1  # the last block of "same" is its own to write to
    node.end()
    assert node.tokens("same") == answer_of(prompt_of(8), 1)
    assert node.tokens("longer by one") == answer_of(prompt_of(9), 1)


def test_blocks_are_used_as_soon_as_the_step_that_fills_them_is_over():
    node = Node(budget=8)
    node.prefill("first", 10, salt="s")
    node.step()
    node.prefill("second", 12, salt="s")
    assert node.step() == [("first", 8, 2), ("second", 8, 4)]


def test_prompts_that_start_in_one_step_wait_for_nobody():
    node = Node(budget=100)
    for name in ("first", "second"):
        node.prefill(name, 10, salt="s")
    assert node.begin() == [("first", 0, 10), ("second", 0, 10)]
    assert not set(node.works[0].block_ids) & set(node.works[1].block_ids)
    node.end()


def test_a_step_that_failed_leaves_nothing_to_use():
    node = Node(budget=8)
    node.prefill("fails", 16, salt="s")
    node.step()
    node.begin()
    node.fail_step()
    assert node.load.num_blocks_cached == 2  # the first half is good
    node.prefill("next", 16, salt="s")
    assert node.step() == [("next", 8, 8)]


def test_a_prompt_that_needs_the_whole_pool_gets_it_at_the_cost_of_what_is_cached():
    node = Node(num_blocks=4, budget=100)
    first = node.has_read("first", 16)
    node.deliver(first)
    node.sent(first)
    assert (node.num_free, node.load.num_blocks_cached) == (4, 4)
    node.prefill("second", 16)
    assert node.step() == [("second", 0, 16)]
    assert node.num_free == 0


def test_a_cached_prefix_in_use_is_not_counted_twice():
    node = Node(num_blocks=5, budget=100)
    node.has_read("first", 12, salt="s")  # 3 blocks
    node.prefill("second", 17, salt="s")  # 5 blocks, 3 of them there: 2 are free
    assert node.step() == [("second", 12, 5)]
    assert node.num_free == 0


def test_without_caching_nothing_is_used_again():
    node = Node(budget=100, caching=False)
    for name in ("a", "b"):
        request = node.prefill(name, 11, salt="s")
        assert node.step() == [(name, 0, 11)]
        node.deliver(request)
        node.sent(request)
    load = node.load
    assert (load.num_prompt_tokens, load.num_cached_tokens, load.num_blocks_cached) == (22, 0, 0)
    assert node.hints == set()


def test_the_same_prompt_again_and_again_is_computed_once():
    node = Node(budget=100)
    for index in range(5):
        request = node.prefill(str(index), 30, salt="s")
        assert node.step() == [(str(index), 0 if index == 0 else 28, 30 if index == 0 else 2)]
        node.deliver(request)
        node.sent(request)
    assert node.load.num_cached_tokens == 4 * 28
    node.check_empty()
