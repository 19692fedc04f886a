"""The scheduler by example: one event after another, and the instructions each of them gives."""

import pytest

from coordinator.control.instructions import RESEND_S
from coordinator.control.request import ONE_EVENT_S, Phase
from coordinator.control.scheduler import MAX_EARLY_TOKENS
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import PROMPT, World


@pytest.fixture
def world():
    return World()


def test_the_life_of_a_request_and_its_timeline(world):
    assert world.submit(now=10.0) == ["reserve d0", "prefill p0"]
    attempt = world.attempt
    assert [(list(job.token_ids), job.num_prompt_tokens) for job in world.jobs] == [(PROMPT, 3)] * 2
    assert world.jobs[0].sampling_params.max_tokens == 5
    assert world.first(attempt, now=12.0, prefill_s=0.5) == ["emit 0:100", "begun d0"]
    assert world.tell("d0", events.reserved(attempt), 13.0) == ["deliver p0"]
    assert world.tell("d0", events.committed(attempt), 15.0) == []
    assert world.tell("p0", events.transferred(attempt), 15.5) == []
    assert world.step(attempt, 1, now=17.0, step_s=0.25) == ["emit 1:101"]
    assert world.step(attempt, 2, events.STOP, now=18.0) == ["emit 2:102", "end complete"]
    assert world.outcome == inference_pb2.Complete(
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        matched_token_id=102,
        prompt_tokens=3,
        completion_tokens=3,
        timeline=inference_pb2.Timeline(
            prefill_queue_s=1.5, prefill_s=0.5, kv_alloc_s=1.0, kv_transfer_s=2.0, decode_queue_s=1.75,
            decode_s=1.25, e2e_s=8.0, ttft_s=2.0, prefill_node="p0", decode_node="d0",
        ),
    )  # fmt: skip
    assert world.scheduler.num_open == 0


@pytest.mark.parametrize("how", ["sent", "lost", "failed"])
def test_a_prompt_that_is_read_is_held_until_its_node_has_let_go(world, how):
    world.submit()
    attempt = world.attempt
    world.tell("d0", events.reserved(attempt))
    assert world.outgoing("p0") == 0
    world.first(attempt)
    world.tell("d0", events.committed(attempt))
    assert world.outgoing("p0") == 3
    prefill_node = world.registry.find("p0")
    match how:
        case "sent":
            assert world.tell("p0", events.transferred(attempt)) == []
        case "lost":
            assert world.lose("p0") == []
        case "failed":
            assert world.tell("p0", events.failed(attempt, "TRANSFER_FAILED")) == []
    assert world.ledger.of(prefill_node).tokens_outgoing == 0


def test_a_descriptor_that_is_there_before_the_first_token_leaves_no_kv_alloc(world):
    world.submit()
    attempt = world.attempt
    assert world.tell("d0", events.reserved(attempt, b"xyz"), 1.0) == ["deliver p0"]
    world.first(attempt, now=2.0)
    world.tell("d0", events.committed(attempt), 3.0)
    world.step(attempt, 1, events.LENGTH, now=4.0)
    timeline = world.outcome.timeline
    assert (timeline.kv_alloc_s, timeline.kv_transfer_s, timeline.decode_queue_s) == (0.0, 1.0, 1.0)
    assert not world.outcome.HasField("matched_stop")


def test_steps_that_a_node_has_joined_end_an_answer(world):
    """Its last token is in one message with the token before."""
    world.submit()
    attempt = world.attempt
    world.tell("d0", events.reserved(attempt))
    world.first(attempt)
    world.tell("d0", events.committed(attempt))
    world.step(attempt, 1)
    joined = [events.sampled(attempt, 2, 102), events.sampled(attempt, 3, 103, events.STOP)]
    assert world.tell("d0", events.step_tokens(*joined)) == ["emit 2:102", "emit 3:103", "end complete"]
    assert world.ledger.tokens_taken(world.registry.find("d0")) == 0
    assert world.metrics.num_generated_tokens == 4


def test_an_answer_of_one_token_needs_no_decode_node(world):
    world.submit()
    attempt = world.attempt
    assert world.first(attempt, finish_reason=events.LENGTH) == ["emit 0:100", "cancel d0", "end complete"]
    assert world.scheduler.num_open == 1
    world.tell("d0", events.cancelled(attempt))
    assert world.scheduler.num_open == 0


