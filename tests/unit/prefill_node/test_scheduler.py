"""The prefill scheduler: order, chunks, blocks, reuse and refusals, worked out by hand; conservation as a property."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_node.scheduler import PrefillScheduler
from serving_core.blocks import BlockAllocator
from serving_core.errors import RequestError
from serving_core.layout import KVLayout
from serving_core.requests import Request, SampledToken, SamplingParams
from tests.toy_kv import FINGERPRINT

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


def make_request(name: str, num_tokens: int, salt: str | None = None) -> Request:
    """All begin alike, and have nothing to share unless they are given the same salt."""
    salt = name if salt is None else salt
    return Request(name, 1, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=8), salt)


def make_scheduler(num_blocks=8, budget=10, max_num_queued=100, caching=True):
    allocator = BlockAllocator(num_blocks, caching=caching)
    scheduler = PrefillScheduler(
        allocator, LAYOUT, fingerprint=FINGERPRINT, max_num_batched_tokens=budget, max_num_queued=max_num_queued
    )
    return scheduler, allocator


def shares(works):
    return [(work.request.request_id, work.start, work.num_tokens) for work in works]


def run_step(scheduler):
    works = scheduler.plan()
    tokens = [SampledToken(99) for work in works if work.samples]
    return works, scheduler.apply(works, tokens)


def test_a_long_prompt_goes_in_chunks_and_a_short_one_joins_its_last():
    scheduler, _ = make_scheduler(budget=10)
    scheduler.add(make_request("long", 14))
    scheduler.add(make_request("short", 3))
    works, outcomes = run_step(scheduler)
    assert shares(works) == [("long", 0, 10)]
    assert [token for _, token in outcomes] == [None]
    works, outcomes = run_step(scheduler)
    assert shares(works) == [("long", 10, 4), ("short", 0, 3)]
    assert [token.token_id for _, token in outcomes] == [99, 99]
    assert scheduler.plan() == []


def test_the_sampled_token_is_appended_once_the_prompt_is_computed():
    scheduler, _ = make_scheduler()
    request = make_request("a", 5)
    scheduler.add(request)
    run_step(scheduler)
    assert request.token_ids == [0, 1, 2, 3, 4, 99]
    assert request.num_output_tokens == 1


def test_a_prompt_waits_until_the_pool_has_all_its_blocks_and_nobody_overtakes_it():
    scheduler, allocator = make_scheduler(num_blocks=4, budget=100)
    first = scheduler.add(make_request("first", 12))  # 3 blocks
    scheduler.add(make_request("second", 8))  # 2 blocks: one is missing
    scheduler.add(make_request("third", 4))  # would fit, but came later
    works, _ = run_step(scheduler)
    assert shares(works) == [("first", 0, 12)]
    assert scheduler.plan() == []
    scheduler.remove(first)
    assert shares(scheduler.plan()) == [("second", 0, 8), ("third", 0, 4)]
    allocator.check_integrity()


def test_blocks_stay_held_after_the_prompt_is_computed_until_removed():
    scheduler, allocator = make_scheduler(num_blocks=8)
    prompt = scheduler.add(make_request("a", 8))
    run_step(scheduler)
    assert allocator.num_free == 6
    scheduler.remove(prompt)
    assert allocator.num_free == 8


def test_a_cancelled_prompt_gets_no_further_chunk():
    scheduler, _ = make_scheduler(budget=4)
    prompt = scheduler.add(make_request("a", 12))
    run_step(scheduler)
    prompt.cancelled = True
    assert scheduler.plan() == []


def test_refusals_name_the_limit_and_the_value():
    scheduler, _ = make_scheduler(num_blocks=2, max_num_queued=1)
    with pytest.raises(RequestError, match="needs 3 KV blocks, the prefill node has 2") as caught:
        scheduler.add(make_request("never", 9))
    assert caught.value.reason == "PROMPT_TOO_LONG"
    scheduler.add(make_request("waits", 8))
    with pytest.raises(RequestError, match="holds its 1 requests") as caught:
        scheduler.add(make_request("one too many", 4))
    assert caught.value.reason == "QUEUE_FULL"


def test_a_prompt_starts_behind_the_blocks_that_an_earlier_one_left():
    scheduler, allocator = make_scheduler(budget=100)
    first = scheduler.add(make_request("first", 11, salt="s"))
    run_step(scheduler)
    scheduler.remove(first)
    second = scheduler.add(make_request("second", 14, salt="s"))
    other = scheduler.add(make_request("other", 14, salt="another"))
    assert scheduler.num_waiting_tokens == (14 - 8) + 14
    works, _ = run_step(scheduler)
    assert shares(works) == [("second", 8, 6), ("other", 0, 14)]
    assert works[0].block_ids[:2] == [0, 1]  # where the first one had its two full blocks
    assert (second.num_cached_tokens, other.num_cached_tokens) == (8, 0)
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (11 + 14 + 14, 8)
    allocator.check_integrity()


def test_the_last_token_is_always_computed():
    scheduler, _ = make_scheduler(budget=100)
    scheduler.add(make_request("first", 8, salt="s"))
    run_step(scheduler)
    scheduler.add(make_request("same", 8, salt="s"))
    scheduler.add(make_request("longer by one", 9, salt="s"))
    works, outcomes = run_step(scheduler)
    assert shares(works) == [("same", 4, 4), ("longer by one", 8, 1)]
    assert len(outcomes) == 2
    assert works[0].block_ids[0] == works[1].block_ids[0] == 0
    assert works[0].block_ids[1] != works[1].block_ids[1] == 1  # the last block of "same" is its own to write to


def test_blocks_are_used_as_soon_as_the_step_that_fills_them_is_over():
    scheduler, _ = make_scheduler(budget=8)
    scheduler.add(make_request("first", 10, salt="s"))
    run_step(scheduler)
    scheduler.add(make_request("second", 12, salt="s"))
    works, _ = run_step(scheduler)
    assert shares(works) == [("first", 8, 2), ("second", 8, 4)]


def test_prompts_that_start_in_one_step_wait_for_nobody():
    scheduler, allocator = make_scheduler(budget=100)
    for name in ("first", "second"):
        scheduler.add(make_request(name, 10, salt="s"))
    works, _ = run_step(scheduler)
    assert shares(works) == [("first", 0, 10), ("second", 0, 10)]
    assert not set(works[0].block_ids) & set(works[1].block_ids)
    allocator.check_integrity()


def test_a_step_that_failed_leaves_nothing_to_use():
    scheduler, allocator = make_scheduler(budget=8)
    prompt = scheduler.add(make_request("fails", 16, salt="s"))
    run_step(scheduler)
    scheduler.plan()  # the second half, of which nothing is heard again
    prompt.in_step = False
    scheduler.remove(prompt)
    assert allocator.num_cached == 2  # the first half is good
    scheduler.add(make_request("next", 16, salt="s"))
    assert shares(scheduler.plan()) == [("next", 8, 8)]


def test_a_prompt_that_needs_the_whole_pool_gets_it_at_the_cost_of_what_is_cached():
    scheduler, allocator = make_scheduler(num_blocks=4, budget=100)
    first = scheduler.add(make_request("first", 16))
    run_step(scheduler)
    scheduler.remove(first)
    assert (allocator.num_free, allocator.num_cached) == (4, 4)
    scheduler.add(make_request("second", 16))
    assert shares(scheduler.plan()) == [("second", 0, 16)]
    assert allocator.num_free == 0


def test_a_cached_prefix_in_use_is_not_counted_twice():
    scheduler, allocator = make_scheduler(num_blocks=5, budget=100)
    scheduler.add(make_request("first", 12, salt="s"))  # 3 blocks
    run_step(scheduler)
    scheduler.add(make_request("second", 17, salt="s"))  # 5 blocks, 3 of them there: 2 are free
    assert shares(scheduler.plan()) == [("second", 12, 5)]
    assert allocator.num_free == 0
    allocator.check_integrity()


def test_without_caching_nothing_is_used_again():
    scheduler, allocator = make_scheduler(budget=100, caching=False)
    for _ in range(2):
        prompt = scheduler.add(make_request("a", 11, salt="s"))
        works, _ = run_step(scheduler)
        assert shares(works) == [("a", 0, 11)]
        scheduler.remove(prompt)
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens, allocator.num_cached) == (22, 0, 0)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), budget=st.integers(1, 20), data=st.data())
def test_every_prompt_is_computed_once_in_order_and_all_blocks_come_back(lengths, budget, data):
    scheduler, allocator = make_scheduler(num_blocks=8, budget=budget)
    prompts = [scheduler.add(make_request(str(i), length)) for i, length in enumerate(lengths)]
    computed = {str(i): 0 for i in range(len(lengths))}
    finished = []
    waiting_for_transfer = []
    for _ in range(1000):
        works, outcomes = run_step(scheduler)
        assert sum(work.num_tokens for work in works) <= budget
        for work in works:
            assert work.start == computed[work.request.request_id]
            assert len(work.block_ids) * LAYOUT.block_size >= work.start + work.num_tokens
            computed[work.request.request_id] += work.num_tokens
        for prompt, token in outcomes:
            if token is not None:
                finished.append(prompt.request.request_id)
                waiting_for_transfer.append(prompt)
        allocator.check_integrity()
        if waiting_for_transfer and (not works or data.draw(st.booleans())):
            scheduler.remove(waiting_for_transfer.pop(0))
        if len(finished) == len(prompts) and not waiting_for_transfer:
            break
    assert finished == [str(i) for i in range(len(prompts))]
    assert computed == {str(i): length for i, length in enumerate(lengths)}
    assert allocator.num_free == allocator.num_blocks
