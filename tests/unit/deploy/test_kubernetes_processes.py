"""What the pods of deploy/kubernetes start: commands and settings that exist, ports that agree, probes that are
answered, secrets in files alone."""

import importlib.util
from urllib.parse import urlsplit

import pytest

from coordinator.api.http.middleware import OPEN_PATHS
from coordinator.settings import CoordinatorSettings, check_settings
from kv_transfer.descriptor import holder_address_of
from serving_core.flags import secrets_of
from serving_node.health import FOLLOWER_STATES, node_states
from serving_node.settings import NodeSettings, check_network
from serving_node.watchdog import LEAST_S, MARGIN
from splitserve.commands.variables import unknown_variables
from tests.unit.deploy.kubernetes_kit import (
    MODEL,
    VARIANTS,
    container,
    flags_of,
    named,
    objects,
    ours,
    settings_of,
    variables,
)

EVERY_ADDRESS = "::"  # of IPv4 and IPv6: tests/system/test_every_address.py
STOPPING_S = 5.0  # beside the drain: until it is heard of, and for the last words
SECRETS = {*secrets_of(CoordinatorSettings), *secrets_of(NodeSettings)}

every_pod = pytest.mark.parametrize(
    ("variant", "component"), [(variant, component) for variant in VARIANTS for component in ours(variant)]
)


def coordinator(variant, folder, monkeypatch):
    return flags_of(variant, ours(variant)["coordinator"], folder / "coordinator", monkeypatch)


def node(variant, folder, monkeypatch):
    return flags_of(variant, ours(variant)["node"], folder / "node", monkeypatch)


@every_pod
def test_the_command_line_is_understood_and_may_listen_off_loopback(variant, component, tmp_path, monkeypatch):
    settings = settings_of(variant, ours(variant)[component], tmp_path, monkeypatch)
    if component == "coordinator":
        assert isinstance(settings, CoordinatorSettings)
        assert (settings.model, settings.api_key, settings.fleet_secret) == (MODEL, "the api-key", "the fleet-secret")
        check_settings(settings)
    else:
        assert isinstance(settings, NodeSettings)
        assert (settings.engine.model, settings.link.fleet_secret) == (MODEL, "the fleet-secret")
        assert settings.link.name == "splitserve-node-0"
        monkeypatch.delenv("RANK", raising=False)
        check_network(settings)


@every_pod
def test_every_variable_is_a_setting(variant, component):
    pod = ours(variant)[component]
    for each in [container(pod), *pod["spec"]["initContainers"]]:
        assert unknown_variables(variables(variant, pod, each)) == ""


