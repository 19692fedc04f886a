"""What the chart of deploy/helm renders to: objects that meet their schemas, name each other rightly, are rolled out
without a gap, and may do no more than they must."""

import copy
import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.exposition import Exposition
from tests.effort import few
from tests.unit.coordinator.scheduler_kit import World
from tests.unit.deploy.chart_kit import (
    CHART,
    NAMESPACE,
    RELEASE,
    VARIANTS,
    WORKLOADS,
    component,
    container,
    flags_of,
    lint,
    named,
    objects,
    pods,
    pools,
    rendered,
    template_of,
    workloads,
)

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = {path.stem: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
OLDEST, NEWEST = "1.28", "1.37"  # gRPC probes are stable from 1.27 on

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def check(thing, version):
    kubernetes_validate.validate(thing, version, strict=True)


def check_custom(thing):
    jsonschema.validate(thing, CUSTOM[thing["kind"].lower()], format_checker=jsonschema.FormatChecker())


def identity(thing):
    return thing["apiVersion"], thing["kind"], thing["metadata"]["name"]


# ---- schemas ----


@pytest.mark.parametrize("version", few([OLDEST, NEWEST]))
def test_every_object_is_one_of_kubernetes(version):
    unlike = {json.dumps(thing): thing for variant in VARIANTS for thing in objects(variant)}
    for thing in unlike.values():
        if thing["kind"].lower() not in CUSTOM:
            check(thing, version)


def test_custom_objects_meet_their_schemas_and_none_of_these_goes_unused():
    found = [thing for variant in VARIANTS for thing in objects(variant) if thing["kind"].lower() in CUSTOM]
    for thing in found:
        check_custom(thing)
    assert {thing["kind"].lower() for thing in found} == set(CUSTOM)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_what_custom_objects_hold_of_kubernetes_is_that(version):
    group = template_of(named("ranks", "LeaderWorkerSet", "-decode"))
    check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "t"}, "template": group}, version)
    scaled = named("gpu", "ScaledObject", "-decode")
    autoscaler = copy.deepcopy(named("cpu", "HorizontalPodAutoscaler", "-mixed"))
    autoscaler["spec"]["behavior"] = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    check(autoscaler, version)


def test_the_checks_find_what_is_wrong():
    deployment = copy.deepcopy(named("default", "Deployment", "-decode"))
    container(template_of(deployment))["livenessProbe"]["grpc"]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment, NEWEST)
    group = copy.deepcopy(named("ranks", "LeaderWorkerSet", "-decode"))
    group["spec"]["leaderWorkerTemplate"]["sise"] = 2
    with pytest.raises(jsonschema.ValidationError):
        check_custom(group)


@every_variant
def test_no_object_is_there_twice_and_all_are_in_the_namespace(variant):
    found = objects(variant)
    assert len({identity(each) for each in found}) == len(found)
    assert {each["metadata"]["namespace"] for each in found} == {NAMESPACE}
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in found} == {RELEASE}


# ---- values ----


def test_helm_finds_no_fault_in_the_chart():
    assert lint() == []


REFUSED = {  # values, and what the error names
    "replicas of another kind": ({"apiServers": {"replicas": "two"}}, "replicas"),
    "a value that there is not": ({"pools": {"decode": {"replica": 2}}}, "replica"),
    "a role that there is not": ({"pools": {"decode": {"role": "writer"}}}, "role"),
    "a pool without a role": ({"pools": {"more": {"replicas": 2}}}, "role"),
    "a secret among the settings": ({"settings": {"api-key": "k"}}, "api-key"),
    "a list among the settings": ({"settings": {"lora": ["a=b"]}}, "lora"),
    "vLLM without its image": ({"poolDefaults": {"engine": "vllm"}}, "needs an image with vLLM"),
    "vLLM over several pods": (
        {"poolDefaults": {"engine": "vllm", "image": "v:1", "podsPerNode": 2}},
        "a node with vLLM has one pod",
    ),
    "a standby for clients": ({"coordinator": {"standby": True}}, "coordinator.standby needs apiServers.replicas"),
    "ranks in the clear, with TLS": ({"tls": {"enabled": True}, "poolDefaults": {"podsPerNode": 2}}, "trusted-network"),
}


def test_values_that_cannot_work_are_refused_by_name():
    for told, (name, (_, wanted)) in zip(
        rendered(*(values for values, _ in REFUSED.values())), REFUSED.items(), strict=True
    ):
        assert isinstance(told, str), name
        assert wanted in told, (name, told)


