"""What the pods of the chart start: commands and settings that exist, ports that agree, probes that are answered,
secrets in files alone."""

import importlib.util
from urllib.parse import urlsplit

import pytest

from coordinator.api.http.middleware import OPEN_PATHS
from coordinator.api_server_settings import ApiServerSettings
from coordinator.settings import CoordinatorSettings, check_settings
from kv_transfer.descriptor import holder_address_of
from serving_core.flags import secrets_of
from serving_node.health import FOLLOWER_STATES, node_states
from serving_node.settings import NodeSettings, check_network
from serving_node.watchdog import LEAST_S, MARGIN
from splitserve.commands.variables import unknown_variables
from splitserve_vllm.process import check_vllm_flags
from splitserve_vllm.settings import VllmSettings
from tests.unit.deploy.chart_kit import (
    VARIANTS,
    component,
    container,
    flags_of,
    named,
    objects,
    pods,
    pools,
    settings_of,
    variables,
    workloads,
)

EVERY_ADDRESS = "::"  # of IPv4 and IPv6: tests/system/test_every_address.py
STOPPING_S = 5.0  # beside the drain: until it is heard of, and for the last words
SECRETS = {*secrets_of(CoordinatorSettings), *secrets_of(NodeSettings)}
HAS_TLS = {"gpu", "default with TLS"}

every_pod = pytest.mark.parametrize(("variant", "name"), [(each, name) for each in VARIANTS for name in pods(each)])
every_pool = pytest.mark.parametrize(("variant", "name"), [(each, name) for each in VARIANTS for name in pools(each)])
every_front = pytest.mark.parametrize(
    ("variant", "name"),
    [
        (each, name)
        for each in VARIANTS
        for name in pods(each)
        if name not in pools(each) and (each, name) != ("standby", "coordinator")
    ],
)


@every_pod
def test_the_command_line_is_understood_and_may_listen_off_loopback(variant, name, tmp_path, monkeypatch):
    pod, model = pods(variant)[name], VARIANTS[variant].get("model", "")
    settings = settings_of(variant, pod, tmp_path, monkeypatch)
    if component(pod) != "node":
        settings = settings.served if isinstance(settings, ApiServerSettings) else settings
        assert (settings.model, settings.api_key, settings.fleet_secret) == (model, "the api-key", "the fleet-secret")
        check_settings(settings)
        return
    assert settings.link.fleet_secret == "the fleet-secret"
    assert settings.link.name == "llm-decode-0"
    if variant == "vllm":
        assert isinstance(settings, VllmSettings)
        assert settings.model == model
        args = container(pod)["args"]
        check_vllm_flags(tuple(args[args.index("--") + 1 :]))
    else:
        assert isinstance(settings, NodeSettings)
        assert settings.engine.model == model
        monkeypatch.delenv("RANK", raising=False)
        check_network(settings)


@every_pod
def test_every_variable_is_a_setting(variant, name):
    pod = pods(variant)[name]
    for each in [container(pod), *pod["spec"]["initContainers"]]:
        assert unknown_variables(variables(variant, pod, each)) == ""


