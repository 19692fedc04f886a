"""How a request ends on a node: once, when nothing touches its blocks any more; and what a node tells of itself."""

import pytest

from protos import fleet_pb2
from serving_core import reasons
from serving_core.node.prefix import hint_of
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, STEP_S, Node, prompt_of

# ---- every stage ----


class Case:
    """A request in some stage, and what has to happen until nothing touches its blocks any more."""

    def __init__(self, stage):
        self.node = node = Node(budget=6)
        self.let_go = []
        getattr(self, stage.replace(", ", " ").replace(" ", "_"))()
        self.told = node.words("a")

    def end_step(self):
        self.let_go.append(self.node.end)

    def end_transfer(self):
        if self.request.epoch in self.node.sending:
            self.let_go.append(lambda: self.node.send_fails(self.request))
        else:
            self.let_go.append(lambda: self.node.receive_fails(self.request))

    def queued(self):
        self.request = self.node.prefill("a", 13)

    def queued_here(self):
        self.request = self.node.local("a", 13)

    def queued_with_a_descriptor(self):
        self.queued()
        self.node.deliver(self.request)
        self.end_transfer()

    def reading_between_steps(self):
        self.queued()
        self.node.step()

    def reading_here_between_steps(self):
        self.queued_here()
        self.node.step()

    def reading_in_step(self):
        self.queued()
        self.node.begin()
        self.end_step()

    def reading_here_in_step(self):
        self.queued_here()
        self.node.begin()
        self.end_step()

    def reading_in_its_last_step(self):
        self.queued()
        self.node.step()
        self.node.step()
        self.node.begin()
        self.end_step()

    def reading_in_step_and_sending(self):
        self.queued()
        self.node.step()
        self.node.begin()
        self.node.deliver(self.request)
        self.end_step()
        self.end_transfer()

    def sending_and_reading_in_step(self):
        self.reading_in_step_and_sending()
        self.let_go.reverse()

    def read(self):
        self.request = self.node.has_read("a", 13)

    def sending(self):
        self.read()
        self.node.deliver(self.request)
        self.end_transfer()

    def awaiting(self):
        self.rest = self.node.allocator.allocate(self.node.num_free)
        self.request = self.node.reserve("a", 13)
        self.let_go.append(self.rest.release)

    def granted(self):
        self.request = self.node.reserve("a", 13)
        self.end_transfer()

    def writing(self):
        self.request = self.node.writes("a", 13, max_tokens=9)

    def writing_in_step(self):
        self.writing()
        self.node.step()
        self.node.begin()
        self.end_step()

    def writing_what_was_read_here(self):
        self.request = self.node.local("a", 4, max_tokens=9)
        self.node.step()
        self.node.begin()
        self.end_step()


STAGES = [
    "queued",
    "queued here",
    "queued with a descriptor",
    "reading between steps",
    "reading here between steps",
    "reading in step",
    "reading here in step",
    "reading in its last step",
    "reading in step and sending",
    "sending and reading in step",
    "read",
    "sending",
    "awaiting",
    "granted",
    "writing",
    "writing in step",
    "writing what was read here",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", ["cancel", "detach", "cancel, then detach", "detach, then cancel", "cancel twice"])
def test_it_ends_once_when_nothing_touches_its_blocks_any_more(stage, end):
    case = Case(stage)
    node, is_awaiting = case.node, stage == "awaiting"
    touching = [] if is_awaiting else case.let_go
    transfers = len(node.sending) + len(node.opened)
    for how in end.replace(" twice", ", then cancel").split(", then "):
        node.cancel(case.request) if how == "cancel" else node.detached()
    assert node.cancelled == [case.request.epoch] * transfers
    for let_go in touching:
        assert node.words("a") == case.told
        assert not node.scheduler.is_idle
        let_go()
    if is_awaiting:
        case.rest.release()
    # the second of two cancels finds nothing where nothing had to let go, and is answered all the same
    num_cancelled = 2 if end == "cancel twice" and not touching else end.count("cancel") and 1
    assert node.words("a") == case.told + ["cancelled"] * num_cancelled
    assert node.begin() == []
    node.check_empty()


@pytest.mark.parametrize("stage", [stage for stage in STAGES if "in step" in stage or "in its last step" in stage])
def test_a_step_that_fails_ends_all_that_were_in_it(stage):
    case = Case(stage)
    node = case.node
    bystander = node.local("bystander", 5)
    node.fail_step()
    if "sending" in stage:
        assert node.words("a") == case.told
        assert node.cancelled == [case.request.epoch]
        node.send_fails(case.request)
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.STEP_FAILED, "the cause")
    assert node.words("a") == [*case.told, "failed"]
    node.steps()
    assert node.tokens("bystander") == answer_of(bystander.token_ids, 4)
    node.check_empty()


