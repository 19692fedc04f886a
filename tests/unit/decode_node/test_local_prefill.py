"""The decode scheduler's local prompts: computed in chunks beside the batch, from the node's own cached blocks."""

from decode_node.reservation import State
from serving_core.requests import Request, SamplingParams
from tests.unit.decode_node.decode_scheduler_kit import (
    EOS,
    make_request,
    make_scheduler,
    names,
    run_step,
    shares,
    start,
)


def reserve(scheduler, request):
    return scheduler.reserve(request, now=0.0, local_prefill=True)


def start_local(scheduler, request):
    """Reserves and grants one local request whose turn it is."""
    reservation = reserve(scheduler, request)
    assert scheduler.grant() == [reservation]
    return reservation


def test_credit_takes_the_prompt_and_a_token_and_lets_it_run():
    scheduler, allocator = make_scheduler()
    reservation = start_local(scheduler, make_request("a", 8))
    assert reservation.state is State.RUNNING
    assert len(reservation.lease.block_ids) == 3
    assert scheduler.num_waiting_tokens == 8
    works, (answer,) = run_step(scheduler, token_id=7)
    assert shares(works) == [("a", 0, 8)]
    assert answer.is_first
    assert reservation.request.token_ids == [*range(8), 7]
    works, (answer,) = run_step(scheduler, token_id=9)
    assert shares(works) == [("a", 8, 1)]
    assert not answer.is_first
    assert (scheduler.num_waiting_tokens, scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (0, 8, 0)
    allocator.check_integrity()


def test_decode_goes_first_and_prompts_take_the_rest_in_order_of_arrival():
    scheduler, _ = make_scheduler(num_blocks=32, budget=8)
    start(scheduler, make_request("decodes", 4))
    start_local(scheduler, make_request("first", 10))
    start(scheduler, make_request("decodes too", 4))
    start_local(scheduler, make_request("second", 6))
    works, answered = run_step(scheduler)
    assert shares(works) == [("decodes", 4, 1), ("decodes too", 4, 1), ("first", 0, 6)]
    assert names(answer.reservation for answer in answered) == ["decodes", "decodes too"]
    assert scheduler.num_waiting_tokens == 4 + 6
    works, answered = run_step(scheduler)
    assert shares(works) == [("decodes", 5, 1), ("decodes too", 5, 1), ("first", 6, 4), ("second", 0, 2)]
    assert [answer.is_first for answer in answered] == [False, False, True]
    works, _ = run_step(scheduler)
    assert shares(works) == [("decodes", 6, 1), ("first", 10, 1), ("decodes too", 6, 1), ("second", 2, 4)]


def test_a_prompt_gets_on_though_all_others_decode_and_the_budget_is_least():
    scheduler, _ = make_scheduler(num_blocks=32, max_num_seqs=3, budget=3)
    for name in "ab":
        start(scheduler, make_request(name, 4, max_tokens=20))
    start_local(scheduler, make_request("prompt", 4))
    for position in range(4):
        works, answered = run_step(scheduler)
        assert sorted(shares(works)) == [("a", 4 + position, 1), ("b", 4 + position, 1), ("prompt", position, 1)]
    assert [answer.is_first for answer in answered] == [False, False, True]


def test_cached_blocks_are_not_computed_but_the_last_token_is():
    scheduler, allocator = make_scheduler()
    start(scheduler, make_request("there", 8, salt="s"))
    part = start_local(scheduler, make_request("part", 11, salt="s"))
    whole = start_local(scheduler, make_request("whole", 8, salt="s"))
    assert scheduler.num_waiting_tokens == 3 + 4
    works, _ = run_step(scheduler)
    assert shares(works) == [("there", 8, 1), ("part", 8, 3), ("whole", 4, 4)]
    assert (part.num_cached_blocks, whole.num_cached_blocks) == (2, 1)
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (8 + 11 + 8, 8 + 4)
    allocator.check_integrity()


def test_a_prompt_uses_what_those_before_it_have_computed_since_it_got_credit():
    scheduler, allocator = make_scheduler(budget=8)
    start_local(scheduler, make_request("first", 10, salt="s"))
    second = start_local(scheduler, make_request("second", 11, salt="s"))
    num_free = allocator.num_free
    run_step(scheduler)
    works, _ = run_step(scheduler)
    assert shares(works) == [("first", 8, 2), ("second", 8, 3)]
    assert second.num_cached_blocks == 2
    assert allocator.num_free == num_free + 2
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (21, 8)
    allocator.check_integrity()


def test_what_waits_counts_its_tokens_as_far_as_one_can_tell():
    scheduler, _ = make_scheduler(max_num_seqs=1)
    start(scheduler, make_request("there", 8, salt="s"))
    reserve(scheduler, make_request("local", 11, salt="s"))
    scheduler.reserve(make_request("remote", 11), now=0.0)
    assert scheduler.grant() == []
    assert scheduler.num_waiting_tokens == 3


def test_a_prompt_that_is_preempted_in_the_middle_begins_again_and_counts_once():
    scheduler, allocator = make_scheduler(num_blocks=7, budget=4, caching=False)
    start(scheduler, make_request("old", 7, max_tokens=12))  # 2 blocks
    young = start_local(scheduler, make_request("young", 9))  # 3 blocks
    rest = allocator.allocate(2)
    works, _ = run_step(scheduler)
    assert shares(works) == [("old", 7, 1), ("young", 0, 3)]
    works, _ = run_step(scheduler)  # the old one needs a third block
    assert shares(works) == [("old", 8, 1)]
    assert young.state is State.PREEMPTED
    assert scheduler.num_waiting_tokens == 9
    rest.release()
    for start_token in (0, 3, 6):  # the freed blocks are enough for it again
        works, answered = run_step(scheduler)
        assert shares(works)[1] == ("young", start_token, 3)
    assert [answer.is_first for answer in answered] == [False, True]
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (7 + 9, 0)
    assert scheduler.num_preemptions == 1


def test_a_request_that_is_preempted_while_it_decodes_has_its_first_token():
    scheduler, _ = make_scheduler()
    start_local(scheduler, make_request("old", 4))
    young = start_local(scheduler, make_request("young", 6))
    run_step(scheduler)
    scheduler._preempt(young)
    assert scheduler.num_waiting_tokens == 0
    _, answered = run_step(scheduler)
    assert [answer.is_first for answer in answered] == [False, False]


def test_a_prompt_that_goes_on_with_an_earlier_answer_and_one_that_ends_at_once():
    scheduler, allocator = make_scheduler()
    moved = Request("moved", 2, list(range(7)), 5, SamplingParams(max_tokens=4), "moved")
    start_local(scheduler, moved)
    ends = start_local(scheduler, make_request("ends", 4, max_tokens=1))
    stops = start_local(scheduler, make_request("stops", 4))
    _, answered = run_step(scheduler, token_id=EOS)
    assert [(answer.is_first, answer.finish_reason is not None) for answer in answered] == [(True, True)] * 3
    assert moved.num_output_tokens == 3
    for answer in answered:
        scheduler.remove(answer.reservation)
    assert ends.lease is stops.lease is None
    assert allocator.num_free == allocator.num_blocks


def test_local_and_remote_requests_share_credit_in_order_of_arrival():
    scheduler, _ = make_scheduler(max_num_seqs=2)
    scheduler.reserve(make_request("remote", 4), now=0.0)
    reserve(scheduler, make_request("local", 4))
    reserve(scheduler, make_request("late", 4))
    granted = scheduler.grant()
    assert [(each.request.request_id, each.state) for each in granted] == [
        ("remote", State.GRANTED),
        ("local", State.RUNNING),
    ]
    assert scheduler.grant() == []
