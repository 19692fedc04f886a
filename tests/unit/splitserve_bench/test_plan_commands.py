"""The commands that a plan prints: what they start is what was simulated."""

import shlex
from dataclasses import replace

import pytest

from coordinator.control.slo import Limit, parse_slo_classes
from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve.commands import roles
from splitserve.commands.serve import up
from splitserve_bench.plan.commands import commands_of
from splitserve_bench.plan.nodes import machines_of
from splitserve_bench.plan.plans import Plan, Pool
from splitserve_bench.plan.study import study_of
from tests.unit.splitserve_bench.plan_kit import OPT, asked, asked_nodes, model_folder, paper_nodes, plan_of
from tests.unit.splitserve_bench.simulate_kit import PROFILE


@pytest.fixture
def nodes(tmp_path):
    return asked_nodes(model=str(model_folder(tmp_path / "model")))


def test_the_commands_of_a_plan_say_what_has_no_room(nodes):
    held_bytes = 100_000_000
    study = study_of(asked(replace(nodes, weights_memory_bytes=held_bytes), gpus=4))
    one, two = study.machines.kinds
    assert (one.weights_memory_bytes, two.weights_memory_bytes) == (held_bytes, 0)  # two ranks hold 82 MB each
    mixed = Plan((Pool(PREFILL, one, 1), Pool(DECODE, two, 1)), 4, 4)
    assert f"--weights-memory-bytes {held_bytes}" in " ".join(commands_of(study, mixed))
    assert "--weights-memory-bytes" not in " ".join(commands_of(study, Plan((Pool(BOTH, two, 1),), 4, 4)))


def test_nodes_on_several_hosts_are_started_one_by_one(nodes):
    study = study_of(asked(nodes, gpus=8))
    head, coordinator_words, *lines = commands_of(study, plan_of(nodes, 2, -3))
    assert head.startswith("Run it on 2 hosts, with SPLITSERVE_FLEET_SECRET and SPLITSERVE_API_KEY set")
    program, role, *words = shlex.split(coordinator_words, comments=True)
    assert (program, role) == ("splitserve", "coordinator")
    flags = roles.coordinator.make_context(role, words).params
    assert {flags[name] for name in ("host", "http_host", "fleet_host")} == {"0.0.0.0"}
    taken = {"0": [], "1": []}  # devices of each host
    for line in lines:
        visible, program, role, *words = shlex.split(line, comments=True)
        flags = {"prefill": roles.prefill, "decode": roles.decode}[role].make_context(role, words).params
        assert flags["kv_bind"] == "tcp://eth0:*"
        devices = visible.removeprefix("CUDA_VISIBLE_DEVICES=").split(",")
        assert len(devices) == flags["tensor_parallel_size"]
        taken[line.split("# host ")[1][0]] += devices
    assert taken == {"0": ["0", "1", "2", "3"], "1": ["0", "1", "2", "3"]}


@pytest.mark.parametrize(
    ("profile", "hardware", "told"),
    [("", ("cpu",), {"0", "1", "2", "3"}), ("profile.json", (), {"1/4", "2/4", "3/4", "4/4"})],
)
def test_nodes_without_cuda_get_cores_of_their_own(nodes, tmp_path, profile, hardware, told):
    PROFILE.save(tmp_path / "profile.json")
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), hardware)
    nodes = replace(nodes, profile=profile and str(tmp_path / profile), tp_sizes=(1,), **names)
    (kind,) = machines_of(nodes).kinds
    _, _, *lines = commands_of(study_of(asked(nodes, gpus=8)), Plan((Pool(BOTH, kind, 8),), 8, 4))
    words = [shlex.split(line, comments=True) for line in lines]
    cpus = [roles.both.make_context("both", each[2:]).params["cpus"] for each in words]
    assert (len(cpus), set(cpus[:4]), set(cpus[4:])) == (8, told, told)


def made(commands):
    """The settings that a command's flags stand for, by the words before them."""
    contexts = {"up": up, "coordinator": roles.coordinator, "prefill": roles.prefill, "decode": roles.decode}
    found = {}
    for line in commands:
        words = shlex.split(line, comments=True)
        if "splitserve" in words:
            at = words.index("splitserve")
            found.setdefault(words[at + 1], []).append(
                contexts[words[at + 1]].make_context("it", words[at + 2 :]).params
            )
    return found