def test_a_step_that_fails_leaves_those_alone_that_were_not_in_it():
    node = Node(budget=6)
    read = node.has_read("read", 5)
    coming = node.reserve("coming", 5)
    node.local("in it", 5)
    node.begin()
    node.arrive(coming)
    node.fail_step()
    assert node.words("in it") == ["failed"]
    node.steps()
    assert node.tokens("coming") == answer_of(prompt_of(5), 4)[1:]
    node.deliver(read)
    node.sent(read)
    assert node.words("read") == ["first_token", "transferred"]
    node.check_empty()


def test_what_was_cancelled_in_its_step_says_nothing_of_the_token():
    node = Node()
    cancelled = node.writes("a", 5, max_tokens=9)
    node.local("b", 5)
    node.begin()
    node.cancel(cancelled)
    node.end()
    assert node.words("a") == ["reserved", "committed", "cancelled"]
    assert node.words("b") == ["first_token"]


def test_one_that_was_sent_before_its_cancel_took_effect_is_cancelled_all_the_same():
    node = Node()
    request = node.has_read("a", 5)
    node.deliver(request)
    node.cancel(request)
    node.sent(request, num_bytes=5)
    assert node.words("a") == ["first_token", "cancelled"]
    assert node.load.num_kv_bytes == 5
    node.check_empty()


def test_one_that_was_received_before_its_cancel_took_effect_is_cancelled_all_the_same():
    node = Node()
    request = node.reserve("a", 5)
    node.cancel(request)
    node.arrive(request)
    assert node.words("a") == ["reserved", "cancelled"]
    node.check_empty()


def test_a_cancel_that_meets_an_end_without_a_word_is_answered():
    """An answer of one token that nobody will receive: the transfer ends first."""
    node = Node()
    request = node.prefill("a", 5, max_tokens=1)
    node.deliver(request)
    node.step()
    node.cancel(request)
    assert node.words("a") == ["first_token"]
    node.send_fails(request)
    assert node.words("a") == ["first_token", "cancelled"]
    node.check_empty()


def test_a_descriptor_for_one_that_is_ending_or_gone_is_left_alone():
    node = Node()
    request = node.prefill("a", 5)
    node.begin()
    node.cancel(request)
    node.deliver(request)
    assert not node.sending
    node.end()
    node.deliver(request)
    assert not node.sending
    assert node.words("a") == ["cancelled"]
    node.check_empty()


def test_the_first_ending_wins():
    node = Node()
    request = node.prefill("a", 5)
    node.begin()
    node.cancel(request)
    node.fail_step()
    assert node.words("a") == ["cancelled"]
    node.check_empty()


def test_an_unknown_cancel_is_answered_at_once():
    node = Node()
    node.handle(cancel=fleet_pb2.Cancel(attempt=fleet_pb2.Attempt(request_id="nobody", epoch=7)))
    assert node.event("nobody", "cancelled").attempt.epoch == 7


def test_attempts_at_one_request_are_apart():
    node = Node()
    old = node.prefill("a", 5, epoch=1, age=3)
    node.local("a", 5, epoch=2, age=3, max_tokens=2)
    node.cancel(old)
    node.steps()
    assert node.words("a") == ["cancelled", "first_token", "step_tokens"]
    assert node.event("a", "cancelled").attempt.epoch == 1
    assert node.event("a", "first_token").attempt.epoch == 2
    node.check_empty()


