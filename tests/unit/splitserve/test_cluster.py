"""The plan of a cluster: what each process is told."""

import dataclasses
import os
import sys
from pathlib import Path

import click
import pytest

from serving_core.errors import SettingsError
from serving_core.flags import build, environment_of, fields_of, settings_command
from serving_node.ranks import processes as rank_processes
from splitserve.launch.cluster import (
    COORDINATOR,
    DECODE,
    PLANNED,
    PREFILL,
    ROOMS,
    ClusterSettings,
    Place,
    Process,
    command_of,
    flat,
    in_full,
    node_rooms,
    plan_cluster,
    replaced,
    up_settings_class,
)
from splitserve.launch.models import LocalModel
from splitserve.launch.preflight import cuda_devices

MODEL = LocalModel(Path("/models/tiny"), "tiny")
PLACE = Place(fleet_port=4000, socket_dir="/run/x", fleet_secret="s3cret", instance_id="this one", cpus=(0, 1, 2, 5))


def received(process, room, monkeypatch):
    """What the process's own command line makes of its argv and environment."""
    monkeypatch.setattr(os, "environ", dict(process.environment))
    assert process.argv[1:3] == ("-m", room.package)
    seen = []
    command = settings_command(room.settings_class, seen.append, name=room.role, help="")
    command.main(list(process.argv[3:]), standalone_mode=False)
    return flat(seen[0])


def test_each_process_is_told_its_place(monkeypatch):
    settings = ClusterSettings(prefill=1, decode=2, grpc_port=50061, http_port=8001, drain_s=3.0)
    processes = plan_cluster(settings, {}, MODEL, PLACE)
    assert [process.name for process in processes] == ["coordinator", "prefill-0", "decode-0", "decode-1"]
    rooms = [COORDINATOR, PREFILL, DECODE, DECODE]
    told = [received(process, room, monkeypatch) for process, room in zip(processes, rooms, strict=True)]
    front, *nodes = told
    assert (front["host"], front["grpc_port"]) == ("127.0.0.1", 50061)
    assert (front["http_host"], front["http_port"]) == ("127.0.0.1", 8001)
    assert (front["fleet_host"], front["fleet_port"]) == ("127.0.0.1", 4000)
    assert (front["served_model_name"], front["instance_id"]) == ("tiny", "this one")
    assert [node["name"] for node in nodes] == ["prefill-0", "decode-0", "decode-1"]
    assert [node["cpus"] for node in nodes] == ["0,1", "2", "5"]
    assert [node["kv_bind"] for node in nodes[1:]] == ["ipc:///run/x/decode-0", "ipc:///run/x/decode-1"]
    assert {node["coordinator"] for node in nodes} == {"127.0.0.1:4000"}
    for values in told:
        assert (values["model"], values["fleet_secret"], values["drain_s"]) == ("/models/tiny", "s3cret", 3.0)


@pytest.mark.parametrize(("settings", "wait_s"), [(ClusterSettings(), 60.0), (ClusterSettings(node_wait_s=0.0), 0.0)])
def test_requests_wait_until_a_node_that_died_has_started_again(monkeypatch, settings, wait_s):
    """A lone coordinator knows of nobody who starts nodes."""
    front, *_ = plan_cluster(settings, {}, MODEL, PLACE)
    assert received(front, COORDINATOR, monkeypatch)["node_wait_s"] == wait_s