@every_pod
def test_secrets_come_from_files_and_stand_in_no_manifest(variant, component):
    pod = ours(variant)[component]
    for each in [container(pod), *pod["spec"]["initContainers"]]:
        flags = " ".join([*each["args"], *each.get("command", [])])
        for secret in SECRETS:
            assert f"--{secret.replace('_', '-')}" not in flags
            assert f"SPLITSERVE_{secret.upper()}" not in variables(variant, pod, each)
    assert not objects(variant, "Secret"), "it is made by whoever runs the cluster"
    (secrets,) = [volume["secret"] for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"]
    keys = {item["key"] for item in secrets["items"]}
    assert keys == ({"api-key", "fleet-secret"} if component == "coordinator" else {"fleet-secret"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_nodes_dial_the_fleets_port_and_clients_the_others(variant, tmp_path, monkeypatch):
    flags = coordinator(variant, tmp_path, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container(ours(variant)["coordinator"])["ports"]}
    assert ports == {"grpc": flags["grpc_port"], "fleet": flags["fleet_port"], "http": flags["http_port"]}
    host, port = node(variant, tmp_path, monkeypatch)["coordinator"].split(":")
    (dialled,) = named(variant, "Service", host)["spec"]["ports"]
    assert (dialled["port"], dialled["targetPort"]) == (int(port), "fleet")
    assert named(variant, "Service", host)["spec"]["publishNotReadyAddresses"] is True, "or no node could ever come"
    assert {flags[name] for name in ("host", "fleet_host", "http_host")} == {EVERY_ADDRESS}
    public = named(variant, "Service", "splitserve")["spec"]
    assert {each["targetPort"]: each["port"] for each in public["ports"]} == {"grpc": 50051, "http": 8000}
    assert "publishNotReadyAddresses" not in public


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_ports_of_a_node_are_those_that_it_listens_on(variant, tmp_path, monkeypatch):
    flags = node(variant, tmp_path, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container(ours(variant)["node"])["ports"]}
    kv = urlsplit(flags["kv_bind"])
    assert (kv.scheme, kv.hostname) == ("tcp", "10.1.2.3"), "that of the pod, which the others can dial"
    assert ports == {"health": flags["health_port"], "kv": kv.port, "metrics": flags["metrics_port"]}
    assert flags["metrics_host"] == EVERY_ADDRESS


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_network_lets_in_who_is_expected(variant, tmp_path, monkeypatch):
    def allowed(component):
        policy = named(variant, "NetworkPolicy", f"splitserve-{component}")["spec"]
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
        assert policy["policyTypes"] == ["Ingress"]
        return policy["ingress"]

    nodes = [{"podSelector": {"matchLabels": ours(variant)["node"]["metadata"]["labels"]}}]
    (to_node,) = allowed("node")
    assert to_node["from"] == nodes
    if variant == "leaderworkerset":
        assert "ports" not in to_node, "torch.distributed takes any"
    else:
        (ports,) = to_node["ports"]
        flags = node(variant, tmp_path, monkeypatch)
        _, last = holder_address_of(flags["kv_transport"], flags["kv_bind"])
        assert (ports["port"], ports["endPort"]) == (urlsplit(flags["kv_bind"]).port, last)
    to_fleet, to_public = allowed("coordinator")
    flags = coordinator(variant, tmp_path / "again", monkeypatch)
    assert to_fleet == {"from": nodes, "ports": [{"protocol": "TCP", "port": flags["fleet_port"]}]}
    assert [port["port"] for port in to_public["ports"]] == [flags["grpc_port"], flags["http_port"]]
    assert "from" not in to_public


@every_pod
def test_there_is_time_to_drain(variant, component, tmp_path, monkeypatch):
    pod = ours(variant)[component]
    drain_s = flags_of(variant, pod, tmp_path, monkeypatch)["drain_s"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= drain_s + STOPPING_S
    assert pod["spec"]["shareProcessNamespace"] is True
    assert "lifecycle" not in container(pod)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nodes_are_probed_at_services_of_their_health_port(variant, tmp_path, monkeypatch):
    flags, each = node(variant, tmp_path, monkeypatch), container(ours(variant)["node"])
    asked = {name: each[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in asked.values()} == {flags["health_port"]}
    services = {name: probe["service"] for name, probe in asked.items()}
    assert services == {"startup": "live", "liveness": "live", "readiness": "ready"}
    assert set(services.values()) < set(node_states(None, None)) == set(FOLLOWER_STATES)
    assert flags["health_host"] == EVERY_ADDRESS
    # Whoever is stuck ends by itself first, with a word in the log.
    liveness = each["livenessProbe"]
    waits_s = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert waits_s > flags["stuck_exit_s"] + LEAST_S + MARGIN
    startup = each["startupProbe"]
    if variant != "leaderworkerset":
        deadline_s = named(variant, "Deployment", "splitserve-node")["spec"]["progressDeadlineSeconds"]
        assert deadline_s > startup["periodSeconds"] * startup["failureThreshold"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_coordinator_is_probed_without_a_key(variant, tmp_path, monkeypatch):
    health = f"fleet://localhost:{coordinator(variant, tmp_path, monkeypatch)['fleet_port']}"  # as of compose's check
    each = container(ours(variant)["coordinator"])
    for name in ("startup", "liveness"):
        python, dash_m, module, target = each[f"{name}Probe"]["exec"]["command"]
        assert (python, dash_m, target) == ("python", "-m", health)
        assert importlib.util.find_spec(module) is not None
    ready = each["readinessProbe"]["httpGet"]
    assert ready["path"] in OPEN_PATHS
    assert ready.get("scheme", "HTTP") == ("HTTPS" if variant == "cpu with tls" else "HTTP")


@every_pod
def test_the_model_is_fetched_before_and_into_what_is_read_then(variant, component):
    pod = ours(variant)[component]
    (before,) = pod["spec"]["initContainers"]
    python, dash_m, module = before["command"]
    assert (python, dash_m) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    assert before["args"] == ["$(SPLITSERVE_MODEL)"]
    assert before["envFrom"] == container(pod)["envFrom"]
    mounts = [{mount["mountPath"]: mount for mount in each["volumeMounts"]} for each in (before, container(pod))]
    assert mounts[0]["/cache"] == {"name": "cache", "mountPath": "/cache"}
    assert mounts[1]["/cache"] == {"name": "cache", "mountPath": "/cache", "readOnly": True}
    assert variables(variant, pod, container(pod))["HF_HUB_OFFLINE"] == "1"


def test_a_group_of_pods_is_a_node_of_as_many_ranks(tmp_path, monkeypatch):
    variant = "leaderworkerset"
    settings = settings_of(variant, ours(variant)["node"], tmp_path, monkeypatch)
    workers = named(variant, "LeaderWorkerSet", "splitserve-node")["spec"]["leaderWorkerTemplate"]
    assert settings.engine.num_ranks == workers["size"] == 2
    told = variables(variant, ours(variant)["node"], container(ours(variant)["node"]))
    assert told["WORLD_SIZE"] == str(settings.engine.num_ranks)
    assert (told["RANK"], told["LOCAL_RANK"]) == ("0", "0")
    assert told["MASTER_ADDR"] == "splitserve-node-0.splitserve-node"
    assert told["MASTER_PORT"].isdecimal()
