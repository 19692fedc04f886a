"""Limits and priorities of requests and of classes: what is refused, which of them hold, their way to the nodes over
retries and moves, and what the end of an answer tells of them."""

import math
from contextlib import nullcontext

import pytest

from coordinator.control.load import Prompt
from coordinator.control.nodes import Registry
from coordinator.control.slo import MAX_CLASSES, MAX_PRIORITY, Limit, Slo, SloClass, SloClasses, parse_slo_classes
from protos import inference_pb2
from protos.inference_pb2 import GenerateRequest
from serving_core.errors import RequestError, SettingsError
from serving_core.requests import MEAN, Pooling, SamplingParams
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import Noting, World

CLASSES = SloClasses(
    parse_slo_classes(
        ["chat=ttft:500,tpot:40", "tight=ttft:5x,tpot:1.5x", "first=ttft:200,priority:-5", "night=priority:10"]
    )
)


def nodes(**loads):
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    for name, load in loads.items():
        node = registry.admit(events.hello(name).hello, 0.0)
        registry.heartbeat(node, events.heartbeat(**load).heartbeat, 0.0)
    return registry.nodes


def slo_of(num_prompt_tokens=100, fleet=(), **fields):
    return CLASSES.slo_of(GenerateRequest(**fields), num_prompt_tokens, fleet)


def test_the_default_class_is_that_of_requests_that_name_none():
    classes = SloClasses(parse_slo_classes(["default=ttft:2000,priority:3", "chat=tpot:40"]))

    def asked(**fields):
        return classes.slo_of(GenerateRequest(**fields), 100, ())

    assert asked() == Slo("default", 2.0, None, 3)
    assert asked(tpot_ms=20, priority=0) == Slo("default", 2.0, 0.02, 0)
    assert asked(slo_class="chat") == Slo("chat", None, 0.04)
    assert asked(slo_class="default") == Slo("default", 2.0, None, 3)


def test_a_class_is_a_name_with_limits_in_ms_or_multiples_and_a_priority():
    texts = ["chat=ttft:500,tpot:40.5", " tight=tpot:1.5x ", "first=priority:-1, ttft:5", "batch=priority:100"]
    assert parse_slo_classes(texts) == [
        SloClass("chat", "ttft:500,tpot:40.5", Limit(500.0), Limit(40.5)),
        SloClass("tight", "tpot:1.5x", None, Limit(1.5, is_multiple=True)),
        SloClass("first", "priority:-1, ttft:5", Limit(5.0), None, -1),
        SloClass("batch", "priority:100", None, None, 100),
    ]
    assert parse_slo_classes([]) == []


NO_CLASSES = [
    "",
    "chat",
    "chat=",
    "=ttft:5",
    "chat=ttft",
    "chat=ttft:",
    "chat=ttft:5s",
    "chat=e2el:5",
    "chat=ttft:-5",
    "chat=ttft:nan",
    "chat=ttft:5,",
    "chat=ttft:5,ttft:6",
    "chat=priority:1,priority:2",
    "chat=priority:",
    "chat=priority:1x",
    "chat=priority:0.5",
    "chat=priority:high",
    "chat=ttft:5,priority:1000000000",
    "a chat=ttft:5",
    "-x=ttft:5",
    "x" * 65 + "=ttft:5",
]


