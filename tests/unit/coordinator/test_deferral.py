"""Requests that are held, since they would make answers late, while their first token has time; and those that can wait
no longer, and go behind all others."""

from contextlib import nullcontext

import pytest

from coordinator.control.request import Phase, SoFar
from coordinator.control.slo import Slo
from protos import inference_pb2
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import PROMPT, Noting, World

# A step takes 10 ms and 5 ms for each answer, a prompt 1 ms a token and a step's 10 ms for each 512 of them.
WEIGHTS = [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
TPOT_S = 0.022  # two answers keep it
TTFT_S = 10.0
MAX_TOKENS = 200
LONG_PROMPT = list(range(1000))
LONG_S = 1.02  # that it takes
LOOKS_S = 0.25  # at least so often it is seen who can wait no longer


def slo(ttft_s=TTFT_S, tpot_s=TPOT_S, priority=0):
    return Slo("", ttft_s, tpot_s, priority)


def learn(world, name):
    told = events.heartbeat(step_weights=WEIGHTS, prefill_tokens_per_s=1000.0)
    world.registry.heartbeat(world.registry.find(name), told.heartbeat, 0.0)


def submit(world, name, limits, now=0.0, token_ids=PROMPT, max_tokens=MAX_TOKENS, **others):
    return world.submit(f"{name}/0", token_ids, max_tokens=max_tokens, slo=limits, now=now, **others)


def full_world(limits=None, nums_tokens=(MAX_TOKENS, MAX_TOKENS), hello=None, **settings):
    """b0 writes two answers, of which the attempts are returned too: as many as keep their limit."""
    world = World((), **settings)
    world.attach("b0", num_blocks=10_000, max_model_len=100_000, **(hello or {}))
    learn(world, "b0")
    attempts = []
    for index, num_tokens in enumerate(nums_tokens):
        assert submit(world, f"running-{index}", limits or slo(), max_tokens=num_tokens) == ["reserve b0"]
        attempts.append(world.attempt)
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)))
        assert world.step(world.attempt, 1, node="b0") == ["emit 1:101"]
    return world, attempts


def end_of(world, attempt, now):
    """The answer of the attempt has its last token."""
    return world.step(attempt, 2, events.LENGTH, node="b0", now=now)


def test_one_too_many_begins_when_another_one_has_ended():
    world, (first, second) = full_world()
    assert submit(world, "r", slo()) == []
    scheduler = world.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_deferred, scheduler.num_waiting_for_nodes) == (
        2,
        1,
        1,
        0,
    )
    assert scheduler.phases() == {Phase.DECODE: 2, Phase.PREFILL_QUEUE: 1}
    assert world.tick(1.0) == []
    assert end_of(world, first, 2.0) == ["emit 2:102", "end complete", "reserve b0"]
    assert world.attempt.request_id == "r/0"
    assert end_of(world, second, 2.5) == ["emit 2:102", "end complete"]
    world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100), prefill_s=0.5), 3.0)
    assert world.step(world.attempt, 1, events.LENGTH, node="b0", now=3.0)[-1] == "end complete"
    timeline = world.outcome.timeline
    assert (timeline.ttft_s, timeline.prefill_queue_s, timeline.prefill_s) == (3.0, 2.5, 0.5)
    assert (scheduler.num_open, scheduler.num_deferred) == (0, 0)


def test_who_can_wait_no_longer_and_harms_others_goes_behind_all_that_come():
    """Held ones can wait for 0.6 of their time. A late one leaves a place: three in a step keep no limit."""
    for now, is_late in ((1.0 + 0.6 * TTFT_S - LOOKS_S - 0.01, False), (1.0 + 0.6 * TTFT_S - LOOKS_S + 0.01, True)):
        world, (first, second) = full_world()
        assert submit(world, "r", slo(), now=1.0) == []
        assert world.tick(now) == []
        assert end_of(world, first, now)[2:] == ([] if is_late else ["reserve b0"])
        if is_late:
            assert submit(world, "s", slo(), now=now) == ["reserve b0"], "it passes"
            newcomer = world.attempt
            assert end_of(world, second, now) == ["emit 2:102", "end complete"]
            world.tell("b0", events.first_token(events.sampled(newcomer, 0, 100)), now)
            last = events.step_tokens(events.sampled(newcomer, 1, 101, events.LENGTH))
            assert world.tell("b0", last, now) == ["emit 1:101", "end complete", "reserve b0"]
        assert world.attempt.request_id == "r/0"


def test_without_limits_nobody_is_held():
    world, _ = full_world()
    assert submit(world, "r", None) == ["reserve b0"]