def test_step_tokens_that_overtake_the_first_token_wait_for_it(world):
    world.submit()
    attempt = world.attempt
    world.tell("d0", events.reserved(attempt), 1.0)
    world.tell("d0", events.committed(attempt), 2.0)
    assert world.step(attempt, 1, now=3.0) == []
    assert world.step(attempt, 2, now=4.0) == []
    assert world.first(attempt, now=5.0, prefill_s=4.5) == ["emit 0:100 1:101 2:102"]
    assert world.step(attempt, 3, events.LENGTH, now=6.0) == ["emit 3:103", "end complete"]
    timeline = world.outcome.timeline
    assert (timeline.prefill_queue_s, timeline.prefill_s, timeline.decode_s) == (0.5, 4.5, 1.0)


def test_the_last_token_may_overtake_the_first(world):
    world.submit()
    attempt = world.attempt
    assert world.step(attempt, 1, events.STOP) == []
    assert world.first(attempt) == ["emit 0:100 1:101", "end complete"]
    assert world.scheduler.num_open == 0


def test_repeated_late_and_foreign_events_do_nothing(world):
    world.submit()
    attempt = world.attempt
    world.first(attempt)
    world.tell("d0", events.reserved(attempt))
    assert world.tell("d0", events.reserved(attempt)) == []
    assert world.step(attempt, 0) == []
    old = fleet_pb2.Attempt(request_id=attempt.request_id, epoch=attempt.epoch - 1)
    for name, event in (
        ("d0", events.step_tokens(events.sampled(old, 1, 5))),
        ("d1", events.step_tokens(events.sampled(attempt, 1, 5))),
        ("d0", events.first_token(events.sampled(attempt, 1, 5))),
        ("p0", events.failed(old, "ENGINE_ERROR")),
        ("d1", events.failed(attempt, "ENGINE_ERROR")),
        ("p1", events.cancelled(attempt)),
    ):
        assert world.tell(name, event) == []
    assert world.step(attempt, 1, now=2.0) == ["emit 1:101"]
    assert world.first(attempt, now=3.0) == []
    assert world.tell("d0", events.committed(attempt), 4.0) == []
    world.step(attempt, 2, events.LENGTH, now=5.0)
    assert world.outcome.timeline.decode_s == 3.0


def test_a_prefill_node_lost_before_commit_moves_the_request(world):
    world.submit()
    old = world.attempt
    world.first(old)
    assert world.lose("p0", now=1.0) == ["cancel d0", "reserve d0", "prefill p1"]
    assert world.attempt.epoch > old.epoch
    assert [(list(job.token_ids), job.num_prompt_tokens) for job in world.jobs[-2:]] == [([*PROMPT, 100], 3)] * 2
    assert world.step(old, 1) == []  # what the old attempt still says is nobody's
    token = events.sampled(world.attempt, 1, 101)
    assert world.tell("p1", events.first_token(token), 3.0) == ["emit 1:101", "begun d0"]
    assert world.step(world.attempt, 2, events.LENGTH, now=4.0) == ["emit 2:102", "end complete"]
    timeline = world.outcome.timeline
    assert (timeline.num_restarts, timeline.prefill_node, timeline.e2e_s) == (1, "p1", 4.0)
    assert timeline.ttft_s == 0.0  # the first token of the first attempt
    assert world.scheduler.num_open == 1  # d0 has yet to drop the old attempt
    world.tell("d0", events.cancelled(old))
    assert world.scheduler.num_open == 0


@pytest.mark.parametrize("word", [("d0", events.committed), ("p0", events.transferred)])
def test_a_prefill_node_lost_after_commit_is_not_missed(world, word):
    world.submit()
    attempt = world.attempt
    world.first(attempt)
    world.tell(word[0], word[1](attempt))
    assert world.lose("p0") == []
    assert world.step(attempt, 1, events.LENGTH) == ["emit 1:101", "end complete"]


def test_a_commit_is_not_enough_without_the_first_token(world):
    world.submit()
    world.tell("d0", events.committed(world.attempt))
    assert world.lose("p0") == ["cancel d0", "reserve d0", "prefill p1"]


def test_a_decode_node_lost_moves_the_request_and_the_stream_goes_on(world):
    world.submit()
    attempt = world.attempt
    world.first(attempt)
    world.tell("p0", events.transferred(attempt))
    world.step(attempt, 1)
    assert world.lose("d0") == ["reserve d1", "prefill p0"]
    assert list(world.jobs[-1].token_ids) == [*PROMPT, 100, 101]
    assert world.first(world.attempt, index=2) == ["emit 2:102", "begun d1"]
    assert world.step(world.attempt, 3, events.LENGTH, node="d1") == ["emit 3:103", "end complete"]