def test_what_is_no_class_is_refused():
    for text in NO_CLASSES:
        with pytest.raises(SettingsError, match=r"slo_class must be such as chat=ttft:500,tpot:40 \(ms\), "):
            parse_slo_classes([text])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=ttft:0"], "ttft of slo_class 'a' must be above 0 ms and at most 3600000 ms"),
        (["a=tpot:3600001"], "tpot of slo_class 'a' must be above 0 ms and at most 3600000 ms"),
        (["a=tpot:1001x"], "tpot of slo_class 'a' must be above 0x and at most 1000x"),
        (["a=priority:101"], "priority of slo_class 'a' must be within [-100, 100], not 101"),
        (["a=ttft:5,priority:-101"], "priority of slo_class 'a' must be within [-100, 100], not -101"),
        (["a=ttft:1", "b=ttft:1", "a=tpot:1"], "slo_class 'a' is given twice"),
        (["none=ttft:1"], "slo_class 'none' stands for requests without a class"),
        ([f"c{number}=ttft:1" for number in range(MAX_CLASSES + 1)], "slo_class is given 33 times, the limit is 32"),
    ],
)
def test_classes_that_cannot_be_are_refused_with_the_limit(texts, message):
    with pytest.raises(SettingsError) as caught:
        parse_slo_classes(texts)
    assert str(caught.value) == message


def test_without_limits_class_and_priority_there_is_nothing_to_keep():
    assert slo_of() is None
    assert slo_of(priority=0) is None


def test_limits_of_a_request_win_over_those_of_its_class():
    assert slo_of(ttft_ms=250) == Slo("", 0.25, None)
    assert slo_of(slo_class="chat") == Slo("chat", 0.5, 0.04)
    assert slo_of(slo_class="chat", tpot_ms=20) == Slo("chat", 0.5, 0.02)
    assert slo_of(slo_class="first", tpot_ms=20) == Slo("first", 0.2, 0.02, -5)


def test_the_priority_of_a_request_wins_over_that_of_its_class():
    assert slo_of(priority=-3) == Slo("", None, None, -3)
    assert slo_of(slo_class="night") == Slo("night", None, None, 10)
    assert slo_of(slo_class="night", priority=-MAX_PRIORITY) == Slo("night", None, None, -100)
    assert slo_of(slo_class="first", priority=0) == Slo("first", 0.2, None, 0)
    assert slo_of(slo_class="chat", priority=MAX_PRIORITY) == Slo("chat", 0.5, 0.04, 100)


@pytest.mark.parametrize("value", [-101, 101, 2**31 - 1, -(2**31)])
def test_a_priority_that_cannot_be_is_refused_by_name(value):
    with pytest.raises(RequestError) as caught:
        slo_of(priority=value)
    assert str(caught.value) == f"priority must be within [-100, 100], not {value}"
    assert (caught.value.reason, caught.value.metadata) == ("BAD_PARAM", {"field": "priority"})


def test_an_unknown_class_is_refused_with_those_that_there_are():
    with pytest.raises(RequestError) as caught:
        slo_of(slo_class="batch")
    assert str(caught.value) == "slo_class 'batch' is none of the server's: there are chat, tight, first, night"
    assert (caught.value.reason, caught.value.metadata) == ("BAD_PARAM", {"field": "slo_class"})


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 3_600_001.0])
def test_a_limit_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        slo_of(**{name: value})
    assert str(caught.value) == f"{name} must be above 0 and at most 3600000, not {value:g}"
    assert caught.value.metadata == {"field": name}


def test_multiples_are_of_what_the_fastest_nodes_have_measured():
    fleet = nodes(
        p0={"prefill_tokens_per_s": 1000.0, "lone_step_s": 0.001},  # it writes no answers
        p1={"prefill_tokens_per_s": 2000.0},
        d0={"prefill_tokens_per_s": 9000.0, "lone_step_s": 0.02},  # it reads no prompts
        d1={"lone_step_s": 0.01},
    )
    assert slo_of(300, fleet, slo_class="tight") == Slo("tight", pytest.approx(5 * 0.15), pytest.approx(0.015))


def test_a_multiple_of_what_nobody_has_measured_is_no_limit():
    fleet = nodes(p0={"prefill_tokens_per_s": 1000.0}, d0={})
    assert slo_of(100, fleet, slo_class="tight") == Slo("tight", pytest.approx(0.5), None)
    assert slo_of(100, (), slo_class="tight") == Slo("tight", None, None)


# ---- in the scheduler ----

SLO = Slo("", 5.0, 2.0)
LENGTH, ABORT = events.LENGTH, inference_pb2.FINISH_REASON_ABORT


