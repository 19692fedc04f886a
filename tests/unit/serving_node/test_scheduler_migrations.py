"""Running answers that move: what the node does that they leave."""

import pytest

from protos import convert
from serving_core import reasons
from serving_core.node.requests import RequestState
from serving_node import migration
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, Node, prompt_of

PROMPT = 9  # tokens: three blocks, of which the last holds one


def writes(num_blocks=16, max_tokens=30, num_steps=0, **options):
    """A node, and an answer that it has begun to write: so many tokens after its first."""
    node = Node(num_blocks, **options)
    request = node.local("a", PROMPT, max_tokens=max_tokens)
    for _ in range(num_steps + 1):
        node.step()
    return node, request


def node_request(node, name="a"):
    return next(each for each in node.scheduler.node_requests if each.request.request_id == name)


def stage(node, name="a"):
    return node_request(node, name).state


def tail_of(node, request):
    return convert.from_tail(node.sending[request.epoch].tail)[0]


ANSWER = answer_of(prompt_of(PROMPT), 30)

# ---- the way out ----


def test_full_blocks_leave_while_it_writes_on_and_the_rest_when_it_has_stopped():
    node, request = writes()
    node.migrate(request)
    sending = node.sending[request.epoch]
    assert (len(sending.block_ids), sending.is_finished) == (2, False)
    for num_computed, num_ready in ((10, 2), (11, 2), (12, 3), (13, 3)):
        assert node.step() == [("a", num_computed - 1, 1)]
        assert len(sending.block_ids) == num_ready
    node.caught_up(request)
    assert sending.is_finished
    assert sending.block_ids == node_request(node).lease.block_ids[:4]
    assert tail_of(node, request) == ANSWER[:5]
    assert node.step() == []
    assert node.tokens("a") == ANSWER[:5]
    assert (node.load.num_running, node.load.num_waiting) == (1, 0)


def test_in_the_middle_of_a_step_it_stops_behind_it_and_its_token_is_told_first():
    node, request = writes()
    node.migrate(request)
    node.begin()
    node.caught_up(request)
    assert not node.sending[request.epoch].is_finished
    node.end()
    assert node.sending[request.epoch].is_finished
    assert tail_of(node, request) == node.tokens("a") == ANSWER[:2]
    assert node.step() == []


def test_only_tokens_that_the_other_node_does_not_know_go_with_it_be_it_none():
    for num_known, tail in ((PROMPT + 2, ANSWER[2:4]), (PROMPT + 4, [])):
        node, request = writes(num_steps=3)
        node.migrate(request, num_known=num_known)
        node.caught_up(request)
        assert tail_of(node, request) == tail


@pytest.mark.parametrize("in_step", [False, True])
def test_it_stops_before_it_exceeds_what_is_granted(in_step):
    node, request = writes()
    if in_step:
        node.begin()
    node.migrate(request, num_blocks=3)
    node.end()
    node.steps()
    sending = node.sending[request.epoch]
    assert sending.is_finished
    assert (len(sending.block_ids), node_request(node).num_computed) == (3, 12)
    assert tail_of(node, request) == ANSWER[:4]
    assert node.step() == []
    node.caught_up(request)  # late
    assert tail_of(node, request) == ANSWER[:4]


def test_one_that_has_all_the_granted_blocks_full_stops_at_once():
    node, request = writes(num_steps=3)
    assert node_request(node).num_computed == 12
    node.migrate(request, num_blocks=3)
    assert node.sending[request.epoch].is_finished


def test_it_stops_before_its_tail_is_too_long(monkeypatch):
    monkeypatch.setattr(migration, "MAX_TAIL_TOKENS", 6)
    node, request = writes()
    node.migrate(request)
    assert len(node.steps()) == 5
    assert tail_of(node, request) == ANSWER[:6]


def test_once_sent_it_is_held_until_the_coordinator_has_had_its_say():
    node, request = writes()
    node.migrate(request)
    node.caught_up(request)
    node.sent(request, num_bytes=3 * BLOCK_BYTES)
    assert stage(node) is RequestState.FROZEN
    assert node.step() == []
    assert node.num_free == 16 - 3
    assert node.load.num_kv_bytes == 3 * BLOCK_BYTES
    node.cancel(request)
    assert node.words("a") == ["first_token", "cancelled"]
    node.check_empty()


def test_it_waits_for_that_only_so_long():
    node, request = writes(descriptor_timeout_s=60.0)
    node.migrate(request)
    node.caught_up(request)
    assert node.scheduler.wake_at_s is None
    node.now = 100.0
    node.sent(request)
    assert node.scheduler.wake_at_s == 160.0
    node.tick(160.0)
    failed = node.event("a", "failed")
    assert failed.reason == reasons.TRANSFER_FAILED
    assert failed.message == "no command for a frozen sequence came within 60.0 s"
    node.check_empty()


# ---- what may come between ----


