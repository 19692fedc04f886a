"""Running answers that move, by example: one event after another, and the instructions each of them gives."""

import pytest

from coordinator.control.instructions import RESEND_S
from coordinator.control.load import Arrivals
from coordinator.control.migration import NUM_TOKENS_AHEAD, RESERVE_TIMEOUT_S, REST_S, RETRY_S, leaving_late
from coordinator.control.slo import Slo
from protos import fleet_pb2, inference_pb2
from serving_core.node.prefix import MIXED_NUMERICS
from serving_core.slo import Due
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import MAX_TOKENS, PROMPT, MigratingWorld, World


@pytest.fixture
def world():
    return MigratingWorld()


def test_the_target_is_told_who_will_dial_it():
    world = MigratingWorld(nodes=("p0",), source={"kv_keys": [b"k" * 32]})
    world.attach("d1")
    world.begin()
    assert list(world.reserve.sender_keys) == [b"k" * 32]


def test_the_target_is_told_of_the_ranks_that_will_send():
    world = MigratingWorld(nodes=("p0",), source={"tp_size": 2, "pp_size": 3})
    world.attach("d1")
    world.begin()
    assert (world.reserve.prefill_tp_size, world.reserve.prefill_pp_size) == (2, 3)


def test_no_answer_leaves_a_node_whose_engine_hands_none_over():
    world = MigratingWorld(nodes=("p0",), source={"keeps_sequences": True})
    world.attach("d1")
    assert world.drain("d0", 1.0) == []


def test_no_answer_goes_to_a_node_whose_engine_takes_none():
    world = MigratingWorld(nodes=("p0", "d0"))
    world.attach("d1", keeps_sequences=True)
    assert world.drain("d0", 1.0) == []


def test_an_answer_moves_and_tells_what_it_has_cost(world):
    world.begin()
    reserve = world.reserve
    assert world.target.epoch != world.source.epoch
    assert (list(reserve.job.token_ids), reserve.job.num_prompt_tokens) == ([*PROMPT, 100, 101], 3)
    assert (reserve.num_tokens_ahead, reserve.local_prefill, reserve.prefill_tp_size) == (NUM_TOKENS_AHEAD, False, 1)
    assert reserve.job.age == 1
    assert world.account("d1") == (0, 5 + NUM_TOKENS_AHEAD, 1, 0)
    assert world.tell("d1", events.reserved(world.target, b"xyz"), 2.0) == ["migrate d0"]
    assert (world.attempt, world.descriptor) == (world.source, b"xyz")
    assert world.step(world.source, 2, now=3.0) == ["emit 2:102"]  # it writes on
    assert world.commit(num_bytes=70, num_bytes_saved=30) == ["cancel d0", "migrated"]
    assert (world.account("d0"), world.account("d1")) == ((0, 0, 0, 0), (0, 6, 1, 0))
    assert world.step(world.target, 3, now=4.5, node="d1") == ["emit 3:103"]
    assert world.tell("d0", events.cancelled(world.source), 5.0) == []
    world.end(4)
    complete = world.outcome
    assert (complete.kv_bytes, complete.migrated_kv_bytes, complete.kv_bytes_saved) == (170, 70, 30)
    timeline = complete.timeline
    assert (timeline.num_migrations, timeline.migration_pause_s, timeline.num_restarts) == (1, 1.5, 0)
    assert (timeline.prefill_node, timeline.decode_node) == ("p0", "d1")
    assert world.metrics.num_kv_bytes == 170
    assert (sum(world.metrics.migration_pause.counts), world.metrics.migration_pause.sum) == (1, 1.5)


def test_tokens_of_the_target_wait_for_the_last_ones_of_the_source(world):
    world.migrate()
    assert world.commit(next_index=4) == ["cancel d0", "migrated"]
    assert world.step(world.target, 4, node="d1", now=5.0) == []
    assert world.step(world.source, 2, now=6.0) == ["emit 2:102"]
    assert world.step(world.source, 3, now=7.0) == ["emit 3:103 4:104"]
    assert world.tell("d0", events.cancelled(world.source), 7.0) == []
    world.end(5)
    assert world.outcome.timeline.migration_pause_s == 0.0  # it was there before it was needed


def test_tokens_of_the_source_count_below_the_first_one_of_the_target_alone(world):
    world.migration()
    assert world.step(world.source, 3) == []
    assert world.step(world.source, 2) == []
    other = fleet_pb2.Attempt(request_id="r/0", epoch=world.source.epoch - 1)
    assert world.step(other, 2) == []
    assert world.step(world.target, 3, node="d1") == ["emit 3:103"]
    world.end(4)