@pytest.fixture
def world():
    return World(max_restarts=2)


def due(job):
    """What a job tells, by name."""
    return {field.name: value for field, value in job.due.ListFields()}


def decode_node_of(world, request_id):
    [request] = [each for each in world.scheduler.newest(10) if each.request_id == request_id]
    return request.attempt.decode.name


def end_of(world):
    told = world.outcome.attainment
    return {field.name: value for field, value in told.ListFields()}


def counts(world, slo_class="none"):
    attained = world.metrics.attainment.by_class[slo_class]
    return attained.num_sequences, attained.num_ttft_met, attained.num_tpot_met, attained.num_met


def test_without_limits_nothing_is_told(world):
    assert world.submit() == ["reserve d0", "prefill p0"]
    assert not any(job.HasField("due") for job in world.jobs)
    assert world.first(world.attempt, finish_reason=LENGTH)[:2] == ["emit 0:100", "cancel d0"]
    assert not world.outcome.HasField("attainment")
    assert counts(world) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("names", "num_held", "num_tokens"), [("bp", 0, 40), ("bb", 1, 24), ("bp", 2, 8), ("pd", 2, 8)]
)
def test_requests_to_come_count_as_far_as_their_prompts_are_to_be_computed(names, num_held, num_tokens):
    policy, tokens = Noting(), list(range(40))
    world = World([f"{name}{number}" for number, name in enumerate(names)], policy=policy)
    for node in world.registry.nodes:
        world.holds(node.name, events.block_hints(tokens)[:num_held] or [1])
    for number in range(4):
        world.submit(f"{number}/0", token_ids=tokens, now=float(number), slo=Slo("", 5.0, None))
        world.scheduler.finish(f"{number}/0", ABORT, float(number))
    assert [coming.per_s for coming in policy.told] == pytest.approx([0.0, 0.0, 1 / 2, 2 / 3])
    assert [coming.num_tokens for coming in policy.told] == pytest.approx([0.0, 0.0, num_tokens, num_tokens])


@pytest.mark.parametrize(
    ("slo", "per_s"), [(None, 0.0), (Slo("", None, 5.0), 0.0), (Slo("", 1e-3, None), 1.0), (Slo("", 5.0, None), 1.0)]
)
def test_of_requests_to_come_those_count_whose_first_token_could_be_late(slo, per_s):
    policy = Noting()
    world = World(("p0", "d0"), policy=policy)
    for node in world.registry.nodes:
        beat = events.heartbeat(step_weights=[0.01, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0], prefill_tokens_per_s=1000.0)
        world.registry.heartbeat(node, beat.heartbeat, 0.0)
    for number in range(3):
        world.submit(f"{number}/0", now=float(number), slo=slo)
        world.scheduler.finish(f"{number}/0", ABORT, float(number))
    assert [coming.per_s for coming in policy.told] == pytest.approx([0.0, 0.0, per_s / 2])


def test_both_nodes_get_what_is_left_and_the_decode_node_hears_of_the_first_token(world):
    world.submit(now=10.0, slo=SLO)
    assert [due(job) for job in world.jobs] == [{"ttft_left_s": 5.0, "tpot_s": 2.0}] * 2
    assert world.first(world.attempt, now=12.0) == ["emit 0:100", "begun d0"]
    assert world.attempt.epoch == world.jobs[0].attempt.epoch


def test_what_it_took_to_prepare_a_request_is_not_left(world):
    world.submit(now=10.75, slo=Slo("", 1.0, None), preparing_s=0.75)
    assert [due(job) for job in world.jobs] == [{"ttft_left_s": 0.25}] * 2
    world.first(world.attempt, now=11.0, finish_reason=LENGTH)
    timeline = world.outcome.timeline
    assert (timeline.ttft_s, timeline.e2e_s, timeline.prefill_queue_s) == (1.0, 1.0, 1.0)  # from its arrival on


