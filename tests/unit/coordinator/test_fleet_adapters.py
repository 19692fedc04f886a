"""Adapters that come and go while nodes serve, by example: orders to nodes, and the names that requests may give."""

import pytest

from coordinator.control.adapters import (
    LOAD_DEADLINE_S,
    MAX_CHANGES,
    MAX_FOLDER_CHARS,
    RETRY_FAILED_S,
    RETRY_S,
    FleetAdapters,
)
from coordinator.control.nodes import Registry
from protos import fleet_pb2
from serving_core.errors import RequestError
from serving_core.model_files.adapter_names import MOST_ADAPTERS, adapter_key
from tests import fleet_events as events


class Fleet:
    """A registry with nodes, of whose orders the test says what became."""

    def __init__(self, *names, lora=(), **options):
        self.registry = Registry(events.MODEL, node_timeout_s=3.0, step_timeout_s=60.0, model_names=("m",))
        self.using = {}
        self.adapters = FleetAdapters(self.registry, lambda name: self.using.get(name, 0))
        self.nodes = {name: self.attach(name, lora) for name in names}

    def attach(self, name, lora=(), folders=None):
        hello = events.hello(name, **{adapter_key(each): "given" for each in lora}).hello
        for adapter, (folder, digest) in (folders or {}).items():
            hello.node.fingerprint[adapter_key(adapter)] = digest
            hello.adapter_folders[adapter] = folder
        return self.registry.admit(hello, 0.0)

    def done(self, name, adapter, digest="", error="", now=0.0):
        event = fleet_pb2.AdapterChanged(name=adapter, digest=digest, error=error)
        return told(self.adapters.changed(self.nodes[name], event, now))

    def load(self, name="x", folder="f", now=0.0):
        return told(self.adapters.load(name, folder, now))

    def loaded(self, *names, adapter="x"):
        self.load(adapter)
        for name in names:
            self.done(name, adapter, "digest")

    @property
    def served(self):
        return list(self.registry.capacity.adapters)


def told(orders):
    """Return the orders as (node, what, adapter)."""
    return [
        (order.node.name, kind.partition("_")[0], getattr(order.command, kind).name)
        for order in orders
        for kind in [order.command.WhichOneof("command")]
    ]


def refusal(call, *args):
    with pytest.raises(RequestError) as caught:
        call(*args)
    return caught.value.reason, str(caught.value)


def test_an_adapter_is_served_when_the_last_node_has_it():
    fleet = Fleet("p0", "d0", lora=("given",))
    assert fleet.load() == [("d0", "load", "x"), ("p0", "load", "x")]
    assert fleet.done("p0", "x", "digest") == []
    assert (fleet.served, fleet.adapters.is_loading("x")) == (["given"], True)
    fleet.done("d0", "x", "digest")
    assert (fleet.served, fleet.adapters.is_loading("x"), fleet.adapters.outcome("x")) == (["given", "x"], False, None)
    assert all(node.is_ready for node in fleet.registry.nodes)


def test_a_node_that_cannot_load_it_ends_the_load_everywhere():
    fleet = Fleet("p0", "d0")
    fleet.load()
    fleet.done("p0", "x", "digest")
    assert fleet.done("d0", "x", error="no such folder") == [("p0", "unload", "x")]
    error = fleet.adapters.outcome("x")
    assert (error.reason, str(error)) == ("BAD_PARAM", "folder cannot be loaded on node d0: no such folder")
    fleet.done("p0", "x")
    assert fleet.served == []
    assert fleet.load() == [("d0", "load", "x"), ("p0", "load", "x")]


def test_the_end_of_a_load_that_a_later_order_has_overtaken_is_not_that_orders():
    fleet = Fleet("p0", "d0")
    fleet.load(folder="broken")
    fleet.done("p0", "x", error="no such tensor")
    assert fleet.load(folder="good") == [("p0", "load", "x")], "d0 has not ended yet"
    assert fleet.done("d0", "x", error="no such tensor") == [("d0", "load", "x")]
    assert fleet.adapters.is_loading("x")
    fleet.done("p0", "x", "digest")
    fleet.done("d0", "x", "digest")
    assert (fleet.adapters.outcome("x"), fleet.served) == (None, ["x"])


def test_what_an_overtaken_load_has_loaded_is_unloaded_before_the_later_one_is():
    fleet = Fleet("p0", "d0")
    fleet.load(folder="one")
    fleet.done("p0", "x", error="no such tensor")
    fleet.load(folder="two")
    assert fleet.done("d0", "x", "digest of one") == [("d0", "unload", "x")]
    fleet.done("p0", "x", "digest of two")
    assert fleet.served == []
    assert fleet.done("d0", "x") == [("d0", "load", "x")]
    fleet.done("d0", "x", "digest of two")
    assert (fleet.adapters.outcome("x"), fleet.served) == (None, ["x"])


def test_nodes_with_other_files_are_no_fleet_for_it():
    fleet = Fleet("p0", "d0")
    fleet.load()
    fleet.done("p0", "x", "one")
    assert fleet.done("d0", "x", "other") == [("d0", "unload", "x"), ("p0", "unload", "x")]
    assert fleet.adapters.outcome("x").reason == "PAIRING_MISMATCH"


def test_a_load_has_a_deadline():
    fleet = Fleet("p0", "d0")
    fleet.load()
    fleet.done("p0", "x", "digest")
    fleet.adapters.tick(LOAD_DEADLINE_S)
    assert fleet.adapters.is_loading("x")
    assert told(fleet.adapters.tick(LOAD_DEADLINE_S + 1)) == [("p0", "unload", "x")]
    assert fleet.adapters.outcome("x").reason == "DEADLINE_EXCEEDED"
    assert fleet.done("d0", "x", "digest") == [("d0", "unload", "x")]  # late