def test_a_flag_goes_to_every_process_that_knows_it_and_to_no_other(monkeypatch):
    passed = {"block_size": 32, "max_logprobs": 3, "max_num_seqs": 5, "transfer_timeout_s": 7.0, "log_level": "debug"}
    passed["lora"] = ("sql=/adapters/sql", "org/chat=/adapters/chat")
    front, prefill, decode = plan_cluster(ClusterSettings(), passed, MODEL, PLACE)
    front_values = received(front, COORDINATOR, monkeypatch)
    prefill_values = received(prefill, PREFILL, monkeypatch)
    decode_values = received(decode, DECODE, monkeypatch)
    assert (front_values["max_logprobs"], front_values["log_level"]) == (3, "debug")
    assert (prefill_values["block_size"], prefill_values["transfer_timeout_s"]) == (32, 7.0)
    assert (decode_values["block_size"], decode_values["max_num_seqs"]) == (32, 5)
    assert prefill_values["lora"] == decode_values["lora"] == passed["lora"]
    assert not {"block_size", "max_num_seqs", "lora"} & set(front_values)


def test_secrets_travel_in_the_environment_only():
    for process in plan_cluster(ClusterSettings(), {"api_key": "k3y"}, MODEL, PLACE):
        assert not any("s3cret" in argument or "k3y" in argument for argument in process.argv)
        assert process.environment["SPLITSERVE_FLEET_SECRET"] == "s3cret"


def test_the_launchers_environment_does_not_overrule_the_plan(monkeypatch):
    monkeypatch.setenv("SPLITSERVE_FAILPOINTS", "sent:3=kill")
    monkeypatch.setenv("SPLITSERVE_GRPC_PORT", "1234")
    monkeypatch.setenv("SPLITSERVE_FLEET_SECRET", "other")
    front, *_ = plan_cluster(ClusterSettings(grpc_port=50051), {}, MODEL, PLACE)
    values = received(front, COORDINATOR, monkeypatch)
    assert (values["grpc_port"], values["fleet_secret"]) == (50051, "s3cret")
    assert front.environment["SPLITSERVE_FAILPOINTS"] == "sent:3=kill"  # which no flag says


def test_what_is_passed_on_does_not_overrule_the_plan():
    values = flat(build(up_settings_class(), {}))  # as `splitserve up` without flags passes them
    assert plan_cluster(ClusterSettings(), values, MODEL, PLACE) == plan_cluster(ClusterSettings(), {}, MODEL, PLACE)


def test_a_served_model_name_may_be_chosen(monkeypatch):
    front, *_ = plan_cluster(ClusterSettings(), {"served_model_name": "mine"}, MODEL, PLACE)
    assert received(front, COORDINATOR, monkeypatch)["served_model_name"] == "mine"


def test_up_knows_every_flag_of_the_processes():
    names = {field.name for field, _ in fields_of(up_settings_class())}
    for room in ROOMS:
        assert {field.name for field, _ in fields_of(room.settings_class)} <= names | PLANNED


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.role)
def test_flags_of_up_that_are_not_given_change_nothing(room):
    values = {name: value for name, value in flat(build(up_settings_class(), {})).items() if name not in PLANNED}
    given = {name: value for name, value in values.items() if value is not None}
    assert build(room.settings_class, given) == room.settings_class()


def test_settings_survive_the_way_through_a_command_line(monkeypatch):
    settings = build(DECODE.settings_class, {"model": "/m", "max_num_seqs": 3, "fleet_secret": "x", "cpus": "0-1"})
    settings = replaced(settings, block_size=8)
    monkeypatch.setattr(os, "environ", environment_of(settings))
    seen = []
    command: click.Command = settings_command(DECODE.settings_class, seen.append, name="decode", help="")
    command.main(command_of(DECODE, settings)[3:], standalone_mode=False)
    assert seen == [settings]


def planned_with_vllm(place=PLACE, **settings):
    settings = ClusterSettings(engine="vllm", vllm_python="/vllm/bin/python", **settings)
    return plan_cluster(settings, flat(build(up_settings_class(), {})), MODEL, place)


