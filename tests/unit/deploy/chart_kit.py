"""The objects that the chart of deploy/helm renders to, and the processes that their pods start."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import yaml

from serving_core.flags import settings_command
from splitserve.launch.cluster import API_SERVER, ROOMS, flat
from tests.tls_kit import authority

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm"
PAGE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
RELEASE, NAMESPACE = "llm", "serving"
VARIABLE = re.compile(r"\$\((\w+)\)")
ROLES = {room.role: room for room in (*ROOMS, API_SERVER)}
POD = {"metadata.name": "llm-decode-0", "status.podIP": "10.1.2.3"}
SERVICE_IP = "10.96.0.7"
INJECTED = {"LWS_LEADER_ADDRESS": "llm-decode-0.llm-decode", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}
WORKLOADS = ("Deployment", "LeaderWorkerSet")
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}
VARIANTS = {
    "default": {},
    **EXAMPLES,
    "default with TLS": {"tls": {"enabled": True}},
    "standby": {"coordinator": {"standby": True}, "apiServers": {"replicas": 2}},
}

# Helm is a Go runtime, with threads and signal handlers of its own, and stays out of this process.
_RENDER = """
import json, sys
from helm_python import Chart, HelmError
chart, name, namespace, *values = json.load(sys.stdin)
with Chart.load(chart) as loaded:
    results = []
    for each in values:
        try:
            loaded.validate_schema(values=each)
            results.append(loaded.render(values=each, name=name, namespace=namespace))
        except HelmError as error:
            results.append(str(error))
json.dump(results, sys.stdout)
"""


def rendered(*values):
    """Return for each set of values the objects, or as a string why Helm refuses the values."""
    words = json.dumps([str(CHART), RELEASE, NAMESPACE, *values])
    done = subprocess.run([sys.executable, "-c", _RENDER], input=words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [each if isinstance(each, str) else _objects(each) for each in json.loads(done.stdout)]


def lint():
    """Return what `helm lint` says against the chart."""
    script = f"import json, helm_python.chart as c; print(json.dumps(c.lint({str(CHART)!r}, strict=True)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    told = json.loads(done.stdout)
    return told["errors"] + [each for each in told["messages"] if each["severity"] > 1]


def _objects(texts):
    manifests = [text for name, text in texts.items() if name.endswith(".yaml")]
    return [each for text in manifests for each in yaml.safe_load_all(text) if each]


@cache
def _variants():
    found = dict(zip(VARIANTS, rendered(*VARIANTS.values()), strict=True))
    assert all(not isinstance(each, str) for each in found.values()), found
    return found


def objects(variant, *kinds):
    """Return all objects of a variant, or those of these kinds."""
    return [each for each in _variants()[variant] if not kinds or each["kind"] in kinds]


def named(variant, kind, name):
    (found,) = [each for each in objects(variant, kind) if each["metadata"]["name"] == f"{RELEASE}{name}"]
    return found


def template_of(workload):
    """Return the template of its pods."""
    spec = workload["spec"]
    return spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]


def workloads(variant):
    """Return the workloads by their names without the release's: coordinator, api-server, and the pools."""
    return {each["metadata"]["name"].removeprefix(f"{RELEASE}-"): each for each in objects(variant, *WORKLOADS)}


def pods(variant):
    return {name: template_of(each) for name, each in workloads(variant).items()}


def pools(variant):
    return {name: pod for name, pod in pods(variant).items() if component(pod) == "node"}


def component(pod):
    return pod["metadata"]["labels"]["app.kubernetes.io/component"]


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def service_links(variant):
    """Return what the kubelet says of each service to pods that do not refuse to be told."""
    found = {}
    for service in objects(variant, "Service"):
        prefix, ports = service["metadata"]["name"].upper().replace("-", "_"), service["spec"]["ports"]
        found |= {f"{prefix}_SERVICE_HOST": SERVICE_IP, f"{prefix}_SERVICE_PORT": str(ports[0]["port"])}
        found[f"{prefix}_PORT"] = f"tcp://{SERVICE_IP}:{ports[0]['port']}"
    return found


def variables(variant, pod, each):
    """Return the environment of a pod's container as the kubelet makes it; what comes of secrets is <told>."""
    found = dict(INJECTED)
    if pod["spec"].get("enableServiceLinks", True):
        found |= service_links(variant)
    for entry in each.get("env", []):
        if "value" in entry:
            found[entry["name"]] = expanded(entry["value"], found)
        else:
            field = entry["valueFrom"].get("fieldRef", {}).get("fieldPath")
            found[entry["name"]] = POD[field] if field else "<told>"
    return found


def expanded(text, known):
    """Return what Kubernetes makes of $(NAME), of a name that it knows by then."""
    assert set(VARIABLE.findall(text)) <= set(known), text
    return VARIABLE.sub(lambda match: known[match[1]], text)


def mounted(pod, folder):
    """Write the secrets of a pod's container below a folder of this machine. Return what stands for what."""
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    places = {}
    for mount in container(pod)["volumeMounts"]:
        secret = volumes[mount["name"]].get("secret")
        if secret is None:
            continue
        place = folder / mount["name"]
        place.mkdir(parents=True)
        if "items" in secret:
            files = {item["path"]: f"the {item['key']}\n" for item in secret["items"]}
        else:  # of cert-manager
            made, role = authority(folder / "certs", "splitserve"), secret["secretName"].removeprefix(f"{RELEASE}-")
            names = {"tls.crt": f"{role}.crt", "tls.key": f"{role}.key", "ca.crt": "ca.crt"}
            files = {key: (made / name).read_text() for key, name in names.items()}
        for name, text in files.items():
            (place / name).write_text(text)
        places[mount["mountPath"]] = str(place)
    return places


def settings_of(variant, pod, folder, monkeypatch):
    """Return the settings that a pod's process ends up with, secrets and all."""
    places, environment = mounted(pod, folder), variables(variant, pod, container(pod))
    for path, place in places.items():
        environment = {name: value.replace(f"{path}/", f"{place}/") for name, value in environment.items()}
    role, *arguments = (expanded(each, environment) for each in container(pod)["args"])
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environment)
        settings_class, arguments = _command(role, arguments)
        command = settings_command(settings_class, seen.append, name=role, help="")
        command.main(arguments, standalone_mode=False)
    return seen[0]


def _command(role, arguments):
    """Return the class of a process' settings, and its own arguments."""
    if "--engine=vllm" not in arguments:
        return ROLES[role].settings_class, arguments
    from splitserve_vllm.settings import VllmSettings

    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return VllmSettings, [each for each in own if each != "--engine=vllm"]


def flags_of(variant, pod, folder, monkeypatch):
    return flat(settings_of(variant, pod, folder, monkeypatch))
