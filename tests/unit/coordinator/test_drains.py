"""What leaves a node that drains or writes no more, what makes place on a full one, and prompts that get no room."""

import pytest

from coordinator.control.load import Prompt
from coordinator.control.migration import MAX_DRAIN_MIGRATIONS, NUM_TOKENS_AHEAD, REST_S, WAIT_S, check_target
from serving_core.errors import RequestError
from serving_core.node.prefix import MIXED_NUMERICS
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import PROMPT, World

MAX_TOKENS = 200


def write(world, request_id, node="d0", now=0.0, token_ids=PROMPT):
    """An answer that the node writes; its attempt."""
    assert world.submit(request_id, token_ids, max_tokens=MAX_TOKENS, now=now)[0] == f"reserve {node}"
    attempt = world.attempt
    prefill_node = world.prefill_node
    world.tell(prefill_node, events.first_token(events.sampled(attempt, 0, 100)), now)
    world.tell(node, events.reserved(attempt), now)
    world.tell(node, events.committed(attempt), now)
    world.tell(prefill_node, events.transferred(attempt), now)
    assert world.step(attempt, 1, node=node, now=now) == ["emit 1:101"]
    return attempt


def written_on_d0(num_sequences, nodes=("p0", "d0"), **hello):
    """A World in which d0 writes so many answers, and d1 has come since."""
    world = World(nodes)
    attempts = [write(world, f"{number}/0") for number in range(num_sequences)]
    world.attach("d1", **hello)
    return world, attempts


def tells_of_numerics_ids(world, name, kind):
    """The node holds some block, and may hold others that were made so."""
    told = events.cache_changed([1], numerics_ids=[b"a node: " + kind, MIXED_NUMERICS])
    world.registry.cache_changed(world.registry.find(name), told.cache_changed)


def left_on(world, name):
    return world.scheduler.num_left(world.registry.find(name))


def migration(world, target, source="d0", now=2.0):
    """The answer of this target's attempt comes to d1."""
    assert world.tell("d1", events.reserved(target), now) == [f"migrate {source}"]
    return world.tell("d1", events.committed(target, next_index=2), now)


def test_answers_leave_a_draining_node_a_few_at_a_time_and_the_next_when_one_has_gone():
    world, attempts = written_on_d0(MAX_DRAIN_MIGRATIONS + 2)
    assert left_on(world, "d0") == MAX_DRAIN_MIGRATIONS + 2
    assert world.drain("d0", 1.0) == ["reserve d1"] * MAX_DRAIN_MIGRATIONS
    targets = [job.attempt for job in world.jobs[-MAX_DRAIN_MIGRATIONS:]]
    assert world.tick(1.1) == []
    assert migration(world, targets[0], now=1.2) == ["cancel d0", "migrated"]
    assert left_on(world, "d0") == MAX_DRAIN_MIGRATIONS + 2  # until it has answered
    assert world.tell("d0", events.cancelled(attempts[0]), 1.3) == []
    assert left_on(world, "d0") == MAX_DRAIN_MIGRATIONS + 1
    assert world.step(targets[0], 2, node="d1", now=1.3) == ["emit 2:102"]
    assert world.tick(1.4) == ["reserve d1"]


def test_an_answer_that_could_not_move_is_asked_for_again_after_a_while():
    world, _ = written_on_d0(1)
    world.drain("d0", 1.0)
    assert world.tell("d1", events.failed(world.attempt, "QUEUE_FULL"), 1.5) == ["refused"]
    assert world.tick(2.4) == []
    assert world.tick(2.5) == ["reserve d1"]


@pytest.mark.parametrize("hello", [{"num_blocks": 8}, {"max_model_len": 202}])
def test_an_answer_that_no_other_node_has_room_for_stays(hello):
    world, attempts = written_on_d0(1, **hello)
    assert world.drain("d0", 1.0) == []
    assert world.step(attempts[0], 2) == ["emit 2:102"]


def test_a_node_without_a_free_slot_is_no_target():
    world, _ = written_on_d0(2, max_num_seqs=1)
    assert world.drain("d0", 1.0) == ["reserve d1"]


def test_answers_go_where_there_is_most_room():
    world, _ = written_on_d0(1)
    world.attach("d2", num_blocks=400)
    assert world.drain("d0", 1.0) == ["reserve d2"]


@pytest.mark.parametrize(("kind", "num_leaving"), [(b"e", 3), (b"c", 2)])
def test_what_answers_begin_with_alike_takes_room_once_where_names_tell_bits(kind, num_leaving):
    """Ten blocks of their prompts, and nine of their own, where there are 40."""
    prompt = list(range(160))
    world = World(("p0", "d0"))
    for number in range(3):
        write(world, f"{number}/0", token_ids=[*prompt, number])
    world.attach("d1", num_blocks=40)
    for name in ("d0", "d1"):
        tells_of_numerics_ids(world, name, kind)
    assert world.drain("d0", 1.0) == ["reserve d1"] * num_leaving
    d1, num_needed = world.registry.find("d1"), 161 + 2 + NUM_TOKENS_AHEAD
    num_common = 2 * 160 if num_leaving == 3 else 0
    assert world.ledger.tokens_taken(d1) == num_leaving * num_needed - num_common
    for job in world.jobs[-num_leaving:]:
        assert migration(world, job.attempt)[:2] == ["cancel d0", "migrated"]
    num_room_for_more = num_needed if num_leaving == 2 else 0  # which is taken at once
    assert world.ledger.tokens_taken(d1) == num_leaving * (161 + 2) - num_common + num_room_for_more
    world.ledger.check_integrity()


