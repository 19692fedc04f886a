"""Requests that there is no node for, or no room on any: they wait for one, in the scheduler and at the API servers."""

import pytest

from coordinator.control.nodes import RECOVERY_S, Pauses
from coordinator.control.request import ONE_EVENT_S, SoFar
from coordinator.control.request_log import history_of
from coordinator.control.scheduler import RETRY_S
from coordinator.control.slo import Slo
from protos import inference_pb2
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.scripted_nodes import begin, begin_to_write, cluster, first_message, read_all, read_to_end, run, step
from tests.unit.coordinator.scheduler_kit import PROMPT, World

WAIT_S = 5.0


def world_of(*nodes, **settings):
    return World(nodes, **{"node_wait_s": WAIT_S, **settings})


def write_two_tokens(world):
    """The request of the last submit has two tokens; its attempt."""
    attempt = world.attempt
    world.first(attempt)
    world.tell("p0", events.transferred(attempt))
    world.step(attempt, 1)
    return attempt


@pytest.mark.parametrize(("there", "missing"), [("p0", "d0"), ("d0", "p0")])
def test_a_new_request_waits_for_the_node_that_is_missing(there, missing):
    world = world_of(there)
    assert world.submit(now=1.0) == []
    assert (world.scheduler.num_open, world.scheduler.num_waiting) == (1, 1)
    assert world.tick(2.0) == []
    world.attach(missing)
    assert world.tick(2.1) == ["reserve d0", "prefill p0"]
    assert world.tick(WAIT_S + 2.0) == []  # it waits no more
    assert world.first(world.attempt, finish_reason=events.LENGTH, now=8.0)[0] == "emit 0:100"
    timeline = world.outcome.timeline
    assert (timeline.prefill_queue_s, timeline.num_restarts) == (7.0, 0)


@pytest.mark.parametrize(("slo", "nums_begun"), [(None, [40, 0]), (Slo("", 20.0, 0.2), [16, 16, 8, 0])])
def test_of_many_that_wait_some_begin_at_a_time_where_there_are_limits(slo, nums_begun):
    """Placing one takes long beside many limits, and nodes are to be heard meanwhile."""
    world = world_of(max_live=100)
    for index in range(40):
        world.submit(f"r{index}/0", slo=slo, now=1.0)
    world.attach("b0", num_blocks=1000)
    for number, num_begun in enumerate(nums_begun):
        begun = {job.attempt.request_id for job in world.jobs}
        assert world.tick(2.0 + number / 4) == ["reserve b0"] * num_begun
        new = {job.attempt.request_id for job in world.jobs} - begun
        assert new == {f"r{index}/0" for index in range(len(begun), len(begun) + num_begun)}, "the oldest first"
    assert world.scheduler.num_waiting == 40, "their prompts are read"


def test_of_many_with_limits_whose_node_is_lost_some_begin_again_at_a_time():
    world = world_of(max_live=100)
    world.attach("b0", num_blocks=1000)
    for index in range(40):
        world.submit(f"r{index}/0", slo=Slo("", 20.0, 0.2), now=1.0)
    world.attach("b1", num_blocks=1000)
    assert world.lose("b0", now=2.0) == ["reserve b1"] * 16
    assert [world.tick(2.0 + number / 4) for number in range(1, 4)] == [["reserve b1"] * 16, ["reserve b1"] * 8, []]
    assert {job.attempt.request_id for job in world.jobs[-40:]} == {f"r{index}/0" for index in range(40)}


def test_some_that_no_node_can_have_do_not_stand_before_others():
    world = world_of(max_live=100)
    for index in range(40):
        world.submit(f"r{index}/0", PROMPT if index == 39 else range(900), slo=Slo("", 20.0, 0.2), now=1.0)
    world.attach("b0", num_blocks=10)
    assert world.tick(2.0) == ["reserve b0"]
    assert world.attempt.request_id == "r39/0"
    ended = world.tick(1.0 + WAIT_S)
    assert len(ended) == 39
    assert all(each.startswith("end ") for each in ended)


