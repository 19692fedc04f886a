"""Who may start, and what is told of blocks and running slots, of requests that stand where a test puts them."""

import pytest

from decode_node.preallocation import Preallocation
from decode_node.preemption import Preemption
from prefill_node.scheduler import PrefillScheduler
from serving_core.node.costs import StepCosts
from serving_core.node.requests import HolderEndpoint, RequestEvent, RequestState
from serving_core.slo import Due
from serving_node.admission import Admission
from serving_node.decisions import Decisions, RevokeRemoteKV
from serving_node.distributed_kv.source import DistributedKV
from serving_node.transfers import Endings
from tests.unit.serving_node.node_requests_kit import LAYOUT, House
from tests.unit.serving_node.slack_kit import ExactCosts

TILE_BLOCKS = 4
READY = {"is_receiving": True, "has_first_token": True}
HOLDERS = (HolderEndpoint("host:1", bytes(32)),)


class Node(House):
    def __init__(self, num_blocks=16, num_slots=2, costs=None, tile_blocks=TILE_BLOCKS):
        super().__init__(num_blocks)
        self.revoked = []
        prefill = PrefillScheduler(self.node_requests, self.leases, StepCosts(), max_num_queued=9)
        self.preallocation = Preallocation(self.node_requests, self.leases, max_num_queued=9)
        preemption = Preemption(self.node_requests, self.leases, self.revoked.append)
        self.endings = Endings(self.node_requests, self.leases, Decisions())
        self.admission = Admission(
            self.node_requests, self.leases, prefill, self.preallocation, preemption, costs or StepCosts(), num_slots
        )
        parts = self.node_requests, self.leases, self.allocator, self.endings
        self.distributed = DistributedKV(*parts, tile_blocks * LAYOUT.block_size)
        self.distributed.join(self.admission, preemption)
        self.held_kv, self.reservation = self.distributed.held_kv, self.admission.reserve

    def fill_slots(self):
        return [self.add(f"answer-{age}", age, RequestState.RUNNING, 1) for age in (1, 2)]

    def granted(self):
        return [each.request.request_id for each in self.admission.admit()]

    def may_start(self, *node_requests):
        gate = self.admission.start_rule(lambda node_request, num_spare: False)
        return [gate(each) for each in node_requests]


def test_blocks_that_are_awaited_and_one_for_each_answer():
    node = Node()
    node.fill_slots()
    node.add("granted", 3, RequestState.RECEIVING_KV, 5)
    node.add("read", 4, RequestState.PREFILLING, 5)
    node.add("outgoing", 5, RequestState.PREFILLING, 5, only_prefills=True)
    assert node.admission.num_blocks_wanted() == node.admission.num_running() == 4
    node.add("queued", 6, RequestState.WAITING, 8)  # 9 tokens
    assert node.admission.num_blocks_wanted() == 4 + 3
    node.add("awaiting", 7, RequestState.WAITING_FOR_BLOCKS, 8, num_ahead=5)  # 13
    assert node.admission.num_blocks_wanted() == 4 + 3 + 4
    node.add("queued for another", 8, RequestState.WAITING, 8, only_prefills=True)  # 8
    assert node.admission.num_blocks_wanted() == 4 + 3 + 4 + 2
    node.add("stopped", 9, RequestState.FROZEN, 1)
    assert node.admission.num_running() == 5


@pytest.mark.parametrize(
    ("has_slot", "facts", "may_start"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"only_prefills": True}, True),
        (False, {"only_prefills": True, "is_kept": True}, True),  # it needs none before it is read
    ],
)
def test_whether_a_prompt_may_start_by_the_slot_that_it_needs(has_slot, facts, may_start):
    node = Node()
    if not has_slot:
        node.fill_slots()
    queued = node.add("queued", 9, RequestState.WAITING, 5, **facts)
    assert node.may_start(queued) == [may_start]


@pytest.mark.parametrize("only_prefills", [False, True])
def test_a_prompt_whose_blocks_come_from_elsewhere_waits_for_them(only_prefills):
    node = Node(num_slots=3)
    node.fill_slots()
    queued, asked = node.add("queued", 9, RequestState.WAITING, 5, only_prefills=only_prefills), []
    gate = node.admission.start_rule(lambda *given: asked.append(given) or True)
    assert not gate(queued)
    assert asked == [(queued, 2)]  # a block for each answer is to be left


