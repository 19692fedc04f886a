"""The compose files start what `splitserve up` starts, with settings that exist, and old and new compose take them."""

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from coordinator.settings import CoordinatorSettings, check_settings
from kv_transfer.transports.zmq import WILDCARDS
from serving_core.flags import ENV_PREFIX, fields_of, settings_command
from serving_node.process import node_command
from serving_node.settings import check_network, is_encrypted
from splitserve.commands.certs import certs
from splitserve.commands.engines import with_engine
from splitserve.launch.cluster import ROOMS, ClusterSettings, Place, flat, plan_cluster
from splitserve.launch.models import LocalModel
from splitserve_vllm.seam import TESTED
from splitserve_vllm.settings import check_vllm_flags
from tests.tls_kit import authority

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FILES = ("docker-compose.yml", "docker-compose.v2.yml", "docker-compose.tls.yml")
TEXTS = {name: (DEPLOY / name).read_text() for name in FILES}
COMPOSE, V2, TLS = (yaml.safe_load(text) for text in TEXTS.values())
VLLM_TEXT = (DEPLOY / "docker-compose.vllm.yml").read_text()
VLLM = yaml.safe_load(VLLM_TEXT)
VLLM_DOCKERFILE = (DEPLOY / "Dockerfile.vllm").read_text()
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+):?-([^}]*)\}")
SERVICES = COMPOSE["services"]
ROLES = {room.role: room for room in ROOMS}
NODES = ("prefill", "decode", "prefill-gpu", "decode-gpu")
PROCESSES = ("coordinator", *NODES)
SECRETS = "/run/secrets/"
TLS_FOLDER = "/tls/"
# What the schema of Compose 1.29 knows, of what is used here.
OLD_KEYS = {
    *("build", "cap_add", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "environment", "healthcheck"),
    *(
        "image",
        "init",
        "logging",
        "network_mode",
        "networks",
        "ports",
        "profiles",
        "read_only",
        "restart",
        "scale",
        "secrets",
    ),
    *("security_opt", "shm_size", "stop_grace_period", "tmpfs", "user", "volumes"),
}
OLD_HEALTHCHECK_KEYS = {"interval", "retries", "start_period", "test", "timeout"}
SECRET_FLAGS = {"SPLITSERVE_API_KEY_FILE": "api_key", "SPLITSERVE_FLEET_SECRET_FILE": "fleet_secret"}


def interpolated(text: str) -> str:
    """What compose makes of ${NAME:-default}, where nothing is set."""
    return VARIABLE.sub(lambda found: found[2], text)


@pytest.fixture
def settings_of(tmp_path, monkeypatch):
    """Gives the settings that a service's process ends up with, where its secrets are files of a folder."""

    def settings(service, **more_environment):
        role, *arguments = map(interpolated, SERVICES[service]["command"])
        environment = {name: interpolated(value) for name, value in SERVICES[service]["environment"].items()}
        for name in SERVICES[service]["secrets"]:
            (tmp_path / name).write_text(f"the {name}\n")
        environment = {name: value.replace(SECRETS, f"{tmp_path}/") for name, value in environment.items()}
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment | more_environment)
            command = settings_command(ROLES[role].settings_class, seen.append, name=role, help="")
            command.main(arguments, standalone_mode=False)
        return seen[0]

    return settings


def test_one_coordinator_and_nodes_of_each_role_by_profile():
    roles = {name: SERVICES[name]["command"][0] for name in PROCESSES}
    assert roles == {"coordinator": "coordinator"} | {name: name.removesuffix("-gpu") for name in NODES}
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles == {
        "model": [],
        "coordinator": [],
        "prefill": ["cpu"],
        "decode": ["cpu"],
        "prefill-gpu": ["gpu"],
        "decode-gpu": ["gpu"],
        "prometheus": ["obs"],
        "grafana": ["obs"],
    }


@pytest.mark.parametrize("name", PROCESSES)
def test_command_lines_are_understood_and_carry_the_fleets_secret(name, settings_of):
    values = flat(settings_of(name))
    assert values["fleet_secret"] == "the fleet_secret"
    assert values["model"] == ""


@pytest.mark.parametrize("name", NODES)
def test_nodes_scale_they_have_no_name_in_the_file_and_listen_where_others_can_dial(name, settings_of):
    settings = settings_of(name)
    values = flat(settings)
    assert (values["name"], values["coordinator"], values["cpus"]) == ("", "coordinator:50052", "")
    assert not values["kv_bind"].startswith((*WILDCARDS, "tcp://127."))
    assert SERVICES[name]["networks"] == ["fleet"]
    assert not {"container_name", "hostname", "ports"} & set(SERVICES[name])
    check_network(settings)