@pytest.mark.parametrize(
    "limits",
    [slo(ttft_s=0.25), slo(tpot_s=0.014), slo(tpot_s=None, ttft_s=1e-3)],
    ids=["little time", "less than a step alone", "none for answers"],
)
def test_who_would_gain_nothing_by_a_wait_and_harms_others_is_late_at_once(limits):
    world, (first, _) = full_world()
    assert submit(world, "r", limits) == []
    assert end_of(world, first, 0.1) == ["emit 2:102", "end complete"], "it leaves a place"
    assert submit(world, "s", slo(), now=0.1) == ["reserve b0"]
    assert world.tick(50.0) == []
    assert world.scheduler.num_deferred == 1


def test_a_limit_on_tpot_alone_is_held_until_there_is_room():
    world, (first, _) = full_world()
    assert submit(world, "r", slo(ttft_s=None)) == []
    assert world.tick(50.0) == []
    assert end_of(world, first, 90.0) == ["emit 2:102", "end complete", "reserve b0"]


def test_nodes_that_have_nothing_to_do_hold_nobody():
    world = World(())
    world.attach("b0", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b0")
    assert submit(world, "r", slo(tpot_s=0.0151), token_ids=LONG_PROMPT) == ["reserve b0"]


def test_a_prefill_node_that_has_work_is_not_a_node_that_has_nothing_to_do():
    world = World((), admits_late=False)
    for name in ("p0", "d0", "d1"):
        world.attach(name, num_blocks=10_000, max_model_len=100_000)
        learn(world, name)
    assert submit(world, "busy", None, token_ids=LONG_PROMPT) == ["reserve d0", "prefill p0"]
    with pytest.raises(RequestError, match="limits of the request"):
        submit(world, "r", slo(ttft_s=0.5), token_ids=LONG_PROMPT[::-1])


def test_it_begins_on_nodes_that_have_nothing_to_do_any_more_though_it_will_be_late():
    world, (first, second) = full_world()
    assert submit(world, "r", slo(tpot_s=0.0151)) == []
    assert end_of(world, first, 1.0) == ["emit 2:102", "end complete"]
    assert end_of(world, second, 2.0) == ["emit 2:102", "end complete", "reserve b0"]


def test_an_answer_that_goes_on_has_its_first_token_and_is_not_held():
    world, _ = full_world()
    assert submit(world, "r", slo(), so_far=SoFar((100,))) == ["reserve b0"]


def test_one_counts_once_in_how_many_come_also_if_it_is_held():
    policy = Noting()
    world, (first, _) = full_world(policy=policy)
    assert submit(world, "r", slo()) == []
    world.tick(1.0)
    assert policy.told[-1].per_s == 2.0  # and two at the beginning
    assert end_of(world, first, 2.0)[-1] == "reserve b0"
    submit(world, "s", slo(), now=4.0)
    assert policy.told[-1].per_s == 0.5


def test_who_makes_nobody_late_passes_those_that_would():
    world, (first, _) = full_world()
    assert end_of(world, first, 0.0) == ["emit 2:102", "end complete"]
    assert submit(world, "r", slo(tpot_s=0.016)) == []
    assert submit(world, "s", slo()) == ["reserve b0"]


def test_who_makes_others_late_is_held_too():
    world, (first, _) = full_world()
    assert submit(world, "r", slo(tpot_s=None)) == []
    assert end_of(world, first, 2.0)[-1] == "reserve b0"


def test_one_that_another_node_can_take_goes_there():
    world, _ = full_world()
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1")
    assert submit(world, "r", slo()) == ["reserve b1"]


def test_the_more_important_go_first_then_those_that_can_wait_the_least_then_the_older():
    world, attempts = full_world()
    for name, ttft_s, priority in (("a", 9.0, 0), ("b", 8.0, 0), ("c", 8.0, 0), ("d", TTFT_S, -1)):
        assert submit(world, name, slo(ttft_s, priority=priority)) == []
    begun = []
    for _ in range(4):
        assert end_of(world, attempts.pop(0), 0.01)[-1] == "reserve b0"
        attempts.append(world.attempt)
        begun.append(world.attempt.request_id)
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)), 0.01)
        world.step(world.attempt, 1, node="b0", now=0.01)
    assert begun == ["d/0", "b/0", "c/0", "a/0"]


def test_who_can_wait_no_longer_takes_none_along_that_can():
    world, attempts = full_world()
    assert submit(world, "important", slo(priority=-1)) == []
    for name, ttft_s in (("waits", 5.1), ("hurries", 5.0)):
        assert submit(world, name, slo(ttft_s)) == []
    assert world.tick(0.6 * 5.0 - LOOKS_S + 0.01) == []
    begun = []
    for now in (2.77, 2.78, 2.79, 2.79):
        if end_of(world, attempts.pop(0), now)[2:] == ["reserve b0"]:
            attempts.append(world.attempt)
            begun.append(world.attempt.request_id)
            world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)), now)
            world.step(world.attempt, 1, node="b0", now=now)
    assert begun == ["important/0", "waits/0", "hurries/0"], "the last where nothing else was to do"