def test_a_source_lost_before_its_last_tokens_came_is_missed(world):
    world.migrate()
    world.commit(next_index=4)
    assert world.step(world.target, 4, node="d1") == []
    assert world.lose("d0") == ["cancel d1", "reserve d1", "prefill p0"]
    assert list(world.jobs[-1].token_ids) == [*PROMPT, 100, 101]


def test_a_source_lost_after_its_last_tokens_came_is_not_missed(world):
    world.migration()
    assert world.lose("d0") == []
    world.end()


def test_a_target_lost_after_the_commit_is_a_lost_node(world):
    world.registry.admit(events.hello("d2", "decode").hello, 0.0)
    world.migration()
    assert world.lose("d1") == ["reserve d2", "prefill p0"]
    assert world.tell("d0", events.cancelled(world.source)) == []


def test_where_the_target_holds_other_blocks_than_the_source_it_moves_whole_the_next_time(world):
    world.migrate()
    assert not world.reserve.is_whole
    mismatch = events.migration_failed(world.source, "PAIRING_MISMATCH")
    assert world.tell("d0", mismatch, 3.0) == ["cancel d1", "failed"]
    assert world.tell("d1", events.cancelled(world.target), 3.0) == ["keep d0"]
    assert world.tick(3.0 + RETRY_S) == ["reserve d1"]
    assert world.reserve.is_whole


def test_after_another_failure_the_next_move_is_like_the_first(world):
    world.migrate()
    world.tell("d0", events.migration_failed(world.source), 3.0)
    world.tell("d1", events.cancelled(world.target), 3.0)
    assert world.tick(3.0 + RETRY_S) == ["reserve d1"]
    assert not world.reserve.is_whole


@pytest.mark.parametrize(
    ("numerics_ids", "is_whole"),
    [
        ([], False),
        ([b"a node: e", MIXED_NUMERICS], False),
        (events.NUMERICS_IDS, True),
        ([b"a node: e", b"another:c", MIXED_NUMERICS], True),
    ],
    ids=["none that it has told of", "such as tell bits", "such as do not", "both"],
)
def test_what_a_node_of_such_makers_has_written_moves_whole(world, numerics_ids, is_whole):
    world.registry.cache_changed(
        world.registry.find("d0"), events.cache_changed([1], numerics_ids=numerics_ids).cache_changed
    )
    world.begin()
    assert world.reserve.is_whole == is_whole


@pytest.mark.parametrize("word", [events.cancelled, lambda attempt: events.failed(attempt, "QUEUE_FULL")])
def test_a_target_that_has_no_room_leaves_the_source_in_peace(world, word):
    world.begin()
    assert world.tell("d1", word(world.target)) == ["refused"]
    assert world.step(world.source, 2) == ["emit 2:102"]
    assert world.outcome is None


def test_a_target_that_gives_no_blocks_in_time_is_let_go(world):
    world.begin(now=1.0)
    assert world.tick(1.0 + RESERVE_TIMEOUT_S - 0.1) == []
    assert world.tick(1.0 + RESERVE_TIMEOUT_S) == ["cancel d1", "refused"]
    assert world.tell("d1", events.reserved(world.target)) == []
    assert world.tell("d1", events.cancelled(world.target)) == []
    world.end(2, node="d0")


@pytest.mark.parametrize("reason", ["TRANSFER_FAILED", "KV_CHECKSUM_MISMATCH", "ENGINE_ERROR"])
def test_a_target_that_fails_on_the_way_gives_the_answer_back(world, reason):
    world.migrate()
    assert world.tell("d1", events.failed(world.target, reason)) == ["failed", "keep d0"]
    assert world.attempt == world.source
    assert world.commit() == []
    world.end(2, node="d0")
    assert (world.outcome.timeline.num_migrations, world.outcome.timeline.num_restarts) == (0, 0)


def test_a_target_lost_on_the_way_gives_the_answer_back(world):
    world.migrate()
    assert world.lose("d1") == ["failed", "keep d0"]
    assert world.step(world.source, 2) == ["emit 2:102"]


FAILURES = {
    "the source cannot send": ("d0", lambda world: events.migration_failed(world.source)),
    "the target takes its blocks back": ("d1", lambda world: events.revoked(world.target)),
}