def test_the_coordinator_may_serve_off_loopback(settings_of):
    settings = settings_of("coordinator")
    assert isinstance(settings, CoordinatorSettings)
    assert (settings.host, settings.http_host, settings.fleet_host) == ("0.0.0.0",) * 3
    assert settings.api_key == "the api_key"
    check_settings(settings)


def test_it_is_the_processes_that_up_starts():
    place = Place(fleet_port=1, socket_dir="/s", fleet_secret="x", instance_id="i", cpus=())
    nodes = {role: SERVICES[role]["scale"] for role in ("prefill", "decode")}
    up = plan_cluster(ClusterSettings(**nodes), {}, LocalModel(Path("/m"), "m"), place)
    roles = ["coordinator", *(role for role, number in nodes.items() for _ in range(number))]
    assert [process.argv[2] for process in up] == [ROLES[role].package for role in roles]


def test_only_the_public_ports_are_published_and_the_fleet_has_a_network_of_its_own(settings_of):
    published = {
        name: [*map(interpolated, service["ports"])] for name, service in SERVICES.items() if "ports" in service
    }
    values = flat(settings_of("coordinator"))
    assert published.pop("coordinator") == [f"{port}:{port}" for port in (values["grpc_port"], values["http_port"])]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert COMPOSE["networks"]["fleet"] == {"internal": True}


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_is_checked_by_grpc_reaped_and_given_time_to_drain(name, settings_of):
    service = SERVICES[name]
    values = flat(settings_of(name))
    health_port = service["environment"].get("SPLITSERVE_HEALTH_PORT")
    target = f"http://localhost:{health_port}" if health_port else f"fleet://localhost:{values['fleet_port']}"
    assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "splitserve.healthcheck", target]
    assert service["init"] is True
    drain_s = next(f.default for f, _ in fields_of(ROLES[service["command"][0]].settings_class) if f.name == "drain_s")
    assert int(service["stop_grace_period"].removesuffix("s")) > drain_s


@pytest.mark.parametrize("name", NODES)
def test_nodes_start_once_the_model_is_there_but_do_not_wait_for_the_coordinator(name):
    assert SERVICES["coordinator"]["depends_on"] == {"model": {"condition": "service_completed_successfully"}}
    assert SERVICES[name]["depends_on"] == {"coordinator": {"condition": "service_started"}}


@pytest.mark.parametrize("name", ["model", *PROCESSES, "prometheus", "grafana"])
def test_containers_can_change_nothing_of_their_own(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "user", "cap_add"} & set(service)


def test_secrets_are_files_and_only_the_coordinator_and_who_looks_at_it_know_the_clients_key():
    holders = [name for name, service in SERVICES.items() if "api_key" in service.get("secrets", [])]
    assert holders == ["coordinator", "prometheus", "grafana"]
    for name in PROCESSES:
        told = {key: value for key, value in SERVICES[name]["environment"].items() if key in SECRET_FLAGS}
        assert told == {key: f"{SECRETS}{SECRET_FLAGS[key]}" for key in told}
        assert sorted(SECRET_FLAGS[key] for key in told) == sorted(SERVICES[name]["secrets"])
        assert not {"SPLITSERVE_API_KEY", "SPLITSERVE_FLEET_SECRET"} & set(SERVICES[name]["environment"])
    assert set(COMPOSE["secrets"]) == set(SECRET_FLAGS.values())
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())