def test_the_time_before_an_attempt_is_no_wait_for_blocks():
    policy = Noting()
    world = World(policy=policy, max_restarts=2)
    for name in ("a/0", "b/0", "c/0"):
        world.submit(name, now=20.0, preparing_s=8.0)
        world.tell(decode_node_of(world, name), events.reserved(world.attempt), 21.0)
    world.submit("d/0", now=21.0)
    assert policy.transfers.credit_s == 1.0


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_decode_node_hears_of_the_first_token_as_long_as_it_lacks_the_kv(world, is_committed):
    world.submit()
    attempt = world.attempt
    world.tell("d0", events.reserved(attempt))
    if is_committed:
        world.tell("d0", events.committed(attempt))
    assert world.first(attempt)[1:] == ([] if is_committed else ["begun d0"])


@pytest.mark.parametrize("slo", [None, Slo("", 5.0, None, 10)])
def test_a_decode_node_that_has_granted_no_blocks_or_takes_them_back_hears_that_the_prompt_is_read(world, slo):
    world.submit(slo=slo)
    attempt = world.attempt
    world.tell("d0", events.reserved(attempt))
    assert world.tell("d0", events.revoked(attempt)) == [], "it is not read yet"
    assert world.first(attempt) == ["emit 0:100", "begun d0"]
    assert world.attempt == attempt
    world.tell("d0", events.reserved(attempt))
    assert world.tell("d0", events.revoked(attempt)) == ["begun d0"]


def test_a_node_that_reads_and_writes_needs_no_word():
    world = World(("b0",))
    assert world.submit(slo=SLO) == ["reserve b0"]
    assert due(world.jobs[0]) == {"ttft_left_s": 5.0, "tpot_s": 2.0}
    token = events.sampled(world.attempt, 0, 100)
    assert world.tell("b0", events.first_token(token)) == ["emit 0:100"]


def test_an_answer_that_has_ended_needs_no_word(world):
    world.submit(slo=SLO)
    assert not any(said.startswith("begun") for said in world.first(world.attempt, finish_reason=LENGTH))


def test_another_attempt_has_the_same_deadlines(world):
    world.submit(now=10.0, slo=SLO)
    world.lose("p0", now=16.0)  # late already
    assert [due(job) for job in world.jobs[2:]] == [{"ttft_left_s": -1.0, "tpot_s": 2.0}] * 2
    token = events.sampled(world.attempt, 0, 100)
    assert world.tell("p1", events.first_token(token), 17.0)[0] == "emit 0:100"
    world.lose(world.prefill_node, now=20.0)
    assert [due(job) for job in world.jobs[4:]] == [{"tpot_s": 2.0, "since_first_s": 3.0}] * len(world.jobs[4:])


def test_a_move_keeps_the_deadlines(world):
    world.submit(now=0.0, max_tokens=200, slo=SLO)
    attempt = world.attempt
    world.first(attempt, now=1.0)
    world.tell("d0", events.reserved(attempt), 1.0)
    world.tell("d0", events.committed(attempt), 1.0)
    world.tell("p0", events.transferred(attempt), 1.0)
    world.step(attempt, 1, now=2.0)
    assert world.drain("d0", 9.0) == ["reserve d1"]
    assert due(world.jobs[-1]) == {"tpot_s": 2.0, "since_first_s": 8.0}


def test_both_nodes_of_every_attempt_get_the_priority(world):
    world.submit(slo=Slo("", priority=-7))
    world.lose("p0")
    assert [job.priority for job in world.jobs] == [-7] * 4
    assert not any(job.HasField("due") for job in world.jobs)


def test_a_move_keeps_the_priority(world):
    world.submit(max_tokens=200, slo=Slo("", priority=-7))
    attempt = world.attempt
    world.first(attempt)
    world.tell("d0", events.reserved(attempt))
    world.tell("d0", events.committed(attempt))
    world.tell("p0", events.transferred(attempt))
    world.step(attempt, 1)
    assert world.drain("d0", 9.0) == ["reserve d1"]
    assert world.jobs[-1].priority == -7


