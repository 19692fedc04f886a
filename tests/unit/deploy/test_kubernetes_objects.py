"""What the overlays of deploy/kubernetes come to: objects that meet their schemas, name each other rightly, are rolled
out without a gap, and may do no more than they must."""

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
from tests.unit.deploy.kubernetes_kit import (
    VARIANTS,
    WORKLOADS,
    container,
    named,
    objects,
    ours,
    pods,
    template_of,
)
from tests.unit.deploy.kustomize_kit import ROOT, NotRendered, identity, read, render

SCHEMAS = Path(__file__).parent / "schemas"
OLDEST, NEWEST = "1.28", "1.37"  # gRPC probes are stable from 1.27 on
CUSTOM = ("LeaderWorkerSet", "ScaledObject")
METRIC = "splitserve_nodes_needed"

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def check(thing, version):
    kubernetes_validate.validate(thing, version, strict=True)


def check_custom(thing):
    schema = json.loads((SCHEMAS / f"{thing['kind'].lower()}.json").read_text())
    jsonschema.validate(thing, schema, format_checker=jsonschema.FormatChecker())


# ---- schemas ----


@pytest.mark.parametrize("version", few([OLDEST, NEWEST]))
def test_every_object_is_one_of_kubernetes(version):
    unlike = {json.dumps(thing): thing for variant in VARIANTS for thing in objects(variant)}
    for thing in unlike.values():
        if thing["kind"] not in CUSTOM:
            check(thing, version)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_custom_objects_meet_their_schemas_and_what_they_hold_that_of_kubernetes(version):
    group = named("leaderworkerset", "LeaderWorkerSet", "splitserve-node")
    check_custom(group)
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "t"}, "template": template_of(group)}
    check(template, version)
    scaled = named("keda", "ScaledObject", "splitserve-node")
    check_custom(scaled)
    autoscaler = copy.deepcopy(named("gpu with hpa", "HorizontalPodAutoscaler", "splitserve-node"))
    autoscaler["spec"]["behavior"] = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    check(autoscaler, version)


def test_the_checks_find_what_is_wrong():
    deployment = copy.deepcopy(named("cpu", "Deployment", "splitserve-node"))
    container(template_of(deployment))["livenessProbe"]["grpc"]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment, NEWEST)
    group = copy.deepcopy(named("leaderworkerset", "LeaderWorkerSet", "splitserve-node"))
    group["spec"]["leaderWorkerTemplate"]["sise"] = 2
    with pytest.raises(jsonschema.ValidationError):
        check_custom(group)


# ---- kustomizations ----


def test_every_file_is_part_of_a_kustomization():
    used = set()
    for path in ROOT.rglob("kustomization.yaml"):
        (told,) = read(path)
        used.add(path)
        names = told.get("resources", []) + told.get("configurations", [])
        names += [patch["path"] for patch in told.get("patches", [])]
        names += [name for each in told.get("configMapGenerator", []) for name in each.get("files", [])]
        used |= {(path.parent / name).resolve() for name in names}
    assert {path for path in ROOT.rglob("*") if path.is_file()} <= used


def test_every_overlay_and_component_is_tried():
    tried = {part for parts in VARIANTS.values() for part in parts}
    for overlay in [part for part in tried if part.startswith("overlays")]:
        (told,) = read(ROOT / overlay / "kustomization.yaml")
        tried |= {str((ROOT / overlay / each).resolve().relative_to(ROOT)) for each in told.get("components", [])}
    assert tried == {
        str(path.relative_to(ROOT)) for folder in ("overlays", "components") for path in (ROOT / folder).iterdir()
    }


def test_a_kind_that_kustomize_does_not_know_is_told_where_names_stand():
    """It gives generated ConfigMaps a name of their own, and must find who uses it."""

    def paths(value, at=""):
        if isinstance(value, dict):
            for key, each in value.items():
                if key == "configMapRef":
                    yield f"{at}/{key}/name".removeprefix("/")
                yield from paths(each, f"{at}/{key}")
        elif isinstance(value, list):
            for each in value:
                yield from paths(each, at)

    (told,) = read(ROOT / "overlays" / "leaderworkerset" / "name-references.yaml")
    (reference,) = told["nameReference"]
    assert (reference["kind"], {each["kind"] for each in reference["fieldSpecs"]}) == ("ConfigMap", {"LeaderWorkerSet"})
    group = named("leaderworkerset", "LeaderWorkerSet", "splitserve-node")
    assert {each["path"] for each in reference["fieldSpecs"]} == set(paths(group))