def goes(node, request, state):
    """Takes an answer that writes into one of the states of a move."""
    node.migrate(request)
    if state == "in step":
        node.begin()
    elif state != "sending":
        node.caught_up(request)
        if state == "sent":
            node.sent(request)
        elif state == "failed":
            node.send_fails(request)
        assert stage(node) is RequestState.FROZEN


STATES = ["sending", "in step", "stopped", "sent", "failed"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ["cancel", "detach"])
def test_it_can_end_in_every_state(state, end):
    node, request = writes()
    goes(node, request, state)
    told = node.words("a")
    node.cancel(request) if end == "cancel" else node.detached()
    if request.epoch in node.sending:
        assert node.cancelled == [request.epoch]
        assert node.words("a") == told
        node.send_fails(request)
    node.end()
    assert node.words("a") == [*told, "cancelled"] if end == "cancel" else told
    node.check_empty()


def test_what_is_cancelled_does_not_send_its_rest():
    node, request = writes()
    node.migrate(request)
    node.cancel(request)
    node.caught_up(request)
    assert not node.sending[request.epoch].is_finished
    node.send_fails(request)
    node.check_empty()


def test_a_step_that_fails_ends_it():
    node, request = writes()
    goes(node, request, "in step")
    node.fail_step()
    assert node.cancelled == [request.epoch]
    assert node.words("a") == ["first_token"]
    node.send_fails(request)
    assert node.words("a") == ["first_token", "failed"]
    node.check_empty()


def test_its_last_token_ends_it_once():
    node, request = writes(max_tokens=3)
    node.migrate(request)
    node.step()
    node.step()
    assert node.cancelled == [request.epoch]
    assert not node.sending[request.epoch].is_finished
    node.send_fails(request)
    assert node.words("a") == ["first_token", "step_tokens", "step_tokens"]
    assert node.tokens("a") == ANSWER[:3]
    node.check_empty()


def test_its_last_token_ends_it_though_all_has_left_meanwhile():
    node, request = writes(max_tokens=2)
    goes(node, request, "in step")
    node.caught_up(request)
    node.end()
    assert not node.sending[request.epoch].is_finished
    node.send_fails(request)
    assert node.words("a") == ["first_token", "step_tokens"]
    node.check_empty()


@pytest.mark.parametrize("state", ["sending", "in step"])
def test_a_transfer_that_fails_before_the_stop_is_told_and_it_writes_on(state):
    node, request = writes()
    goes(node, request, state)
    node.send_fails(request, "WORKER_LOST", "gone")
    failed = node.event("a", "migration_failed")
    assert (failed.attempt.epoch, failed.reason, failed.message) == (request.epoch, "WORKER_LOST", "gone")
    node.keep(request)
    node.end()
    node.steps()
    assert node.tokens("a") == ANSWER
    assert node.load.num_transfers_failed == 1
    node.check_empty()


def test_a_transfer_that_fails_after_the_stop_is_told_and_it_waits():
    node, request = writes()
    goes(node, request, "failed")
    assert node.words("a") == ["first_token", "migration_failed"]
    assert node.step() == []
    node.keep(request)
    node.steps()
    assert node.tokens("a") == ANSWER
    node.check_empty()


@pytest.mark.parametrize("state", STATES)
def test_one_that_is_kept_writes_on(state):
    node, request = writes()
    goes(node, request, state)
    node.keep(request)
    assert stage(node) is RequestState.RUNNING
    is_ending = state not in ("sent", "failed")
    assert node.cancelled == [request.epoch] * is_ending
    node.end()
    node.step()  # at once, though the transport may still hold its blocks
    assert node.tokens("a") == ANSWER[: len(node.tokens("a"))]
    if is_ending:
        node.send_fails(request)
    assert ("migration_failed" in node.words("a")) == (state == "failed")
    node.steps()
    assert node.tokens("a") == ANSWER
    assert node.load.num_transfers_failed == (state == "failed")
    node.check_empty()


def test_one_that_was_kept_can_move_again_when_the_first_transfer_has_ended():
    node, request = writes()
    goes(node, request, "stopped")
    node.keep(request)
    node.migrate(request)
    assert node.event("a", "migration_failed").message == "the transfer before this one has not ended"
    node.caught_up(request)  # of the first
    node.send_fails(request)
    node.step()
    node.migrate(request)
    node.caught_up(request)
    assert tail_of(node, request) == ANSWER[:2]
    node.sent(request)
    node.cancel(request)
    node.check_empty()


def test_one_that_was_kept_and_preempted_becomes_a_prompt_like_any_other():
    node, request = writes(num_blocks=8, max_tokens=20)
    goes(node, request, "stopped")
    node.keep(request)
    node.send_fails(request)
    old = node.local("old", 13, age=0, max_tokens=8)
    node.steps()
    assert node.load.num_preemptions > 0
    assert node.tokens("a") == ANSWER[:20]
    assert node.tokens("old") == answer_of(old.token_ids, 8)
    node.check_empty()


# ---- pools that are too small ----