def test_of_a_priority_alone_the_end_tells_nothing(world):
    write(world, 5.0, slo=Slo("", priority=-7))
    assert not world.outcome.HasField("attainment")
    assert counts(world) == (0, 0, 0, 0)


def write(world, *token_times, slo, now=0.0, name="r/0"):
    """An answer whose tokens come at these times; the last one ends it."""
    world.submit(name, now=now, slo=slo)
    attempt = world.attempt
    last = len(token_times) - 1
    world.first(attempt, finish_reason=LENGTH if last == 0 else 0, now=token_times[0])
    for index, at_s in enumerate(token_times[1:], start=1):
        world.step(attempt, index, LENGTH if index == last else 0, now=at_s)


@pytest.mark.parametrize(
    ("token_times", "ttft_met", "tpot_met"),
    [
        ((5.0, 9.0, 9.0), True, True),  # a gap of twice the limit, and a mean of the limit
        ((5.1, 9.0, 9.2), False, False),
        ((5.0, 6.0, 9.1), True, False),
        ((4.0,), True, True),  # no token follows
    ],
)
def test_the_end_tells_which_limits_were_kept(world, token_times, ttft_met, tpot_met):
    write(world, *token_times, slo=SLO)
    limits = {"ttft_ms": 5000.0, "tpot_ms": 2000.0}
    assert end_of(world) == {**limits, "ttft_met": ttft_met, "tpot_met": tpot_met}
    assert counts(world) == (1, ttft_met, tpot_met, ttft_met and tpot_met)


def test_of_a_limit_that_there_is_not_nothing_is_told_and_it_counts_as_kept(world):
    write(world, 5.0, 99.0, slo=Slo("", 5.0, None))
    assert end_of(world) == {"ttft_ms": 5000.0, "ttft_met": True}
    assert counts(world) == (1, 1, 1, 1)


def test_a_class_whose_limits_nobody_can_work_out_does_not_count(world):
    write(world, 5.0, slo=Slo("tight"))
    assert end_of(world) == {"slo_class": "tight"}
    assert counts(world) == (0, 0, 0, 0)


@pytest.mark.parametrize(("came_s", "is_met"), [(0.5, True), (11.0, False)])
def test_an_embedding_counts_as_a_first_token(came_s, is_met):
    world = World(("p0",), embeds=True)
    prompt, sampling, slo = Prompt([1, 2, 3]), SamplingParams(max_tokens=0), Slo("", 10.0, 0.1)
    world.short(
        world.scheduler.submit(
            "r/0", prompt, sampling, arrived_s=0.0, deadline_s=100.0, now=0.0, slo=slo, pooling=Pooling(MEAN)
        )
    )
    world.tell("p0", events.embedded(world.attempt, b"abcd"), came_s)
    told = world.outcome.attainment
    assert (told.ttft_met, told.tpot_met) == (is_met, True)


def test_what_failed_kept_nothing_and_what_its_client_left_does_not_count(world):
    world.submit("fails/0", slo=SLO)
    world.tell("p0", events.failed(world.attempt, "ENGINE_ERROR"))
    assert counts(world) == (1, 0, 0, 0)
    world.submit("left/0", slo=SLO)
    world.short(world.scheduler.finish("left/0", events.ABORT, 1.0))
    assert counts(world) == (1, 0, 0, 0)


# ---- admission ----