@pytest.mark.parametrize(("num_sequences", "may_start"), [(2, True), (3, False)])
def test_no_more_are_to_be_answered_than_can_be_in_time(num_sequences, may_start):
    """A step takes 10 ms, and 2 for each answer: with three of them 16, which the limit allows, stretched."""
    node = Node(num_slots=8, costs=ExactCosts((0.010, 0.002, 0.0, 0.0, 0.0, 0.0)))
    for age in range(num_sequences):
        node.add(f"answer-{age}", age, RequestState.RUNNING, 1, due=Due(tpot_s=0.0125))
    node.add("answered elsewhere", 7, RequestState.PREFILLING, 5, only_prefills=True, due=Due(tpot_s=0.012))
    own = node.add("own", 8, RequestState.WAITING, 5)
    outgoing = node.add("outgoing", 9, RequestState.WAITING, 5, only_prefills=True)
    assert node.may_start(own, outgoing) == [may_start, True]


@pytest.mark.parametrize(("num_slots", "age", "may_start"), [(9, 3, False), (9, 7, True), (3, 3, True)])
def test_a_prompt_waits_for_an_older_one_that_lacks_blocks_alone(num_slots, age, may_start):
    """Not for one that lacks a running slot too."""
    node = Node(num_slots=num_slots)
    node.fill_slots()
    node.add("granted", 8, RequestState.RECEIVING_KV, 1, is_receiving=True)
    node.add("awaiting", age, RequestState.WAITING_FOR_BLOCKS, 60)
    queued = node.add("queued", 5, RequestState.WAITING, 5, only_prefills=True)
    assert node.granted() == []
    assert node.may_start(queued) == [may_start]


@pytest.mark.parametrize(
    ("num_tokens", "facts", "is_granted"),
    [(39, {}, True), (40, {}, False), (60, {"ending": {}}, True), (40, {"only_prefills": True}, True)],
)
def test_credit_leaves_what_an_older_prompt_is_to_begin_with(num_tokens, facts, is_granted):
    """Ten of 15 blocks that are free, beside four that are granted and one for the answer that is written."""
    node = Node(num_slots=4)
    node.add("answer", 1, RequestState.RUNNING, 1)
    node.add("older", 3, RequestState.WAITING, num_tokens, **facts)
    node.add("awaiting", 5, RequestState.WAITING_FOR_BLOCKS, 13)
    assert node.granted() == ["awaiting"] * is_granted


@pytest.mark.parametrize(("num_tokens", "is_granted"), [(15, True), (16, False)])
def test_credit_leaves_what_those_need_that_share_what_others_bring(num_tokens, is_granted):
    """Of eleven blocks that are free five, one that they grow into, and one for the answer that is coming."""
    node = Node(num_slots=4)
    node.add("ahead", 3, RequestState.RECEIVING_KV, 20, salt="same", is_receiving=True)
    node.add("behind", 4, RequestState.WAITING_FOR_BLOCKS, 20, salt="same")
    node.add("awaiting", 5, RequestState.WAITING_FOR_BLOCKS, num_tokens)
    assert node.granted() == ["awaiting"] * is_granted


@pytest.mark.parametrize(("age", "num_tokens", "starts"), [(5, 15, True), (5, 16, False), (2, 16, True)])
def test_a_prompt_that_starts_leaves_it_too_unless_it_is_older(age, num_tokens, starts):
    node = Node(num_slots=4)
    node.add("ahead", 3, RequestState.RECEIVING_KV, 20, salt="same", is_receiving=True)
    node.add("behind", 4, RequestState.WAITING_FOR_BLOCKS, 20, salt="same")
    assert node.granted() == []
    assert node.admission.start(node.add("queued", age, RequestState.WAITING, num_tokens)) == starts


@pytest.mark.parametrize("facts", [{}, {"is_receiving": True}, {"is_receiving": True, "is_coming": True}, READY])
def test_a_grant_is_taken_back_for_one_that_is_ready_while_nothing_has_come(facts):
    """Nor from one whose sender gave it up, which is cancelled in a moment."""
    node = Node()
    granted = node.add("granted", 3, RequestState.RECEIVING_KV, 8, **facts)
    node.add("ready", 5, RequestState.WAITING_FOR_BLOCKS, 60, has_first_token=True)
    assert node.granted() == []
    assert node.revoked == [granted] * (facts == {"is_receiving": True})