@pytest.mark.parametrize("reporter", ["p0", "d0"])
@pytest.mark.parametrize("reason", ["TRANSFER_FAILED", "KV_CHECKSUM_MISMATCH"])
def test_a_failed_transfer_moves_the_request_away_from_both_ends(world, reason, reporter):
    world.submit()
    other = "d0" if reporter == "p0" else "p0"
    migrated = world.tell(reporter, events.failed(world.attempt, reason))
    assert migrated == [f"cancel {other}", "reserve d1", "prefill p1"]


def test_a_prefill_of_several_steps_is_seen_before_it_ends_and_counts_though_its_node_is_lost(world):
    world.submit()
    assert world.scheduler.phases() == {Phase.PREFILL_QUEUE: 1}
    world.tell("p0", events.progress(world.attempt, 4, prefill_s=2.0), now=5.0)
    world.tell("p0", events.progress(world.attempt, 2, prefill_s=3.0), now=6.0)
    assert world.scheduler.phases() == {Phase.PREFILL: 1}
    world.lose("p0", now=7.0)
    assert world.scheduler.phases() == {Phase.PREFILL_QUEUE: 1}
    token = events.sampled(world.attempt, 0, 100, events.LENGTH)
    world.tell("p1", events.first_token(token, prefill_s=1.0), now=10.0)
    timeline = world.outcome.timeline
    assert (timeline.prefill_queue_s, timeline.prefill_s) == (3.0 + 2.0, 4.0 + 1.0)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [("TRANSFER_FAILED", "WORKER_LOST"), ("KV_CHECKSUM_MISMATCH", "KV_CHECKSUM_MISMATCH")],
)
def test_restarts_are_limited(world, failure, reason):
    world.submit()
    world.first(world.attempt)
    world.tell("d0", events.failed(world.attempt, failure))
    last = world.tell("d1", events.failed(world.attempt, failure))
    assert last == ["cancel p1", f"end {reason}"]
    assert world.outcome.metadata == {"phase": "prefill_queue", "tokens_emitted": "1"}
    assert "what happened" not in str(world.outcome)


def test_a_request_whose_step_failed_is_tried_elsewhere_and_no_third_time(world):
    """A node that fails at once looks idle, and is given all that comes."""
    world.submit()
    assert world.tell("p0", events.failed(world.attempt, "STEP_FAILED")) == ["cancel d0", "reserve d0", "prefill p1"]
    world.tell("p1", events.first_token(events.sampled(world.attempt, 0, 7)))
    assert world.tell("d0", events.failed(world.attempt, "STEP_FAILED")) == ["cancel p1", "end ENGINE_ERROR"]
    assert str(world.outcome).endswith("and it is not tried again: what happened"), "one cause of both"


def test_a_request_that_is_tried_nowhere_else_ends_with_the_cause_of_its_failed_step():
    world = World(max_restarts=0)
    world.submit()
    assert world.tell("p0", events.failed(world.attempt, "STEP_FAILED"))[-1] == "end ENGINE_ERROR"
    assert str(world.outcome) == "the engine of the prefill node failed: what happened"


def test_all_requests_survive_a_node_whose_steps_fail():
    world, num_failed = World(max_live=100), 0
    for number in range(20):
        world.submit(f"r/{number}")
        if world.prefill_node == "p0":
            world.tell("p0", events.failed(world.attempt, "STEP_FAILED"))
            num_failed += 1
        assert world.prefill_node == "p1"
        last = events.first_token(events.sampled(world.attempt, 0, 7, events.STOP))
        assert world.tell("p1", last)[-1] == "end complete"
    assert num_failed == 20, "what fails at once has always the least to do"


@pytest.mark.parametrize(
    ("failure", "reason", "text"),
    [
        ("PROMPT_TOO_LONG", "PROMPT_TOO_LONG", "what happened"),
        ("ENGINE_ERROR", "ENGINE_ERROR", "the engine of the decode node failed: what happened"),
        ("a new reason", "ENGINE_ERROR", "the engine of the decode node failed"),
        ("PAIRING_MISMATCH", "PAIRING_MISMATCH", "node d0 and the coordinator differ: what happened"),
    ],
)
def test_other_failures_end_the_request(world, failure, reason, text):
    world.submit()
    assert world.tell("d0", events.failed(world.attempt, failure)) == ["cancel p0", f"end {reason}"]
    assert str(world.outcome) == text
    world.tell("p0", events.failed(world.attempt, "TRANSFER_FAILED"))  # an answer to cancel as good as Cancelled
    assert world.scheduler.num_open == 0


