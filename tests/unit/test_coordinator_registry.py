"""Registry and timeline: pure parts, by example."""

import pytest

from coordinator.registry import Registry
from coordinator.timeline import Phase, Timeline
from engine.errors import RequestError
from protos import fleet_pb2, inference_pb2
from tests import fleet_events as events


def hello(name, role="decode", **fields):
    return events.hello(name, role, **{"num_blocks": 10, "dtype": "float32", **fields}).hello


def heartbeat(*args, **kwargs):
    return events.heartbeat(*args, **kwargs).heartbeat


@pytest.fixture
def registry():
    return Registry(events.MODEL, node_timeout_s=3.0, step_timeout_s=60.0)


def test_a_node_is_ready_from_the_start_and_keeps_its_own_name(registry):
    node = registry.admit(hello("d0"), 0.0)
    assert node.is_ready
    assert (node.load.name, node.load.role, node.load.num_blocks_free) == ("d0", "decode", 10)
    registry.heartbeat(node, fleet_pb2.Heartbeat(load=inference_pb2.NodeLoad(name="other", state="draining")), 1.0)
    assert not node.is_ready
    assert (node.load.name, node.load.role) == ("d0", "decode")


def test_a_different_fingerprint_is_refused_with_both_values_and_names(registry):
    registry.admit(hello("d0"), 0.0)
    with pytest.raises(RequestError) as error:
        registry.admit(hello("p0", "prefill", dtype="bfloat16", layers="3"), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"
    assert str(error.value) == "nodes p0 and d0 differ: dtype is bfloat16 and float32; layers is 3 and missing"
    assert registry.find("p0") is None


@pytest.mark.parametrize(
    ("fact", "difference"),
    [("protocol_version", "protocol_version is 0 and 3"), ("vocab_size", "vocab_size is 0 and 260")],
)
def test_the_first_node_must_fit_the_coordinator(registry, fact, difference):
    with pytest.raises(RequestError, match=f"node d0 and the coordinator differ: {difference}") as error:
        registry.admit(hello("d0", **{fact: "0"}), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"


def test_an_older_process_that_wakes_up_does_not_replace_the_newer_one(registry):
    registry.admit(hello("d0", incarnation="1"), 0.0)
    new = registry.admit(hello("d0", incarnation="2"), 0.0)
    with pytest.raises(RequestError, match="a newer node d0 is attached") as error:
        registry.admit(hello("d0", incarnation="1"), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"
    assert registry.nodes == [new]


def test_a_fleet_of_one_may_come_back_as_another_model(registry):
    old = registry.admit(hello("d0"), 0.0)
    new = registry.admit(hello("d0", incarnation="2", dtype="bfloat16"), 0.0)
    assert old not in registry
    assert new in registry
    registry.lose(old)  # the late end of the old stream
    assert registry.nodes == [new]


@pytest.mark.parametrize(
    "bad",
    [hello(""), hello("a/b"), hello("x" * 200), hello("d0", "both"), hello("d0", num_blocks=0)],
)
def test_a_hello_that_makes_no_sense_is_refused(registry, bad):
    with pytest.raises(RequestError) as error:
        registry.admit(bad, 0.0)
    assert error.value.reason == "BAD_PARAM"
    assert len(str(error.value)) < 250


def test_silent_and_stuck_nodes_expire(registry):
    silent, stuck, well = (registry.admit(hello(name), 0.0) for name in ("silent", "stuck", "well"))
    for now in (1.0, 2.0, 3.0):
        registry.heartbeat(stuck, heartbeat(step_age_s=58.5 + now), now)
        registry.heartbeat(well, heartbeat(step_age_s=59.0), now)
        expired = registry.expired(now)
        assert [node for node, _ in expired] == ([stuck] if now >= 2.0 else [])
    expired = dict(registry.expired(3.5))
    assert expired[silent] == "no heartbeat for 3.5 s (limit 3 s)"
    assert expired[stuck] == "one step has taken 61.5 s (limit 60 s)"
    assert well not in expired


def test_a_coordinator_that_slept_blames_nobody(registry):
    registry.admit(hello("d0"), 0.0)
    assert registry.expired(1.0) == []
    assert registry.expired(100.0) == []
    assert [registry.expired(100.0 + second) for second in (1.0, 2.0, 3.0)] == [[]] * 3
    assert len(registry.expired(103.5)) == 1


def test_a_node_without_a_tp_size_has_one_rank(registry):
    assert registry.admit(hello("d0"), 0.0).tp_size == 1
    assert registry.admit(hello("d1", tp_size=64), 0.0).tp_size == 64
    with pytest.raises(RequestError, match="tp_size of node d2 is 65, the limit is 64") as error:
        registry.admit(hello("d2", tp_size=65), 0.0)
    assert error.value.reason == "BAD_PARAM"


def cache_changed(*args, **kwargs):
    return events.cache_changed(*args, **kwargs).cache_changed


def test_a_node_holds_what_it_stored_and_did_not_remove(registry):
    node = registry.admit(hello("d0"), 0.0)
    assert registry.cache_changed(node, cache_changed([1, 2**64 - 1, 1])) == 0
    assert registry.cache_changed(node, cache_changed([3], removed=[1, 7])) == 0
    assert node.hints == {3, 2**64 - 1}
    assert registry.admit(hello("d0", incarnation="2"), 1.0).hints == set()  # a new attachment has told nothing yet


def test_a_node_holds_no_more_than_its_blocks(registry):
    node = registry.admit(hello("d0", num_blocks=3), 0.0)
    assert registry.cache_changed(node, cache_changed([1, 2, 2, 3, 4, 5])) == 2
    assert node.hints == {1, 2, 3}
    assert registry.cache_changed(node, cache_changed([6, 3], removed=[1])) == 0  # what goes makes room first
    assert node.hints == {2, 3, 6}


def test_phases_are_dated_back_but_never_before_the_last():
    timeline = Timeline(10.0)
    timeline.enter(Phase.PREFILL, 12.0, ago_s=1.5)
    timeline.enter(Phase.TRANSFER, 12.0)
    assert timeline.tokens(12.0) == 2.0
    timeline.enter(Phase.DECODE, 12.5, ago_s=9.0)
    assert timeline.tokens(12.5) == 0.5
    wire = timeline.to_wire(15.0, "p0", "d0", 1)
    assert (wire.prefill_queue_s, wire.prefill_s, wire.transfer_s, wire.decode_s) == (0.5, 1.5, 0.0, 3.0)
    assert (wire.e2e_s, wire.ttft_s) == (5.0, 2.0)
    assert (wire.prefill_node, wire.decode_node, wire.num_restarts) == ("p0", "d0", 1)


@pytest.mark.parametrize("ago_s", [float("nan"), float("inf"), -5.0])
def test_a_senseless_duration_from_a_node_does_no_harm(ago_s):
    timeline = Timeline(10.0)
    timeline.enter(Phase.PREFILL, 12.0, ago_s=ago_s)
    wire = timeline.to_wire(13.0, "p0", "d0", 0)
    assert wire.prefill_queue_s + wire.prefill_s == wire.e2e_s == 3.0
    assert wire.prefill_queue_s >= 0
    assert wire.prefill_s >= 0
