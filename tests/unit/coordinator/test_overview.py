"""What is going on, as watchers are told: lives of answers by phase and node, rates and times worked out by hand, and
that none of it grows without end."""

import pytest
from google.protobuf.json_format import MessageToJson

from coordinator.api.overview import MAX_IN_FLIGHT, MAX_SAMPLES, Overview
from coordinator.control import request_log
from coordinator.control.request import MAX_MARKS, Phase, Timeline
from coordinator.control.request_log import MAX_ENDED, WINDOW_S
from coordinator.control.slo import AttainmentCounts, Slo, SloClass
from serving_core.errors import RequestError
from serving_core.reasons import WORKER_LOST
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import MigratingWorld, World

LIMITS = {"chat": "ttft:500", "batch": "priority:10"}


def overview_of(world, start_s=0.0):
    return Overview(
        world.registry, world.ledger, world.scheduler, world.metrics, model_name="m", start_s=start_s, limits=LIMITS
    )


def told(world, now, after=0):
    return overview_of(world).to_wire(now, after=after)


def spans(life):
    return [(each.phase, each.begin_s, each.end_s, each.prefill_node, each.decode_node) for each in life.spans]


def answer(world, request_id, now=0.0, slo=None, ttft_s=1.0, tpot_s=0.5):
    """An answer of three tokens from p0 and d0, whose first comes ttft_s after `now`."""
    world.submit(request_id, now=now, slo=slo)
    attempt, first_s = world.attempt, now + ttft_s
    world.first(attempt, now=first_s)
    world.tell("d0", events.reserved(attempt), first_s)
    world.tell("d0", events.committed(attempt, num_bytes=100), first_s)
    world.tell("p0", events.transferred(attempt), first_s)
    world.step(attempt, 1, now=first_s + tpot_s)
    assert world.step(attempt, 2, events.STOP, now=first_s + 2 * tpot_s)[-1].startswith("end")


# ---- lives ----


def test_a_life_tells_phase_by_phase_where_an_answer_was():
    world = World(nodes=("p0", "d0"))
    world.submit(now=10.0)
    attempt = world.attempt
    world.first(attempt, now=13.0, prefill_s=2.0)
    world.tell("d0", events.reserved(attempt), 13.5)
    world.tell("d0", events.committed(attempt, num_bytes=100), 14.0)
    world.tell("p0", events.transferred(attempt), 14.0)
    world.step(attempt, 1, now=15.0, step_s=0.25)
    [live] = told(world, 16.0).live
    where = ("p0", "d0")
    expected = [
        ("prefill_queue", 0.0, 1.0, *where),
        ("prefill", 1.0, 3.0, *where),
        ("kv_alloc", 3.0, 3.5, *where),
        ("kv_transfer", 3.5, 4.0, *where),
        ("decode_queue", 4.0, 4.75, *where),
        ("decode", 4.75, 6.0, *where),
    ]
    assert spans(live) == expected
    assert (live.number, live.sequence_id, live.end, live.start_s) == (0, "r/0", "", 10.0)
    world.step(attempt, 2, events.LENGTH, now=18.0)
    overview = told(world, 20.0)
    [ended] = overview.ended
    assert not overview.live
    assert spans(ended) == [*expected[:-1], ("decode", 4.75, 8.0, *where)]
    assert (ended.number, ended.end, ended.prompt_tokens, ended.completion_tokens) == (1, "length", 3, 3)
    assert (ended.ttft_s, ended.tpot_s, ended.kv_bytes) == (3.0, 2.5, 100)


def test_a_move_is_two_spans_on_two_nodes():
    world = MigratingWorld()
    world.migration()
    world.end()
    [life] = told(world, 10.0).ended
    decodes = [span for span in spans(life) if span[0] == "decode"]
    assert decodes == [("decode", 0.0, 4.0, "p0", "d0"), ("decode", 4.0, 9.0, "p0", "d1")]
    assert (life.num_migrations, life.num_restarts) == (1, 0)


def test_a_lost_node_shows_as_a_second_attempt_and_the_wait_for_one_as_no_node():
    world = World(nodes=("p0", "d0"), node_wait_s=9.0)
    world.submit()
    world.first(world.attempt, now=1.0)
    world.lose("d0", 2.0)
    overview = told(world, 2.5)
    assert {each.phase: each.num_sequences for each in overview.phases if each.num_sequences} == {"no_node": 1}
    world.attach("d1")
    world.tick(3.0)
    life = told(world, 4.0).live[0]
    assert spans(life)[-2:] == [("prefill_queue", 2.0, 3.0, "", ""), ("prefill_queue", 3.0, 4.0, "p0", "d1")]
    assert life.num_restarts == 1