def test_the_example_has_every_variable_with_its_default():
    example = re.findall(r"^#?([A-Z0-9_]+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE)
    ours = {name: value for name, value in example if not name.startswith("COMPOSE_")}
    used = [pair for text in (*TEXTS.values(), VLLM_TEXT) for pair in VARIABLE.findall(text)]
    assert ours == dict(used)
    assert len(set(used)) == len(ours)
    compose = {name: value for name, value in example if name.startswith("COMPOSE_")}
    assert compose["COMPOSE_PROFILES"] in ("cpu", "gpu", "obs")
    assert set(compose["COMPOSE_FILE"].split(":")) == set(FILES)


def test_the_images_arguments_have_the_dockerfiles_defaults():
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    build = SERVICES["model"]["build"]
    assert {name: interpolated(value) for name, value in build["args"].items()} == arguments
    assert f" AS {interpolated(build['target'])}\n" in dockerfile


def test_old_and_new_compose_take_the_files():
    """1.29 refuses a file that has what it does not know; what is only for newer ones is in a file of its own."""
    for file in (COMPOSE, TLS, VLLM):
        assert not {"name", "version"} & set(file)
        assert {key for service in file["services"].values() for key in service} <= OLD_KEYS
        checks = [service["healthcheck"] for service in file["services"].values() if "healthcheck" in service]
        assert {key for check in checks for key in check} <= OLD_HEALTHCHECK_KEYS
    assert set(V2["services"]) == set(PROCESSES)
    assert all(set(service) == {"healthcheck"} for service in V2["services"].values())


@pytest.mark.parametrize("name", PROCESSES)
def test_one_more_file_is_tls_for_every_process(name, settings_of, tmp_path):
    folder = authority(tmp_path / "certs", "coordinator")
    environment = TLS["services"][name]["environment"]
    (volume,) = TLS["services"][name]["volumes"]
    assert volume.split(":")[1:] == [TLS_FOLDER.rstrip("/"), "ro"]
    settings = settings_of(name, **{key: value.replace(TLS_FOLDER, f"{folder}/") for key, value in environment.items()})
    if name == "coordinator":
        check_settings(settings)
    else:
        check_network(settings)
        assert is_encrypted(settings)
    known = {field.name for field, _ in fields_of(type(settings))}
    assert {key.removeprefix(ENV_PREFIX).lower() for key in environment} <= known


def test_each_role_sees_its_own_private_key_alone():
    maker = TLS["services"]["certificates"]
    source_of = {volume.split(":")[0] for name in PROCESSES for volume in TLS["services"][name]["volumes"]}
    assert source_of == {"coordinator-tls", "node-tls"}
    assert [volume.split(":")[0] for volume in maker["volumes"]] == ["authority", "coordinator-tls", "node-tls"]
    words = maker["command"][0].split()
    assert {after for before, after in pairwise(words) if before == "certs"} == {"--out"}
    assert {"--out", "--host"} <= {name for option in certs.params for name in option.opts}


@pytest.mark.parametrize("name", ["prefill-gpu", "decode-gpu"])
def test_one_more_file_has_vllm_on_the_gpus(name, tmp_path, monkeypatch):
    role, *words = map(interpolated, VLLM["services"][name]["command"])
    environment = {key: interpolated(value) for key, value in SERVICES[name]["environment"].items()}
    (tmp_path / "fleet_secret").write_text("the fleet_secret\n")
    environment = {key: value.replace(SECRETS, f"{tmp_path}/") for key, value in environment.items()}
    monkeypatch.setattr(os, "environ", environment)
    command, arguments = with_engine(role, node_command(role), words)
    seen = []
    monkeypatch.setattr("splitserve_vllm.process.run_node", lambda *given: seen.append(given))
    command.main(arguments, standalone_mode=False)
    [(started_as, settings, flags)] = seen
    assert started_as == role == name.removesuffix("-gpu")
    assert (settings.link.fleet_secret, settings.link.coordinator) == ("the fleet_secret", "coordinator:50052")
    assert (settings.kv_bind, settings.health_port) == ("tcp://eth0:*", 50053)
    check_vllm_flags(flags)
    assert flags == ("--max-model-len", "8192")


def test_the_image_of_vllm_is_of_a_tested_version_and_has_every_package():
    assert VLLM["services"]["prefill-gpu"]["build"] == VLLM["services"]["decode-gpu"]["build"]
    build = VLLM["services"]["prefill-gpu"]["build"]
    base = interpolated(build["args"]["VLLM"])
    assert f"ARG VLLM={base}\n" in VLLM_DOCKERFILE
    assert base.rpartition(":v")[2] in TESTED
    copied = set(re.findall(r"^COPY (\w+) \w+$", VLLM_DOCKERFILE, re.M))
    assert copied == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert re.findall(r"^USER (\S+)$", VLLM_DOCKERFILE, re.M) == ["10001"]
    kept_in = dict(re.findall(r"(\w+)=(/triton\S*)", VLLM_DOCKERFILE))
    assert set(kept_in) == {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


DEADLINE_S = 60.0
COMPOSES = (["docker", "compose"], ["docker-compose"])


@pytest.mark.parametrize("words", COMPOSES, ids=" ".join)
@pytest.mark.parametrize("files", [FILES[:1], FILES[::2], FILES, (FILES[0], "docker-compose.vllm.yml")])
def test_compose_itself_takes_the_files(files, words):
    version = _version(words)
    if not version:
        pytest.skip(f"there is no {' '.join(words)}")
    if FILES[1] in files and "1.29" in version:
        pytest.skip("docker-compose 1.29 refuses start_interval, which is in a file of its own for that")
    named = [word for name in files for word in ("-f", str(DEPLOY / name))]
    profiles = [word for name in ("cpu", "gpu", "obs") for word in ("--profile", name)]
    done = subprocess.run([*words, *named, *profiles, "config"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert set(SERVICES) <= set(yaml.safe_load(done.stdout)["services"])


def _version(words: list[str]) -> str:
    """What this compose says of its version; nothing where there is none."""
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run([*words, "version"], capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout if done.returncode == 0 else ""
