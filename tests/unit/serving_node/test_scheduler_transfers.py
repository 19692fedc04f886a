"""KV transfers in both directions over one pool: credits taken back, prompts that are read again, next descriptors."""

import pytest

from serving_core import reasons
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, Node, prompt_of, token_of


def test_both_directions_at_once_and_an_answer_of_its_own():
    node = Node(num_blocks=24)
    out = node.prefill("out", 9)
    coming = node.reserve("in", 9)
    node.local("here", 9)
    node.deliver(out)
    assert node.step() == [("out", 0, 9), ("here", 0, 9)]
    node.arrive(coming)
    assert node.step() == [("in", 9, 1), ("here", 9, 1)]
    node.sent(out, num_bytes=3 * BLOCK_BYTES)
    node.steps()
    assert node.words("out") == ["first_token", "transferred"]
    assert node.words("in") == ["reserved", "committed", *["step_tokens"] * 3]
    assert node.words("here") == ["first_token", *["step_tokens"] * 3]
    answer = answer_of(prompt_of(9), 4)
    assert (node.tokens("out"), node.tokens("in"), node.tokens("here")) == (answer[:1], answer[1:], answer)
    assert node.load.num_kv_bytes == 6 * BLOCK_BYTES
    node.check_empty()


# ---- credits that are taken back ----


def one_that_needs_a_block(num_granted, *, num_blocks=7, **options):
    """An old answer that has filled its second block, and younger credits that hold the rest of the pool."""
    node = Node(num_blocks, **options)
    node.writes("old", 7, max_tokens=17, age=1)
    requests = [node.reserve(f"granted {index}", 4, age=10 + index) for index in range(num_granted)]
    assert len(node.opened) == num_granted
    node.rest = node.allocator.allocate(node.num_free)
    assert node.step() == [("old", 7, 1)]
    return node, requests


def test_a_grant_is_taken_back_for_an_older_answer_and_granted_again_by_another_descriptor():
    node, (request,) = one_that_needs_a_block(1)
    assert node.step() == []  # it waits for the blocks, which another node may be writing to
    assert node.cancelled == [request.epoch]
    assert node.words("granted 0") == ["reserved"]
    node.receive_fails(request, message="cancelled")
    assert node.words("granted 0") == ["reserved", "revoked"]
    assert node.step() == [("old", 8, 1)]
    assert node.load.num_transfers_failed == 0
    assert node.load.num_preemptions == 0
    node.rest.release()
    node.step()
    assert node.words("granted 0") == ["reserved", "revoked", "reserved"]
    first, second = node.descriptors("granted 0")
    assert first != second
    node.arrive(request)
    node.steps()
    assert node.tokens("granted 0") == answer_of(prompt_of(4), 4)[1:]
    assert node.tokens("old") == answer_of(prompt_of(7), 17)[1:]
    node.check_empty()


def test_the_youngest_grant_goes_first_and_one_at_a_time():
    node, (older, younger) = one_that_needs_a_block(2, num_blocks=9)
    node.step()
    assert node.cancelled == [younger.epoch]
    node.step()  # the wait goes on
    assert node.cancelled == [younger.epoch]
    node.receive_fails(younger)
    assert node.step() == [("old", 8, 1)]
    assert node.words("granted 0") == ["reserved"]
    assert older.epoch in node.opened


def test_no_grant_is_taken_back_for_a_younger_answer():
    node = Node(7, caching=False)
    node.writes("young", 7, max_tokens=17, age=9)
    older = node.reserve("older", 4, age=2)
    rest = node.allocator.allocate(node.num_free)
    assert node.step() == [("young", 7, 1)]
    for _ in range(3):
        assert node.step() == []
    assert node.cancelled == []
    node.arrive(older)
    assert node.step() == [("older", 4, 1)]
    rest.release()
    node.steps()
    assert node.tokens("young") == answer_of(prompt_of(7), 17)[1:]
    assert node.words("older") == ["reserved", "committed", *["step_tokens"] * 3]
    node.check_empty()


def test_kv_that_crosses_the_revocation_still_commits():
    node, (request,) = one_that_needs_a_block(1)
    node.step()
    assert node.cancelled == [request.epoch]
    node.arrive(request)
    assert node.words("granted 0") == ["reserved", "committed"]
    assert node.step() == [("old", 8, 1)]  # at the cost of the one that has just come
    assert node.load.num_preemptions == 1
    node.rest.release()
    node.steps()
    assert node.tokens("granted 0") == answer_of(prompt_of(4), 4)[1:]
    node.check_empty()