def test_what_the_renderer_does_not_know_it_refuses(tmp_path):
    path = tmp_path / "kustomization.yaml"
    begin = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    path.write_text(begin + "namePrefix: a-\n")
    with pytest.raises(NotRendered, match="namePrefix"):
        render(tmp_path)
    path.write_text(begin + "patches:\n- path: p.yaml\n")
    (tmp_path / "p.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: s}\n")
    with pytest.raises(NotRendered, match="there is no"):
        render(tmp_path)


def test_patches_change_what_they_name_and_nothing_else():
    base = {identity(each): each for each in render(ROOT / "base")}
    cpu = {identity(each): each for each in render(ROOT / "overlays" / "cpu")}
    changed = [key for key in base if base[key] != cpu[key]]
    assert set(base) == set(cpu)
    assert changed == [("apps/v1", "Deployment", "splitserve-node")]
    before, after = (copy.deepcopy(container(template_of(each[changed[0]]))) for each in (base, cpu))
    assert after.pop("resources")["limits"] == {"cpu": "4", "memory": "8Gi"}
    assert after["env"].pop(0)["name"] == "OMP_NUM_THREADS"
    assert before == after


def test_a_node_on_cpus_may_have_them_for_itself():
    """The kubelet's static policy gives whole CPUs to containers of pods whose QoS class is Guaranteed: each container,
    init containers too, has limits of CPU and memory, and requests no less."""
    spec = ours("cpu")["node"]["spec"]
    for each in [*spec["initContainers"], *spec["containers"]]:
        limits, requests = each["resources"]["limits"], each["resources"]["requests"]
        assert limits == requests
        assert set(limits) == {"cpu", "memory"}
    assert container(ours("cpu")["node"])["resources"]["limits"]["cpu"].isdecimal()


# ---- who is meant ----


@every_variant
def test_selectors_find_the_pods_that_are_there(variant):
    labels = [pod["metadata"]["labels"] for pod in pods(variant).values()]
    for thing in objects(variant):
        spec = thing.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is not None and thing["kind"] not in WORKLOADS:
            assert selector.get("matchLabels", selector) in labels, identity(thing)
        if thing["kind"] == "Deployment":
            assert selector["matchLabels"] == template_of(thing)["metadata"]["labels"]
    assert len(labels) == len({json.dumps(each) for each in labels})