def test_an_error_ends_a_life_by_its_reason_alone():
    world = World()
    world.submit()
    world.scheduler.fail("r/0", RequestError(WORKER_LOST, "words that may quote something"), 2.0)
    overview = told(world, 3.0)
    assert [life.end for life in overview.ended] == [WORKER_LOST]
    assert "words" not in MessageToJson(overview)


def test_nothing_of_what_was_said_is_told():
    """Neither the ids of tokens nor anything that could hold a text."""
    world = World()
    answer(world, "r/0")
    [life] = told(world, 9.0).ended
    texts = [value for field, value in life.ListFields() if field.type == field.TYPE_STRING]
    assert texts == ["r/0", "stop"]
    assert not [field.name for field in life.DESCRIPTOR.fields if field.type == field.TYPE_BYTES]
    assert "token_ids" not in MessageToJson(life, preserving_proto_field_name=True)


def test_who_has_seen_some_lives_is_told_the_rest():
    world = World(max_live=1000)
    for index in range(5):
        answer(world, f"r{index}/0")
    overview = overview_of(world)

    def numbers(after):
        return [life.number for life in overview.to_wire(9.0, after=after).ended]

    assert (numbers(0), numbers(3), numbers(5)) == ([1, 2, 3, 4, 5], [4, 5], [])
    assert numbers(77) == [1, 2, 3, 4, 5]  # it has seen those of a server before
    silent = overview.to_wire(9.0)
    assert (len(silent.ended), len(silent.live)) == (0, 0)


def test_the_lives_that_are_kept_are_bounded():
    world = World(max_live=10_000)
    for index in range(MAX_ENDED + 7):
        answer(world, f"r{index}/0", now=float(index))
    for index in range(MAX_IN_FLIGHT + 7):
        world.submit(f"live{index}/0")
    overview = told(world, 200.0)
    assert [life.number for life in overview.ended] == list(range(8, MAX_ENDED + 8))
    assert [life.sequence_id for life in overview.live] == [f"live{index}/0" for index in range(7, MAX_IN_FLIGHT + 7)]


def test_a_timeline_without_end_keeps_its_beginning_and_its_last_span():
    timeline = Timeline(0.0)
    for number in range(1, 1000):
        timeline.placed(float(number), f"p{number}", "d0")
    told = list(timeline.spans(1000.0))
    assert len(told) == MAX_MARKS
    assert told[0][0].prefill_node == "p1" or told[0][0].prefill_node == ""
    assert (told[-1][0].prefill_node, told[-1][1]) == ("p999", 1000.0)
    assert [end_s for _, end_s in told[:-1]] == [mark.at_s for mark, _ in told[1:]]


def test_a_phase_that_began_before_its_node_was_known_begins_with_it():
    timeline = Timeline(0.0)
    timeline.placed(3.0, "p0", "d0")
    timeline.enter(Phase.PREFILL, 4.0, ago_s=2.0)
    assert [(mark.phase, mark.at_s, end_s) for mark, end_s in timeline.spans(5.0)] == [
        (Phase.PREFILL_QUEUE, 0.0, 3.0),
        (Phase.PREFILL, 3.0, 5.0),
    ]


# ---- times, rates, nodes ----


def test_times_by_class_against_limits():
    world = World(max_live=1000)
    world.metrics.attainment = AttainmentCounts([SloClass("chat", LIMITS["chat"])])
    for index in range(9):
        answer(world, f"plain{index}/0", ttft_s=1.0 + index, tpot_s=0.1 + 0.1 * index)
    chat = Slo("chat", ttft_s=0.5)
    answer(world, "late/0", slo=chat, ttft_s=0.75)
    answer(world, "kept/0", slo=chat, ttft_s=0.25)
    world.submit("failed/0", slo=chat)
    world.scheduler.fail("failed/0", RequestError(WORKER_LOST, "gone"), 3.0)
    world.submit("left/0", slo=chat)
    world.scheduler.finish("left/0", events.ABORT, 3.0)
    every, in_class, unnamed = told(world, 20.0).times
    assert (every.slo_class, every.num_sequences, every.num_limited, every.num_met) == ("", 12, 3, 1)
    assert (in_class.slo_class, in_class.limits, in_class.num_sequences) == ("chat", "ttft:500", 3)
    assert (in_class.ttft_s.p50, in_class.ttft_s.p99) == (0.25, 0.75)
    assert (unnamed.slo_class, unnamed.num_sequences, unnamed.num_limited) == ("none", 9, 0)
    ttft, tpot = unnamed.ttft_s, unnamed.tpot_s
    assert (ttft.p50, ttft.p90, ttft.p99) == (5.0, 9.0, 9.0)
    assert (tpot.p50, tpot.p90, tpot.p99) == pytest.approx((0.5, 0.9, 0.9))


