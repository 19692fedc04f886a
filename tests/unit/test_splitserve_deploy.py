"""The compose file starts the commands that `splitserve up` starts, with flags that exist."""

import importlib
import os
import re
from pathlib import Path

import pytest
import yaml

from coordinator.settings import CoordinatorSettings, check_settings
from engine.flags import fields_of, settings_command
from kv_transfer.transports.zmq import WILDCARDS
from splitserve.cluster import ClusterSettings, Place, plan_cluster
from splitserve.healthcheck import is_healthy
from splitserve.models import LocalModel
from splitserve.rooms import ROOMS, flat
from tests.scripted_server import Script, serving

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
ROLES = {room.role: room for room in ROOMS}
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROCESSES = ("coordinator", *NODES)


def interpolated(text: str) -> str:
    """What compose makes of ${NAME:-default} and ${NAME:?message}."""
    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda found: found[3] if found[2] == "-" else f"<{found[1]}>", text)


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
    assert published == {"coordinator": [f"{port}:{port}" for port in (values["port"], values["http_port"])]}
    assert COMPOSE["networks"]["fleet"] == {"internal": True}


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_is_checked_reaped_and_given_time_to_drain(name):
    service = SERVICES[name]
    _, python, dash_m, module, *arguments = service["healthcheck"]["test"]
    assert (python, dash_m) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    assert arguments[1:] == ([] if name == "coordinator" else [name])
    assert service["init"] is True
    drain_s = next(f.default for f, _ in fields_of(ROLES[service["command"][0]].settings_class) if f.name == "drain_s")
    assert int(service["stop_grace_period"].removesuffix("s")) > drain_s


@pytest.mark.parametrize("name", NODES)
def test_nodes_start_after_the_coordinator(name):
    assert SERVICES[name]["depends_on"] == {"coordinator": {"condition": "service_healthy"}}


def test_the_image_holds_every_package_and_runs_as_nobody_in_particular():
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \w+$", dockerfile, re.MULTILINE))
    assert copied == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert re.search(r"^USER [1-9]\d*$", dockerfile, re.MULTILINE)


def test_the_health_check_knows_the_coordinator_and_its_nodes():
    script = Script()
    with serving(script) as target:
        assert is_healthy(target)
        assert is_healthy(target, "p0")
        assert not is_healthy(target, "p1")
