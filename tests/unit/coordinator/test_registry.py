"""Registry and timeline, and nodes of unlike kinds, by example."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control.nodes import MAX_NAME_CHARS, MAX_PAIRS, Kinds, Registry, num_kinds
from coordinator.control.request import Phase, Timeline
from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION, shape_to_wire
from serving_core.errors import RequestError
from serving_core.shapes import ROLES, Shape, preset
from serving_core.version import VERSION
from tests import fleet_events as events
from tests.scripted_nodes import cluster, run

LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 64}
PREFILL, DECODE, BOTH = (preset(role, **LIMITS) for role in ROLES)


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


def test_the_shape_of_a_node_is_what_it_has_confirmed_and_its_role_follows(registry):
    node = registry.admit(hello("d0"), 0.0)
    assert (node.role, node.shape, node.usable) == ("decode", DECODE, DECODE)
    assert node.load.shape == shape_to_wire(DECODE)
    registry.heartbeat(node, heartbeat(), 1.0)  # of one that has not said anything of it
    assert node.shape == DECODE
    registry.heartbeat(node, heartbeat(shape=shape_to_wire(BOTH)), 2.0)
    assert (node.role, node.load.role, node.usable) == ("mixed", "mixed", BOTH)
    assert node.hello.node.role == "decode"


@pytest.mark.parametrize(
    ("old", "asked", "usable"),
    [
        (DECODE, BOTH, DECODE),
        (BOTH, DECODE, DECODE),
        (DECODE, PREFILL, Shape(0, 0, accepts_transfers=False)),
        (BOTH, Shape(512, 9, accepts_transfers=False), Shape(512, 9, accepts_transfers=False)),
    ],
)
def test_what_is_asked_for_counts_at_once_where_it_takes_work_away(registry, old, asked, usable):
    node = registry.admit(hello("d0", shape=old), 0.0)
    registry.request_shape(node, asked)
    assert (node.shape, node.usable) == (old, usable)
    registry.heartbeat(node, heartbeat(shape=shape_to_wire(old)), 1.0)  # was under way already
    assert node.usable == usable
    registry.heartbeat(node, heartbeat(shape=shape_to_wire(asked)), 2.0)
    assert (node.requested_shape, node.usable) == (None, asked)


def test_a_different_fingerprint_is_refused_with_both_values_and_names(registry):
    registry.admit(hello("d0"), 0.0)
    with pytest.raises(RequestError) as error:
        registry.admit(hello("p0", "prefill", dtype="bfloat16", layers="3"), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"
    assert str(error.value) == "nodes p0 and d0 differ: dtype is bfloat16 and float32; layers is 3 and missing"
    assert registry.find("p0") is None


SQL, CHAT = {"lora:sql": "d1"}, {"lora:org/chat": "d2"}


def test_the_adapters_of_the_fleet_are_those_of_its_nodes(registry):
    assert registry.adapters is None
    node = registry.admit(hello("d0", **SQL, **CHAT), 0.0)
    assert registry.adapters == ["org/chat", "sql"]
    for others in ({}, SQL, {**SQL, **CHAT, "lora:third": "d3"}, {**SQL, "lora:org/chat": "d3"}):
        with pytest.raises(RequestError, match="nodes p0 and d0 differ: lora:") as error:
            registry.admit(hello("p0", "prefill", **others), 0.0)
        assert error.value.reason == "PAIRING_MISMATCH"
    assert registry.adapters == ["org/chat", "sql"]
    registry.lose(node)
    assert registry.adapters == ["org/chat", "sql"]  # which may come back
    registry.admit(hello("p0", "prefill"), 0.0)
    assert registry.adapters == []


@pytest.mark.parametrize(
    ("adapters", "why"),
    [
        (["tiny"], "the name of adapter 'tiny' of node d0 is the model's own"),
        ([""], "the name of adapter '' of node d0 must match"),
        (["é"], "the name of adapter 'é' of node d0 must match"),
        ([f"a{number}" for number in range(65)], "node d0 has 65 adapters, the limit is 64"),
    ],
)
def test_adapters_that_clients_could_not_ask_for(adapters, why):
    registry = Registry({}, node_timeout_s=3.0, step_timeout_s=60.0, model_names=("small", "tiny"))
    with pytest.raises(RequestError, match=why):
        registry.admit(hello("d0", **{f"lora:{name}": "d" for name in adapters}), 0.0)
    assert (registry.nodes, registry.adapters) == ([], None)


@pytest.mark.parametrize(
    ("fact", "difference"),
    [("protocol_version", f"protocol_version is 0 and {PROTOCOL_VERSION}"), ("vocab_size", "vocab_size is 0 and 260")],
)
def test_the_first_node_must_fit_the_coordinator(registry, fact, difference):
    with pytest.raises(RequestError, match=f"node d0 and the coordinator differ: {difference}") as error:
        registry.admit(hello("d0", **{fact: "0"}), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"


@pytest.mark.parametrize("version", ["", "0.99.0", "9.0.0", "0.99." + "1" * 500])
def test_a_node_of_a_version_too_far_away_is_refused(registry, version):
    told = f"version is {version[:MAX_NAME_CHARS] or 'missing'} and {VERSION}, more than 1 minor apart"
    with pytest.raises(RequestError, match=f"node d0 and the coordinator differ: {re.escape(told)}") as error:
        registry.admit(hello("d0", version=version), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"
    assert registry.nodes == []


def test_versions_next_to_the_coordinators_are_in_one_fleet(registry):
    major, minor, _ = VERSION.split(".")
    nodes = [registry.admit(hello("d0", version=VERSION), 0.0)]
    nodes.append(registry.admit(hello("d1", version=f"{major}.{int(minor) + 1}.7"), 0.0))
    assert registry.nodes == nodes


@pytest.mark.parametrize("incarnation", ["0", "1", "2"])
def test_a_name_is_taken_until_its_holder_is_lost_however_old_the_other_is(registry, incarnation):
    holder = registry.admit(hello("d0"), 0.0)
    for session in (0, holder.session - 1, holder.session + 1):
        with pytest.raises(RequestError, match="another process is attached as d0") as error:
            registry.admit(hello("d0", incarnation=incarnation, session=session), 2.9)
        assert error.value.reason == "NAME_TAKEN"
    assert registry.nodes == [holder]
    [(expired, *_)] = registry.expired(3.1)
    registry.lose(expired)
    new = registry.admit(hello("d0", incarnation=incarnation), 3.1)
    assert registry.nodes == [new]
    with pytest.raises(RequestError, match="another process is attached as d0"):  # the old one, when it wakes up
        registry.admit(hello("d0", session=holder.session), 3.2)


def test_a_process_that_shows_its_session_replaces_itself(registry):
    old = registry.admit(hello("d0"), 0.0)
    new = registry.admit(hello("d0", session=old.session), 0.0)
    assert new.session != old.session
    registry.lose(old)  # the late end of the old stream
    assert registry.nodes == [new]
    with pytest.raises(RequestError, match="another process is attached as d0"):  # a hello that was on its way for long
        registry.admit(hello("d0", session=old.session), 0.0)


def test_a_namesake_that_can_never_belong_here_is_told_so_at_once(registry):
    registry.admit(hello("d0"), 0.0)
    registry.admit(hello("d1"), 0.0)
    with pytest.raises(RequestError) as error:
        registry.admit(hello("d0", dtype="bfloat16"), 0.0)
    assert error.value.reason == "PAIRING_MISMATCH"


def test_a_fleet_of_one_may_come_back_as_another_model(registry):
    old = registry.admit(hello("d0"), 0.0)
    with pytest.raises(RequestError, match="another process is attached as d0"):
        registry.admit(hello("d0", dtype="bfloat16"), 0.0)
    registry.lose(old)
    new = registry.admit(hello("d0", dtype="bfloat16"), 0.0)
    assert registry.nodes == [new]


@given(
    st.lists(
        st.tuples(st.sampled_from(("hello", "beat", "end", "wait")), st.integers(0, 2), st.sampled_from(("p0", "p1"))),
        max_size=60,
    )
)
def test_nobody_takes_a_name_from_a_live_process(happenings):
    """Three processes for two names, against a plain account of who holds what."""
    registry = Registry(events.MODEL, node_timeout_s=3.0, step_timeout_s=60.0, first_session=2**63)
    shown = {}  # (process, name): the session of its last welcome
    holders = {}  # name: (process, node, when it was last heard)
    given_out, now = set(), 0.0
    for what, process, name in happenings:
        holder, node, _ = holders.get(name, (None, None, None))
        if what == "hello" and holder in (None, process):
            new = registry.admit(hello(name, "prefill", session=shown.get((process, name), 0)), now)
            assert new.session not in given_out
            given_out.add(new.session)
            shown[process, name] = new.session
            holders[name] = (process, new, now)
            assert node not in registry.nodes
        elif what == "hello":
            with pytest.raises(RequestError, match="another process"):
                registry.admit(hello(name, "prefill", session=shown.get((process, name), 0)), now)
        elif what == "beat" and holder == process:
            registry.heartbeat(node, heartbeat(), now)
            holders[name] = (process, node, now)
        elif what == "end" and holder == process:
            registry.lose(node)
            del holders[name]
        elif what == "wait":
            for lost, *_ in look_until(registry, now, now := now + 1.0):
                assert now - holders[lost.name][2] > 3.0
                registry.lose(lost)
                del holders[lost.name]
        assert {node.name: node for node in registry.nodes} == {name: node for name, (_, node, _) in holders.items()}


@pytest.mark.parametrize(
    "bad",
    [
        hello(""),
        hello("a/b"),
        hello("x" * 200),
        hello("d0", "decode_node", shape=Shape(0, 1, accepts_transfers=True)),
        hello("d0", num_blocks=0),
        hello("d0", shape=Shape(0, 0, accepts_transfers=False)),
        hello("d0", shape=Shape(0, 65, accepts_transfers=True)),
        hello("d0", home=Shape(0, 65, accepts_transfers=True)),
        hello("d0", max_num_batched_tokens=32, shape=Shape(33, 0, accepts_transfers=False)),
    ],
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
        assert [node for node, *_ in expired] == ([stuck] if now >= 2.0 else [])
    expired = {node: why for node, *why in look_until(registry, 3.0, 3.5)}
    assert expired[stuck] == ["step", "one step has taken 61.5 s (limit 60 s)"]
    assert silent not in expired, "the coordinator was seen once a second, and may have missed what it said"
    expired = {node: why for node, *why in look_until(registry, 3.5, 4.5)}
    assert expired[silent] == ["silence", "no heartbeat for 3.2 s (limit 3.0 s)"]
    assert well not in expired


def test_a_coordinator_that_does_not_run_blames_nobody(registry):
    registry.admit(hello("d0"), 0.0)
    assert look_until(registry, 0.0, 1.0) == []
    assert registry.expired(100.0) == []
    assert look_until(registry, 100.0, 101.5) == []
    assert len(look_until(registry, 101.5, 102.0)) == 1


def test_a_coordinator_that_is_late_gives_nodes_the_time_that_it_lacks(registry):
    registry.admit(hello("d0"), 0.0)
    times = [1.5 * number for number in range(12)]  # each four times later than it may be
    assert [len(registry.expired(now)) for now in times] == [0] * 9 + [1] * 3


def test_a_node_whose_heartbeats_are_slow_is_waited_for_longer(registry):
    node = registry.admit(hello("d0"), 0.0)
    look_until(registry, 0.0, 2.5)
    registry.heartbeat(node, heartbeat(), 2.5)
    assert node.load.longest_heartbeat_gap_s == 2.5
    assert look_until(registry, 2.5, 12.5) == []
    [(lost, cause, why)] = look_until(registry, 12.5, 12.75)
    assert (lost, cause, why) == (node, "silence", "no heartbeat for 10.2 s (limit 10.0 s)")


@pytest.mark.parametrize(("starved_share", "gap_s"), [(0.0, 1.0), (0.5, 4.0)])
def test_a_process_that_was_silent_for_want_of_a_core_is_waited_for_longer_when_it_is_back(
    registry, starved_share, gap_s
):
    first = registry.admit(hello("d0"), 0.0)
    look_until(registry, 0.0, 1.0)
    registry.heartbeat(first, heartbeat(), 1.0)
    look_until(registry, 1.0, 5.25)
    registry.lose(first)
    second = registry.admit(hello("d0", session=first.session, starved_share=starved_share), 6.0)
    assert second.load.longest_heartbeat_gap_s == gap_s
    registry.lose(second)
    another_process = registry.admit(hello("d0"), 5.0)
    assert another_process.load.longest_heartbeat_gap_s == 0.0


def test_losses_count_for_ten_minutes(registry):
    for now in (0.0, 100.0, 200.0):
        node = registry.admit(hello("d0"), now)
        node.health.lost(now)
        registry.lose(node)
    node = registry.admit(hello("d0"), 300.0)
    assert node.load.num_losses == 3
    registry.heartbeat(node, heartbeat(), 650.0)
    assert node.load.num_losses == 2


def test_losses_are_forgotten_of_those_that_have_been_gone_for_longest_and_only_where_there_are_too_many(
    registry, monkeypatch
):
    monkeypatch.setattr("coordinator.control.nodes.MAX_NAMES", 6)
    for name in "abcdef":
        node = registry.admit(hello(name, "prefill"), 0.0)
        node.health.lost(0.0)
        registry.lose(node)
    assert [registry.admit(hello(name, "prefill"), 1.0).load.num_losses for name in "abcdef"] == [1] * 6
    for name in "abc":
        registry.lose(registry.find(name))
    assert registry.admit(hello("g", "prefill"), 1.0).load.num_losses == 0
    assert [registry.admit(hello(name, "prefill"), 1.0).load.num_losses for name in "cba"] == [1, 1, 0]


def look_until(registry, since, until):
    """Look at the nodes as often as a coordinator does, and return what it finds last."""
    return [registry.expired(since + 0.25 * number) for number in range(1, 1 + round(4 * (until - since)))][-1]


@pytest.mark.parametrize("kv_keys", [[b"short"], [bytes(33)], [bytes(32)] * 65])
def test_keys_that_are_none_are_refused(registry, kv_keys):
    registry.admit(hello("d0", kv_keys=[bytes(32)] * 64), 0.0)
    with pytest.raises(RequestError, match="node d1 must have 64 keys of 32 bytes at most") as error:
        registry.admit(hello("d1", kv_keys=kv_keys), 0.0)
    assert error.value.reason == "BAD_PARAM"


def test_a_node_without_a_tp_size_has_one_rank(registry):
    assert registry.admit(hello("d0"), 0.0).tp_size == 1
    assert registry.admit(hello("d1", tp_size=64), 0.0).tp_size == 64
    with pytest.raises(RequestError, match="tp_size of node d2 is 65, the limit is 64") as error:
        registry.admit(hello("d2", tp_size=65), 0.0)
    assert error.value.reason == "BAD_PARAM"


def test_a_node_without_a_pp_size_has_one_stage(registry):
    assert registry.admit(hello("d0", tp_size=64), 0.0).pp_size == 1
    assert registry.admit(hello("d1", tp_size=16, pp_size=4), 0.0).pp_size == 4
    for sizes in ({"tp_size": 33, "pp_size": 2}, {"pp_size": 66}):
        with pytest.raises(RequestError, match="node d2 has 66 ranks, the limit is 64") as error:
            registry.admit(hello("d2", **sizes), 0.0)
        assert error.value.reason == "BAD_PARAM"


def cache_changed(*args, **kwargs):
    return events.cache_changed(*args, **kwargs).cache_changed


def test_a_node_holds_what_it_stored_and_did_not_remove(registry):
    node = registry.admit(hello("d0"), 0.0)
    assert registry.cache_changed(node, cache_changed([1, 2**64 - 1, 1])) == 0
    assert registry.cache_changed(node, cache_changed([3], removed=[1, 7])) == 0
    assert node.hints == {3, 2**64 - 1}
    assert (
        registry.admit(hello("d0", session=node.session), 1.0).hints == set()
    )  # a new attachment has told nothing yet


def test_a_node_holds_no_more_than_its_blocks(registry):
    node = registry.admit(hello("d0", num_blocks=3), 0.0)
    assert registry.cache_changed(node, cache_changed([1, 2, 2, 3, 4, 5])) == 2
    assert node.hints == {1, 2, 3}
    assert registry.cache_changed(node, cache_changed([6, 3], removed=[1])) == 0  # what goes makes room first
    assert node.hints == {2, 3, 6}


def test_phases_are_dated_back_but_never_before_the_last():
    timeline = Timeline(10.0)
    timeline.enter(Phase.PREFILL, 12.0, ago_s=1.5)
    timeline.enter(Phase.KV_TRANSFER, 12.0)
    assert timeline.tokens(12.0) == 2.0
    timeline.enter(Phase.DECODE, 12.5, ago_s=9.0)
    assert timeline.tokens(12.5) == 0.5
    wire = timeline.to_wire(15.0, prefill_node="p0", decode_node="d0", num_restarts=1)
    assert (wire.prefill_queue_s, wire.prefill_s, wire.kv_transfer_s, wire.decode_s) == (0.5, 1.5, 0.0, 3.0)
    assert (wire.e2e_s, wire.ttft_s) == (5.0, 2.0)
    assert (wire.prefill_node, wire.decode_node, wire.num_restarts) == ("p0", "d0", 1)


@pytest.mark.parametrize("ago_s", [float("nan"), float("inf"), -5.0])
def test_a_senseless_duration_from_a_node_does_no_harm(ago_s):
    timeline = Timeline(10.0)
    timeline.enter(Phase.PREFILL, 12.0, ago_s=ago_s)
    wire = timeline.to_wire(13.0)
    assert wire.prefill_queue_s + wire.prefill_s == wire.e2e_s == 3.0
    assert wire.prefill_queue_s >= 0
    assert wire.prefill_s >= 0


# ---- nodes of unlike kinds ----

OLD = {"cpu": "avx2 fma", "kernels": "avx2 abc", "tp_size": "1"}
NEW = {"cpu": "avx2 avx512_f fma", "kernels": "avx2 abc", "tp_size": "2"}


class Fleet:
    def __init__(self):
        self.registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
        self.kinds = Kinds()

    def attach(self, name, numerics):
        node = self.registry.admit(events.hello(name, numerics=numerics).hello, 0.0)
        return self.kinds.meet(node, self.registry.nodes)


def test_the_first_two_of_a_pair_of_kinds_are_told_with_what_they_differ_in():
    fleet = Fleet()
    assert fleet.attach("p0", OLD) == []
    assert fleet.attach("p1", OLD) == []
    assert fleet.attach("d0", NEW) == [
        "outputs of nodes d0 and p0 may differ in bits, as the nodes differ in cpu (avx512_f / -); tp_size (2 / 1)"
    ]
    assert num_kinds(fleet.registry.nodes) == 2


def test_a_pair_of_kinds_is_told_once():
    fleet = Fleet()
    fleet.attach("p0", OLD)
    assert len(fleet.attach("d0", NEW)) == 1
    fleet.registry.lose(fleet.registry.find("d0"))
    assert fleet.attach("d0", NEW) == fleet.attach("d1", NEW) == fleet.attach("p1", OLD) == []
    third = fleet.attach("b0", {**OLD, "torch": "3"})
    assert [sentence.split()[3:6] for sentence in third] == [["b0", "and", "d0"], ["b0", "and", "p0"]]


def test_a_node_that_tells_nothing_is_unlike_nobody():
    fleet = Fleet()
    assert [fleet.attach("p0", OLD), fleet.attach("d0", {}), fleet.attach("d1", {})] == [[], [], []]
    assert num_kinds(fleet.registry.nodes) == 1


def test_no_fleet_floods_the_log():
    fleet = Fleet()
    sentences = [each for number in range(40) for each in fleet.attach(f"b{number}", {"cpu": str(number)})]
    assert len(sentences) == MAX_PAIRS
    assert num_kinds(fleet.registry.nodes) == 40


def test_long_traits_are_cut():
    fleet = Fleet()
    fleet.attach("p0", OLD)
    [sentence] = fleet.attach("d0", {**OLD, "cpu": "x" * 10_000})
    assert len(sentence) < 400


def test_the_coordinator_logs_it_and_tells_clients_the_traits(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            for name, numerics in (("p0", OLD), ("p1", OLD), ("d0", NEW), ("d1", NEW)):
                await c.attach(name, numerics=numerics)
            server = await c.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
            assert [dict(node.numerics) for node in server.nodes] == [NEW, NEW, OLD, OLD]

    run(scenario())
    said = [(record.levelname, record.message) for record in caplog.records if "may differ in bits" in record.message]
    assert said == [
        (
            "WARNING",
            "outputs of nodes d0 and p0 may differ in bits, as the nodes differ in cpu (avx512_f / -); tp_size (2 / 1)",
        )
    ]