def test_settings_of_a_pool_go_before_those_of_its_kind_and_of_all():
    values = {
        "settings": {"max-num-seqs": 64, "kv-cache-memory-bytes": 8_000_000_000, "log-level": "debug"},
        "poolDefaults": {"settings": {"block-size": 32, "max-num-seqs": 32}},
        "pools": {"decode": {"settings": {"max-num-seqs": 16, "kv-shared-memory": False}}},
    }
    [found] = rendered(values)
    [decode] = [each for each in found if each["kind"] == "Deployment" and each["metadata"]["name"] == "llm-decode"]
    told = {each["name"]: each.get("value") for each in container(template_of(decode))["env"]}
    settings = {key.removeprefix("SPLITSERVE_"): told[key] for key in sorted(told) if key.startswith("SPLITSERVE_")}
    assert settings == {
        "BLOCK_SIZE": "32",
        "FLEET_SECRET_FILE": "/run/secrets/splitserve/fleet-secret",
        "KV_CACHE_MEMORY_BYTES": "8000000000",
        "KV_SHARED_MEMORY": "false",
        "LOG_LEVEL": "debug",
        "MAX_NUM_SEQS": "16",
        "MODEL": "",
    }


def test_the_defaults_split_prefill_and_decode():
    assert {name: container(pod)["args"][0] for name, pod in pools("default").items()} == {
        "prefill": "prefill",
        "decode": "decode",
    }


def test_a_node_on_cpus_may_have_them_for_itself():
    """The kubelet's static policy gives whole CPUs to containers of pods whose QoS class is Guaranteed: each container,
    init containers too, has limits of CPU and memory, and requests no less."""
    spec = pools("cpu")["mixed"]["spec"]
    for each in [*spec["initContainers"], *spec["containers"]]:
        limits, requests = each["resources"]["limits"], each["resources"]["requests"]
        assert limits == requests == {"cpu": "4", "memory": "8Gi"}


# ---- who is meant ----


def selected(selector, labels):
    return selector.items() <= labels.items()


