"""Limits and priorities of requests and of classes: what is refused, which of them hold, and what a request takes
alone."""

import math

import pytest

from coordinator.control.registry import Registry
from coordinator.control.slo import MAX_CLASSES, MAX_PRIORITY, Limit, Slo, SloClass, SloClasses, parse_slo_classes
from protos.inference_pb2 import GenerateRequest
from serving_core.errors import RequestError, SettingsError
from tests import fleet_events as events

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


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_what_is_no_class_is_refused(text):
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