def test_an_answer_whose_last_node_is_lost_waits_and_goes_on_where_it_was():
    world = world_of("p0", "d0")
    world.submit()
    old = write_two_tokens(world)
    assert world.lose("d0", now=1.0) == []
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 1)
    (waiting,) = world.scheduler.newest(1)
    span = history_of(waiting, 1.5).spans[-1]
    assert (span.phase, span.begin_s, span.prefill_node, span.decode_node) == ("prefill_queue", 1.0, "", "")
    for event in (events.first_token(events.sampled(old, 2, 5)), events.failed(old, "ENGINE_ERROR")):
        assert world.tell("p0", event, 1.5) == []  # what the old attempt still says is nobody's
    world.attach("d0")
    assert world.tick(3.0) == ["reserve d0", "prefill p0"]
    assert list(world.jobs[-1].token_ids) == [*PROMPT, 100, 101]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 1)  # it is read again
    assert world.first(world.attempt, index=2, now=3.5) == ["emit 2:102", "begun d0"]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 0)
    assert world.step(world.attempt, 3, events.LENGTH, now=4.0) == ["emit 3:103", "end complete"]
    assert world.outcome.timeline.num_restarts == 1
    assert world.scheduler.num_open == 0


def test_an_answer_of_an_earlier_call_waits_while_it_is_read():
    world = world_of("p0", "d0")
    assert world.submit(so_far=SoFar((100, 101))) == ["reserve d0", "prefill p0"]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 1)
    world.first(world.attempt, index=2)
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 0)


def test_both_nodes_lost_one_after_the_other_are_waited_for():
    world = world_of("p0", "d0")
    world.submit()
    assert world.lose("p0", now=1.0) == ["cancel d0"]
    world.lose("d0", now=1.0)
    world.attach("p0")
    assert world.tick(1.5) == []
    world.attach("d0")
    assert world.tick(2.0) == ["reserve d0", "prefill p0"]


def test_they_begin_in_the_order_of_their_age_new_and_lost_alike():
    world = world_of("p0", "d0")
    world.submit("a/0")
    world.submit("b/0")
    world.lose("d0")
    world.submit("c/0")
    world.attach("d0")
    world.jobs.clear()
    assert world.tick(1.0) == ["reserve d0", "prefill p0"] * 3
    assert [job.attempt.request_id for job in world.jobs[::2]] == ["a/0", "b/0", "c/0"]
    assert [job.age for job in world.jobs[::2]] == [1, 2, 3]


def test_one_that_no_node_can_hold_keeps_nobody_waiting():
    world = world_of("p0")
    world.submit("long/0", list(range(200)))
    world.submit("short/0")
    world.attach("d0", num_blocks=4)
    assert world.tick(1.0) == ["reserve d0", "prefill p0"]
    assert world.jobs[-1].attempt.request_id == "short/0"
    assert world.tick(WAIT_S) == ["end NO_DECODE_WORKER"]
    assert str(world.outcome) == "no node that decodes sequences can hold 205 tokens"


def test_the_wait_has_an_end():
    world = world_of("p0")
    world.submit(now=1.0)
    assert world.tick(WAIT_S + 0.9) == []
    assert world.tick(WAIT_S + 1.0) == ["end NO_DECODE_WORKER"]
    assert str(world.outcome) == "no node that decodes sequences is ready"
    assert world.outcome.metadata == {"phase": "prefill_queue", "tokens_emitted": "0"}
    assert world.scheduler.num_open == 0


def test_its_own_deadline_ends_the_wait_before():
    world = world_of("p0", node_wait_s=1000.0)
    world.submit()
    assert world.tick(99.9) == []
    assert world.tick(100.0) == ["end DEADLINE_EXCEEDED"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_client_that_leaves_ends_it(is_new):
    world = world_of("p0", *(() if is_new else ("d0",)))
    world.submit()
    if not is_new:
        write_two_tokens(world)
        world.lose("d0")
    ended = world.short(world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 2.0))
    assert ended == ["end complete"]
    timeline = world.outcome.timeline
    assert (timeline.prefill_node, timeline.decode_node, timeline.prefill_queue_s) == ("", "", 2.0)
    assert world.scheduler.num_open == 0
    world.attach("d0")
    assert world.tick(3.0) == []


def test_those_that_wait_count_among_the_live_and_are_bounded_with_them():
    world = world_of("p0", max_live=2)
    world.submit("a/0")
    world.submit("b/0")
    with pytest.raises(RequestError, match="2 sequences are in flight, the limit is 2") as error:
        world.submit("c/0")
    assert error.value.reason == "QUEUE_FULL"
    with pytest.raises(RequestError) as error:
        world.submit("a/0")
    assert error.value.reason == "DUPLICATE_REQUEST_ID"


