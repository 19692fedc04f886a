"""docs/guides/kubernetes.md says what there is."""

import re

import yaml

from coordinator.control.roles import BUSY, CATCH_UP_S, MAX_SAMPLES, WINDOW_S
from tests.unit.deploy.kubernetes_kit import PAGE, container, example, named, objects, ours
from tests.unit.deploy.kustomize_kit import ROOT, render


def test_every_part_is_named_and_every_name_is_a_part():
    named_parts = set(re.findall(r"(?:overlays|components)/[a-z]+", PAGE))
    assert all((ROOT / part).is_dir() for part in named_parts)
    for folder in ("overlays", "components"):
        for path in (ROOT / folder).iterdir():
            assert f"`{path.name}`" in PAGE or f"{folder}/{path.name}" in PAGE


def test_the_example_of_an_overlay_can_be_rendered(tmp_path):
    """By kustomize itself in test_kustomize.py; here without what the small renderer does not know."""
    told = example()
    assert [each["name"] for each in told.pop("images")] == [container(ours("gpu")["node"])["image"]]
    assert told.pop("namespace")
    assert told.pop("patches")
    for key in ("resources", "components"):
        told[key] = [str((ROOT / "overlays" / "own" / each).resolve()) for each in told[key]]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(told))
    (settings,) = [
        each["data"]
        for each in render(tmp_path)
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "splitserve"
    ]
    assert settings["SPLITSERVE_DEVICE"] == "cuda"
    assert settings["SPLITSERVE_MAX_NUM_SEQS"] == "128"


def test_its_commands_name_what_there_is():
    deployments = {each["metadata"]["name"] for each in objects("cpu", "Deployment")}
    services = {each["metadata"]["name"] for each in objects("cpu", "Service")}
    assert set(re.findall(r"kubectl (?:scale|rollout status) deployment ([\w-]+)", PAGE)) <= deployments
    assert set(re.findall(r"port-forward service/([\w-]+)", PAGE)) <= services
    assert set(re.findall(r"certs --out certs (.*)", PAGE)) == {"--host splitserve --host splitserve-fleet"}
    keys = set(re.findall(r"--from-file=([\w.-]+)", PAGE))
    mounted = {
        item["key"]
        for pod in ours("cpu with tls").values()
        for volume in pod["spec"]["volumes"]
        for item in volume.get("secret", {}).get("items", [])
    }
    assert keys == mounted


def test_its_figures_are_those_of_the_code():
    assert (CATCH_UP_S, BUSY, MAX_SAMPLES, WINDOW_S) == (30.0, 0.8, 256, 60.0)
    assert "waiting / 30 s" in PAGE
    assert "/ 0.8, rounded up" in PAGE
    assert "the last 256 requests" in PAGE
    pod = ours("cpu")["node"]
    assert f"({pod['spec']['terminationGracePeriodSeconds']})" in PAGE
    assert "--drain-s=90" in container(pod)["args"]
    liveness = container(pod)["livenessProbe"]
    assert f"gives it {liveness['periodSeconds'] * liveness['failureThreshold']} s" in PAGE
    (policy,) = named("cpu", "NetworkPolicy", "splitserve-node")["spec"]["ingress"]
    (ports,) = policy["ports"]
    assert f"({ports['port']}, one more" in PAGE
    assert f"{ports['endPort']} of `--distributed-kv`" in PAGE