def test_a_descriptor_is_not_told_when_the_grant_is_being_taken_back():
    node = Node(7)
    node.writes("old", 7, max_tokens=17, age=1)
    node.credits_at_once = False
    request = node.reserve("granted", 4, age=2)
    rest = node.allocator.allocate(node.num_free)
    node.step()
    node.step()
    assert node.cancelled == [request.epoch]
    node.grant(request)
    assert node.words("granted") == []
    node.receive_fails(request)
    rest.release()
    node.step()
    node.grant(request)
    assert node.words("granted") == ["revoked", "reserved"]


def test_a_descriptor_is_not_told_of_one_that_was_cancelled_before_every_rank_awaited_its_blocks():
    node = Node()
    node.credits_at_once = False
    request = node.reserve("a", 4)
    node.cancel(request)
    node.grant(request)
    assert node.words("a") == []
    node.receive_fails(request)
    assert node.words("a") == ["cancelled"]
    node.check_empty()


def test_one_that_is_cancelled_while_its_grant_is_taken_back_ends():
    node, (request,) = one_that_needs_a_block(1)
    node.step()
    node.cancel(request)
    assert node.words("granted 0") == ["reserved"]
    node.receive_fails(request)
    assert node.words("granted 0") == ["reserved", "cancelled"]
    assert node.step() == [("old", 8, 1)]


def test_an_abort_that_crosses_the_revocation_leaves_the_word_to_the_sender():
    node, (request,) = one_that_needs_a_block(1)
    node.step()
    node.receive_fails(request, reasons.TRANSFER_ABORTED)
    assert "failed" not in node.words("granted 0")
    node.cancel(request)
    assert node.words("granted 0")[-1] == "cancelled"
    assert node.step() == [("old", 8, 1)]


def test_an_aborted_grant_does_not_hold_up_an_older_answer_until_it_is_cancelled():
    node = Node(9, caching=False)
    node.writes("old", 7, max_tokens=17, age=1)
    node.writes("young", 6, max_tokens=9, age=2)
    aborted = node.reserve("aborted", 4, age=3)
    node.rest = node.allocator.allocate(node.num_free)
    node.receive_fails(aborted, reasons.TRANSFER_ABORTED)
    assert node.words("aborted") == ["reserved"]
    node.step()
    assert ("old", 8, 1) in node.step()
    node.cancel(aborted)
    assert node.words("aborted") == ["reserved", "cancelled"]


def test_one_whose_grant_was_taken_back_has_all_of_its_time_again():
    node, (request,) = one_that_needs_a_block(1, credit_timeout_s=30.0)
    node.step()
    node.now = 100.0
    node.receive_fails(request)
    assert node.scheduler.wake_at_s == 130.0
    node.tick(129.0)
    assert node.words("granted 0") == ["reserved", "revoked"]
    node.tick(130.0)
    assert node.event("granted 0", "failed").reason == reasons.QUEUE_FULL


# ---- prompts that are read and have to go ----


def test_a_prompt_that_is_read_and_not_sent_gives_its_blocks_to_an_older_answer():
    node = Node(7)
    node.writes("old", 7, max_tokens=13, age=1)  # 5 blocks in the end
    request = node.prefill("read", 13, age=2)  # 4 blocks
    node.step()
    shares = [node.step() for _ in range(2)]
    assert shares == [[("old", 8, 1)], [("old", 9, 1)]]
    while node.num_free:
        node.step()
    assert node.words("read") == ["first_token"]
    node.steps()
    assert node.tokens("old") == answer_of(prompt_of(7), 13)[1:]
    assert node.words("read") == ["first_token"]  # it was read again, and its token was not sampled again
    node.deliver(request)
    assert node.sending[request.epoch].is_finished
    assert len(node.sending[request.epoch].block_ids) == 4
    assert token_of(node.sending[request.epoch].tail) == answer_of(prompt_of(13), 1)[0]
    node.sent(request)
    node.check_empty()


def evicted(caching=True):
    """A prompt that has just been evicted by an old answer, which goes on for long."""
    node = Node(8, caching=caching)
    node.writes("old", 7, max_tokens=24, age=1)  # 8 blocks in the end
    request = node.prefill("read", 13, age=2)  # 4 blocks
    assert node.step() == [("old", 7, 1), ("read", 0, 13)]
    rest = node.allocator.allocate(2)
    assert node.num_free == 0
    assert node.step() == [("old", 8, 1)]
    return node, request, rest