def test_a_late_failure_of_the_prefill_node_is_not_missed(world):
    world.submit()
    attempt = world.attempt
    world.first(attempt)
    world.tell("d0", events.committed(attempt))
    assert world.tell("p0", events.failed(attempt, "TRANSFER_FAILED")) == []
    assert world.step(attempt, 1) == ["emit 1:101"]


def test_a_node_that_does_not_know_the_request_loses_it(world):
    world.submit()
    assert world.tell("p0", events.cancelled(world.attempt)) == ["cancel d0", "reserve d0", "prefill p1"]


@pytest.mark.parametrize(("name", "reason"), [("p0", "NO_PREFILL_WORKER"), ("d0", "NO_DECODE_WORKER")])
def test_without_another_node_the_request_ends_at_once(name, reason):
    world = World(nodes=("p0", "d0"), max_restarts=5)
    world.submit()
    other = {"p0": "d0", "d0": "p0"}[name]
    assert world.lose(name) == [f"cancel {other}", f"end {reason}"]
    assert world.outcome.metadata == {"phase": "prefill_queue", "tokens_emitted": "0"}


def test_requests_go_where_fewer_tokens_are_assigned(world):
    assert world.submit("a/0") == ["reserve d0", "prefill p0"]
    a = world.attempt
    assert world.submit("b/0") == ["reserve d1", "prefill p1"]
    world.first(a)  # its prefill is over, its decode is not
    assert world.submit("c/0") == ["reserve d1", "prefill p0"]


def test_finish_ends_a_request_once(world):
    world.submit()
    attempt = world.attempt
    world.first(attempt)
    world.tell("p0", events.transferred(attempt))
    ended = world.short(world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 2.0))
    assert ended == ["cancel d0", "end complete"]
    assert world.outcome.finish_reason == inference_pb2.FINISH_REASON_ABORT
    assert world.outcome.completion_tokens == 1
    assert world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 2.0) == []


def test_a_request_ends_at_its_deadline(world):
    world.submit()
    assert world.short(world.scheduler.tick(99.9)) == []
    assert world.short(world.scheduler.tick(100.0)) == ["cancel p0", "cancel d0", "end DEADLINE_EXCEEDED"]
    assert world.outcome.metadata["phase"] == "prefill_queue"


def test_cancel_is_repeated_until_it_is_answered_or_the_node_is_lost(world):
    world.submit()
    attempt = world.attempt
    world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 0.0)
    assert world.short(world.scheduler.tick(RESEND_S - 0.1)) == []
    world.tell("p0", events.cancelled(attempt), 1.0)
    assert world.short(world.scheduler.tick(RESEND_S)) == ["cancel d0"]
    assert world.short(world.scheduler.tick(RESEND_S + 0.1)) == []
    world.lose("d0")
    assert world.scheduler.num_open == 0


def test_live_and_unreleased_answers_are_limited_together():
    world = World(max_live=2)
    world.submit("a/0")
    attempt = world.attempt
    world.scheduler.finish("a/0", inference_pb2.FINISH_REASON_ABORT, 0.0)
    with pytest.raises(RequestError, match="2 sequences are in flight, the limit is 2") as error:
        world.submit("b/0")
    assert error.value.reason == "QUEUE_FULL"
    world.tell("p0", events.cancelled(attempt))
    world.submit("b/0")


def test_each_asker_may_have_its_share_of_the_live_answers():
    world = World(max_live=5, max_live_per_asker=2)
    for name, asker in (("a/0", "ann"), ("b/0", "ann"), ("c/0", ""), ("d/0", "")):
        world.submit(name, asker=asker)
    for asker, whose in (("ann", "the API key of ann"), ("", "API keys without a name")):
        with pytest.raises(
            RequestError, match=f"^2 sequences of {whose} are in flight, the limit for one is 2$"
        ) as error:
            world.submit("e/0", asker=asker)
        assert error.value.reason == "QUEUE_FULL"
    world.submit("e/0", asker="bob")
    world.scheduler.finish("a/0", inference_pb2.FINISH_REASON_ABORT, 0.0)
    for name, now in (("p0", 0.0), ("d0", ONE_EVENT_S)):
        world.lose(name, now)  # whatever was theirs is let go
    world.submit("f/0", asker="ann")