def test_whoever_would_be_late_by_now_is_refused_with_the_wait():
    world = world_of("p0", admits_late=False)
    told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
    world.registry.heartbeat(world.registry.find("p0"), told, 0.0)
    world.submit("other", slo=Slo("", 6.0, None))
    world.submit(slo=Slo("", 7.0, None))  # which its 3 tokens behind the other's would have kept
    world.attach("d0")
    assert world.tick(2.0) == ["reserve d0", "prefill p0", "end WOULD_BE_LATE"]
    assert float(world.outcome.metadata["retry_after_s"]) >= 1.0


# ---- pauses of the coordinator itself ----


@pytest.fixture
def world():
    """Of a coordinator that is to run every 1.5 s at least, and whose answers begin again once."""
    world = world_of("p0", "p1", "d0", "d1")
    world.registry.pauses = Pauses(1.5, 1.5)
    world.registry.pauses.note(0.0)
    return world


def lose_all(world, now):
    for name in ("d0", "p0", "d1", "p1"):
        world.lose(name, now)


def test_nodes_that_have_given_a_stopped_coordinator_up_cost_its_answers_nothing(world):
    world.submit()
    write_two_tokens(world)
    lose_all(world, now=12.0)
    assert world.outcome is None
    for name in ("p0", "d0"):
        world.attach(name)
    assert world.tick(12.5) == ["reserve d0", "prefill p0"]
    assert list(world.jobs[-1].token_ids) == [*PROMPT, 100, 101]
    for now in (13.0, 14.0, 15.0, 16.0):
        world.registry.pauses.note(now)
    world.lose("d0", now=12.0 + RECOVERY_S)  # its own fault, and the first one
    world.attach("d0")
    assert world.tick(18.0) == ["reserve d0", "prefill p0"]
    for now in (18.0, 19.0, 20.0, 21.0, 22.0):
        world.registry.pauses.note(now)
    assert world.lose("d0", now=12.0 + RECOVERY_S + ONE_EVENT_S)[-1] == "end WORKER_LOST"
    assert world.outcome.metadata["tokens_emitted"] == "2"


def test_losses_of_one_event_count_once_and_then_nodes_are_waited_for(world):
    world.submit()
    world.registry.pauses.note(1.0)
    lose_all(world, now=1.5)
    assert world.outcome is None
    world.attach("p2")
    world.attach("d2")
    assert world.tick(2.0) == ["reserve d2", "prefill p2"]


def test_without_a_pause_losses_of_different_times_count(world):
    world.submit()
    world.registry.pauses.note(1.0)
    assert world.lose("d0", now=1.5) == ["cancel p0", "reserve d1", "prefill p0"]
    for now in (2.0, 3.0, 4.0, 5.0, 6.0):
        world.registry.pauses.note(now)
    assert world.lose("d1", now=1.5 + ONE_EVENT_S)[-1] == "end WORKER_LOST"


def test_the_wait_for_nodes_stands_still_with_the_coordinator(world):
    lose_all(world, now=1.0)
    world.submit(now=1.0)
    assert world.registry.expired(1.0) == []
    for now in (13.0, 14.0, 15.0, 16.0):  # 12 s of it a pause
        world.registry.expired(now)
        assert world.tick(now) == []
    assert world.tick(WAIT_S + 13.0) == ["end NO_PREFILL_WORKER"]


def test_a_pause_is_what_is_longer_than_the_time_between_two_calls_can_be():
    pauses = Pauses(1.5, 1.5)
    for now in (10.0, 11.5, 13.0):
        pauses.note(now)
    assert (pauses.awake_s(13.0), pauses.is_recent(13.0)) == (13.0, False)
    pauses.note(20.0)
    assert pauses.awake_s(20.0) == 14.5
    assert pauses.is_recent(20.0 + RECOVERY_S - 0.1)
    assert not pauses.is_recent(20.0 + RECOVERY_S)


# ---- at the API server ----


