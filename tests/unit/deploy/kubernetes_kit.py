"""What the overlays of deploy/kubernetes come to, and the processes that their pods start."""

import os
import re
from functools import cache

import yaml

from serving_core.flags import settings_command
from splitserve.launch.cluster import ROOMS, flat
from tests.tls_kit import authority
from tests.unit.deploy.kustomize_kit import ROOT, render

PAGE = (ROOT.parents[1] / "docs" / "guides" / "kubernetes.md").read_text()
IMAGE = "splitserve"
MODEL = "/models/m"
VARIABLE = re.compile(r"\$\((\w+)\)")
ROLES = {room.role: room for room in ROOMS}
POD = {"metadata.name": "splitserve-node-0", "status.podIP": "10.1.2.3"}
SERVICE_IP = "10.96.0.7"
INJECTED = {"LWS_LEADER_ADDRESS": "splitserve-node-0.splitserve-node", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}
WORKLOADS = ("Deployment", "LeaderWorkerSet")
# By name: the overlay, and the components that it does not have itself.
VARIANTS = {
    **{name: (f"overlays/{name}",) for name in ("cpu", "gpu", "obs", "keda", "leaderworkerset")},
    "cpu with tls": ("overlays/cpu", "components/tls"),
    "gpu with hpa": ("overlays/gpu", "components/hpa"),
}


def example():
    """The overlay of your own that the docs show."""
    (text,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", PAGE, re.DOTALL)
    return yaml.safe_load(text)


@cache
def _rendered(variant):
    overlay, *components = VARIANTS[variant]
    return render(ROOT / overlay, [ROOT / each for each in components])


def objects(variant, *kinds):
    """All of them, or those of these kinds."""
    return [each for each in _rendered(variant) if not kinds or each["kind"] in kinds]


def named(variant, kind, name):
    (found,) = [each for each in objects(variant, kind) if each["metadata"]["name"] == name]
    return found


def template_of(workload):
    """The template of its pods."""
    spec = workload["spec"]
    return spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]


def pods(variant):
    """The templates of all pods by the component that they are."""
    templates = [template_of(each) for each in objects(variant, *WORKLOADS)]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}


def ours(variant):
    """The templates of the pods that run our image."""
    return {name: pod for name, pod in pods(variant).items() if container(pod)["image"] == IMAGE}


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def service_links(variant):
    """What the kubelet says of each service to pods that do not refuse to be told."""
    found = {}
    for service in objects(variant, "Service"):
        prefix, ports = service["metadata"]["name"].upper().replace("-", "_"), service["spec"]["ports"]
        found |= {f"{prefix}_SERVICE_HOST": SERVICE_IP, f"{prefix}_SERVICE_PORT": str(ports[0]["port"])}
        found[f"{prefix}_PORT"] = f"tcp://{SERVICE_IP}:{ports[0]['port']}"
    return found


def variables(variant, pod, each):
    """The environment of a pod's container as the kubelet makes it; what comes of secrets or resources is <told>."""
    found = dict(INJECTED)
    if pod["spec"].get("enableServiceLinks", True):
        found |= service_links(variant)
    for source in each.get("envFrom", []):
        found |= named(variant, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in each.get("env", []):
        if "value" in entry:
            found[entry["name"]] = expanded(entry["value"], found)
        else:
            field = entry["valueFrom"].get("fieldRef", {}).get("fieldPath")
            found[entry["name"]] = POD[field] if field else "<told>"
    return found


def expanded(text, known):
    """What Kubernetes makes of $(NAME), of a name that it knows by then."""
    assert set(VARIABLE.findall(text)) <= set(known), text
    return VARIABLE.sub(lambda match: known[match[1]], text)


def mounted(pod, folder):
    """The files of the secrets of a pod's container, below a folder of this machine. Returns what stands for what."""
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    places = {}
    for mount in container(pod)["volumeMounts"]:
        secret = volumes[mount["name"]].get("secret")
        if secret is None:
            continue
        place = folder / mount["name"]
        certificates = authority(folder / "certs", "splitserve") if "tls" in secret["secretName"] else None
        place.mkdir(parents=True)
        for item in secret["items"]:
            text = (certificates / item["key"]).read_text() if certificates else f"the {item['key']}\n"
            (place / item["path"]).write_text(text)
        places[mount["mountPath"]] = str(place)
    return places


def settings_of(variant, pod, folder, monkeypatch):
    """The settings that a pod's process ends up with, secrets and all."""
    places, environment = mounted(pod, folder), variables(variant, pod, container(pod))
    for path, place in places.items():
        environment = {name: value.replace(f"{path}/", f"{place}/") for name, value in environment.items()}
    environment["SPLITSERVE_MODEL"] = MODEL
    role, *arguments = (expanded(each, environment) for each in container(pod)["args"])
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environment)
        command = settings_command(ROLES[role].settings_class, seen.append, name=role, help="")
        command.main(arguments, standalone_mode=False)
    return seen[0]


def flags_of(variant, pod, folder, monkeypatch):
    return flat(settings_of(variant, pod, folder, monkeypatch))