@pytest.mark.parametrize(("age", "makes_way"), [(3, True), (5, False)])
def test_nobody_gives_way_to_what_is_younger_than_a_claim(age, makes_way):
    """It may not start with what it would get."""
    node = Node()
    node.reservation.put(4, now=0.0, step_s=0.0)
    node.add("waiting", age, RequestState.WAITING, 60)
    node.add("read", 9, RequestState.PREFILLED, 40, only_prefills=True)
    assert node.admission.preempt_for_older() == makes_way


@pytest.mark.parametrize(("num_tokens", "age", "may_start"), [(19, 5, True), (20, 5, False), (20, 3, True)])
def test_what_is_younger_than_a_claim_leaves_a_tile(num_tokens, age, may_start):
    """Nine blocks are free."""
    node = Node()
    node.add("answer", 1, RequestState.RUNNING, 28)
    node.reservation.put(4, now=0.0, step_s=0.0)
    queued = node.add("queued", age, RequestState.WAITING, num_tokens)  # and the first token of its answer
    assert node.may_start(queued) == [may_start]
    node.node_requests.remove(queued)
    node.add("awaiting", age, RequestState.WAITING_FOR_BLOCKS, num_tokens)
    assert node.granted() == ["awaiting"] * may_start


@pytest.mark.parametrize(("age", "lacks", "is_granted"), [(3, True, False), (3, False, True), (9, True, True)])
def test_a_prompt_with_hosts_that_lacks_blocks_comes_before_younger_credits(age, lacks, is_granted):
    node = Node()
    node.add(
        "growing", age, RequestState.PREFILLING, 8, num_computed=8 if lacks else 7, holders=HOLDERS
    ).request.token_ids += [0] * 80
    node.add("awaiting", 5, RequestState.WAITING_FOR_BLOCKS, 5)
    assert node.granted() == ["awaiting"] * is_granted


@pytest.mark.parametrize(
    ("num_hosted", "num_tokens", "is_stranded"), [(0, 64, False), (6, 39, False), (6, 40, True), (7, 39, True)]
)
@pytest.mark.parametrize("stage", [RequestState.WAITING, RequestState.WAITING_FOR_BLOCKS])
def test_what_needs_more_than_others_leave_is_stranded(stage, num_hosted, num_tokens, is_stranded):
    """Ten of 16 blocks are left beside six."""
    node = Node(tile_blocks=1)
    node.held_kv.lease(1, num_hosted, age=9)
    waiting = node.add("waiting", 5, stage, num_tokens, has_first_token=stage is RequestState.WAITING_FOR_BLOCKS)
    assert node.distributed.stranded() is (waiting if is_stranded else None)


@pytest.mark.parametrize(("num_hosted", "is_stranded"), [(10, False), (11, True)])
@pytest.mark.parametrize("stage", [RequestState.RUNNING, RequestState.PREFILLING])
def test_what_cannot_grow_by_a_block_beside_others_is_stranded(stage, num_hosted, is_stranded):
    node = Node(tile_blocks=1)
    node.held_kv.lease(1, num_hosted, age=9)
    holders = HOLDERS if stage is RequestState.PREFILLING else ()
    grown = node.add("grown", 5, stage, 20, num_computed=20, holders=holders)
    grown.request.token_ids += [0] * 40 * bool(holders)  # more than the pool holds
    assert node.distributed.stranded() is (grown if is_stranded else None)


@pytest.mark.parametrize("stage", [RequestState.RUNNING, RequestState.PREFILLING])
def test_a_younger_one_gives_its_blocks_to_an_older_one_that_has_none(stage):
    node = Node()
    younger = node.add("younger", 9, stage, 60)
    node.add("youngest", 12, RequestState.WAITING, 8)  # which has none
    node.add("older", 3, RequestState.WAITING, 8, only_prefills=True)
    assert node.admission.preempt_for_older()
    assert (younger.state, younger.lease) == (RequestState.WAITING, None)


@pytest.mark.parametrize("only_prefills", [False, True])
def test_what_starts_takes_blocks_from_what_is_read_where_it_is_for_another_node_too(only_prefills):
    """Six of 16 blocks are another node's, of which half may be; there are enough for both."""
    node = Node()
    node.add("answer", 1, RequestState.RUNNING, 1)
    read = node.add("read", 9, RequestState.PREFILLED, 24, only_prefills=True)
    assert node.admission.start(node.add("older", 3, RequestState.WAITING, 11, only_prefills=only_prefills))
    assert (read.lease is None) == only_prefills


