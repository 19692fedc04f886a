"""The compose file starts the commands that `splitserve up` starts, with flags that exist."""

import asyncio
import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coordinator.settings import CoordinatorSettings, check_settings
from engine.cpus import parse_cpus
from engine.flags import fields_of, settings_command
from kv_transfer.transports.zmq import WILDCARDS
from splitserve.cluster import ClusterSettings, Place, plan_cluster
from splitserve.models import LocalModel
from splitserve.rooms import ROOMS, flat
from tests.scripted_nodes import cluster, run

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
COMPOSE_FILE = (ROOT / "deploy" / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_FILE)
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
VARIABLE = re.compile(r"\$\{(\w+):?([-?])([^}]*)\}")
SERVICES = COMPOSE["services"]
ROLES = {room.role: room for room in ROOMS}
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROCESSES = ("coordinator", *NODES)


def interpolated(text: str) -> str:
    """What compose makes of ${NAME:-default} and ${NAME:?message}."""
    return VARIABLE.sub(lambda found: found[3] if found[2] == "-" else f"<{found[1]}>", text)


def settings_of(service: str, monkeypatch):
    """The settings that the service's process ends up with."""
    role, *arguments = map(interpolated, SERVICES[service]["command"])
    environment = {name: interpolated(value) for name, value in SERVICES[service]["environment"].items()}
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environment)
        command = settings_command(ROLES[role].settings_class, seen.append, name=role, help="")
        command.main(arguments, standalone_mode=False)
    return seen[0]


def test_one_coordinator_two_prefill_and_two_decode_nodes():
    assert set(SERVICES) == {"model", *PROCESSES}
    roles = [SERVICES[name]["command"][0] for name in PROCESSES]
    assert roles == ["coordinator", "prefill", "prefill", "decode", "decode"]


@pytest.mark.parametrize("name", PROCESSES)
def test_command_lines_are_understood_and_carry_the_fleets_secret(name, monkeypatch):
    values = flat(settings_of(name, monkeypatch))
    assert values["fleet_secret"] == "<SPLITSERVE_FLEET_SECRET>"
    assert values["model"] == ""
    if name != "coordinator":
        assert (values["name"], values["coordinator"]) == (name, "coordinator:50052")


def test_the_coordinator_may_serve_off_loopback(monkeypatch):
    settings = settings_of("coordinator", monkeypatch)
    assert isinstance(settings, CoordinatorSettings)
    assert (settings.host, settings.http_host, settings.fleet_host) == ("0.0.0.0",) * 3
    assert settings.api_key == "<SPLITSERVE_API_KEY>"
    check_settings(settings)


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
def test_decode_nodes_listen_where_prefill_nodes_can_dial(name, monkeypatch):
    kv_bind = flat(settings_of(name, monkeypatch))["kv_bind"]
    assert not kv_bind.startswith((*WILDCARDS, "tcp://127."))
    assert SERVICES[name]["networks"] == ["fleet"]


def test_it_is_the_processes_that_up_starts():
    place = Place(fleet_port=1, socket_dir="/s", fleet_secret="x", instance_id="i", cpus=())
    up = plan_cluster(ClusterSettings(prefill=2, decode=2), {}, LocalModel(Path("/m"), "m"), place)
    packages = [process.argv[2] for process in up]
    assert packages == [ROLES[SERVICES[name]["command"][0]].package for name in PROCESSES]


def test_only_the_public_ports_are_published_and_the_fleet_has_a_network_of_its_own(monkeypatch):
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    values = flat(settings_of("coordinator", monkeypatch))
    assert {name: [*map(interpolated, ports)] for name, ports in published.items()} == {
        "coordinator": [f"{port}:{port}" for port in (values["port"], values["http_port"])]
    }
    assert COMPOSE["networks"]["fleet"] == {"internal": True}


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_is_checked_reaped_and_given_time_to_drain(name):
    service = SERVICES[name]
    _, python, dash_m, module, *arguments = service["healthcheck"]["test"]
    assert (python, dash_m) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    assert arguments == (["localhost:8000"] if name == "coordinator" else ["coordinator:8000", name])
    assert service["init"] is True
    drain_s = next(f.default for f, _ in fields_of(ROLES[service["command"][0]].settings_class) if f.name == "drain_s")
    assert int(service["stop_grace_period"].removesuffix("s")) > drain_s