def test_times_are_those_of_a_window_and_bounded(monkeypatch):
    monkeypatch.setattr(request_log, "MAX_TIMES", 100)
    world = World(max_live=10_000)
    answer(world, "early/0", now=0.0)
    assert told(world, 2.0 + WINDOW_S).times[0].num_sequences == 1
    assert not told(world, 2.5 + WINDOW_S).times
    for index in range(103):
        answer(world, f"r{index}/0", now=100.0)
    assert told(world, 110.0).times[0].num_sequences == 100


def test_rates_are_those_of_the_last_seconds():
    world = World(max_live=1000)
    overview = overview_of(world)
    for second in range(1, 200):
        world.metrics.num_generated_tokens += 10 if second < 190 else 30
        world.metrics.num_prompt_tokens += 7
        world.metrics.finished["stop"] += 2
        node = world.registry.find("d0")
        node.num_generated_tokens += 5
        world.registry.heartbeat(
            world.registry.find("p0"),
            events.heartbeat(num_prefill_tokens=12 * second).heartbeat,
            float(second),
        )
        overview.tick(float(second))
        overview.tick(second + 0.25)  # too soon to count again
    wire = overview.to_wire(199.0)
    assert (wire.rates.tokens_per_s, wire.rates.prompt_tokens_per_s, wire.rates.requests_per_s) == (30.0, 7.0, 2.0)
    recent = list(wire.recent_tokens_per_s)
    assert len(recent) == MAX_SAMPLES - 1
    assert recent[-11:] == [10.0] + [30.0] * 10
    rates = {node.load.name: (node.prompt_tokens_per_s, node.tokens_per_s) for node in wire.nodes}
    assert rates == {"p0": (12.0, 0.0), "p1": (0.0, 0.0), "d0": (0.0, 5.0), "d1": (0.0, 0.0)}
    world.lose("d0")
    overview.tick(200.0)
    assert [node.load.name for node in overview.to_wire(200.0).nodes] == ["d1", "p0", "p1"]


def test_nodes_are_told_with_what_they_have_been_given():
    world = World(nodes=("p0", "d0"))
    world.submit()
    d0, p0 = told(world, 1.0).nodes
    assert (d0.num_sequences, d0.num_incoming, d0.num_tokens_used, d0.num_pool_tokens) == (1, 1, 3, 1600)
    assert (p0.num_tokens_to_compute, p0.num_sequences, p0.load.shape.prompt_tokens) == (3, 0, 512)
    world.first(world.attempt)
    d0, p0 = told(world, 1.0).nodes
    assert (d0.num_incoming, p0.num_tokens_to_compute, p0.num_tokens_used) == (0, 0, 3)


def test_what_answers_begin_with_alike_a_node_is_told_to_hold_once():
    world = World(nodes=("p0", "d0"))
    world.holds("d0", events.block_hints([5] * 16))
    for number in range(2):
        world.submit(f"{number}/0", token_ids=[1] * 40)
    assert [node.num_tokens_used for node in told(world, 1.0).nodes] == [48, 0]


def test_live_answers_are_counted_by_phase():
    world = World(nodes=("p0", "d0"))
    phases = [each.phase for each in told(world, 0.0).phases]
    assert phases == ["prefill_queue", "prefill", "kv_alloc", "kv_transfer", "decode_queue", "decode", "no_node"]
    world.submit("a/0")
    world.submit("b/0")
    world.first(world.attempt)
    counts = {each.phase: each.num_sequences for each in told(world, 1.0).phases if each.num_sequences}
    assert counts == {"prefill_queue": 1, "kv_alloc": 1}
