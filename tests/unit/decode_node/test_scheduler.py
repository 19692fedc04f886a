"""Who gives way to an answer that needs a block."""

import pytest

from decode_node.preemption import MAX_EVICTIONS, Preemption
from decode_node.scheduler import DecodeScheduler
from serving_core.node.requests import RequestState
from tests.unit.serving_node.node_requests_kit import House


def make(num_blocks=4):
    house, revoked = House(num_blocks), []
    preemption = Preemption(house.node_requests, house.leases, revoked.append)
    return house, DecodeScheduler(house.node_requests, house.leases, preemption), preemption, revoked


def needs_a_block(house, age=1):
    """An answer whose two blocks are full."""
    node_request = house.add("needs", age, RequestState.RUNNING, 8, num_computed=8)
    node_request.request.token_ids.append(0)
    return node_request


def rest_is_held(house):
    house.allocator.allocate(house.allocator.num_free)


# stage, facts, and where it stands afterwards; None: it does not give way
CASES = [
    (RequestState.RUNNING, {}, RequestState.WAITING),
    (RequestState.PREFILLING, {}, RequestState.WAITING),
    (RequestState.PREFILLING, {"only_prefills": True}, RequestState.WAITING),
    (RequestState.PREFILLING, {"only_prefills": True, "is_sending": True}, None),
    (RequestState.PREFILLED, {"only_prefills": True}, RequestState.WAITING),
    (RequestState.PREFILLED, {"only_prefills": True, "num_evictions": MAX_EVICTIONS - 1}, RequestState.WAITING),
    (RequestState.PREFILLED, {"only_prefills": True, "num_evictions": MAX_EVICTIONS}, None),
    (RequestState.PREFILLED, {"only_prefills": True, "is_sending": True}, None),
    (RequestState.RECEIVING_KV, {"is_receiving": True}, RequestState.RECEIVING_KV),
    (RequestState.RECEIVING_KV, {}, None),  # aborted, and about to be cancelled
]


@pytest.mark.parametrize(("stage", "facts", "then"), CASES)
def test_what_a_younger_request_gives(stage, facts, then):
    house, scheduler, preemption, revoked = make()
    needs = needs_a_block(house)
    younger = house.add("younger", 2, stage, 8, num_computed=8, **facts)
    works = scheduler.plan()
    if then is RequestState.WAITING:
        assert works[0].request is needs.request
        assert younger.lease is None
        assert younger.num_computed == 0
        assert (preemption.num_preemptions, preemption.num_evictions) == (
            (0, 1) if stage is RequestState.PREFILLED else (1, 0)
        )
    else:
        assert [work.request for work in works] == []
        assert younger.lease is not None
        assert revoked == ([younger] if then else [])
        assert younger.is_revoked == bool(then)
        assert preemption.num_preemptions == preemption.num_evictions == 0
    assert younger.state is (then or stage)
    assert needs.state is RequestState.RUNNING
    house.allocator.check_integrity()


def test_no_more_is_taken_while_a_grant_is_being_taken_back():
    house, scheduler, _, revoked = make(8)
    needs_a_block(house)
    grant = house.add("grant", 9, RequestState.RECEIVING_KV, 4, is_receiving=True)
    other = house.add("other", 8, RequestState.RECEIVING_KV, 4, is_receiving=True)
    rest_is_held(house)
    assert scheduler.plan() == scheduler.plan() == []
    assert revoked == [grant]
    assert not other.is_revoked


def test_one_that_has_its_place_in_the_step_keeps_it():
    """The younger one is behind in the order, but what is older than it in want of a block comes before it."""
    house, scheduler, _, _ = make(8)
    first = house.add("first", 1, RequestState.RUNNING, 7, num_computed=6)
    second = needs_a_block(house, age=2)
    third = house.add("third", 3, RequestState.RUNNING, 7, num_computed=6)
    rest_is_held(house)
    assert [work.request for work in scheduler.plan()] == [first.request, second.request]
    assert third.state is RequestState.WAITING


def test_the_oldest_does_not_give_way_and_the_youngest_gives_way_itself():
    house, scheduler, preemption, _ = make(6)
    oldest = house.add("oldest", 1, RequestState.RUNNING, 7, num_computed=6)
    youngest = needs_a_block(house, age=2)
    rest_is_held(house)
    assert [work.request for work in scheduler.plan()] == [oldest.request]
    assert youngest.state is RequestState.WAITING
    assert preemption.num_preemptions == 1


def test_an_answer_that_has_no_younger_and_is_the_oldest_waits():
    house, scheduler, _, revoked = make(6)
    read = house.add("read", 1, RequestState.PREFILLED, 8, num_computed=8, only_prefills=True)
    needs = needs_a_block(house, age=2)
    rest_is_held(house)
    assert scheduler.plan() == []
    assert needs.state is RequestState.RUNNING
    assert read.state is RequestState.PREFILLED
    assert not revoked


def test_what_is_ending_is_not_in_the_step():
    house, scheduler, _, _ = make(6)
    house.add("ends", 1, RequestState.RUNNING, 7, num_computed=6, ending={})
    assert scheduler.plan() == []