def test_a_kept_prompt_that_is_about_to_leave_gets_no_slot():
    node = Node()
    kept = node.add("kept", 3, RequestState.PREFILLED, 5, only_prefills=True, is_kept=True, ending={})
    assert not node.admission.start_kept()
    kept.ending = None
    assert node.admission.start_kept()


def test_a_read_prompt_that_is_kept_gets_a_slot_and_not_blocks_of_what_has_none():
    node = Node(num_slots=1)
    node.add("kept", 3, RequestState.PREFILLED, 5, only_prefills=True, is_kept=True)
    granted = node.add("granted", 5, RequestState.RECEIVING_KV, 5, is_receiving=True)
    read = node.add("read", 9, RequestState.PREFILLED, 5, only_prefills=True)
    assert not node.admission.preempt_for_older()  # the running slot comes free later
    assert node.revoked == [granted]
    assert read.lease is not None


@pytest.mark.parametrize(
    ("stage", "facts"),
    [
        (RequestState.RUNNING, {"is_sending": True}),
        (RequestState.RUNNING, {"ending": {}}),
        (RequestState.RUNNING, {"is_moving": True}),
        (RequestState.WAITING, {"is_loading": True}),
        (RequestState.RECEIVING_KV, {"is_receiving": True, "is_revoked": True}),
        (RequestState.RECEIVING_KV, {}),
        (RequestState.FROZEN, {}),
    ],
)
def test_nobody_is_stranded_while_something_comes_free_anyway(stage, facts):
    node = Node()
    node.held_kv.lease(1, 1, age=9)
    waiting = node.add("waiting", 5, RequestState.WAITING, 60)
    assert node.distributed.stranded() is waiting
    node.add("going", 6, stage, 1, **facts)
    assert node.distributed.stranded() is None
    assert not node.admission.preempt_for_older()


@pytest.mark.parametrize("stage", [RequestState.WAITING, RequestState.PREFILLING])
def test_nobody_takes_what_others_gave_up_for_an_older_one(stage):
    """Until that has blocks: to begin with, or to go on with where it has holders."""
    node = Node(num_slots=4)
    older = node.add("older", 3, stage, 8, num_computed=8, holders=HOLDERS)
    older.request.token_ids += [0] * 30
    read = node.add("read", 9, RequestState.PREFILLED, 40, only_prefills=True)
    assert node.admission.preempt_for_older()
    assert read.lease is None
    younger = node.add("younger", 5, RequestState.WAITING, 1)
    assert node.may_start(younger) == [False]
    if stage is RequestState.PREFILLING:
        node.leases.grow(older, 1)
        assert node.may_start(younger) == [True]
        older.num_computed += 4  # what it lacks from now on nobody has given up for it
    else:
        assert node.admission.start(older)
        node.node_requests.apply(older, RequestEvent.STARTED)
        older.num_computed = 0
    assert node.may_start(younger) == [True]


def test_what_was_revoked_for_an_answer_is_granted_to_no_younger_one():
    node = Node(num_slots=4, tile_blocks=1)
    node.held_kv.lease(1, 11, age=9)
    older = node.add("older", 5, RequestState.RUNNING, 20, num_computed=20)
    node.add("younger", 7, RequestState.WAITING_FOR_BLOCKS, 5)
    assert node.distributed.revoke(older)
    assert node.endings.decisions.take() == [RevokeRemoteKV(1)]
    node.held_kv.release(1)
    assert node.granted() == []
    node.leases.grow(older, 1)
    assert node.granted() == ["younger"]
    assert [node.distributed.may_hold(age) for age in (4, 6)] == [True, False]  # it may grow again
    node.node_requests.remove(older)
    assert node.distributed.may_hold(6)


@pytest.mark.parametrize("facts", [{}, {"ending": {}}])
def test_what_others_gave_up_for_an_older_one_is_for_no_tiles(facts):
    """Unless that is about to leave."""
    node = Node(num_slots=4)
    older = node.add("older", 3, RequestState.WAITING, 8)
    node.add("read", 9, RequestState.PREFILLED, 60, only_prefills=True)
    assert node.admission.preempt_for_older()
    older.ending = facts.get("ending")
    assert [node.distributed.may_hold(age) for age in (2, 4)] == [True, bool(facts)]