def test_a_stream_goes_on_when_its_only_decode_node_is_back(tmp_path):
    async def scenario():
        async with cluster(tmp_path, node_wait_s=60.0) as c:
            call = c.generate(max_tokens=3)
            attempt = await begin_to_write(c)
            await first_message(call)
            await c.nodes["d0"].close()
            await c.until_loads(lambda loads: len(loads.nodes) == 1)
            await c.attach("d0")
            again, job = await begin(c)
            assert (again.epoch > attempt.epoch, job.token_ids[-1]) == (True, ord("a"))
            await c.nodes["p0"].send(events.first_token(events.sampled(again, 1, ord("b"))))
            await c.nodes["d0"].send(events.committed(again))
            await step(c.nodes["d0"], again, 2, "c", events.LENGTH)
            rest = await read_to_end(call)
            assert "".join(response.chunk.text for response in rest) == "bc"
            assert rest[0].chunk.first_token_index == 1
            assert rest[-1].complete.timeline.num_restarts == 1

    run(scenario())


def test_a_request_that_comes_before_any_node_is_answered(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=(), node_wait_s=60.0) as c:
            call = c.generate(max_tokens=1)
            await c.until_loads(lambda loads: loads.num_live_requests == 1)
            await c.attach("p0")
            await c.attach("d0")
            attempt, _ = await begin(c)
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("a"), events.LENGTH)))
            assert (await read_all(call))[0] == "a"

    run(scenario())


def test_a_client_that_hangs_up_waits_no_more(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0",), node_wait_s=60.0) as c:
            call = c.generate()
            await c.until_loads(lambda loads: loads.num_live_requests == 1)
            call.cancel()
            await c.until_nothing_is_live()

    run(scenario())


# ---- nodes that have no room ----


def full(world, name, now=0.0):
    return world.tell(name, events.failed(world.attempt, "QUEUE_FULL", "the queue is full"), now)


def begun(world):
    world.submit()
    assert world.first(world.attempt) == ["emit 0:100", "begun d0"]


@pytest.mark.parametrize(
    ("turning_away", "told"),
    [("d0", ["cancel p0", "reserve d1", "prefill p0"]), ("p0", ["cancel d0", "reserve d0", "prefill p1"])],
)
def test_what_one_node_turns_away_another_one_takes(turning_away, told):
    world = World(max_restarts=0)
    world.submit()
    assert full(world, turning_away) == told
    assert world.outcome is None


@pytest.mark.parametrize("node_wait_s", [0.0, 5.0])
def test_a_new_request_that_every_node_turns_away_asks_again(node_wait_s):
    world = World(node_wait_s=node_wait_s)
    world.submit()
    assert full(world, "d0")[1:] == ["reserve d1", "prefill p0"]
    assert full(world, "d1") == ["cancel p0"]
    assert not {"reserve d0", "prefill p0"} & set(world.tick(0.9 * RETRY_S))
    assert "prefill p0" in world.tick(RETRY_S)
    assert world.first(world.attempt)[0] == "emit 0:100"
    assert world.outcome is None


@pytest.mark.parametrize("node_wait_s", [0.0, 5.0])
def test_one_that_has_tokens_out_asks_again_until_there_is_room(node_wait_s):
    world = World(("p0", "d0"), max_restarts=0, node_wait_s=node_wait_s)
    begun(world)
    now = 0.0
    for _ in range(20):
        assert full(world, "d0", now) == ["cancel p0"]
        assert not {"reserve d0", "prefill p0"} & set(world.tick(now + 0.9 * RETRY_S))
        now += RETRY_S
        assert world.tick(now)[-2:] == ["reserve d0", "prefill p0"]  # behind cancels that are sent again
        assert list(world.jobs[-1].token_ids) == [*PROMPT, 100]
    assert world.first(world.attempt, 1) == ["emit 1:101", "begun d0"]
    assert world.outcome is None


def test_it_does_not_ask_beyond_its_time():
    world = World(("p0", "d0"))
    begun(world)
    full(world, "d0", 99.5)
    assert world.tick(100.0) == ["end DEADLINE_EXCEEDED"]


def test_two_full_nodes_are_both_tried_again():
    world = World()
    begun(world)
    assert full(world, "d0")[1:] == ["reserve d1", "prefill p0"]
    assert full(world, "d1") == ["cancel p0"]
    assert world.tick(RETRY_S)[0].startswith("reserve")
