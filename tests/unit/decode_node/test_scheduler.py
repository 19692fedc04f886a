"""The decode scheduler: credit, batches, preemption, reuse; progress and conservation as properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.reservation import State
from serving_core.errors import RequestError
from serving_core.requests import FinishReason, Request, SamplingParams
from tests.unit.decode_node.decode_scheduler_kit import (
    EOS,
    LAYOUT,
    make_request,
    make_scheduler,
    names,
    run_step,
    shares,
    start,
)


def test_credit_takes_the_prompt_and_the_first_token_to_come():
    scheduler, allocator = make_scheduler(num_blocks=16)
    scheduler.reserve(make_request("a", 8), now=0.0)
    (granted,) = scheduler.grant()
    assert len(granted.lease.block_ids) == 3  # 8 prompt tokens and one more, 4 to a block
    assert allocator.num_free == 13


def test_credit_stops_at_max_num_seqs_and_follows_arrival():
    scheduler, _ = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.reserve(make_request(name, 4), now=0.0)
    assert names(scheduler.grant()) == ["a", "b"]
    assert scheduler.grant() == []


def test_credit_leaves_a_block_for_each_that_holds_some():
    scheduler, _ = make_scheduler(num_blocks=5)
    scheduler.reserve(make_request("a", 4), now=0.0)  # 2 blocks
    scheduler.reserve(make_request("b", 4), now=0.0)  # 2 more would leave 1 for the 1 that holds: fits
    scheduler.reserve(make_request("c", 1, max_tokens=1), now=0.0)  # 1 block is free, and is spoken for
    assert names(scheduler.grant()) == ["a", "b"]


def test_nobody_overtakes_a_large_reservation():
    scheduler, _ = make_scheduler(num_blocks=6)
    start(scheduler, make_request("a", 8))
    scheduler.reserve(make_request("large", 14), now=0.0)
    scheduler.reserve(make_request("small", 1), now=0.0)
    assert scheduler.grant() == []


def test_a_committed_request_decodes_one_token_a_step_behind_its_first():
    scheduler, _ = make_scheduler()
    reservation = start(scheduler, make_request("a", 6))
    works, answered = run_step(scheduler, token_id=7)
    assert shares(works) == [("a", 6, 1)]  # the KV of the first token is computed, the second is sampled
    assert reservation.request.token_ids == [0, 1, 2, 3, 4, 5, 5, 7]
    assert answered[0].token.token_id == 7
    assert answered[0].finish_reason is None


def test_answers_end_by_eos_and_by_length():
    scheduler, _ = make_scheduler()
    start(scheduler, make_request("eos", 4))
    _, (answer,) = run_step(scheduler, token_id=EOS)
    assert answer.finish_reason is FinishReason.STOP
    scheduler.remove(answer.reservation)
    start(scheduler, make_request("length", 4, max_tokens=2))
    _, (answer,) = run_step(scheduler)
    assert answer.finish_reason is FinishReason.LENGTH


def test_the_youngest_is_preempted_computes_again_in_chunks_and_goes_on():
    scheduler, allocator = make_scheduler(num_blocks=7, budget=4, caching=False)
    old = start(scheduler, make_request("old", 7, max_tokens=12))  # 2 blocks
    young = start(scheduler, make_request("young", 7, max_tokens=9))  # 2 blocks
    rest = allocator.allocate(3)  # somebody else's
    run_step(scheduler)  # both fill their second block
    works, _ = run_step(scheduler)  # both need a third: none is left
    assert names([young]) == ["young"]
    assert young.state is State.PREEMPTED
    assert young.lease is None
    assert shares(works) == [("old", 8, 1)]
    assert scheduler.num_preemptions == 1
    rest.release()
    works, _ = run_step(scheduler)  # decode first, then as much of the recompute as the budget holds
    assert shares(works) == [("old", 9, 1), ("young", 0, 3)]
    works, _ = run_step(scheduler)
    assert shares(works) == [("old", 10, 1), ("young", 3, 3)]
    works, answered = run_step(scheduler)
    assert shares(works) == [("old", 11, 1), ("young", 6, 3)]
    assert names(answer.reservation for answer in answered) == ["old", "young"]
    assert old.state is State.RUNNING
    allocator.check_integrity()


def test_no_credit_while_a_preempted_request_waits():
    scheduler, allocator = make_scheduler(num_blocks=6)
    start(scheduler, make_request("old", 7, max_tokens=16))
    start(scheduler, make_request("young", 7))
    rest = allocator.allocate(2)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.count(State.PREEMPTED) == 1
    scheduler.reserve(make_request("new", 1), now=0.0)
    assert scheduler.grant() == []
    rest.release()


def test_overdue_names_those_that_wait_too_long():
    scheduler, _ = make_scheduler(max_num_seqs=1)
    scheduler.reserve(make_request("granted", 4), now=1.0)
    scheduler.grant()
    scheduler.reserve(make_request("early", 4), now=2.0)
    scheduler.reserve(make_request("late", 4), now=3.0)
    assert names(scheduler.overdue(waiting_since=3.0)) == ["early"]


def test_refusals_name_the_limit_and_the_value():
    scheduler, _ = make_scheduler(num_blocks=4, max_num_queued=1)
    with pytest.raises(RequestError, match="need 5 KV blocks, the decode node has 4") as caught:
        scheduler.reserve(make_request("never", 9, max_tokens=8), now=0.0)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    scheduler.reserve(make_request("waits", 4), now=0.0)
    with pytest.raises(RequestError, match="holds its 1 requests") as caught:
        scheduler.reserve(make_request("one too many", 4), now=0.0)
    assert caught.value.reason == "QUEUE_FULL"


def test_credit_starts_with_the_blocks_that_the_pool_holds():
    scheduler, allocator = make_scheduler(num_blocks=16)
    first = start(scheduler, make_request("first", 8, salt="s"))
    assert first.num_cached_blocks == 0
    scheduler.reserve(make_request("second", 11, salt="s"), now=0.0)
    scheduler.reserve(make_request("other", 11, salt="another"), now=0.0)
    second, other = scheduler.grant()
    assert (second.num_cached_blocks, other.num_cached_blocks) == (2, 0)
    assert second.lease.block_ids[:2] == first.lease.block_ids[:2] == [0, 1]
    assert allocator.num_free == 16 - 3 - 1 - 3
    allocator.check_integrity()


def test_a_whole_prompt_may_be_there_and_its_next_token_gets_a_block_of_its_own():
    scheduler, allocator = make_scheduler()
    start(scheduler, make_request("first", 8, salt="s"))
    second = start(scheduler, make_request("second", 8, salt="s"))
    assert second.num_cached_blocks == 2
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (8 + 8, 8)
    works, _ = run_step(scheduler)
    assert shares(works) == [("first", 8, 1), ("second", 8, 1)]
    assert works[0].block_ids[:2] == works[1].block_ids[:2]
    assert works[0].block_ids[2] != works[1].block_ids[2]
    allocator.check_integrity()


def test_what_is_granted_and_not_committed_is_nobody_elses():
    scheduler, allocator = make_scheduler()
    start(scheduler, make_request("first", 4, salt="s"))
    for name in ("second", "third"):
        scheduler.reserve(make_request(name, 12, salt="s"), now=0.0)
    second, third = scheduler.grant()
    assert (second.num_cached_blocks, third.num_cached_blocks) == (1, 1)
    scheduler.remove(second)  # its transfer failed
    assert allocator.num_cached == 0
    scheduler.commit(third, first_token_id=5)
    scheduler.reserve(make_request("fourth", 12, salt="s"), now=0.0)
    (fourth,) = scheduler.grant()
    assert fourth.num_cached_blocks == 3
    allocator.check_integrity()


def test_the_blocks_of_an_answer_stay_for_the_next_turn():
    scheduler, allocator = make_scheduler()
    reservation = start(scheduler, make_request("turn", 6, max_tokens=8, salt="s"))
    while run_step(scheduler, token_id=7)[1][0].finish_reason is None:
        pass
    scheduler.remove(reservation)
    assert allocator.num_cached == 3  # 14 tokens, the last of which has no KV
    tokens = [*range(6), 5, 7, 7, 7, 7, 7, 7, 7, 8, 9]
    scheduler.reserve(Request("next turn", 1, tokens, len(tokens), SamplingParams(max_tokens=2), "s"), now=0.0)
    (granted,) = scheduler.grant()
    assert granted.num_cached_blocks == 3


def test_credit_counts_cached_blocks_that_nobody_uses_as_taken():
    scheduler, allocator = make_scheduler(num_blocks=6)
    scheduler.remove(start(scheduler, make_request("gone", 8, salt="s")))
    assert (allocator.num_free, allocator.num_cached) == (6, 2)
    start(scheduler, make_request("a", 8))  # 3 blocks
    scheduler.reserve(make_request("b", 8, salt="s"), now=0.0)  # 3 more, 2 of them cached, would leave a none to grow
    assert scheduler.grant() == []
    scheduler, allocator = make_scheduler(num_blocks=6)
    start(scheduler, make_request("a", 8, salt="s"))
    scheduler.reserve(make_request("b", 8, salt="s"), now=0.0)  # 1 more, the others are in use anyway
    assert names(scheduler.grant()) == ["b"]
    assert allocator.num_free == 2


def test_the_preempted_computes_only_what_was_taken_from_it():
    scheduler, allocator = make_scheduler(num_blocks=8)
    start(scheduler, make_request("old", 7, max_tokens=12))  # 2 blocks
    young = start(scheduler, make_request("young", 11, max_tokens=9))  # 3 blocks
    rest = allocator.allocate(3)  # somebody else's
    run_step(scheduler)  # both fill their last block
    works, _ = run_step(scheduler)  # the old one takes the youngest block of the preempted
    assert shares(works) == [("old", 8, 1)]
    assert young.state is State.PREEMPTED
    assert allocator.num_cached == 2
    rest.release()
    works, _ = run_step(scheduler)
    assert shares(works) == [("old", 9, 1), ("young", 8, 5)]
    assert len(young.request.token_ids) == 14
    allocator.check_integrity()


def test_the_preempted_computes_its_last_token_again_whatever_is_there():
    scheduler, _ = make_scheduler()
    start(scheduler, make_request("old", 7, max_tokens=12, salt="s"))
    run_step(scheduler)
    young = start(scheduler, make_request("young", 7, max_tokens=9, salt="s"))
    scheduler._preempt(young)  # all of its 8 known tokens are in blocks of the old one
    works, answered = run_step(scheduler)
    assert shares(works) == [("old", 8, 1), ("young", 4, 4)]
    assert names(answer.reservation for answer in answered) == ["old", "young"]


def test_without_caching_every_block_is_sent():
    scheduler, allocator = make_scheduler(caching=False)
    start(scheduler, make_request("first", 8, salt="s"))
    assert start(scheduler, make_request("second", 8, salt="s")).num_cached_blocks == 0
    assert allocator.take_changes() == ([], [])


def check_progress(scheduler, works, allocator):
    """Of a step that has just been planned."""
    planned = {work.request for work in works}
    left_out = [each for each in scheduler._in_state(State.RUNNING) if each.request not in planned]
    decoding = [each for each in left_out if each.num_missing_tokens == 1]
    assert not decoding or not allocator.num_free, "a request that could have decoded did not"
    prompts = [each for each in scheduler._in_state(State.RUNNING) if each.num_missing_tokens > 1]
    assert not prompts or any(each.request in planned for each in prompts), "no prompt got on"


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(2, 24)), min_size=1, max_size=10),
    budget=st.integers(4, 24),
    data=st.data(),
)
def test_everyone_finishes_whatever_the_pool_and_the_order_of_events(sizes, budget, data):
    """A tight pool, prompts from elsewhere and local ones, commits and cancels at random moments: no deadlock, exact
    answers, every block free at the end, and with every step whoever decodes gets on, and of prompts at least one."""
    num_blocks = data.draw(st.integers(11, 14))  # the largest request alone needs 11
    scheduler, allocator = make_scheduler(num_blocks=num_blocks, max_num_seqs=4, budget=budget)
    lengths = {}
    for i, (num_tokens, max_tokens) in enumerate(sizes):
        scheduler.reserve(make_request(str(i), num_tokens, max_tokens), now=0.0, local_prefill=data.draw(st.booleans()))
        lengths[str(i)] = num_tokens + max_tokens
    granted, done, cancelled = [], {}, set()
    for _ in range(5000):
        granted += [each for each in scheduler.grant() if each.state is State.GRANTED]
        if granted and (data.draw(st.booleans()) or not scheduler.count(State.RUNNING)):
            scheduler.commit(granted.pop(0), first_token_id=5)
        works, answered = run_step(scheduler, check=lambda works: check_progress(scheduler, works, allocator))
        assert sum(work.num_tokens for work in works) <= budget
        for work in works:
            assert len(work.block_ids) * LAYOUT.block_size >= work.start + work.num_tokens
        for answer in answered:
            name = answer.reservation.request.request_id
            if answer.finish_reason is not None:
                done[name] = len(answer.reservation.request.token_ids)
                scheduler.remove(answer.reservation)
            elif data.draw(st.integers(0, 30)) == 0:
                cancelled.add(name)
                scheduler.remove(answer.reservation)
        allocator.check_integrity()
        if not scheduler.num_requests:
            break
    assert not scheduler.num_requests, "the scheduler is stuck"
    assert done == {name: length for name, length in lengths.items() if name not in cancelled}
    assert allocator.num_free == allocator.num_blocks