@every_variant
def test_ports_of_services_are_those_of_pods(variant):
    by_labels = {json.dumps(pod["metadata"]["labels"]): container(pod) for pod in pods(variant).values()}
    for service in objects(variant, "Service"):
        known = {port["name"] for port in by_labels[json.dumps(service["spec"]["selector"])]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= known


@every_variant
def test_every_volume_is_there_and_used(variant):
    for pod in pods(variant).values():
        spec = pod["spec"]
        mounted = {
            mount["name"]
            for each in [*spec["containers"], *spec.get("initContainers", [])]
            for mount in each["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in spec["volumes"]}


# ---- what they may do ----


@every_variant
def test_pods_may_do_no_more_than_they_must(variant):
    for pod in pods(variant).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


# ---- rollouts, disruptions, scale ----


@every_variant
def test_no_node_goes_before_another_one_is_ready(variant):
    if variant == "leaderworkerset":
        spec = named(variant, "LeaderWorkerSet", "splitserve-node")["spec"]
        rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert not [each for each in objects(variant, "Deployment") if each["metadata"]["name"] == "splitserve-node"]
    else:
        spec = named(variant, "Deployment", "splitserve-node")["spec"]
        rolling = spec["strategy"]["rollingUpdate"]
    assert (rolling["maxUnavailable"], rolling["maxSurge"]) == (0, 1)
    assert "replicas" not in spec, "it is an autoscaler's, or an operator's"
    (budget,) = objects(variant, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"] == ours(variant)["node"]["metadata"]["labels"]


@every_variant
def test_there_is_one_coordinator_at_a_time(variant):
    spec = named(variant, "Deployment", "splitserve-coordinator")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_autoscalers_follow_the_one_metric_up_at_once_and_down_slowly():
    scaled = named("keda", "ScaledObject", "splitserve-node")["spec"]
    autoscaler = named("gpu with hpa", "HorizontalPodAutoscaler", "splitserve-node")["spec"]
    world = World()
    text = Exposition(world.metrics, world.scheduler, world.registry, "m").render().decode()
    assert METRIC in {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    (trigger,), (metric,) = scaled["triggers"], autoscaler["metrics"]
    assert trigger["metadata"]["query"] == f"max({METRIC})"
    assert metric["external"]["metric"] == {"name": METRIC}
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    for behavior in (autoscaler["behavior"], scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]):
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300
        assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    for variant, target in (("keda", scaled["scaleTargetRef"]), ("gpu with hpa", autoscaler["scaleTargetRef"])):
        assert named(variant, target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    assert autoscaler["minReplicas"] == scaled["minReplicaCount"] >= 2


def test_prometheus_finds_the_coordinator_and_keda_finds_prometheus():
    config = yaml.safe_load(named("keda", "ConfigMap", "splitserve-prometheus")["data"]["config.yaml"])
    scrape, _ = config["scrape_configs"]
    ((host, port),) = [target.split(":") for each in scrape["static_configs"] for target in each["targets"]]
    service = named("keda", "Service", host)["spec"]
    assert service["ports"][0]["port"] == int(port)
    assert service["selector"] == ours("keda")["coordinator"]["metadata"]["labels"]
    each = container(pods("keda")["prometheus"])
    mounts = {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}
    assert scrape["authorization"]["credentials_file"] == f"{mounts['secrets']}/api-key"
    assert f"--config.file={mounts['config']}/config.yaml" in each["args"]
    (trigger,) = named("keda", "ScaledObject", "splitserve-node")["spec"]["triggers"]
    scheme, _, address = trigger["metadata"]["serverAddress"].partition("://")
    host, port = address.split(":")
    name, namespace = host.split(".")  # KEDA asks from a namespace of its own
    assert (scheme, namespace) == ("http", "default")
    assert named("keda", "Service", name)["spec"]["ports"][0]["port"] == int(port)


def test_prometheus_finds_the_nodes_is_let_in_and_has_the_alerts():
    data = named("obs", "ConfigMap", "splitserve-prometheus")["data"]
    config = yaml.safe_load(data["config.yaml"])
    assert [data[name] for name in config["rule_files"]] == [(ROOT.parent / "alerts.yml").read_text()]
    _, scrape = config["scrape_configs"]
    asked, asked_of_six = scrape["dns_sd_configs"]
    assert (asked["type"], asked_of_six) == ("A", {**asked, "type": "AAAA"})
    service = named("obs", "Service", *asked["names"])["spec"]
    node, prometheus = (pods("obs")[name]["metadata"]["labels"] for name in ("node", "prometheus"))
    assert (service["clusterIP"], service["publishNotReadyAddresses"], service["selector"]) == ("None", True, node)
    policy = named("obs", "NetworkPolicy", "splitserve-node-metrics")["spec"]
    assert policy["podSelector"] == {"matchLabels": node}
    ((let_in, port),) = [(each["from"], each["ports"]) for each in policy["ingress"]]
    assert let_in == [{"podSelector": {"matchLabels": prometheus}}]
    listens = {each["name"]: each["containerPort"] for each in container(pods("obs")["node"])["ports"]}
    assert {port[0]["port"], asked["port"]} == {listens["metrics"]}


def test_ranks_in_pods_of_their_own_are_what_ranks_in_one_pod_are():
    """The template of the LeaderWorkerSet is written out; it must not go another way than that of the Deployment."""
    one, group = (copy.deepcopy(ours(variant)["node"]) for variant in ("gpu", "leaderworkerset"))
    ranks = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    }
    env = container(group)["env"]
    container(group)["env"] = [each for each in env if each["name"] not in ranks]
    assert len(env) - len(container(group)["env"]) == len(ranks)
    del one["spec"]["topologySpreadConstraints"]
    for pod in (one, group):
        for key in ("volumes", "volumeMounts"):
            part = pod["spec"] if key == "volumes" else container(pod)
            kept = [each for each in part[key] if each["name"] != "shm"]  # ranks of one pod share it
            part[key] = sorted(kept, key=lambda each: each["name"])
    assert one == group