def test_a_cluster_knows_the_limits_that_requests_were_simulated_with(nodes):
    study = study_of(asked(nodes, gpus=8, goodput=("ttft:1234567.5 tpot:0.25",)))
    near = made(commands_of(study, plan_of(nodes, 2, 2)))["up"]
    far = made(commands_of(study, plan_of(nodes, 2, -3)))["coordinator"]
    for (flags,) in (near, far):
        (limits,) = parse_slo_classes(flags["slo_class"])
        assert (limits.name, limits.ttft, limits.tpot) == ("default", Limit(1234567.5), Limit(0.25))
    whole = study_of(asked(nodes, gpus=8, goodput=("e2el:900",)))  # of which no server knows
    assert "--slo-class" not in " ".join(commands_of(whole, plan_of(nodes, 2, 2)))


@pytest.mark.parametrize("gpus_per_host", [8, 2])
def test_nodes_have_the_flags_that_they_were_measured_with(tmp_path, gpus_per_host):
    flags = {"quantization": "w8a8", "batch_invariant": True, "weights_disk_path": "/a b"}
    replace(PROFILE, flags=flags).save(tmp_path / "profile.json")
    study = study_of(asked(replace(paper_nodes(tmp_path), gpus_per_host=gpus_per_host), gpus=4))
    (kind,) = study.machines.kinds
    plan = Plan((Pool(PREFILL, kind, 2), Pool(DECODE, kind, 2)), 4, gpus_per_host)
    found = made(commands_of(study, plan))
    nodes = found["up"] if gpus_per_host == 8 else [*found["prefill"], *found["decode"]]
    assert len(nodes) == (1 if gpus_per_host == 8 else 4)
    assert all(flags.items() <= each.items() for each in nodes)


def test_the_longest_request_that_was_planned_for_is_the_longest_that_is_taken(nodes):
    study = study_of(asked(replace(nodes, max_model_len=300), gpus=8))
    assert made(commands_of(study, plan_of(nodes, 2, 2)))["up"][0]["max_model_len"] == 300
    others = made(commands_of(study, plan_of(nodes, 2, -3)))
    assert {flags["max_model_len"] for role in ("prefill", "decode") for flags in others[role]} == {300}


def test_nodes_of_unlike_sizes_get_the_pools_that_they_were_simulated_with(nodes):
    """One size for all would be the smaller one; a CUDA node takes its own share of its device."""
    study = study_of(asked(nodes, gpus=4))
    one, two = study.machines.kinds
    assert one.kv_cache_memory_bytes < two.kv_cache_memory_bytes
    plan = Plan((Pool(PREFILL, one, 2), Pool(DECODE, two, 1)), 4, 4)
    (flags,) = made(commands_of(study, plan))["up"]
    assert not flags["kv_cache_memory_bytes"]
    assert flags["gpu_memory_utilization"] == 0.9
    alike = made(commands_of(study, Plan((Pool(PREFILL, one, 2), Pool(DECODE, one, 2)), 4, 4)))["up"]
    assert alike[0]["kv_cache_memory_bytes"] == one.kv_cache_memory_bytes


@pytest.mark.parametrize("values", [{"device_memory_bytes": 2**34}, {"hardware": "cpu"}])
def test_unlike_nodes_whose_memory_is_no_share_of_a_device_are_started_one_by_one(nodes, values):
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), (values.pop("hardware", "h100"),))
    study = study_of(asked(replace(nodes, **names, **values), gpus=4))
    one, two = study.machines.kinds
    lines = commands_of(study, Plan((Pool(PREFILL, one, 2), Pool(DECODE, two, 1)), 4, 4))
    assert lines[0].startswith("Run it on 1 host, with")
    found = made(lines)
    assert [each["kv_cache_memory_bytes"] for each in found["prefill"]] == [one.kv_cache_memory_bytes] * 2
    assert [each["kv_cache_memory_bytes"] for each in found["decode"]] == [two.kv_cache_memory_bytes]


def test_a_model_that_is_not_served_gets_no_command(tmp_path):
    nodes = asked_nodes(model=str(model_folder(tmp_path / "opt-13b", OPT | {"is_encoder_decoder": True})))
    study = study_of(asked(nodes))
    assert "does not serve it" in commands_of(study, study.plans[0])[0]