@pytest.mark.parametrize("caching", [True, False])
def test_it_is_read_again_from_what_is_cached(caching):
    node, request, rest = evicted(caching)
    assert node.load.num_waiting == 1
    assert node.load.num_waiting_tokens == (1 if caching else 13)  # the old one took the block that was not full
    rest.release()
    shares = node.step()
    assert shares == [("old", 9, 1), ("read", 12, 1) if caching else ("read", 0, 13)]
    assert node.words("read") == ["first_token"]
    assert node.load.num_preemptions == 0
    assert node.load.num_prompt_tokens == 7 + 13
    node.deliver(request)
    node.sent(request)
    assert node.words("read") == ["first_token", "transferred"]
    node.steps()
    node.check_empty()


def test_if_all_of_it_is_there_it_is_ready_again_without_a_step():
    node = Node(8)
    node.writes("old", 11, age=1, salt="s", max_tokens=9)
    read = node.prefill("read", 8, age=2, salt="s")  # both its blocks are the old one's too
    assert node.step() == [("old", 11, 1), ("read", 4, 4)]
    rest = node.allocator.allocate(node.num_free)
    assert node.step() == [("old", 12, 1)]
    assert node.load.num_waiting == 1
    rest.release()
    assert node.step() == [("old", 13, 1)]
    assert node.load.num_waiting == 0
    node.deliver(read)
    assert node.sending[read.epoch].is_finished
    assert node.words("read") == ["first_token"]
    node.sent(read)
    node.steps()
    node.check_empty()


def test_the_descriptor_may_come_while_it_waits_to_be_read_again():
    node, request, rest = evicted()
    node.deliver(request)
    sending = node.sending[request.epoch]
    assert (sending.block_ids, sending.is_finished) == ([], False)
    rest.release()
    node.step()
    assert sending.is_finished
    assert len(sending.block_ids) == 4
    node.sent(request)
    node.steps()
    node.check_empty()


def test_what_is_being_sent_is_never_evicted():
    node = Node(8, caching=False)
    node.writes("old", 7, max_tokens=24, age=1)
    request = node.prefill("read", 13, age=2)
    node.step()
    node.deliver(request)
    rest = node.allocator.allocate(node.num_free)
    for _ in range(3):
        assert node.step() == []
    assert request.epoch in node.sending
    node.sent(request)
    assert node.step() == [("old", 8, 1)]
    rest.release()


def test_one_that_is_evicted_has_all_of_its_time_for_a_descriptor_again():
    node, _, rest = evicted()
    node.now = 50.0
    rest.release()
    node.step()
    assert node.scheduler.wake_at_s == 50.5 + 60.0  # from the end of the step
    node.tick(110.5)
    assert node.event("read", "failed").reason == reasons.TRANSFER_FAILED


@pytest.mark.parametrize("end", ["cancel", "detach"])
def test_one_that_is_evicted_may_end(end):
    node, request, rest = evicted()
    rest.release()
    if end == "cancel":
        node.cancel(request)
        assert node.words("read") == ["first_token", "cancelled"]
        node.steps()
    else:
        node.detached()
        assert node.words("read") == ["first_token"]
    node.check_empty()


# ---- a sender whose receiver takes its blocks back ----


@pytest.mark.parametrize("moment", ["queued", "reading", "read"])
def test_a_sender_waits_for_the_next_descriptor(moment):
    node = Node(budget=6)
    node.prefill("before", 6)
    request = node.prefill("a", 13)
    node.step()
    num_steps = {"queued": 0, "reading": 1, "read": 4}[moment]
    for _ in range(num_steps):
        node.step()
    node.deliver(request, b"first")
    assert node.sending[request.epoch].is_finished == (moment == "read")
    node.send_fails(request, reasons.TRANSFER_REVOKED)
    assert request.epoch not in node.sending
    assert "failed" not in node.words("a")
    node.steps()
    assert request.epoch not in node.sending
    assert node.words("a") == ["first_token"]
    node.deliver(request, b"second")
    assert node.sending[request.epoch].descriptor == b"second"
    assert node.sending[request.epoch].is_finished
    assert len(node.sending[request.epoch].block_ids) == 4
    node.sent(request)
    assert node.words("a") == ["first_token", "transferred"]
    assert node.load.num_transfers_failed == 0


@pytest.mark.parametrize("is_read", [False, True])
def test_a_sender_goes_on_with_a_descriptor_that_has_come_already(is_read):
    node = Node(budget=6)
    request = node.prefill("a", 13)
    node.step()
    node.deliver(request, b"first")
    if is_read:
        node.steps()
    node.deliver(request, b"second")
    node.deliver(request, b"third")  # the last one counts: a descriptor before it is void
    assert node.sending[request.epoch].descriptor == b"first"
    node.send_fails(request, reasons.TRANSFER_REVOKED)
    sending = node.sending[request.epoch]
    assert sending.descriptor == b"third"
    assert sending.is_finished == is_read
    node.steps()
    assert sending.is_finished
    assert len(sending.block_ids) == 4
    node.sent(request)
    node.check_empty()