def test_what_moves_is_not_preempted_and_does_not_preempt_itself():
    node, request = writes(num_blocks=8, caching=False, max_tokens=20)
    node.migrate(request, num_blocks=8)
    old = node.local("old", 11, age=0, max_tokens=4)  # three blocks
    assert [each[0] for each in node.step()] == ["a", "old"]
    rest = node.allocator.allocate(node.num_free)
    while node.step():
        pass
    assert node.load.num_preemptions == 0
    assert {stage(node), stage(node, "old")} == {RequestState.RUNNING}, "both wait for a block"
    node.caught_up(request)
    assert stage(node) is RequestState.FROZEN
    assert node.step() == []
    node.sent(request)
    node.cancel(request)
    node.steps()
    assert node.tokens("old") == answer_of(old.token_ids, 4)
    rest.release()
    node.check_empty()


def test_what_moves_takes_no_block_from_an_older_one():
    node = Node(num_blocks=12, caching=False)
    for age, name in enumerate(["oldest", "older"], start=1):
        node.local(name, 10, age=age, max_tokens=10)  # five blocks in the end
    request = node.local("a", PROMPT, age=3, max_tokens=20)
    assert len(node.step()) == 3
    rest = node.allocator.allocate(node.num_free - 2)  # a fourth block for each of the older ones
    node.migrate(request)
    while "a" in [name for name, _, _ in node.step()]:
        pass
    assert node.load.num_preemptions == 0
    node.caught_up(request)
    node.sent(request)
    node.cancel(request)
    node.steps()
    rest.release()
    assert node.tokens("older") == answer_of(prompt_of(10), 10)
    node.check_empty()


def test_one_that_has_stopped_keeps_its_slot():
    node, request = writes(slots=1)
    goes(node, request, "sent")
    other = node.local("b", 4)
    assert node.step() == []
    node.keep(request)
    assert node.step() == [("a", PROMPT, 1)]
    node.cancel(request)
    assert node.step() == [("b", 0, 4)]
    node.cancel(other)


@pytest.mark.parametrize("state", ["sending", "stopped", "sent"])
def test_nothing_is_taken_back_while_it_will_let_go(state):
    node, request = writes(num_blocks=8, max_tokens=20)
    goes(node, request, state)
    grant = node.reserve("granted", 4, age=9)
    node.local("old", 18, age=0, max_tokens=1)
    if state == "sending":
        node.begin()
        node.caught_up(request)
        node.end()
    assert node.step() == []
    assert node.cancelled == []
    if state != "sent":
        node.sent(request)
    node.cancel(request)
    assert node.step() == [("old", 0, 18)]
    node.receive_fails(grant)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        ({"num_blocks": 2}, "the sequence has 3 blocks now, and 2 were reserved"),
        ({"num_known": PROMPT + 2}, "the descriptor knows 11 tokens of 10"),
        ({"descriptor": b"odd"}, ""),
    ],
)
def test_a_descriptor_that_does_not_fit_is_told_and_it_writes_on(descriptor, message):
    node, request = writes()
    node.migrate(request, **descriptor)
    failed = node.event("a", "migration_failed")
    assert failed.reason == reasons.TRANSFER_FAILED
    assert message in failed.message
    node.steps()
    assert node.tokens("a") == ANSWER
    node.check_empty()


def test_the_step_that_runs_counts_for_what_it_needs():
    node, request = writes(num_steps=3)
    assert node_request(node).num_computed == 12
    node.begin()
    node.migrate(request, num_blocks=3)
    assert node.event("a", "migration_failed").message == "the sequence has 4 blocks now, and 3 were reserved"


@pytest.mark.parametrize("state", ["queued", "reading", "for another node", "stopped"])
def test_what_is_not_being_written_cannot_move(state):
    node = Node(budget=4)
    request = node.prefill("a", 9) if state == "for another node" else node.local("a", 9)
    for _ in range({"queued": 0, "reading": 1}.get(state, 3)):
        node.step()
    if state == "stopped":
        goes(node, request, "sent")
    node.migrate(request)
    assert node.event("a", "migration_failed").message == "the sequence is not decoding now"
    assert request.epoch not in node.sending


@pytest.mark.parametrize("command", ["migrate", "keep"])
def test_what_is_not_here_is_answered_as_failed(command):
    node, request = writes(max_tokens=1)
    getattr(node, command)(request)
    assert node.event("a", "failed").message == "the node has nothing of this attempt"


@pytest.mark.parametrize("command", ["migrate", "keep"])
def test_what_is_ending_is_left_to_end(command):
    node, request = writes()
    goes(node, request, "stopped")
    node.cancel(request)
    getattr(node, command)(request)
    assert node.words("a") == ["first_token"]
    node.send_fails(request)
    assert node.words("a") == ["first_token", "cancelled"]
    node.check_empty()


def test_what_another_node_has_the_kv_of_cannot_be_kept():
    node = Node()
    request = node.reserve("a", 9)
    node.keep(request)
    node.receive_fails(request)
    assert node.event("a", "failed").reason == reasons.PAIRING_MISMATCH
    node.check_empty()