def test_nodes_with_vllm_run_in_its_environment(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    coordinator, *nodes = planned_with_vllm(prefill=1, decode=1, vllm_flag=("--enforce-eager",))
    assert coordinator.argv[0] == sys.executable
    for node, role, cpus in zip(nodes, ("prefill", "decode"), ("0,1", "2,5"), strict=True):
        assert node.argv[:4] == ("/vllm/bin/python", "-m", "splitserve_vllm", role)
        assert node.argv[-3:] == ("--", "--enforce-eager", "--gpu-memory-utilization=0.45")
        assert node.environment["VLLM_CPU_OMP_THREADS_BIND"] == cpus
        monkeypatch.setattr(os, "environ", dict(node.environment))
        seen = []
        command = settings_command(type(node.settings), seen.append, name=role, help="")
        command.main(list(node.argv[4:-3]), standalone_mode=False)
        assert seen == [node.settings]
        assert node.settings.link.fleet_secret == PLACE.fleet_secret
        assert node.settings.kv_bind == f"ipc:///run/x/{role}-0"


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization=0.3", "--kv_cache_memory_bytes=1000000"])
def test_vllms_own_memory_flags_win(flag):
    _, *nodes = planned_with_vllm(mixed=2, vllm_flag=(flag,))
    assert all(node.argv[-2:] == ("--", flag) for node in nodes)


def test_a_node_with_vllm_has_a_device_of_its_own_where_there_are_enough():
    _, *nodes = planned_with_vllm(dataclasses.replace(PLACE, cuda_devices=("4", "7")), mixed=2)
    assert [node.environment["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["4", "7"]
    assert all(node.argv[-1] == "--" for node in nodes)


def test_up_has_the_flags_of_nodes_with_vllm_with_the_same_defaults():
    ours = {field.name: field.default for field, _ in fields_of(up_settings_class())}
    for room in node_rooms("vllm"):
        for field, _ in fields_of(room.settings_class):
            assert field.name in PLANNED or field.default == ours[field.name]


class Ended:
    """A follower that has ended well."""

    def wait(self):
        return 0


def test_ranks_that_a_node_starts_are_told_what_it_was(monkeypatch):
    """A flag that the node was given wins over its environment, and must with them."""
    given = {"model": "/m", "tensor_parallel_size": 3, "max_num_seqs": 3, "fleet_secret": "s3cret"}
    settings = build(DECODE.settings_class, given)
    environment = {"SPLITSERVE_BLOCK_SIZE": "32", "SPLITSERVE_FLEET_SECRET_FILE": "/other", "SPLITSERVE_NATIVE": "off"}
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", **environment})
    started = []

    def popen(argv, *, env, **_):
        started.append((argv, env))
        return Ended()

    monkeypatch.setattr(rank_processes.subprocess, "Popen", popen)
    monkeypatch.setattr(rank_processes, "_held", held := [])
    rank_processes.start_followers(DECODE.package, settings, "d0")
    for port in held:
        port.close()
    assert [env["RANK"] for _, env in started] == ["1", "2"]
    for argv, env in started:
        assert (env["WORLD_SIZE"], env["PATH"], env["SPLITSERVE_NATIVE"]) == ("3", "/bin", "off")
        assert argv[1:3] == ["-m", "serving_core.process.child"]
        follower = Process("d0", DECODE.role, tuple(argv[4:]), env)
        assert received(follower, DECODE, monkeypatch) == {**flat(settings), "name": "d0"}


def test_every_rank_has_a_share_of_the_cpus(monkeypatch):
    """Four CPUs over three ranks of prefill and one of decode."""
    settings = ClusterSettings(prefill_tp=3)
    _, prefill, decode = plan_cluster(settings, {"tensor_parallel_size": 9}, MODEL, PLACE)
    prefill_values = received(prefill, PREFILL, monkeypatch)
    decode_values = received(decode, DECODE, monkeypatch)
    assert (prefill_values["tensor_parallel_size"], prefill_values["cpus"]) == (3, "0,1,2")
    assert (decode_values["tensor_parallel_size"], decode_values["cpus"]) == (1, "5")


def test_stages_are_ranks_too(monkeypatch):
    """Four CPUs over two stages of one rank of prefill and one of two of decode."""
    settings = ClusterSettings(prefill_pp=2, decode_tp=2)
    _, prefill, decode = plan_cluster(settings, {"pipeline_parallel_size": 9}, MODEL, PLACE)
    told = [received(prefill, PREFILL, monkeypatch), received(decode, DECODE, monkeypatch)]
    assert [(values["tensor_parallel_size"], values["pipeline_parallel_size"]) for values in told] == [(1, 2), (2, 1)]
    assert [values["cpus"] for values in told] == ["0,1", "2,5"]


def test_ranks_share_cpus_where_there_are_too_few(monkeypatch):
    place = dataclasses.replace(PLACE, cpus=(3, 4))
    _, prefill, decode = plan_cluster(ClusterSettings(prefill_tp=2, decode_tp=4), {}, MODEL, place)
    assert set(received(prefill, PREFILL, monkeypatch)["cpus"].split(",")) == {"3", "4"}
    assert set(received(decode, DECODE, monkeypatch)["cpus"].split(",")) == {"3", "4"}


def test_the_data_plane_of_torch_dist_is_on_the_loopback(monkeypatch):
    *_, decode = plan_cluster(ClusterSettings(), {"kv_transport": "torch_dist"}, MODEL, PLACE)
    values = received(decode, DECODE, monkeypatch)
    assert (values["kv_transport"], values["kv_bind"]) == ("torch_dist", "")


@pytest.mark.parametrize(("folder", "is_taken"), [(86 * "x", True), (91 * "x", False), (46 * "ä", False)])
def test_sockets_are_where_their_paths_are_short_enough(folder, is_taken, monkeypatch):
    *_, decode = plan_cluster(ClusterSettings(), {}, MODEL, dataclasses.replace(PLACE, socket_dir=f"/{folder}"))
    assert received(decode, DECODE, monkeypatch)["kv_bind"] == (f"ipc:///{folder}/decode-0" if is_taken else "")


def test_nodes_on_other_hosts_find_the_coordinator_and_their_own_addresses(monkeypatch):
    place = dataclasses.replace(PLACE, socket_dir="", cpus=(), fleet_host="10.0.0.1")
    front, *nodes = plan_cluster(ClusterSettings(ray="auto"), {}, MODEL, place)
    values = received(front, COORDINATOR, monkeypatch)
    assert (values["fleet_host"], values["host"]) == ("10.0.0.1", "127.0.0.1")
    for node, room in zip(nodes, (PREFILL, DECODE), strict=True):
        values = received(node, room, monkeypatch)
        assert (values["coordinator"], values["kv_bind"], values["cpus"]) == ("10.0.0.1:4000", "", "")


def test_paths_are_told_in_full_to_whoever_runs_in_another_folder(tmp_path, monkeypatch):
    """What is not here stays as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    _, _, node = plan_cluster(ClusterSettings(), {}, MODEL, PLACE)
    texts = {name for name, value in flat(node.settings).items() if value == ""}
    told = in_full(replaced(node.settings, **dict.fromkeys(texts, "here"), lora=("a=here", "b=gone/c=d")))
    changed = {name for name in texts if told[name] != "here"}
    folders = {"speculative_model", "lora_root", "kv_disk_path", "weights_disk_path"}
    assert changed == folders | {"tls_cert", "tls_key", "tls_ca"}
    assert {told[name] for name in changed} == {str(tmp_path / "here")}
    assert told["lora"] == (f"a={tmp_path}/here", "b=gone/c=d")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, "prefill-0 decode-0"),
        ({"prefill": 2}, "prefill-0 prefill-1 decode-0"),
        ({"mixed": 2}, "mixed-0 mixed-1"),
        ({"prefill": 1, "mixed": 1}, "prefill-0 mixed-0"),
        ({"prefill": 0, "decode": 1, "mixed": 1}, "decode-0 mixed-0"),
    ],
)
def test_nodes_of_every_role_by_number(given, names, monkeypatch):
    _, *nodes = plan_cluster(ClusterSettings(**given), {}, MODEL, PLACE)
    assert " ".join(node.name for node in nodes) == names
    for node in nodes:
        room = next(room for room in ROOMS if room.role == node.name[:-2])
        assert received(node, room, monkeypatch)["name"] == node.name
        assert node.role == room.role


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, "prefill-0"),
        ({"prefill": 2}, "prefill-0 prefill-1"),
        ({"decode": 1}, "prefill-0 decode-0"),
        ({"mixed": 2}, "mixed-0 mixed-1"),
    ],
)
def test_for_embeddings_nobody_has_to_write(given, names):
    _, *nodes = plan_cluster(ClusterSettings(**given), {}, MODEL, PLACE, embeds=True)
    assert " ".join(node.name for node in nodes) == names
    with pytest.raises(SettingsError, match="nobody would prefill"):
        plan_cluster(ClusterSettings(prefill=0), {}, MODEL, PLACE, embeds=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill": 0}, "nobody would prefill: --prefill or --mixed must be above 0"),
        ({"decode": 0}, "nobody would decode: --decode or --mixed must be above 0"),
    ],
)
def test_a_part_that_nobody_would_do_is_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        plan_cluster(ClusterSettings(**given), {}, MODEL, PLACE)


def test_nodes_get_a_certificate_with_a_ca_alone():
    given = {"tls_cert": "c", "tls_key": "k"}
    for passed, expected in ((given, ("", "", "")), (given | {"tls_ca": "a"}, ("c", "k", "a"))):
        coordinator, *nodes = (flat(each.settings) for each in plan_cluster(ClusterSettings(), passed, MODEL, PLACE))
        assert (coordinator["tls_cert"], coordinator["tls_key"]) == ("c", "k")
        for node in nodes:
            assert (node["tls_cert"], node["tls_key"], node["tls_ca"]) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("0", "1", "2"), ["0", "1", "2,0"]),
        (("GPU-a", "GPU-b"), ["GPU-a", "GPU-b", "GPU-a,GPU-b"]),
        (("3",), [None, None, None]),  # all share the one that there is
        ((), [None, None, None]),
    ],
)
def test_each_rank_gets_a_cuda_device_in_turn(devices, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = ClusterSettings(prefill=2, decode=1, decode_tp=2)
    _, *nodes = plan_cluster(settings, {}, MODEL, dataclasses.replace(PLACE, cuda_devices=devices))
    assert [node.environment.get("CUDA_VISIBLE_DEVICES") for node in nodes] == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(("0",), 0.225), (("0", "1"), 0.45), (("0", "1", "2"), 0.45), (("0", "1", "2", "3"), 0.9), ((), 0.9)],
)
def test_ranks_that_share_a_device_divide_its_memory(devices, expected):
    settings, place = ClusterSettings(prefill=2, decode_tp=2), dataclasses.replace(PLACE, cuda_devices=devices)
    _, *nodes = plan_cluster(settings, {}, MODEL, place)
    assert {node.settings.engine.gpu_memory_utilization for node in nodes} == {expected}
    _, *nodes = plan_cluster(settings, {"gpu_memory_utilization": 0.3}, MODEL, place)
    assert {node.settings.engine.gpu_memory_utilization for node in nodes} == {0.3}


def test_the_cuda_devices_that_there_are(tmp_path):
    listed = f"{tmp_path}/gpus/*", f"{tmp_path}/nvidia[0-9]*"
    assert cuda_devices({}, listed) == ()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "gpus"):
        (tmp_path / name).mkdir()
    assert cuda_devices({}, listed) == ("0", "1", "2"), "where the driver's folder is hidden"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir()
    assert cuda_devices({}, listed) == ("0", "1")
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "1, GPU-c"}, listed) == ("1", "GPU-c")
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": ""}, listed) == ()