def test_who_has_its_share_neither_asks_for_nodes_nor_takes_a_turn():
    """Prompts of 3 s: two in the first ten seconds keep no node busy, and a hundred more would keep dozens."""
    world = World(max_live=5, max_live_per_asker=1)
    for name in ("p0", "p1"):
        told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
        world.registry.heartbeat(world.registry.find(name), told, 0.0)
    world.submit("a/0", asker="bob")
    world.first(world.attempt, finish_reason=events.LENGTH)
    world.submit("b/0", asker="ann")
    for _ in range(100):
        with pytest.raises(RequestError) as error:
            world.submit("c/0", asker="ann")
        assert "retry_after_s" not in error.value.metadata
    assert world.scheduler.nodes_needed.mixed == 1


def test_a_live_id_is_not_taken_twice_but_may_be_used_again(world):
    world.submit()
    old = world.attempt
    with pytest.raises(RequestError) as error:
        world.submit()
    assert error.value.reason == "DUPLICATE_REQUEST_ID"
    world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 0.0)
    assert len(world.submit()) == 2
    assert world.first(old) == []  # the old request's token is not the new one's
    assert world.first(world.attempt) == ["emit 0:100", "begun d0"]


def test_refused_requests_leave_no_trace():
    world = World(nodes=("p0",))
    with pytest.raises(RequestError) as error:
        world.submit()
    assert error.value.reason == "NO_DECODE_WORKER"
    assert world.scheduler.num_open == 0
    assert world.account("p0") == (0, 0, 0, 0)


def test_tokens_that_can_never_be_emitted_are_bounded(world):
    world.submit()
    attempt = world.attempt
    for index in range(1, MAX_EARLY_TOKENS + 1):
        assert world.step(attempt, index) == []
    assert world.step(attempt, MAX_EARLY_TOKENS + 1) == ["cancel p0", "cancel d0", "reserve d0", "prefill p1"]


# ---- one node reads the prompt and writes the answer: no descriptor, no transfer ----


@pytest.fixture
def mixed():
    return World(nodes=("b0", "b1"))


def first(mixed, name="b0", index=0, finish_reason=0, now=0.0, **fields):
    token = events.sampled(mixed.attempt, index, 100 + index, finish_reason)
    return mixed.tell(name, events.first_token(token, **fields), now)


def test_the_life_of_a_request_on_one_node_and_its_timeline(mixed):
    assert mixed.submit(now=10.0) == ["reserve b0"]
    attempt = mixed.attempt
    assert (mixed.is_local, mixed.prefill_tp_size) == (True, 0)
    assert [list(job.token_ids) for job in mixed.jobs] == [PROMPT]
    assert mixed.account("b0") == (3, 3, 1, 0)
    assert first(mixed, now=12.0, prefill_s=0.5, num_cached_tokens=2) == ["emit 0:100"]
    assert mixed.account("b0") == (0, 4, 1, 0)
    assert mixed.step(attempt, 1, now=13.0, step_s=0.25, node="b0") == ["emit 1:101"]
    assert mixed.step(attempt, 2, events.STOP, now=14.0, node="b0") == ["emit 2:102", "end complete"]
    assert mixed.outcome == inference_pb2.Complete(
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        matched_token_id=102,
        prompt_tokens=3,
        completion_tokens=3,
        cached_tokens=2,
        timeline=inference_pb2.Timeline(
            prefill_queue_s=1.5, prefill_s=0.5, decode_queue_s=0.75, decode_s=1.25, e2e_s=4.0, ttft_s=2.0,
            prefill_node="b0", decode_node="b0",
        ),
    )  # fmt: skip
    assert mixed.scheduler.num_open == 0
    assert mixed.account("b0") == (0, 0, 0, 0)


def test_an_answer_of_one_token_is_over_with_the_first(mixed):
    mixed.submit()
    assert first(mixed, finish_reason=events.LENGTH) == ["emit 0:100", "end complete"]
    assert mixed.scheduler.num_open == 0