def test_who_can_wait_no_longer_goes_where_there_is_room_for_it():
    world = World(())
    for name, max_model_len in (("b0", MAX_TOKENS + len(PROMPT)), ("b1", 100_000)):
        world.attach(name, num_blocks=10_000, max_model_len=max_model_len)
        learn(world, name)
    attempts = {}
    for index in range(4):
        (said,) = submit(world, f"running-{index}", slo())
        name = said.removeprefix("reserve ")
        attempts[name] = world.attempt
        world.tell(name, events.first_token(events.sampled(world.attempt, 0, 100)))
    assert submit(world, "important", slo(priority=-1), token_ids=PROMPT * 4) == [], "which b0 cannot hold"
    assert submit(world, "short", slo(ttft_s=5.0)) == []
    assert world.step(attempts["b0"], 1, events.LENGTH, node="b0") == ["emit 1:101", "end complete"]
    assert world.tick(3.0 - LOOKS_S - 0.01) == []
    assert world.tick(3.0 - LOOKS_S + 0.01) == ["reserve b0"]
    assert world.attempt.request_id == "short/0"


NO_SLOT = slo(tpot_s=1.0)  # which hundreds of answers keep, but none waits so long for a place and is in time


def full_decode_node(*prefill_nodes):
    """d0 writes two answers, for which it has room, and these nodes read. Places become free in 4 s, 199 steps of
    20 ms: nobody is in time before, and nobody harms others who reads meanwhile."""
    world = World(())
    for name in prefill_nodes:
        world.attach(name, num_blocks=10_000, max_model_len=100_000)
    world.attach("d0", num_blocks=10_000, max_model_len=100_000, max_num_seqs=2)
    for name in (*prefill_nodes, "d0"):
        learn(world, name)
    for index in range(2):
        assert submit(world, f"running-{index}", NO_SLOT) == ["reserve d0", "prefill p0"]
        world.first(world.attempt)
    return world


def test_they_go_early_enough_that_all_can_be_read():
    """Three prompts take half as long again as is expected, and there is a look every 0.25 s."""
    world, ttft_s = full_decode_node("p0"), 7.0
    for name in "abc":
        assert submit(world, name, slo(ttft_s, tpot_s=1.0), token_ids=LONG_PROMPT) == []
    first_s = ttft_s - 1.5 * 3 * LONG_S - LOOKS_S
    assert world.tick(first_s - 0.01) == []
    assert world.tick(first_s + 0.01) == ["reserve d0", "prefill p0"]
    attempt = world.attempt
    assert attempt.request_id == "a/0"
    assert world.tick(ttft_s - 1.5 * 2 * LONG_S - LOOKS_S + 0.01) == [], "the prefill node has work"
    world.first(attempt, now=3.8)
    assert world.tick(3.8) == ["reserve d0", "prefill p0"]
    assert world.attempt.request_id == "b/0"


def test_two_nodes_that_are_ready_read_them_in_half_the_time():
    world, ttft_s = full_decode_node("p0", "p1", "p2"), 5.0
    assert world.drain("p2", 0.0) == []
    for name in "abc":
        assert submit(world, name, slo(ttft_s, tpot_s=1.0), token_ids=LONG_PROMPT) == []
    first_s = ttft_s - 1.5 * 3 * LONG_S / 2 - LOOKS_S
    assert world.tick(first_s - 0.01) == []
    assert world.tick(first_s + 0.01) == ["reserve d0", "prefill p0"]


def test_of_many_that_can_wait_no_longer_some_begin_with_each_look():
    """So that nodes are heard meanwhile. The two places become free in 4 s."""
    world, _ = full_world(NO_SLOT, hello={"max_num_seqs": 2}, max_live=100)
    for index in range(60):
        assert submit(world, f"r{index}", slo(ttft_s=3.0, tpot_s=1.0)) == []
    assert world.tick(0.6 * 3.0 - LOOKS_S + 0.01) == world.tick(0.6 * 3.0) == ["reserve b0"] * 16
    assert world.attempt.request_id == "r31/0"
    told = world.drain("b0", 2.0)
    assert told.count("end NO_PREFILL_WORKER") == 28, "that is nothing to work out"


def test_a_client_may_give_up_one_that_is_held():
    world, (first, _) = full_world()
    assert submit(world, "r", slo()) == []
    assert world.short(world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 1.0)) == ["end complete"]
    assert end_of(world, first, 2.0) == ["emit 2:102", "end complete"]
    assert world.scheduler.num_open == 1