@pytest.mark.parametrize(("kind", "target"), [(b"e", "d1"), (b"c", "d2")])
def test_what_others_hold_already_counts_as_room_where_it_need_not_come(kind, target):
    """Without that the other node has more."""
    prompt = list(range(160))
    world = World(("p0", "d0"))
    write(world, "r/0", token_ids=prompt)
    d1, _ = world.attach("d1"), world.attach("d2", num_blocks=99)
    for name in ("d0", "d1"):
        tells_of_numerics_ids(world, name, kind)
    world.ledger.decode("other", d1, 165, Prompt(prompt).hashes_shared(16))
    assert world.drain("d0", 1.0) == [f"reserve {target}"]


def test_an_answer_that_is_about_to_end_stays():
    world = World(("p0", "d0"))
    world.submit(max_tokens=5)
    world.first(world.attempt)
    world.tell("d0", events.committed(world.attempt))
    world.step(world.attempt, 1)
    world.attach("d1")
    assert world.drain("d0", 1.0) == []


@pytest.mark.parametrize(("name", "pair"), [("p0", ["reserve d0", "prefill p1"]), ("d0", ["reserve d1", "prefill p0"])])
def test_prompts_without_a_token_begin_again_elsewhere_and_it_is_no_restart(name, pair):
    world = World(max_restarts=0)
    world.submit()
    old = world.attempt
    assert world.drain(name, 1.0) == ["cancel p0", "cancel d0", *pair]
    assert world.metrics.num_restarts == 0
    assert left_on(world, name) == 1
    world.tell(name, events.cancelled(old), 1.0)
    assert left_on(world, name) == 0


def test_a_prompt_that_no_other_node_can_read_stays():
    world = World(("p0", "d0"))
    world.submit()
    assert world.drain("p0", 1.0) == []
    assert world.first(world.attempt) == ["emit 0:100", "begun d0"]


def test_transfers_under_way_finish():
    world = World()
    world.submit(max_tokens=MAX_TOKENS)
    attempt = world.attempt
    world.first(attempt)
    assert world.drain("p0", 1.0) == []
    assert world.drain("d0", 1.0) == []
    assert world.tell("d0", events.reserved(attempt), 2.0) == ["deliver p0"]
    world.tell("d0", events.committed(attempt), 2.0)
    assert world.tick(2.0) == []  # it is not written yet
    world.step(attempt, 1, now=2.0)
    assert world.tick(2.0) == ["reserve d1"]


def test_what_is_told_of_a_drained_node_does_not_depend_on_what_it_says_itself():
    world = World()
    node = world.registry.find("d0")
    world.registry.drain(node)
    world.registry.heartbeat(node, events.heartbeat("ready").heartbeat, 1.0)
    assert (node.is_ready, node.load.state) == (False, "draining")
    assert world.submit() == ["reserve d1", "prefill p0"]


@pytest.mark.parametrize(("name", "verb"), [("p0", "prefills prompts"), ("d0", "decodes sequences")])
def test_a_node_without_another_one_of_its_kind_cannot_drain(name, verb):
    world = World(("p0", "d0", "p1", "d1"))
    node = world.registry.find(name)
    check_target(node, world.registry.nodes)
    world.registry.drain(world.registry.find(f"{name[0]}1"))
    with pytest.raises(RequestError, match=f"^node {name} cannot drain: no other node {verb}$") as error:
        check_target(node, world.registry.nodes)
    assert error.value.reason == "NO_OTHER_NODE"


# ---- balance ----


def full_world(num_sequences=2):
    """d0 writes answers, and one that is read waits for its blocks since 10.0; d1 is there by then."""
    world = World(("p0", "d0"), keep_after_s=1e9)
    attempts = [write(world, f"{number}/0") for number in range(num_sequences)]
    world.submit("waits/0", max_tokens=MAX_TOKENS, now=9.0)
    waiting = world.attempt
    world.first(waiting, now=10.0)
    world.attach("d1")
    return world, attempts, waiting