@pytest.mark.parametrize("first", ["prefill", "reserve", "local"])
@pytest.mark.parametrize("second", ["prefill", "reserve", "local"])
def test_an_attempt_that_is_here_already_is_refused(first, second):
    node = Node()
    getattr(node, first)("a", 5, epoch=3)
    told = node.words("a")
    getattr(node, second)("a", 5, epoch=3)
    assert node.words("a") == [*told, "failed"]
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (
        reasons.DUPLICATE_REQUEST_ID,
        "attempt 3 of the request was announced twice",
    )
    assert failed.attempt.epoch == 3


@pytest.mark.parametrize("command", ["prefill", "reserve", "local"])
def test_what_is_to_be_computed_with_an_adapter_that_is_not_here_is_refused(command):
    """Such as when all nodes were started again without it while a request waited for one."""
    node = Node()
    getattr(node, command)("a", 5, adapter="sql")
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.MODEL_NOT_FOUND, "no node has an adapter 'sql' any more")
    assert not len(node.scheduler.node_requests)


@pytest.mark.parametrize("command", [{}, {"welcome": fleet_pb2.Welcome()}])
def test_a_command_that_is_not_known_is_answered_as_failed(command):
    node = Node()
    node.handle(**command, attempt=fleet_pb2.Attempt(request_id="a", epoch=4))
    failed = node.event("a", "failed")
    assert failed.attempt.epoch == 4
    assert failed.reason == reasons.PAIRING_MISMATCH
    assert "does not know the command" in failed.message


def test_a_command_of_a_later_version_is_answered_as_failed():
    """Its field of the oneof is unknown here, and `attempt` tells what it was about."""
    attempt = fleet_pb2.NodeCommand(attempt=fleet_pb2.Attempt(request_id="a", epoch=4))
    later = attempt.SerializeToString() + bytes([100 << 3 & 0x7F | 2 | 0x80, 100 >> 4, 0])  # field 100, of no bytes
    node = Node()
    node.worker.handle(fleet_pb2.NodeCommand.FromString(later))
    (event,) = node.events
    assert event.failed.attempt.request_id == "a"


# ---- time ----


def test_a_descriptor_that_does_not_come_fails_the_prompt():
    node = Node(descriptor_timeout_s=60.0)
    node.now = 5.0
    assert node.scheduler.wake_at_s is None
    node.prefill("a", 5)
    assert node.scheduler.wake_at_s is None  # its time begins when it is read
    node.step()
    assert node.scheduler.wake_at_s == 5.0 + STEP_S + 60.0
    node.tick(65.0)
    assert node.words("a") == ["first_token"]
    node.tick(65.5)
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.TRANSFER_FAILED, "no descriptor came within 60.0 s")
    node.check_empty()


def test_credit_that_does_not_come_fails_the_request():
    node = Node(slots=1, credit_timeout_s=30.0)
    node.writes("there", 4, max_tokens=20)
    node.now = 2.0
    node.reserve("early", 4)
    node.now = 3.0
    node.reserve("late", 4)
    assert node.scheduler.wake_at_s == 32.0
    node.tick(32.0)
    failed = node.event("early", "failed")
    assert failed.reason == reasons.QUEUE_FULL
    assert failed.message == "the decode node had no room for the request within 30.0 s"
    assert node.words("late") == []
    assert node.scheduler.wake_at_s == 33.0


def test_what_is_computed_or_on_its_way_is_not_timed_here():
    node = Node(budget=4)
    sending = node.has_read("sending", 4)
    node.deliver(sending)
    node.reserve("granted", 4)
    node.local("reading", 13)
    node.step()
    assert node.scheduler.wake_at_s is None
    node.tick(1e9)
    assert not any(event.HasField("failed") for event in node.events)


def test_a_failure_by_time_makes_room_for_the_next():
    node = Node(num_blocks=5, descriptor_timeout_s=60.0, credit_timeout_s=90.0)
    node.has_read("a", 13)
    node.reserve("b", 13)
    assert node.words("b") == []
    node.tick(60.5)
    assert node.words("a") == ["first_token", "failed"]
    assert node.words("b") == ["reserved"]


# ---- figures ----