@every_variant
def test_selectors_find_the_pods_that_are_there(variant):
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(variant).items()}
    for thing in objects(variant):
        spec = thing.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        selector = selector.get("matchLabels", selector)
        if thing["kind"] == "ServiceMonitor":
            services = [each["metadata"]["labels"] for each in objects(variant, "Service")]
            assert sum(selected(selector, each) for each in services) == 1
            continue
        found = {name for name, each in labels.items() if selected(selector, each)}
        assert found, identity(thing)
        if thing["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert found == {thing["metadata"]["name"].removeprefix(f"{RELEASE}-")}


@every_variant
def test_ports_of_services_are_those_of_pods(variant):
    for service in objects(variant, "Service"):
        (pod,) = [
            each for each in pods(variant).values() if selected(service["spec"]["selector"], each["metadata"]["labels"])
        ]
        known = {port["name"] for port in container(pod)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= known


def test_clients_reach_api_servers_where_there_are_some():
    fronts = {}
    for variant in ("default", "gpu"):
        selector = named(variant, "Service", "")["spec"]["selector"]
        fronts[variant] = selector["app.kubernetes.io/component"]
    assert fronts == {"default": "coordinator", "gpu": "api-server"}
    pool = named("gpu", "InferencePool", "")["spec"]
    assert pool["selector"]["matchLabels"] == named("gpu", "Service", "")["spec"]["selector"]
    ports = {each["name"]: each["containerPort"] for each in container(pods("gpu")["api-server"])["ports"]}
    assert [each["number"] for each in pool["targetPorts"]] == [ports["http"]]


@every_variant
def test_every_volume_is_there_and_used(variant):
    for pod in pods(variant).values():
        spec = pod["spec"]
        mounts = {
            mount["name"]
            for each in [*spec["containers"], *spec.get("initContainers", [])]
            for mount in each["volumeMounts"]
        }
        assert mounts == {volume["name"] for volume in spec["volumes"]}


# ---- what they may do ----


@every_variant
def test_pods_may_do_no_more_than_they_must(variant):
    for pod in pods(variant).values():
        spec = pod["spec"]
        asks_kubernetes = variant == "standby" and component(pod) == "coordinator"
        assert spec["automountServiceAccountToken"] is asks_kubernetes
        assert ("serviceAccountName" in spec) is asks_kubernetes
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_coordinator_with_a_standby_may_ask_for_its_lease_alone(tmp_path, monkeypatch):
    pod = pods("standby")["coordinator"]
    (create, change) = named("standby", "Role", "-coordinator")["rules"]
    assert create["verbs"] == ["create"]
    assert set(change["verbs"]) == {"get", "update"}
    flags = flags_of("standby", pod, tmp_path, monkeypatch)
    assert change["resourceNames"] == [flags["standby_lease"]]
    assert flags["standby"]
    binding = named("standby", "RoleBinding", "-coordinator")
    (subject,) = binding["subjects"]
    assert subject["name"] == pod["spec"]["serviceAccountName"] == f"{RELEASE}-coordinator"
    assert subject["namespace"] == NAMESPACE
    assert binding["roleRef"]["name"] == f"{RELEASE}-coordinator"
    assert not objects("default", "Role", "RoleBinding", "ServiceAccount")


# ---- rollouts, disruptions, scale ----


@every_variant
def test_no_node_and_no_api_server_goes_before_another_one_is_ready(variant):
    budgets = {each["metadata"]["name"]: each["spec"] for each in objects(variant, "PodDisruptionBudget")}
    assert set(budgets) == {f"{RELEASE}-{name}" for name in workloads(variant) if name != "coordinator"}
    assert all(each["maxUnavailable"] == 1 for each in budgets.values())
    for name, workload in workloads(variant).items():
        if name == "coordinator":
            rolling = {"rollingUpdate": {"maxUnavailable": "100%", "maxSurge": "100%"}, "type": "RollingUpdate"}
            wanted = (2, rolling) if variant == "standby" else (1, {"type": "Recreate"})
            assert (workload["spec"]["replicas"], workload["spec"]["strategy"]) == wanted
        elif workload["kind"] == "LeaderWorkerSet":
            assert workload["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
            rolling = workload["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
            assert (rolling["maxUnavailable"], rolling["maxSurge"]) == (0, 1)
        else:
            rolling = workload["spec"]["strategy"]["rollingUpdate"]
            assert (rolling["maxUnavailable"], rolling["maxSurge"]) == (0, 1)


def signals():
    """The names of the metrics that the coordinator exposes."""
    world = World()
    text = Exposition(world.metrics, world.scheduler, world.registry, "m").render().decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_each_pool_follows_the_signal_of_its_role_up_at_once_and_down_slowly():
    followed = {}
    for variant in ("cpu", "gpu", "ranks"):
        for scaler in objects(variant, "HorizontalPodAutoscaler", "ScaledObject"):
            spec = scaler["spec"]
            if scaler["kind"] == "ScaledObject":
                (trigger,) = spec["triggers"]
                assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
                query = trigger["metadata"]["query"]
                metric = query.removeprefix("max(").partition("{")[0]
                assert query == f'max({metric}{{namespace="{NAMESPACE}",service="{RELEASE}-fleet"}})'
                named(variant, "Service", "-fleet")
                behavior, least = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"], spec["minReplicaCount"]
            else:
                ((external, target),) = [(each["external"], each["external"]["target"]) for each in spec["metrics"]]
                assert target == {"type": "AverageValue", "averageValue": "1"}
                metric = external["metric"]["name"]
                behavior, least = spec["behavior"], spec["minReplicas"]
            assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
            assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300
            assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
            target = spec["scaleTargetRef"]
            (workload,) = [each for each in objects(variant, *WORKLOADS) if each["metadata"]["name"] == target["name"]]
            assert (workload["kind"], workload["apiVersion"]) == (target["kind"], target["apiVersion"])
            assert "replicas" not in workload["spec"], "they are the autoscaler's"
            followed[variant, container(template_of(workload))["args"][0]] = (metric, least)
    assert followed == {
        ("cpu", "mixed"): ("splitserve_nodes_needed", 2),
        ("gpu", "prefill"): ("splitserve_prefill_nodes_needed", 1),
        ("gpu", "decode"): ("splitserve_decode_nodes_needed", 2),
        ("ranks", "decode"): ("splitserve_decode_nodes_needed", 1),
    }
    assert {metric for metric, _ in followed.values()} <= signals()


def test_prometheus_finds_the_coordinator_and_the_nodes_is_let_in_and_has_the_alerts():
    (endpoint,) = named("gpu", "ServiceMonitor", "-coordinator")["spec"]["endpoints"]
    service = named("gpu", "Service", "-fleet")["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert endpoint["port"] in {each["name"] for each in service["ports"]}
    assert endpoint["authorization"] == {"credentials": {"name": "splitserve", "key": "api-key"}}
    certificate = named("gpu", "Certificate", "-coordinator")["spec"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] in certificate["dnsNames"]
    assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == certificate["secretName"]
    (node,) = named("gpu", "PodMonitor", "-node")["spec"]["podMetricsEndpoints"]
    (port,) = {
        each["containerPort"]
        for pod in pools("gpu").values()
        for each in container(pod)["ports"]
        if each["name"] == node["port"]
    }
    _, let_in = named("gpu", "NetworkPolicy", "-node")["spec"]["ingress"]
    assert let_in["ports"] == [{"protocol": "TCP", "port": port}]
    assert let_in["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    rules = named("gpu", "PrometheusRule", "-coordinator")["spec"]
    assert rules == yaml.safe_load((CHART.parent / "alerts.yml").read_text())


def test_ranks_in_pods_of_their_own_are_what_ranks_in_one_pod_are():
    alone = {**VARIANTS["ranks"], "pools": {"decode": {"podsPerNode": 1}}}
    [found] = rendered(alone)
    [deployment] = [each for each in found if identity(each) == ("apps/v1", "Deployment", f"{RELEASE}-decode")]
    one, group = template_of(deployment), copy.deepcopy(pods("ranks")["decode"])
    env = {each["name"]: each for each in container(group)["env"]}
    ranks = set(env) - {each["name"] for each in container(one)["env"]}
    assert ranks == {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        *("SPLITSERVE_TENSOR_PARALLEL_SIZE", "SPLITSERVE_RANK_TIMEOUT_S"),
    }
    container(group)["env"] = [each for name, each in env.items() if name not in ranks]
    del one["spec"]["topologySpreadConstraints"]
    assert one == group
    assert all(component(pod) == "node" for pod in pools("ranks").values())