def test_one_that_is_held_ends_at_its_deadline():
    world, _ = full_world()
    assert submit(world, "r", slo(ttft_s=1000.0)) == []
    assert "end DEADLINE_EXCEEDED" in world.tick(100.5)


@pytest.mark.parametrize(("held_s", "reason"), [(0.0, "DEADLINE_EXCEEDED"), (1.0, "NO_PREFILL_WORKER")])
def test_it_ends_once_where_its_node_drains_and_the_time_of_others_is_over(held_s, reason):
    world, _ = full_world()
    assert submit(world, "r", slo(ttft_s=1000.0), now=held_s) == []
    told = world.drain("b0", 100.0)
    assert told == ["cancel b0", "end DEADLINE_EXCEEDED"] * 2 + [f"end {reason}"]
    assert world.scheduler.num_deferred == 0
    assert world.tick(100.1) == []


def test_who_waits_for_nodes_in_vain_and_who_is_held_end_once_each():
    world, (first, _) = full_world()
    world.tell("b0", events.failed(first, "QUEUE_FULL"))
    assert submit(world, "r", slo(ttft_s=100.0), now=0.5) == []
    assert world.scheduler.num_deferred == world.scheduler.num_deferred == 1
    assert world.drain("b0", 2.0) == ["end NO_PREFILL_WORKER"] * 2


def test_one_that_is_held_waits_for_nodes_where_there_are_none_and_is_held_where_they_are_full():
    world, _ = full_world(node_wait_s=5.0)
    assert submit(world, "r", slo()) == []
    world.lose("b0", now=1.0)
    world.tick(1.1)
    assert (world.scheduler.num_waiting_for_nodes, world.scheduler.num_deferred) == (3, 0)
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1")
    assert world.tick(2.0) == ["reserve b1"] * 2, "those that have tokens"
    assert (world.scheduler.num_waiting_for_nodes, world.scheduler.num_deferred) == (0, 1)
    last = events.first_token(events.sampled(world.attempt, 2, 102, events.LENGTH))
    assert world.tell("b1", last, 2.5) == ["emit 2:102", "end complete", "reserve b1"]


def test_what_a_node_has_had_is_not_held():
    world, _ = full_world(node_wait_s=5.0)
    world.attach("b1", num_blocks=10_000, max_model_len=100_000)
    learn(world, "b1")
    assert submit(world, "r", slo()) == ["reserve b1"]
    assert world.tell("b1", events.failed(world.attempt, "QUEUE_FULL")) == ["reserve b0"]
    assert world.tell("b0", events.failed(world.attempt, "QUEUE_FULL")) == []
    world.lose("b1", now=0.5)
    assert (world.scheduler.num_waiting_for_nodes, world.scheduler.num_deferred) == (1, 0)
    assert world.tick(1.1) == ["reserve b0"]


def test_without_a_wait_for_nodes_it_ends_with_them():
    world, _ = full_world(max_restarts=0)
    assert submit(world, "r", slo()) == []
    assert world.lose("b0", now=1.0) == ["end WORKER_LOST", "end NO_PREFILL_WORKER", "end WORKER_LOST"]
    assert world.scheduler.num_open == 0


def test_what_would_be_late_still_is_refused_then_where_such_are():
    world, (first, _) = full_world(admits_late=False)
    assert submit(world, "r", slo()) == []
    assert submit(world, "s", slo(), now=0.5) == []
    assert end_of(world, first, 2.0)[-1] == "reserve b0"
    assert world.tick(6.0) == []
    assert world.tick(6.5 - 0.24) == ["end WOULD_BE_LATE"]


@pytest.mark.parametrize(("ttft_s", "is_held"), [(7.3, False), (7.4, True)])
def test_who_would_wait_for_too_long_is_refused_at_once_where_such_are(ttft_s, is_held):
    """Of 198 steps of 20 ms, 3.96 s, one is to begin within 0.6 of its time, of which a tenth is spared."""
    world, _ = full_world(admits_late=False)
    with nullcontext() if is_held else pytest.raises(RequestError, match=r"try again in 4\.0 s") as refusal:
        assert submit(world, "r", slo(ttft_s)) == []
    assert world.scheduler.num_deferred == is_held
    assert is_held or float(refusal.value.metadata["retry_after_s"]) == pytest.approx(3.96)


def test_who_is_to_wait_behind_others_has_a_later_place_than_they():
    """The places of answers with 98 and 198 tokens to come are free in 1.96 s and 3.96 s. Both could wait for 2.7 s."""
    world, _ = full_world(nums_tokens=(100, 200), admits_late=False)
    assert submit(world, "r", slo(ttft_s=5.0)) == []
    with pytest.raises(RequestError, match=r"try again in 4\.0 s"):
        submit(world, "s", slo(ttft_s=5.0))
