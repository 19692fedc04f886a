"""Prompts that were read for another node and are answered here after all."""

import pytest

from serving_core import reasons
from serving_core.node.requests import RequestState
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import Node, prompt_of

ANSWER = answer_of(prompt_of(13), 6)


def stage(node, name="a"):
    return next(each.state for each in node.scheduler.node_requests if each.request.request_id == name)


def check_answered(node):
    node.steps()
    assert node.words("a") == ["first_token", *["step_tokens"] * 5]
    assert node.tokens("a") == ANSWER
    node.check_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("in_step", [False, True])
def test_in_every_stage(num_steps, in_step):
    """Queued, read in part, and, after three steps, read."""
    node = Node(budget=6)
    request = node.prefill("a", 13, max_tokens=6)
    for _ in range(num_steps):
        node.step()
    if in_step:
        node.begin()
    node.keep(request)
    if num_steps == 3:
        assert stage(node) is RequestState.RUNNING
    node.end()
    check_answered(node)


def test_it_waits_for_no_descriptor_any_more():
    node = Node(slots=1)
    node.writes("b", 4, max_tokens=9)
    request = node.prefill("a", 13, max_tokens=6)
    node.step()
    node.step()
    assert node.scheduler.wake_at_s is not None
    node.keep(request)
    assert node.scheduler.wake_at_s is None
    assert stage(node) is RequestState.PREFILLED
    node.deliver(request)
    assert request.epoch not in node.sending
    check_answered(node)


def test_a_kept_prompt_gets_the_next_slot_before_younger_ones_and_after_older_ones():
    node = Node(num_blocks=40, slots=1)
    busy = node.writes("busy", 4, max_tokens=9, age=1)
    kept = node.prefill("kept", 13, age=5)
    node.step()
    node.keep(kept)
    older = node.reserve("older", 4, age=3)
    younger = node.reserve("younger", 4, age=9)
    node.local("own and younger", 4, age=8)
    node.cancel(busy)
    assert node.words("older") == ["reserved"]
    assert stage(node, "kept") is RequestState.PREFILLED
    node.cancel(older)
    node.receive_fails(older)
    assert stage(node, "kept") is RequestState.RUNNING
    assert node.words("younger") == []
    node.steps()
    assert node.tokens("kept") == answer_of(prompt_of(13), 4)
    node.cancel(younger)
    if younger.epoch in node.opened:
        node.receive_fails(younger)
    node.steps()
    node.check_empty()


@pytest.mark.parametrize("caching", [True, False])
def test_one_that_was_evicted_is_read_again_and_goes_on_behind_its_first_token(caching):
    node = Node(8, caching=caching)
    node.writes("old", 7, max_tokens=24, age=1)
    request = node.prefill("a", 13, age=2, max_tokens=6)
    assert node.step() == [("old", 7, 1), ("a", 0, 13)]
    rest = node.allocator.allocate(2)
    assert node.step() == [("old", 8, 1)]
    assert stage(node) is RequestState.WAITING
    node.keep(request)
    rest.release()
    check_answered(node)


def test_one_that_is_wholly_cached_is_written_without_a_step_in_between():
    node = Node(8)
    node.writes("old", 11, age=1, salt="s", max_tokens=3)
    request = node.prefill("a", 8, age=2, salt="s")
    assert node.step() == [("old", 11, 1), ("a", 4, 4)]
    rest = node.allocator.allocate(node.num_free)
    assert node.step() == [("old", 12, 1)]
    assert stage(node) is RequestState.WAITING
    node.keep(request)
    rest.release()
    assert node.step() == [("a", 8, 1)]
    node.steps()
    assert node.tokens("a") == answer_of(prompt_of(8), 4)
    node.check_empty()


@pytest.mark.parametrize("how", ["revoked", "cancelled", "in time"])
def test_while_a_void_transfer_is_still_ending(how):
    node = Node()
    request = node.has_read("a", 13, max_tokens=6)
    node.deliver(request)
    node.deliver(request, b"the next one")
    node.keep(request)
    assert node.cancelled == [request.epoch]
    assert stage(node) is RequestState.RUNNING
    node.step()
    if how == "in time":
        node.sent(request)
    else:
        node.send_fails(request, reasons.TRANSFER_REVOKED if how == "revoked" else "TRANSFER_FAILED")
    assert request.epoch not in node.sending
    check_answered(node)


@pytest.mark.parametrize("is_read", [False, True])
def test_cancelled_while_a_void_transfer_is_still_ending(is_read):
    node = Node(budget=6)
    request = node.prefill("a", 13)
    node.deliver(request)
    if is_read:
        node.steps()
    node.keep(request)
    node.cancel(request)
    node.send_fails(request)
    assert node.words("a")[-1] == "cancelled"
    node.check_empty()


def test_what_is_finished_while_its_void_transfer_is_still_ending_is_not_sent():
    node = Node(budget=6, slots=1)
    node.writes("b", 4, max_tokens=20)
    request = node.prefill("a", 13)
    node.step()
    node.deliver(request)
    node.keep(request)
    for _ in range(5):
        node.step()
    assert stage(node) is RequestState.PREFILLED
    assert not node.sending[request.epoch].is_finished
    node.send_fails(request)
    node.steps()
    assert node.tokens("a") == answer_of(prompt_of(13), 4)


def test_one_that_ends_with_its_first_token_ends():
    node = Node()
    request = node.prefill("a", 13, max_tokens=1)
    node.keep(request)
    node.steps()
    assert node.words("a") == ["first_token"]
    node.check_empty()


def test_one_that_is_kept_twice_or_was_always_here_goes_on():
    node = Node()
    request = node.prefill("a", 13, max_tokens=6)
    node.keep(request)
    node.keep(request)
    local = node.local("b", 5)
    node.keep(local)
    node.steps()
    node.keep(request)
    assert node.tokens("b") == answer_of(prompt_of(5), 4)
    assert node.words("a") == ["first_token", *["step_tokens"] * 5, "failed"]


def test_a_node_that_would_stand_still_gives_the_slot_of_a_younger_grant_to_a_kept_prompt():
    node = Node(slots=1)
    grant = node.reserve("granted", 4, age=9)
    request = node.has_read("a", 13, age=2, max_tokens=6)
    node.keep(request)
    assert node.step() == []
    assert node.cancelled == [grant.epoch]
    node.receive_fails(grant)
    assert node.step() == [("a", 13, 1)]
    node.cancel(grant)
    check_answered(node)
