"""Nodes of unlike kinds meet: told once for each pair of kinds, in the log and in the metrics."""

from coordinator.control.kinds import MAX_PAIRS, Kinds, num_kinds
from coordinator.control.registry import Registry
from protos import inference_pb2
from tests import fleet_events as events
from tests.scripted_nodes import cluster, run

OLD = {"cpu": "avx2 fma", "kernels": "avx2 abc", "tp_size": "1"}
NEW = {"cpu": "avx2 avx512_f fma", "kernels": "avx2 abc", "tp_size": "2"}


class Fleet:
    def __init__(self):
        self.registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
        self.kinds = Kinds()

    def attach(self, name, traits):
        node = self.registry.admit(events.hello(name, traits=traits).hello, 0.0)
        return self.kinds.meet(node, self.registry.nodes)


def test_the_first_two_of_a_pair_of_kinds_are_told_with_what_they_differ_in():
    fleet = Fleet()
    assert fleet.attach("p0", OLD) == []
    assert fleet.attach("p1", OLD) == []
    assert fleet.attach("d0", NEW) == [
        "answers of nodes d0 and p0 may differ in bits, as the nodes differ in cpu (avx512_f / -); tp_size (2 / 1)"
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
            for name, traits in (("p0", OLD), ("p1", OLD), ("d0", NEW), ("d1", NEW)):
                await c.attach(name, traits=traits)
            server = await c.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
            assert [dict(node.traits) for node in server.nodes] == [NEW, NEW, OLD, OLD]

    run(scenario())
    said = [(record.levelname, record.message) for record in caplog.records if "may differ in bits" in record.message]
    assert said == [
        (
            "WARNING",
            "answers of nodes d0 and p0 may differ in bits, as the nodes differ in cpu (avx512_f / -); tp_size (2 / 1)",
        )
    ]