@every_pod
def test_secrets_come_from_files_and_stand_in_no_manifest(variant, name):
    pod = pods(variant)[name]
    for each in [container(pod), *pod["spec"]["initContainers"]]:
        flags = " ".join([*each["args"], *each.get("command", [])])
        for secret in SECRETS:
            assert f"--{secret.replace('_', '-')}" not in flags
            assert f"SPLITSERVE_{secret.upper()}" not in variables(variant, pod, each)
    assert not objects(variant, "Secret"), "it is made by whoever runs the cluster"
    (secrets,) = [volume["secret"] for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"]
    keys = {item["key"] for item in secrets["items"]}
    assert keys == ({"fleet-secret"} if component(pod) == "node" else {"api-key", "fleet-secret"})


@every_pod
def test_there_is_time_to_drain(variant, name, tmp_path, monkeypatch):
    pod = pods(variant)[name]
    flags = flags_of(variant, pod, tmp_path, monkeypatch)
    hook = container(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert hook[0] == "sleep"
    assert pod["spec"]["terminationGracePeriodSeconds"] >= flags["drain_s"] + STOPPING_S + float(hook[1])
    assert pod["spec"]["shareProcessNamespace"] is True
    assert ("lifecycle" in container(pod)) == (component(pod) != "node"), "nodes are behind no Service"


@every_pod
def test_the_model_is_fetched_before_and_into_what_is_read_then(variant, name):
    pod = pods(variant)[name]
    (before,) = pod["spec"]["initContainers"]
    python, dash_m, module = before["command"]
    assert (python, dash_m) == ("python3", "-m")
    assert importlib.util.find_spec(module) is not None
    assert before["args"] == [VARIANTS[variant].get("model", "")]
    assert before["image"] == container(pod)["image"]
    mounts = [{mount["mountPath"]: mount for mount in each["volumeMounts"]} for each in (before, container(pod))]
    assert mounts[0]["/cache"] == {"name": "cache", "mountPath": "/cache"}
    assert mounts[1]["/cache"] == {"name": "cache", "mountPath": "/cache", "readOnly": True}
    assert variables(variant, pod, container(pod))["HF_HUB_OFFLINE"] == "1"


@every_front
def test_coordinator_and_api_servers_are_probed_without_a_key(variant, name, tmp_path, monkeypatch):
    """The coordinator at its fleet port, where clients cannot crowd a probe out; API servers have no such port."""
    flags, each = flags_of(variant, pods(variant)[name], tmp_path, monkeypatch), container(pods(variant)[name])
    health = f"fleet://localhost:{flags['fleet_port']}" if name == "coordinator" else f"localhost:{flags['grpc_port']}"
    for probe in ("startup", "liveness"):
        python, dash_m, module, target = each[f"{probe}Probe"]["exec"]["command"]
        assert (python, dash_m, target) == ("python", "-m", health)
        assert importlib.util.find_spec(module) is not None
    ready = each["readinessProbe"]["httpGet"]
    assert ready["path"] in OPEN_PATHS
    assert ready["scheme"] == ("HTTPS" if variant in HAS_TLS else "HTTP")
    ports = {port["name"]: port["containerPort"] for port in each["ports"]}
    fleet = {"fleet": flags["fleet_port"]} if name == "coordinator" else {}
    assert ports == {"grpc": flags["grpc_port"], "http": flags["http_port"], **fleet}
    assert {flags[name] for name in ("host", "http_host")} == {EVERY_ADDRESS}


def test_of_two_coordinators_the_one_that_serves_is_ready(tmp_path, monkeypatch):
    """Nothing listens at a standby, which no probe may end therefore."""
    pod = pods("standby")["coordinator"]
    each, flags = container(pod), flags_of("standby", pod, tmp_path, monkeypatch)
    assert each.keys() & {"startupProbe", "livenessProbe"} == set()
    ports = {port["name"]: port["containerPort"] for port in each["ports"]}
    assert ports[each["readinessProbe"]["tcpSocket"]["port"]] == flags["fleet_port"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_nodes_and_api_servers_dial_the_fleet_port_and_clients_the_others(variant, tmp_path, monkeypatch):
    flags = flags_of(variant, pods(variant)["coordinator"], tmp_path / "coordinator", monkeypatch)
    assert flags["fleet_host"] == EVERY_ADDRESS
    for name, pod in pods(variant).items():
        if name == "coordinator":
            continue
        host, port = flags_of(variant, pod, tmp_path / name, monkeypatch)["coordinator"].split(":")
        assert host == "llm-fleet"
        assert int(port) == flags["fleet_port"]
    dialled = named(variant, "Service", "-fleet")["spec"]
    assert {each["targetPort"]: each["port"] for each in dialled["ports"]} == {"fleet": 50052, "http": 8000}
    is_ready_without_nodes = variant == "standby"
    assert dialled["publishNotReadyAddresses"] is not is_ready_without_nodes, "or no node could ever come"
    public = named(variant, "Service", "")["spec"]
    assert {each["targetPort"]: each["port"] for each in public["ports"]} == {"grpc": 50051, "http": 8000}
    assert "publishNotReadyAddresses" not in public


@every_pool
def test_the_ports_of_a_node_are_those_that_it_listens_on(variant, name, tmp_path, monkeypatch):
    flags = flags_of(variant, pools(variant)[name], tmp_path, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container(pools(variant)[name])["ports"]}
    kv = urlsplit(flags["kv_bind"])
    assert (kv.scheme, kv.hostname) == ("tcp", "10.1.2.3"), "that of the pod, which the others can dial"
    wanted = {"health": flags["health_port"], "kv": kv.port}
    if variant != "vllm":  # whose figures are its own
        wanted["metrics"] = flags["metrics_port"]
        assert flags["metrics_host"] == EVERY_ADDRESS
    assert ports == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_network_lets_in_who_is_expected(variant, tmp_path, monkeypatch):
    def allowed(name):
        policy = named(variant, "NetworkPolicy", f"-{name}")["spec"]
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == name
        assert policy["policyTypes"] == ["Ingress"]
        return policy["ingress"]

    to_node, *_ = allowed("node")
    (nodes,) = to_node["from"]
    assert nodes["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"
    if variant == "ranks":
        assert "ports" not in to_node, "torch.distributed takes any"
    elif variant != "vllm":
        (ports,) = to_node["ports"]
        pool, *_ = pools(variant).values()
        flags = flags_of(variant, pool, tmp_path, monkeypatch)
        _, last = holder_address_of(flags["kv_transport"], flags["kv_bind"])
        assert (ports["port"], ports["endPort"]) == (urlsplit(flags["kv_bind"]).port, last)
    to_fleet, to_public = allowed("coordinator")
    flags = flags_of(variant, pods(variant)["coordinator"], tmp_path / "again", monkeypatch)
    let_in = {each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in to_fleet["from"]}
    assert let_in == {"node", "api-server"}
    assert to_fleet["ports"] == [{"protocol": "TCP", "port": flags["fleet_port"]}]
    assert [port["port"] for port in to_public["ports"]] == [flags["grpc_port"], flags["http_port"]]
    assert "from" not in to_public


@every_pool
def test_nodes_are_probed_at_services_of_their_health_port(variant, name, tmp_path, monkeypatch):
    flags, each = flags_of(variant, pools(variant)[name], tmp_path, monkeypatch), container(pools(variant)[name])
    asked = {probe: each[f"{probe}Probe"]["grpc"] for probe in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in asked.values()} == {flags["health_port"]}
    services = {probe: asked[probe]["service"] for probe in asked}
    assert services == {"startup": "live", "liveness": "live", "readiness": "ready"}
    assert set(services.values()) < set(node_states(None, None)) == set(FOLLOWER_STATES)
    assert flags["health_host"] == EVERY_ADDRESS
    startup = each["startupProbe"]
    startup_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert startup_s == 1800
    workload = workloads(variant)[name]
    if workload["kind"] == "Deployment":
        assert workload["spec"]["progressDeadlineSeconds"] > startup_s
    if variant != "vllm":
        # Whoever is stuck ends by itself first, with a word in the log.
        liveness = each["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] > flags["stuck_exit_s"] + LEAST_S + MARGIN


def test_a_group_of_pods_is_a_node_of_as_many_ranks(tmp_path, monkeypatch):
    pod = pools("ranks")["decode"]
    settings = settings_of("ranks", pod, tmp_path, monkeypatch)
    workers = named("ranks", "LeaderWorkerSet", "-decode")["spec"]["leaderWorkerTemplate"]
    assert settings.engine.num_ranks == workers["size"] == 2
    told = variables("ranks", pod, container(pod))
    assert told["WORLD_SIZE"] == str(settings.engine.num_ranks)
    assert (told["RANK"], told["LOCAL_RANK"]) == ("0", "0")
    assert told["MASTER_ADDR"] == "llm-decode-0.llm-decode"
    assert told["MASTER_PORT"].isdecimal()


def test_certificates_are_for_the_names_that_are_dialled(tmp_path, monkeypatch):
    """Each process shows the certificate of its kind, and all have the CA that signs both."""
    spec = named("gpu", "Certificate", "-coordinator")["spec"]
    names = {*spec["dnsNames"], *spec["ipAddresses"]}
    host, _ = flags_of("gpu", pools("gpu")["decode"], tmp_path, monkeypatch)["coordinator"].split(":")
    assert {host, "localhost", "llm", "llm.serving", "llm.example"} <= names
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert "client auth" in named("gpu", "Certificate", "-node")["spec"]["usages"]
    issuers = {each["spec"]["issuerRef"]["name"] for each in objects("gpu", "Certificate")}
    assert issuers == {each["metadata"]["name"] for each in objects("gpu", "Issuer")}
    for name, pod in pods("gpu").items():
        (secret,) = [each["secret"]["secretName"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
        assert secret == ("llm-node" if name in pools("gpu") else "llm-coordinator")