def test_what_would_be_late_is_refused_with_the_wait_where_the_configuration_says_so():
    """A prompt of 3 tokens takes 3 s, and another one waits already: 6 s, of which 4 s less the tenth that a new
    coordinator spares are there."""
    world = World(("p0", "d0"), admits_late=False)
    told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
    world.registry.heartbeat(world.registry.find("p0"), told, 0.0)
    assert world.submit("first", slo=Slo("", 4.0, None)) == ["reserve d0", "prefill p0"]
    with pytest.raises(RequestError, match=r"cannot be kept .*: try again in 2\.4 s") as refusal:
        world.submit("second", slo=Slo("", 4.0, None))
    assert refusal.value.reason == "WOULD_BE_LATE"
    assert float(refusal.value.metadata["retry_after_s"]) == pytest.approx(6.0 - 0.9 * 4.0)
    assert world.scheduler.num_open == 1
    assert world.submit("third") == ["reserve d0", "prefill p0"]  # without limits it waits
    assert world.submit("fourth", slo=Slo("", 40.0, None)) == ["reserve d0", "prefill p0"]


@pytest.mark.parametrize(("num_tokens", "is_taken"), [(1, True), (2, True), (3, False)])
def test_a_shorter_prompt_takes_the_time_of_a_longer_one(num_tokens, is_taken):
    """One of 3 tokens, 3 s, waits, and both are due after 3.6 s: as many are in time, and sooner. Not of equal ones."""
    world = World(("p0", "d0"), admits_late=False)
    told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
    world.registry.heartbeat(world.registry.find("p0"), told, 0.0)
    world.submit("first", slo=Slo("", 4.0, None))
    with nullcontext() if is_taken else pytest.raises(RequestError, match="cannot be kept"):
        commands = world.submit("second", token_ids=[7] * num_tokens, slo=Slo("", 4.0, None))
        assert commands == ["reserve d0", "prefill p0"]


@pytest.mark.parametrize(("preparing_s", "is_taken"), [(0.25, True), (0.35, False)])
def test_what_has_taken_long_to_prepare_has_less_time_left(preparing_s, is_taken):
    """Two prompts of 3 tokens take 6 s, of 7 less the tenth that is spared."""
    world = World(("p0", "d0"), admits_late=False)
    told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
    world.registry.heartbeat(world.registry.find("p0"), told, 0.0)
    world.submit("first", slo=Slo("", 4.0, None))
    with nullcontext() if is_taken else pytest.raises(RequestError, match="cannot be kept"):
        world.submit("second", slo=Slo("", 7.0, None), preparing_s=preparing_s)


def test_nodes_that_have_nothing_to_do_refuse_nobody():
    """What is late there would be so at any time, or they are believed to be slower than they are."""
    world = World(("p0", "d0"), admits_late=False)
    told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
    world.registry.heartbeat(world.registry.find("p0"), told, 0.0)
    assert world.submit("hopeless", slo=Slo("", 1.0, None)) == ["reserve d0", "prefill p0"]
    with pytest.raises(RequestError, match=r"cannot be kept"):
        world.submit("another", slo=Slo("", 1.0, None))


def test_a_full_node_takes_nobody_who_would_wait_for_a_slot_for_too_long():
    """Four running slots, and answers of 1,000 tokens in steps of 18 ms."""
    world = World((), admits_late=False)
    b0 = world.attach("b0", max_num_seqs=4, num_blocks=10_000, max_model_len=100_000)
    told = events.heartbeat(prefill_tokens_per_s=1000.0, step_weights=[0.010, 0.002, 0, 0, 0.001, 0, 0]).heartbeat
    world.registry.heartbeat(b0, told, 0.0)
    for index in range(4):
        assert world.submit(f"{index}/0", max_tokens=1000, slo=Slo("", 1.0, None)) == ["reserve b0"]
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)), 0.02)
    with pytest.raises(RequestError, match="cannot be kept") as refusal:
        world.submit("one more", max_tokens=1000, slo=Slo("", 1.0, None), now=0.1)
    assert float(refusal.value.metadata["retry_after_s"]) == pytest.approx(999 * 0.018)


def test_what_would_be_late_is_served_else():
    world = World(("p0", "d0"))
    told = events.heartbeat(prefill_tokens_per_s=1.0).heartbeat
    world.registry.heartbeat(world.registry.find("p0"), told, 0.0)
    assert world.submit("hopeless", slo=Slo("", 1.0, None)) == ["reserve d0", "prefill p0"]