def test_describe_counts_every_stage():
    node = Node(num_blocks=32, budget=16, slots=4)
    node.has_read("read", 9)
    node.writes("writes", 9, max_tokens=20)
    node.reserve("granted", 9)
    node.local("reads", 30)
    node.step()
    node.prefill("waits", 6)
    for index in range(3):
        node.reserve(f"awaits {index}", 4)
    load = node.load
    assert load.state == "ready"
    assert load.num_running == 3  # read, writes, reads
    assert load.num_waiting == 1 + 1 + 3
    assert load.num_waiting_tokens == 15 + 6
    assert load.num_blocks == 32
    assert load.num_blocks_free == node.num_free == 32 - 3 - 3 - 3 - 8 - 2
    assert load.num_blocks_cached == 0
    assert load.num_prompt_tokens == 9 + 9 + 30
    assert load.num_kv_bytes == 3 * BLOCK_BYTES
    node.scheduler.is_draining = True
    assert node.load.state == "draining"


def test_describe_tells_the_rates_of_the_steps():
    node = Node(budget=32)
    assert (node.load.prefill_tokens_per_s, node.load.step_s) == (0.0, 0.0)
    node.local("a", 32, max_tokens=3)
    node.steps()
    load = node.load
    assert load.prefill_tokens_per_s == 32 / STEP_S
    assert load.step_s == STEP_S


def test_what_steps_take_is_told_from_the_first_request_with_limits_on():
    node = Node(budget=32)
    node.local("without", 32, max_tokens=3)
    node.steps()
    assert not node.load.step_weights
    node.reserve("with", 8, due=fleet_pb2.Due(tpot_s=0.1))
    assert len(node.load.step_weights) == 7


def test_tokens_that_are_computed_again_count_as_those_of_a_prompt(monkeypatch):
    node = Node(num_blocks=7, caching=False)
    steps = []
    monkeypatch.setattr(node.rates, "add", lambda *step: steps.append(step))
    node.writes("old", 7, max_tokens=12)
    node.writes("young", 7, max_tokens=9)
    rest = node.allocator.allocate(3)
    node.step()
    node.step()
    rest.release()
    node.step()
    node.step()
    assert steps == [(0, 2, STEP_S), (0, 1, STEP_S), (9, 1, STEP_S), (0, 2, STEP_S)]


# ---- the cache ----


def hints(node):
    return {hint_of(name) for name in node.allocator.blocks_by_name}


def test_what_is_cached_is_told_before_the_token_that_lets_the_client_ask_again():
    node = Node()
    node.local("first token", 9, max_tokens=5, salt="s")
    node.step()
    kinds = [event.WhichOneof("event") for event in node.events]
    assert kinds.index("cache_changed") < kinds.index("first_token")
    assert len(node.hints) == 2
    node.steps()
    *_, cache_changed, last = (event for event in node.events if event.WhichOneof("event") != "cancelled")
    assert last.step_tokens.tokens[-1].finish_reason
    assert cache_changed.HasField("cache_changed")
    assert node.hints == hints(node)
    assert len(node.hints) == 3


def test_what_has_come_from_another_node_is_told_when_it_is_committed():
    node = Node()
    node.writes("a", 9)
    assert [event.WhichOneof("event") for event in node.events][-2:] == ["committed", "cache_changed"]
    assert node.hints == hints(node)
    assert len(node.hints) == 2


def test_what_is_lost_is_told_too_and_nothing_is_told_twice():
    node = Node(num_blocks=4)
    node.local("a", 9, max_tokens=1)
    node.step()
    before = set(node.hints)
    node.local("b", 13, max_tokens=1)
    node.step()
    assert node.hints == hints(node)
    assert not before & node.hints
    num_events = len(node.events)
    assert node.load.num_blocks_cached == 3
    assert len(node.events) == num_events


def test_a_new_coordinator_is_told_everything():
    node = Node()
    node.local("a", 9, max_tokens=1)
    node.step()
    told = set(node.hints)
    node.detached()
    node.scheduler.attached()
    node.hints.clear()
    assert node.load.num_blocks_cached == 2
    assert node.hints == told == hints(node)