def test_requests_that_run_with_it_keep_the_nodes_from_unloading_it():
    fleet = Fleet("p0", "d0")
    fleet.loaded("p0", "d0")
    fleet.using["x"] = 2
    assert told(fleet.adapters.unload("x", 1.0)) == []
    assert fleet.served == []
    assert refusal(fleet.load)[1].endswith("2 requests still run with it")
    fleet.using["x"] = 0
    assert told(fleet.adapters.tick(2.0)) == [("d0", "unload", "x"), ("p0", "unload", "x")]
    assert fleet.done("p0", "x", error="1 requests use the adapter", now=2.0) == []
    assert fleet.done("d0", "x", now=2.0) == []
    assert refusal(fleet.load)[1].endswith("nodes are unloading: try again")
    assert told(fleet.adapters.tick(2.0 + RETRY_S)) == [("p0", "unload", "x")]
    fleet.done("p0", "x", now=4.0)
    assert fleet.load(now=5.0) == [("d0", "load", "x"), ("p0", "load", "x")]


def test_a_node_that_comes_later_is_ready_when_it_has_what_the_others_have():
    fleet = Fleet("p0", "d0", lora=("given",))
    fleet.loaded("p0", "d0")
    fleet.adapters.unload("given", 0.0)
    for name in ("p0", "d0"):
        fleet.done(name, "given")
    late = fleet.nodes["d1"] = fleet.attach("d1", lora=("given",))
    assert not late.is_ready
    assert late.load.state == "ready"  # it does not drain
    assert told(fleet.adapters.tick(1.0)) == [("d1", "load", "x"), ("d1", "unload", "given")]
    fleet.done("d1", "given")
    assert fleet.done("d1", "x", error="no such folder", now=2.0) == []
    assert told(fleet.adapters.tick(2.0 + RETRY_FAILED_S)) == [("d1", "load", "x")]
    assert fleet.done("d1", "x", "other", now=40.0) == [("d1", "unload", "x")]
    assert (late.is_ready, fleet.served) == (False, ["x"])  # its files are not the fleet's, and it alone does nothing
    assert fleet.done("d1", "x", now=41.0) == []
    assert told(fleet.adapters.tick(40.0 + RETRY_FAILED_S)) == [("d1", "load", "x")]
    fleet.done("d1", "x", "digest")
    assert (late.is_ready, fleet.served) == (True, ["x"])


def test_a_node_with_other_content_is_refused():
    fleet = Fleet("p0", "d0")
    fleet.loaded("p0", "d0")
    reason, message = refusal(fleet.attach, "d1", (), {"x": ("f", "other")})
    assert (reason, message) == ("PAIRING_MISMATCH", "adapter x of node d1 has other content than that of the fleet")


def test_another_coordinator_learns_from_the_nodes_what_was_loaded():
    fleet = Fleet()
    fleet.nodes["p0"] = fleet.attach("p0", folders={"x": ("f", "digest")})
    assert fleet.served == ["x"]
    late = fleet.nodes["d0"] = fleet.attach("d0")  # it has started again meanwhile
    assert not late.is_ready
    assert told(fleet.adapters.tick(0.0)) == [("d0", "load", "x")]


def test_a_node_that_is_lost_does_not_hold_up_a_load():
    fleet = Fleet("p0", "d0", "d1")
    fleet.load()
    fleet.done("p0", "x", "digest")
    fleet.done("d0", "x", "digest")
    fleet.registry.lose(fleet.nodes["d1"])
    fleet.adapters.tick(1.0)
    assert fleet.served == ["x"]


REFUSALS = [
    (("x y", "f"), "BAD_PARAM", "must match"),
    (("m", "f"), "BAD_PARAM", "(m) is a name that is served"),
    (("given", "f"), "BAD_PARAM", "(given) is a name that is served"),
    (("x", ""), "BAD_PARAM", f"must have 1 to {MAX_FOLDER_CHARS} characters, not 0"),
    (("x", "f" * (MAX_FOLDER_CHARS + 1)), "BAD_PARAM", f"not {MAX_FOLDER_CHARS + 1}"),
]


@pytest.mark.parametrize(("args", "reason", "message"), REFUSALS)
def test_what_is_refused_at_once(args, reason, message):
    told_reason, told_message = refusal(Fleet("p0", "d0", lora=("given",)).load, *args)
    assert (told_reason, message in told_message) == (reason, True), told_message


def test_there_is_a_limit_and_a_fleet_without_nodes_loads_nothing():
    fleet = Fleet("p0", lora=[f"a{number}" for number in range(MOST_ADAPTERS)])
    assert refusal(fleet.load)[1].endswith(f"the limit is {MOST_ADAPTERS}")
    assert refusal(Fleet().load)[0] == "NO_PREFILL_WORKER"
    assert refusal(fleet.adapters.unload, "x", 0.0)[0] == "MODEL_NOT_FOUND"


def test_names_that_are_unloaded_are_not_kept_for_ever():
    fleet = Fleet("p0")
    fleet.loaded("p0", adapter="kept")
    for number in range(MAX_CHANGES + 5):
        fleet.loaded("p0", adapter=f"a{number}")
        fleet.adapters.unload(f"a{number}", 0.0)
        fleet.done("p0", f"a{number}")
    assert len(fleet.registry.adapter_changes) == MAX_CHANGES
    assert fleet.served == ["kept"]