def test_the_youngest_running_answer_makes_place_for_one_that_waits():
    world, attempts, waiting = full_world()
    assert world.tick(10.0 + WAIT_S - 0.1) == []
    assert world.tick(10.0 + WAIT_S) == ["reserve d1"]
    assert world.attempt.request_id == "1/0"
    assert world.tick(12.0) == []  # one at a time
    assert migration(world, world.attempt, now=12.0) == ["cancel d0", "migrated"]
    target = world.jobs[-1].attempt
    world.tell("d0", events.cancelled(attempts[1]), 12.0)
    world.tell("d0", events.reserved(waiting), 12.0)
    world.step(target, 2, node="d1", now=12.0)
    assert world.tick(13.0) == []


def test_what_has_moved_for_balance_rests():
    world, _, _ = full_world(num_sequences=1)
    assert world.tick(11.0) == ["reserve d1"]
    world.tell("d1", events.failed(world.attempt, "QUEUE_FULL"), 11.0)
    assert world.tick(11.0 + REST_S - 0.1) == []
    assert world.tick(11.0 + REST_S) == ["reserve d1"]


def test_nothing_moves_where_nobody_waits_or_nobody_has_room():
    world, _, waiting = full_world()
    world.tell("d0", events.reserved(waiting), 10.0)
    assert world.tick(20.0) == []
    world, _, _ = full_world()
    world.drain("d1", 10.0)
    assert world.tick(20.0) == []


# ---- prompts that are kept ----


@pytest.fixture
def waiting():
    """A World in which a prompt is read at 10.0 and waits for blocks."""
    world = World(keep_after_s=2.0)
    world.submit(max_tokens=MAX_TOKENS, now=9.0)
    world.first(world.attempt, now=10.0)
    return world


def test_a_prompt_that_gets_no_room_is_answered_where_it_was_read(waiting):
    attempt = waiting.attempt
    assert waiting.tick(11.9) == []
    assert waiting.tick(12.0) == ["cancel d0", "keep p0"]
    assert waiting.attempt == attempt
    assert (waiting.account("p0"), waiting.account("d0")) == ((0, 4, 1, 0), (0, 0, 0, 0))
    assert waiting.tell("d0", events.reserved(attempt)) == []
    assert waiting.tell("d0", events.cancelled(attempt)) == []
    token = events.sampled(attempt, 1, 101, events.LENGTH)
    said = waiting.tell("p0", events.step_tokens(token, step_s=0.5), 13.0)
    assert said == ["emit 1:101", "end complete"]
    timeline = waiting.outcome.timeline
    assert (timeline.kv_alloc_s, timeline.decode_queue_s, timeline.decode_s) == (2.0, 0.5, 0.5)
    assert (timeline.prefill_node, timeline.decode_node, timeline.num_restarts) == ("p0", "p0", 0)
    assert (waiting.scheduler.num_open, waiting.metrics.num_kept) == (0, 1)


def test_a_prompt_whose_descriptor_is_out_is_not_kept_but_once_that_is_void(waiting):
    attempt = waiting.attempt
    waiting.tell("d0", events.reserved(attempt), 11.0)
    assert waiting.tick(13.0) == []
    waiting.tell("d0", events.revoked(attempt), 14.0)
    assert waiting.tick(15.9) == []
    assert waiting.tick(16.0) == ["cancel d0", "keep p0"]


def test_a_prompt_is_not_kept_by_a_node_that_drains(waiting):
    assert waiting.drain("p0", 13.0) == []


def test_a_prompt_is_not_kept_by_a_node_that_it_does_not_fit():
    world = World(("d0",), keep_after_s=2.0)
    world.attach("p0", num_blocks=8)
    world.submit(max_tokens=MAX_TOKENS)
    world.first(world.attempt)
    assert world.tick(5.0) == []


def test_a_prompt_is_not_kept_where_it_would_wait_for_a_slot_too():
    world = World(("d0",), keep_after_s=2.0)
    world.attach("p0", max_num_seqs=1)
    for name in ("a/0", "b/0"):
        world.submit(name, max_tokens=MAX_TOKENS)
        world.first(world.attempt)
    assert world.tick(2.0) == ["cancel d0", "keep p0"]
    kept = world.attempt
    world.tell("d0", events.cancelled(kept))
    assert world.tick(5.0) == []
    world.tell("p0", events.step_tokens(events.sampled(kept, 1, 101, events.LENGTH)), 6.0)
    assert world.tick(7.0) == ["cancel d0", "keep p0"]


def test_a_prompt_that_is_not_read_yet_is_not_kept():
    world = World(keep_after_s=2.0)
    world.submit()
    assert world.tick(50.0) == []


def test_a_prefill_node_that_has_dropped_the_prompt_meanwhile_loses_it(waiting):
    waiting.tick(12.0)
    failed = events.failed(waiting.attempt, "TRANSFER_FAILED", "the node has nothing of this attempt")
    assert waiting.tell("p0", failed, 12.0) == ["reserve d0", "prefill p1"]


def test_a_kept_answer_moves_on_once_a_decode_node_has_room(waiting):
    waiting.tick(12.0)
    waiting.tell("p0", events.step_tokens(events.sampled(waiting.attempt, 1, 101)), 12.0)
    assert waiting.tick(12.0) == ["reserve d0"]