@pytest.mark.parametrize(("name", "event"), FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("answer", [events.cancelled, lambda attempt: events.failed(attempt, "TRANSFER_FAILED")])
def test_the_source_goes_on_only_when_the_target_has_let_go(world, name, event, answer):
    world.migrate()
    assert world.tell(name, event(world)) == ["cancel d1", "failed"]
    assert world.account("d1") == (0, 0, 0, 0)
    for late in (events.committed(world.target, next_index=2), events.reserved(world.target)):
        assert world.tell("d1", late) == []
    assert world.step(world.target, 2, node="d1") == []  # nothing of that epoch counts any more
    assert world.step(world.source, 2) == ["emit 2:102"]  # what it told before it stopped
    assert world.tell(name, event(world)) == []
    assert world.tick(2.0 + RESEND_S) == ["cancel d1"]
    assert world.tell("d1", answer(world.target), 8.0) == ["keep d0"]
    world.end(3, node="d0")


def test_the_source_goes_on_when_the_target_that_was_to_let_go_is_lost(world):
    world.migrate()
    world.tell("d0", events.migration_failed(world.source))
    assert world.lose("d1") == ["keep d0"]


def test_a_move_that_failed_before_the_source_knew_of_it_says_nothing_to_it(world):
    world.begin()
    assert world.tell("d1", events.revoked(world.target)) == ["cancel d1", "refused"]
    assert world.tell("d1", events.cancelled(world.target)) == []


def test_a_source_that_does_not_know_the_answer_it_is_to_keep_loses_it(world):
    world.migrate()
    world.lose("d1")
    world.registry.admit(events.hello("d2", "decode").hello, 0.0)
    failed = events.failed(world.source, "TRANSFER_FAILED", "the node has nothing of this attempt")
    assert world.tell("d0", failed) == ["reserve d2", "prefill p1"]


STEPS = {
    "reserving": (lambda world: world.begin(), ["cancel d0", "cancel d1", "ended"]),
    "migrating": (lambda world: world.migrate(), ["cancel d0", "cancel d1", "ended"]),
    "abandoned": (
        lambda world: (world.migrate(), world.tell("d0", events.migration_failed(world.source))),
        ["cancel d0"],
    ),
    "migrated": (lambda world: world.migration(), ["cancel d1"]),
}


@pytest.mark.parametrize(("bring", "said"), STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("how", ["client", "deadline", "stop string"])
def test_the_end_of_an_answer_ends_its_move_at_every_step(world, bring, said, how):
    bring(world)
    if how == "deadline":
        assert world.tick(1000.0)[-len(said) - 1 :] == [*said, "end DEADLINE_EXCEEDED"]
    else:
        reason = inference_pb2.FINISH_REASON_ABORT if how == "client" else inference_pb2.FINISH_REASON_STOP
        assert world.short(world.scheduler.finish("r/0", reason, 5.0)) == [*said, "end complete"]
    for name, attempt in (("d0", world.source), ("d1", world.target)):
        world.tell(name, events.cancelled(attempt), 1000.0)
    assert world.scheduler.num_open == 0
    assert world.commit(now=1001.0) == []


@pytest.mark.parametrize("step", ["reserving", "migrating"])
def test_the_last_token_of_the_source_ends_the_answer_and_the_move(world, step):
    STEPS[step][0](world)
    assert world.step(world.source, 2, events.LENGTH) == ["emit 2:102", "cancel d1", "ended", "end complete"]
    assert world.commit() == []
    world.tell("d1", events.cancelled(world.target))
    assert world.scheduler.num_open == 0


@pytest.mark.parametrize("step", ["reserving", "migrating"])
def test_a_source_lost_is_a_lost_node_and_its_target_is_let_go(world, step):
    STEPS[step][0](world)
    assert world.lose("d0") == ["cancel d1", "ended", "reserve d1", "prefill p0"]
    assert world.commit() == []
    assert world.tell("d1", events.cancelled(world.target)) == []
    assert world.metrics.num_restarts == 1


def test_a_source_that_fails_while_the_answer_moves_is_a_failed_node(world):
    world.migrate()
    said = world.tell("d0", events.failed(world.source, "ENGINE_ERROR"))
    assert said == ["cancel d1", "ended", "end ENGINE_ERROR"]


def test_a_prefill_node_that_has_not_said_that_it_let_go_is_asked_too():
    world = World()
    world.submit(max_tokens=MAX_TOKENS)
    source = world.attempt
    world.first(source)
    world.tell("d0", events.committed(source))
    world.step(source, 1)
    world.drain("d0", 1.0)
    target = world.attempt
    world.tell("d1", events.reserved(target))
    assert world.tell("d1", events.committed(target, next_index=2)) == ["cancel p0", "cancel d0", "migrated"]
    assert world.tell("p0", events.transferred(source)) == []


def test_an_answer_moves_ten_times(world):
    nodes = ["d0", "d1"]
    source, index = world.source, 2
    for round in range(10):
        here, there = nodes
        now = 9.0 * (round + 1)
        world.drain(there, now, state="ready")
        assert world.drain(here, now) == [f"reserve {there}"]
        target = world.attempt
        assert world.tell(there, events.reserved(target), now) == [f"migrate {here}"]
        assert world.step(source, index, node=here, now=now) == [f"emit {index}:{100 + index}"]
        said = world.tell(there, events.committed(target, num_bytes=5, next_index=index + 1), now)
        assert said == [f"cancel {here}", "migrated"]
        assert world.tell(here, events.cancelled(source), now) == []
        assert world.step(target, index + 1, node=there, now=now) == [f"emit {index + 1}:{101 + index}"]
        nodes, source, index = [there, here], target, index + 2
    assert world.step(source, index, events.STOP, node=nodes[0], now=95.0)[-1] == "end complete"
    timeline = world.outcome.timeline
    assert (timeline.num_migrations, timeline.num_restarts, timeline.decode_node) == (10, 0, nodes[0])
    assert (world.outcome.migrated_kv_bytes, world.outcome.kv_bytes) == (50, 150)
    assert world.scheduler.num_open == 0


# ---- answers that leave a node on which they fall behind their limit ----

# A step takes 10 ms and 5 ms for each answer.
WEIGHTS = [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
QUICK = [0.001, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0]


def learn(world, name, weights=WEIGHTS):
    told = events.heartbeat(step_weights=weights, prefill_tokens_per_s=1000.0)
    world.registry.heartbeat(world.registry.find(name), told.heartbeat, 0.0)


def write(world, request_id, tpot_s):
    """An answer that d0 writes, which has two tokens since 0.0 s; its attempt."""
    slo = None if tpot_s is None else Slo("", None, tpot_s)
    assert world.submit(request_id, max_tokens=MAX_TOKENS, slo=slo)[0] == "reserve d0"
    attempt, prefill_node = world.attempt, world.prefill_node
    world.tell(prefill_node, events.first_token(events.sampled(attempt, 0, 100)))
    world.tell("d0", events.reserved(attempt))
    world.tell("d0", events.committed(attempt))
    world.tell(prefill_node, events.transferred(attempt))
    assert world.step(attempt, 1) == ["emit 1:101"]
    return attempt


def written_on_d0(*tpots_s, weights=WEIGHTS):
    """A World in which d0 writes these answers, and d1 has come since."""
    world = World(("p0", "d0"))
    for index, tpot_s in enumerate(tpots_s):
        write(world, f"{index}/0", tpot_s)
    world.attach("d1")
    learn(world, "p0")
    learn(world, "d0")
    learn(world, "d1", weights)
    return world


def migrated_id(world):
    return world.attempt.request_id


def test_an_answer_whose_limit_is_shorter_than_a_step_moves():
    world = written_on_d0(0.024, 0.1, 0.1)  # 25 ms here, 15 ms there
    assert world.tick(0.03) == ["reserve d1"]
    assert migrated_id(world) == "0/0"
    assert world.tick(0.05) == []  # one at a time


def test_an_answer_that_is_ahead_until_its_end_stays():
    world = World(("p0", "d0"))
    attempts = [write(world, f"{index}/0", tpot_s) for index, tpot_s in enumerate((0.024, 0.1, 0.1))]
    for index in range(2, 101):
        world.step(attempts[0], index)
    world.attach("d1")
    for name in ("p0", "d0", "d1"):
        learn(world, name)
    assert world.tick(0.03) == []  # 99 tokens in steps of 25 ms, and the last one is due in 4.7 s
    late_s = 199 * 0.024 - 99 * 0.025
    assert world.tick(late_s + 0.01) == ["reserve d1"]


@pytest.mark.parametrize("tpots_s", [(0.026, 0.1, 0.1), (None, None, None), (0.024,)])
def test_who_keeps_its_limit_stays(tpots_s):
    assert written_on_d0(*tpots_s).tick(0.03) == []


def test_nobody_moves_to_where_it_would_be_late_too():
    slow = [0.020, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
    assert written_on_d0(0.024, 0.1, 0.1, weights=slow).tick(0.03) == []


def test_nobody_moves_to_where_it_makes_another_one_late():
    world = written_on_d0(0.024, 0.1, 0.1)
    d1 = world.registry.find("d1")
    due = Due(tpot_s=0.016)
    world.ledger.set_due("there", due, 0, 10)
    world.ledger.decode("there", d1, 10)
    assert world.tick(0.03) == []
    due.tpot_s = 0.021
    assert world.tick(0.03) == ["reserve d1"]


def written_on_b0(*tpots_s, num_left, ttft_s=10.0):
    """A World in which b0 writes these answers, which came within 30 ms, and b1 one that has so many tokens to come.
    Prompts of 100 ms that come so fast get through nowhere in time, least of all beside answers."""
    world = World(("b0",))
    learn(world, "b0", QUICK)
    for index, tpot_s in enumerate(tpots_s):
        asked = {"token_ids": range(100), "max_tokens": MAX_TOKENS, "slo": Slo("", ttft_s, tpot_s)}
        # One that is late begins with the next look: it harms nobody.
        assert (world.submit(f"{index}/0", **asked) or world.tick(0.0)) == ["reserve b0"]
        attempt = world.attempt
        world.tell("b0", events.first_token(events.sampled(attempt, 0, 100)))
        assert world.step(attempt, 1, node="b0") == ["emit 1:101"]
    b1 = world.attach("b1")
    learn(world, "b0")  # that its steps take longer, when it has been given too much
    learn(world, "b1")
    world.ledger.set_due("there", Due(tpot_s=0.1), 0, num_left)
    world.ledger.decode("there", b1, 10)
    return world


def leaving(world, per_s):
    """Who migrates where, while prompts of 100 ms with short outputs come at this rate."""
    coming = Arrivals(per_s, 100.0, 1.0)
    found = leaving_late(world.scheduler._on_nodes(), world.registry.nodes, world.ledger, 0.03, coming)
    return [(request.request_id, target.name) for request, target in found]


@pytest.mark.parametrize(("per_s", "migrated"), [(60.0, []), (1.0, [("0/0", "b1")])])
def test_nobody_moves_to_where_it_would_keep_prompts_waiting_for_longer_than_answers_there_do(per_s, migrated):
    """Beside the answer there, one of 24 ms in steps of 20 ms leaves a sixth of the time to prompts."""
    assert leaving(written_on_b0(0.024, 0.1, 0.1, num_left=198), per_s) == migrated


@pytest.mark.parametrize(("tpots_s", "migrated"), [((0.024, 0.1, 0.1), []), ((0.024, 0.024, 0.024), [("0/0", "b1")])])
def test_unless_more_are_late_here_than_prompts_would_be_there(tpots_s, migrated):
    """Of 2.1 prompts a second, 0.21 of the time, 197 steps of 24 ms leave a sixth: two are lost. Here one is late, or
    three."""
    assert leaving(written_on_b0(*tpots_s, num_left=198), 2.1) == migrated


def test_prompts_to_come_that_cannot_be_late_do_not_count():
    assert written_on_b0(0.024, 0.1, 0.1, num_left=10, ttft_s=None).tick(0.03) == ["reserve b1"]


def test_the_one_that_is_least_behind_goes_first():
    world = written_on_d0(0.020, 0.024, 0.1)
    assert world.tick(0.03) == ["reserve d1"]
    assert migrated_id(world) == "1/0"


def test_who_cannot_be_in_time_any_more_stays():
    """198 more steps of 15 ms take 2.97 s, and the last token is due at 199 * 24 ms."""
    late_s = 199 * 0.024 - 198 * 0.015
    assert written_on_d0(0.024, 0.1, 0.1).tick(late_s + 0.01) == []
    assert written_on_d0(0.024, 0.1, 0.1).tick(late_s - 0.01) == ["reserve d1"]


def test_what_has_moved_rests():
    world = written_on_d0(0.024, 0.1, 0.1)
    world.tick(0.03)
    assert world.tell("d1", events.failed(world.attempt, "QUEUE_FULL"), 0.04) == ["refused"]
    assert world.tick(0.05) == []
    assert REST_S > 199 * 0.024  # by then it is over, one way or the other
