"""The prefill scheduler: order, chunks, blocks and refusals, worked out by hand; conservation as a property."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockAllocator
from engine.errors import RequestError
from engine.layout import KVLayout
from engine.requests import Request, SampledToken, SamplingParams
from prefill_node.scheduler import PrefillScheduler

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


def make_request(name: str, num_tokens: int) -> Request:
    return Request(name, 1, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=8))


def make_scheduler(num_blocks=8, budget=10, max_num_queued=100):
    allocator = BlockAllocator(num_blocks)
    scheduler = PrefillScheduler(allocator, LAYOUT, max_num_batched_tokens=budget, max_num_queued=max_num_queued)
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