def test_what_belongs_to_a_transfer_is_not_expected_and_does_nothing(mixed):
    mixed.submit()
    attempt = mixed.attempt
    for event in (events.reserved(attempt), events.committed(attempt, 5, 6), events.transferred(attempt)):
        assert mixed.tell("b0", event) == []
    first(mixed)
    assert mixed.lose("b0") == ["reserve b1"]  # it is still the node's
    assert first(mixed, "b1", index=1, finish_reason=events.LENGTH) == ["emit 1:101", "end complete"]
    assert (mixed.outcome.kv_bytes, mixed.outcome.kv_bytes_saved) == (0, 0)


@pytest.mark.parametrize("num_steps", [None, 0, 2])
def test_a_lost_node_moves_the_request_in_every_phase(mixed, num_steps):
    mixed.submit()
    attempt, answered = mixed.attempt, []
    if num_steps is not None:
        first(mixed)
        answered = [100 + index for index in range(num_steps + 1)]
        for index in range(1, num_steps + 1):
            mixed.step(attempt, index, node="b0")
    assert mixed.lose("b0", now=1.0) == ["reserve b1"]
    assert mixed.is_local
    assert list(mixed.jobs[-1].token_ids) == [*PROMPT, *answered]
    index = len(answered)
    assert first(mixed, "b1", index=index, now=2.0) == [f"emit {index}:{100 + index}"]
    last = mixed.step(mixed.attempt, index + 1, events.LENGTH, now=3.0, node="b1")
    assert last == [f"emit {index + 1}:{101 + index}", "end complete"]
    timeline = mixed.outcome.timeline
    assert (timeline.num_restarts, timeline.prefill_node, timeline.decode_node) == (1, "b1", "b1")
    assert mixed.scheduler.num_open == 0


def test_a_mixed_node_that_does_not_know_the_request_loses_it(mixed):
    mixed.submit()
    assert mixed.tell("b0", events.cancelled(mixed.attempt)) == ["reserve b1"]


def test_a_node_is_asked_once_to_let_go(mixed):
    mixed.submit()
    attempt = mixed.attempt
    ended = mixed.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 1.0)
    assert mixed.short(ended) == ["cancel b0", "end complete"]
    assert mixed.scheduler.num_open == 1
    mixed.tell("b0", events.cancelled(attempt))
    assert mixed.scheduler.num_open == 0


def test_a_failure_ends_the_request_and_nothing_is_left_to_cancel(mixed):
    mixed.submit()
    assert mixed.tell("b0", events.failed(mixed.attempt, "ENGINE_ERROR")) == ["end ENGINE_ERROR"]
    assert mixed.scheduler.num_open == 0


def test_prompts_go_where_fewer_tokens_wait_to_be_computed(mixed):
    assert mixed.submit("a/0") == ["reserve b0"]
    assert mixed.submit("b/0") == ["reserve b1"]
    assert mixed.submit("c/0", token_ids=[1]) == ["reserve b0"]
    assert mixed.submit("d/0") == ["reserve b1"]


def test_the_decode_node_reads_when_the_last_other_prefill_node_is_lost_and_no_more_when_there_is_one():
    world = World(nodes=("p0", "b0"))
    assert world.submit("a/0") == ["reserve b0", "prefill p0"]  # no rate is known yet
    old = world.attempt
    assert world.lose("p0") == ["cancel b0", "reserve b0"]
    assert world.is_local
    assert first(world) == ["emit 0:100"]
    world.tell("b0", events.cancelled(old))
    world.attach("p0")
    assert world.submit("b/0") == ["reserve b0", "prefill p0"]


def test_it_learns_what_a_transfer_takes():
    """Moving takes 1 s; p0 has 0.3 s to compute, b0 0.6 s."""
    world = World(nodes=("p0", "b0"))
    for name, rate in (("p0", 10.0), ("b0", 5.0)):
        beat = events.heartbeat(prefill_tokens_per_s=rate)
        world.registry.heartbeat(world.registry.find(name), beat.heartbeat, 0.0)
    for number in range(3):
        assert world.submit(f"{number}/0", now=number) == ["reserve b0", "prefill p0"]
        world.tell("b0", events.reserved(world.attempt), number)
        world.first(world.attempt, now=number + 0.25)
        world.step(world.attempt, 1, events.LENGTH, now=number + 1.5, node="b0", step_s=0.25)
    assert world.submit("3/0", now=4.0) == ["reserve b0"]
    first(world, finish_reason=events.LENGTH, now=5.0)
    assert world.submit("4/0", now=100.0) == ["reserve b0", "prefill p0"]  # what is old counts no more
