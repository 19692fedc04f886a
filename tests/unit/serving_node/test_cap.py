"""How much of a pool of 16 blocks prompts for other nodes may hold: together 8, or as much as one of them needs."""

import pytest

from decode_node.preemption import MAX_EVICTIONS, Preemption
from prefill_node.scheduler import PrefillScheduler
from serving_core.node.costs import StepCosts
from serving_core.node.requests import RequestState
from serving_node.admission import PrefilledCap
from tests.unit.serving_node.node_requests_kit import LAYOUT, House

BLOCK = LAYOUT.block_size


class Pool(House):
    """With an answer of the node's own, and a prompt for another node that waits."""

    def __init__(self, num_waiting_blocks=4, *, age=2, has_answer=True):
        super().__init__(16)
        prefill = PrefillScheduler(self.node_requests, self.leases, StepCosts(), max_num_queued=9)
        preemption = Preemption(self.node_requests, self.leases, revoke=lambda _: None)
        self.cap = PrefilledCap(self.node_requests, self.leases, prefill, preemption)
        if has_answer:
            self.add("answer", 1, RequestState.RUNNING, 1)
        self.waiting = self.add("waiting", age, RequestState.WAITING, num_waiting_blocks * BLOCK, only_prefills=True)

    def hold(self, num_blocks, age=3, stage=RequestState.PREFILLING, **facts):
        return self.add(f"{age}", age, stage, num_blocks * BLOCK, only_prefills=True, **facts)


@pytest.mark.parametrize(
    ("num_waiting", "num_held", "holds_back"), [(4, 4, False), (4, 5, True), (9, 0, False), (9, 1, True)]
)
def test_what_is_read_counts_together_with_what_waits(num_waiting, num_held, holds_back):
    pool = Pool(num_waiting)
    if num_held:
        pool.hold(num_held)
    assert pool.cap.holds_back(pool.waiting) == holds_back


@pytest.mark.parametrize(
    ("age", "facts", "holds_back"),
    [
        (3, {}, False),
        (1, {}, True),  # an older one
        (3, {"is_sending": True}, True),
        (3, {"ending": {}}, True),
    ],
)
def test_what_only_waits_and_is_younger_does_not_count(age, facts, holds_back):
    pool = Pool()
    pool.hold(5, age, RequestState.PREFILLED, **facts)
    assert pool.cap.holds_back(pool.waiting) == holds_back


def test_what_is_answered_here_is_not_held_back():
    pool = Pool()
    pool.hold(5)
    own = pool.add("own", 9, RequestState.WAITING, 16)
    kept = pool.add("kept", 9, RequestState.WAITING, 16, only_prefills=True, is_kept=True)
    assert not pool.cap.holds_back(own)
    assert not pool.cap.holds_back(kept)


def test_a_node_without_answers_has_all_of_its_pool_for_other_nodes():
    pool = Pool(has_answer=False)
    read = pool.hold(5, stage=RequestState.PREFILLED)
    assert not pool.cap.holds_back(pool.waiting)
    pool.cap.make_room(pool.waiting)
    assert read.lease is not None


@pytest.mark.parametrize(("nums_held", "nums_left"), [((2, 2), (2, 2)), ((3, 2), (3, 0)), ((5, 2), (0, 0))])
def test_room_is_made_by_the_youngest_and_no_more_than_is_needed(nums_held, nums_left):
    pool = Pool()
    read = [pool.hold(num, age, RequestState.PREFILLED) for age, num in enumerate(nums_held, 3)]
    pool.cap.make_room(pool.waiting)
    assert tuple(len(each.lease.block_ids) if each.lease else 0 for each in read) == nums_left
    assert [each.state for each in read if each.lease is None] == [RequestState.WAITING] * nums_left.count(0)


class SharingPool(Pool):
    """Its prompts begin with four blocks in common, and have one of their own."""

    def __init__(self):
        super().__init__(5)
        self.waiting.names.root = self.root = b"common".ljust(32)
        self.waiting.request.token_ids = self.tokens(2)

    def tokens(self, age):
        return [*range(4 * BLOCK), *[100 + age] * BLOCK]

    def hold_alike(self, age, stage=RequestState.PREFILLING, **facts):
        each = self.add(f"{age}", age, stage, 5 * BLOCK, only_prefills=True, holds=False, salt="common", **facts)
        each.request.token_ids = self.tokens(age)
        assert self.leases.take(each, 5 * BLOCK, num_cacheable=4 * BLOCK, num_spare=0)
        each.num_computed = 5 * BLOCK
        self.leases.publish(each)
        return each


@pytest.mark.parametrize(
    ("num_alike", "num_others", "holds_back"), [(3, 0, False), (3, 1, True), (1, 2, False), (1, 3, True)]
)
def test_what_several_begin_with_counts_once(num_alike, num_others, holds_back):
    """Of the 8 blocks the common ones take 4, and each prompt one of its own."""
    pool = SharingPool()
    for age in range(num_alike):
        pool.hold_alike(10 + age)
    if num_others:
        pool.hold(num_others, age=30)
    assert pool.cap.holds_back(pool.waiting) == holds_back


def test_what_it_would_share_with_those_that_give_way_counts_as_its_own():
    """The answer and the younger ones hold what it begins with, and the firm one none of it."""
    pool = SharingPool()
    pool.hold_alike(10, RequestState.PREFILLED)
    pool.hold(3, age=30)
    assert not pool.cap.holds_back(pool.waiting)
    pool.hold(1, age=31)
    assert pool.cap.holds_back(pool.waiting)


def test_of_those_that_share_as_many_give_way_as_free_too_much():
    pool = SharingPool()
    first, second, third = (pool.hold_alike(age, RequestState.PREFILLED) for age in (10, 11, 12))
    pool.hold(2, age=9)
    pool.cap.make_room(pool.waiting)
    assert [each.lease is not None for each in (first, second, third)] == [True, False, False]


def test_what_cannot_give_way_does_not_and_others_do():
    pool = Pool()
    idle = pool.hold(2, 3, RequestState.PREFILLED)
    firm = [
        pool.hold(2, 1, RequestState.PREFILLED),  # an older one
        pool.hold(1, 4, RequestState.PREFILLED, is_sending=True),
        pool.hold(1, 5, RequestState.PREFILLED, num_evictions=MAX_EVICTIONS),
        pool.hold(1, 6, RequestState.PREFILLING),
    ]
    pool.cap.make_room(pool.waiting)
    assert idle.lease is None
    assert all(each.lease is not None for each in firm)