def test_in_the_middle_of_a_step_too():
    node = Node(budget=6)
    request = node.prefill("a", 13)
    node.deliver(request, b"first")
    node.step()
    node.begin()
    node.send_fails(request, reasons.TRANSFER_REVOKED)
    node.deliver(request, b"second")
    assert len(node.sending[request.epoch].block_ids) == 1  # what the step computes is not there yet
    node.end()
    node.steps()
    assert node.sending[request.epoch].is_finished
    node.sent(request)
    node.check_empty()


def test_the_time_for_the_next_descriptor_runs_from_the_revocation():
    node = Node(descriptor_timeout_s=60.0)
    request = node.has_read("a", 5)
    node.deliver(request)
    assert node.scheduler.wake_at_s is None
    node.now = 100.0
    node.send_fails(request, reasons.TRANSFER_REVOKED)
    assert node.scheduler.wake_at_s == 160.0
    node.tick(159.9)
    assert node.words("a") == ["first_token"]
    node.tick(160.0)
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.TRANSFER_FAILED, "no descriptor came within 60.0 s")
    node.check_empty()


def test_a_revocation_of_what_is_ending_anyway_changes_nothing():
    node = Node()
    request = node.has_read("a", 5)
    node.deliver(request, b"first")
    node.deliver(request, b"second")
    node.cancel(request)
    assert node.cancelled == [request.epoch]
    node.send_fails(request, reasons.TRANSFER_REVOKED)
    assert node.words("a") == ["first_token", "cancelled"]
    node.check_empty()


def test_a_revoked_sender_can_be_evicted_and_read_again():
    node = Node(8, caching=False)
    node.writes("old", 7, max_tokens=24, age=1)
    request = node.prefill("read", 13, age=2)
    node.step()
    node.deliver(request, b"first")
    rest = node.allocator.allocate(node.num_free)
    assert node.step() == []
    node.send_fails(request, reasons.TRANSFER_REVOKED)
    assert node.step() == [("old", 8, 1)]
    rest.release()
    node.deliver(request, b"second")
    assert node.step() == [("old", 9, 1), ("read", 0, 13)]
    assert node.sending[request.epoch].is_finished
    node.sent(request)
    node.steps()
    node.check_empty()


# ---- failures ----


@pytest.mark.parametrize("is_read", [False, True])
def test_a_transfer_that_fails_ends_the_prompt(is_read):
    node = Node(budget=6)
    request = node.prefill("a", 13)
    node.deliver(request)
    node.step()
    if is_read:
        node.steps()
    node.send_fails(request, "WORKER_LOST", "gone")
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == ("WORKER_LOST", "gone")
    assert node.load.num_transfers_failed == 1
    node.check_empty()


def test_a_transfer_that_fails_in_a_step_ends_the_prompt_after_it():
    node = Node(budget=6)
    request = node.prefill("a", 13)
    node.deliver(request)
    node.begin()
    node.send_fails(request)
    assert node.words("a") == []
    node.end()
    assert node.words("a") == ["failed"]
    node.check_empty()


def test_a_transfer_that_does_not_arrive_ends_the_answer():
    node = Node()
    request = node.reserve("a", 5)
    node.receive_fails(request, reasons.KV_CHECKSUM_MISMATCH, "spoilt")
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.KV_CHECKSUM_MISMATCH, "spoilt")
    assert node.load.num_transfers_failed == 1
    node.check_empty()


def test_a_transfer_that_the_sender_gave_up_is_the_senders_to_explain():
    node = Node()
    request = node.reserve("a", 5)
    node.receive_fails(request, reasons.TRANSFER_ABORTED)
    assert node.words("a") == ["reserved"]
    assert node.load.num_transfers_failed == 0, "it counts there"
    node.cancel(request)
    assert node.words("a") == ["reserved", "cancelled"]
    node.check_empty()


def test_the_transfer_of_an_answer_that_is_cancelled_has_not_failed():
    node = Node()
    arriving, leaving = node.reserve("a", 5), node.prefill("b", 13)
    node.deliver(leaving)
    node.step()
    for request in (arriving, leaving):
        node.cancel(request)
    node.receive_fails(arriving, reasons.TRANSFER_FAILED)
    node.send_fails(leaving, reasons.TRANSFER_FAILED)
    assert (node.words("a"), node.words("b")) == (["reserved", "cancelled"], ["first_token", "cancelled"])
    assert node.load.num_transfers_failed == 0
    node.check_empty()