@pytest.mark.parametrize("name", NODES)
def test_nodes_start_once_the_model_is_there_but_do_not_wait_for_the_coordinator(name):
    assert SERVICES["coordinator"]["depends_on"] == {"model": {"condition": "service_completed_successfully"}}
    assert SERVICES[name]["depends_on"] == {"coordinator": {"condition": "service_started"}}


def test_the_image_holds_every_package_and_runs_as_nobody_in_particular():
    copied = set(re.findall(r"^COPY (\w+) \w+$", DOCKERFILE, re.MULTILINE))
    assert copied == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert re.search(r"^USER [1-9]\d*$", DOCKERFILE, re.MULTILINE)


def test_the_nodes_divide_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    shares = [parse_cpus(flat(settings_of(name, monkeypatch))["cpus"]) for name in NODES]
    assert sorted(cpu for share in shares for cpu in share) == list(range(16))
    assert {len(share) for share in shares} == {4}


def test_only_the_coordinator_knows_the_clients_key():
    holders = [name for name in PROCESSES if "SPLITSERVE_API_KEY" in SERVICES[name]["environment"]]
    assert holders == ["coordinator"]


def test_the_example_has_every_variable_with_its_default():
    example = dict(re.findall(r"^#?([A-Z0-9_]+)=(.*)$", (ROOT / "deploy" / ".env.example").read_text(), re.MULTILINE))
    used = {name: default for name, kind, default in VARIABLE.findall(COMPOSE_FILE) if kind == "-"}
    required = {name: "" for name, kind, _ in VARIABLE.findall(COMPOSE_FILE) if kind == "?"}
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE))
    assert {name: interpolated(value) for name, value in SERVICES["model"]["build"]["args"].items()} == arguments
    assert example == used | required


def test_old_and_new_compose_take_the_file():
    """1.29 refuses a file that has one of these, and newer ones do without."""
    assert not {"name", "version"} & set(COMPOSE)
    assert not any("start_interval" in SERVICES[name]["healthcheck"] for name in PROCESSES)


def test_the_dependencies_are_installed_before_the_sources_are_there():
    _, stage, *_ = re.split("^FROM ", DOCKERFILE, flags=re.MULTILINE)
    assert re.findall(r"^COPY (.*)$", stage, re.MULTILINE) == ["pyproject.toml constraints.txt .ci/requirements.py ./"]
    assert "requirements.txt" in stage


def test_nothing_that_was_built_here_gets_into_the_image():
    *_, last = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line]
    after = (ROOT / ".dockerignore").read_text().partition(f"{last}\n")[2].split()
    assert {"**/*.so", "**/build", "**/__pycache__"} <= set(after)


def check(*arguments):
    """The health check, as the container engine runs it."""
    command = [sys.executable, "-m", "splitserve.healthcheck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_the_health_check_knows_the_coordinator_and_its_nodes(tmp_path):
    async def scenario():
        async with cluster(tmp_path, ("p0", "d0"), http_port=0, api_key="k") as c:
            target = f"127.0.0.1:{c.server.http_port}"
            done = [await asyncio.to_thread(check, target, *node) for node in ((), ("p0",), ("d0",), ("p0&d0",))]
            assert [each.returncode for each in done] == [0, 0, 0, 1]
            assert done[-1].stderr == "not ready\n"
        async with cluster(tmp_path, (), http_port=0) as c:
            assert (await asyncio.to_thread(check, f"127.0.0.1:{c.server.http_port}")).returncode == 0

    run(scenario())


def test_the_health_check_of_a_coordinator_that_is_not_there_is_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
    done = check(target)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("the coordinator does not answer: ")
    assert len(done.stderr.splitlines()) == 1


def test_the_health_check_starts_no_grpc():
    code = "import splitserve.healthcheck, sys; print({'grpc', 'splitserve.client', 'click'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
