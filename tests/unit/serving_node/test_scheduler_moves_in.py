"""Answers that move to a node, and what goes with the last block of one that another node writes on."""

import pytest

from kv_transfer.wire import MAX_TAIL_BYTES
from protos import convert, fleet_pb2
from serving_core import reasons
from serving_core.node.prefix import CHUNK
from serving_node.migration import MAX_TAIL_TOKENS
from tests.toy_kv import ELSEWHERE
from tests.unit.serving_node.scheduler_kit import Node, prompt_of
from tests.unit.serving_node.test_scheduler_migrations import ANSWER, PROMPT, node_request


def test_it_goes_on_behind_the_tokens_that_came_with_it():
    node = Node()
    request = node.reserve("a", prompt_of(PROMPT) + ANSWER[:2], num_prompt_tokens=PROMPT, max_tokens=30, ahead=6)
    assert len(node.opened[request.epoch].block_ids) == 5  # for 17 tokens
    node.arrive(request, num_tokens=5)
    committed = node.event("a", "committed")
    assert (committed.attempt.epoch, committed.next_index) == (request.epoch, 7)
    assert node.step() == [("a", PROMPT + 6, 1)]
    node.steps()
    assert node.tokens("a") == ANSWER[7:]
    assert len(node.tokens("a")) == 23
    node.check_empty()


def test_it_comes_whole_though_some_blocks_of_its_tokens_are_here():
    """They may have other bits than those that it was written behind."""
    node = Node()
    node.local("before", PROMPT, salt="s", max_tokens=30)
    node.steps()
    known = prompt_of(PROMPT) + ANSWER[:2]
    request = node.reserve("a", known, num_prompt_tokens=PROMPT, max_tokens=30, ahead=6, salt="s")
    assert node.opened[request.epoch].num_cached == 0
    node.arrive(request, num_tokens=5)
    assert node.event("a", "committed").num_bytes_saved == 0
    assert node_request(node).names.numerics_ids == [ELSEWHERE + CHUNK] * 3
    node.steps()
    assert node.tokens("a") == ANSWER[7:]
    node.check_empty()


def test_it_is_no_prompt_of_the_node_that_it_comes_to_nor_if_it_gives_way_there():
    node = Node(num_blocks=10)
    request = node.reserve("a", prompt_of(PROMPT) + ANSWER[:2], num_prompt_tokens=PROMPT, max_tokens=20, ahead=6)
    node.arrive(request, num_tokens=5)
    assert (node.load.num_prompt_tokens, node.load.num_prefill_tokens) == (0, 0)
    node.local("old", 13, age=0, max_tokens=8)
    node.steps()
    assert node.load.num_preemptions > 0
    assert node.tokens("a") == ANSWER[7:20]
    assert node.load.num_prompt_tokens == 13
    node.check_empty()


@pytest.mark.parametrize("num_known", [0, 3, 4])
def test_nothing_new_may_have_come_with_it(num_known):
    """Its last known token's KV is computed here, be it the first of a block or the last of one."""
    node = Node()
    known = prompt_of(PROMPT) + ANSWER[:num_known]
    request = node.reserve("a", known, num_prompt_tokens=PROMPT, max_tokens=30, ahead=6)
    node.arrive(request, num_tokens=0, tail=b"")
    assert node.event("a", "committed").next_index == num_known
    assert node.step() == [("a", len(known) - 1, 1)]
    node.steps()
    assert node.tokens("a") == ANSWER[num_known:]
    node.check_empty()


@pytest.mark.parametrize(
    ("ahead", "num_tokens", "max_tokens", "message"),
    [
        (0, 2, 30, "2 tokens came with a prompt's KV; it must be 1"),
        (0, 0, 30, "0 tokens came with a prompt's KV; it must be 1"),
        (4, 9, 30, "9 tokens came with the KV; 4 were granted"),
        (9, 5, 5, "5 tokens came with the KV; max_tokens is 5"),
    ],
)
def test_a_tail_that_does_not_fit_fails_the_transfer(ahead, num_tokens, max_tokens, message):
    node = Node()
    request = node.reserve("a", PROMPT, max_tokens=max_tokens, ahead=ahead)
    node.arrive(request, num_tokens=1, tail=convert.to_tail(ANSWER[:num_tokens], []))
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.TRANSFER_FAILED, message)
    node.check_empty()


def test_no_more_is_granted_than_the_answer_may_still_grow_by():
    node = Node(num_blocks=4)
    request = node.reserve("a", PROMPT, max_tokens=7, ahead=1000)
    assert len(node.opened[request.epoch].block_ids) == 4
    node.cancel(request)
    node.receive_fails(request)


def test_its_grant_can_be_taken_back_like_any_other():
    node = Node(7)
    node.writes("old", 7, max_tokens=17, age=1)
    request = node.reserve("a", 4, age=9, ahead=3)
    rest = node.allocator.allocate(node.num_free)
    node.step()
    node.step()
    assert node.cancelled == [request.epoch]
    node.receive_fails(request)
    assert node.words("a") == ["reserved", "revoked"]
    node.cancel(request)
    rest.release()
    node.steps()
    node.check_empty()


# ---- tails ----


@pytest.mark.parametrize("token_ids", [[], [0], [1, 49151, 2**32 - 1]])
def test_tokens_travel_in_the_tail(token_ids):
    assert convert.from_tail(convert.to_tail(token_ids, [])) == (token_ids, [])


def test_the_longest_tail_fits_a_message():
    numerics_ids = [b"origin: c", b"origin: s"] * (convert.MAX_NUMERICS_RUNS // 2)
    tail = convert.to_tail([2**32 - 1] * MAX_TAIL_TOKENS, numerics_ids)
    assert len(convert.from_tail(tail)[1]) == convert.MAX_NUMERICS_RUNS
    assert len(tail) <= MAX_TAIL_BYTES


def test_a_tail_tells_who_made_the_blocks_unless_they_are_too_many():
    read, written = b"origin: c", b"origin: s"
    tail = convert.to_tail([5], [read, read, written, read])
    assert convert.from_tail(tail) == ([5], [(read, 2), (written, 1), (read, 1)])
    numerics_ids = [read, written] * convert.MAX_NUMERICS_RUNS
    most = convert.MAX_NUMERICS_RUNS
    for num_blocks, num_told in ((most, most), (most + 1, 0)):
        tail = convert.to_tail([5], numerics_ids[:num_blocks])
        assert convert.from_tail(tail) == ([5], [(numerics_id, 1) for numerics_id in numerics_ids[:num_told]])


@pytest.mark.parametrize(
    "tail", [b"abc", fleet_pb2.Tail(numerics=[fleet_pb2.NumericsRun(numerics_id=b"short")]).SerializeToString()]
)
def test_an_odd_tail_tells_nothing(tail):
    with pytest.raises(ValueError, match="a tail"):
        convert.from_tail(tail)
