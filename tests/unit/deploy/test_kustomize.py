"""What kustomize itself makes of deploy/kubernetes, where it is: the same as the renderer that the other tests use."""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from tests.effort import few
from tests.unit.deploy.kubernetes_kit import IMAGE, example
from tests.unit.deploy.kustomize_kit import KINDS, ROOT, identity, render

DEADLINE_S = 60.0
COMMANDS = {"kubectl": ["kubectl", "kustomize"], "kustomize": ["kustomize", "build"]}
COMMAND = next((words for name, words in COMMANDS.items() if shutil.which(name)), None)
HASHED = re.compile(r"(.+)-[a-z0-9]{10}")
COMBINATIONS = [  # every overlay, and those with a Deployment with all components that go together
    *((overlay,) for overlay in ("cpu", "gpu", "obs", "keda", "leaderworkerset")),
    *((overlay, "prometheus") for overlay in ("gpu", "leaderworkerset")),
    *((overlay, component) for overlay in ("cpu", "gpu") for component in ("keda", "hpa", "tls")),
    *((overlay, "tls") for overlay in ("obs", "keda")),
    *(("gpu", "prometheus", component, "tls") for component in ("keda", "hpa")),
]

pytestmark = pytest.mark.skipif(COMMAND is None, reason="there is neither kubectl nor kustomize")


def kustomized(folder):
    """The objects, under the names that their ConfigMaps have before kustomize adds a hash of what is in them."""
    done = subprocess.run([*COMMAND, str(folder)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    found = list(yaml.safe_load_all(done.stdout))
    maps = [each for each in found if each["kind"] == "ConfigMap"]
    plain = {each["metadata"]["name"]: HASHED.fullmatch(each["metadata"]["name"])[1] for each in maps}
    for each in maps:
        each["metadata"]["name"] = plain[each["metadata"]["name"]]
    for reference in references(found):
        reference["name"] = plain[reference["name"]]  # so one that kustomize has not found fails here
    return found


def references(value):
    """Of all that names a ConfigMap, what has the name."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in children:
        if key in ("configMap", "configMapRef"):
            yield each
        yield from references(each)


def write(folder, told):
    """A kustomization whose parts are named from deploy/kubernetes."""
    told = {"apiVersion": KINDS["Kustomization"], "kind": "Kustomization", **told}
    for key in ("resources", "components"):
        told[key] = [os.path.relpath((ROOT / each).resolve(), folder.resolve()) for each in told[key]]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(told))
    return folder


def by_identity(objects):
    found = {identity(each): each for each in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("parts", few(COMBINATIONS, ("cpu",), ("gpu", "prometheus", "keda", "tls")), ids=" ".join)
def test_it_makes_the_same_of_them(parts, tmp_path):
    overlay, *components = parts
    told = {"resources": [f"overlays/{overlay}"], "components": [f"components/{each}" for each in components]}
    ours = render(ROOT / told["resources"][0], [ROOT / each for each in told["components"]])
    assert by_identity(kustomized(write(tmp_path, told))) == by_identity(ours)


def test_a_change_of_settings_is_another_config_map_for_all_who_read_it(tmp_path):
    told = {"resources": ["overlays/gpu"], "components": []}
    change = {"name": "splitserve", "behavior": "merge", "literals": ["SPLITSERVE_MAX_NUM_SEQS=128"]}
    names = []
    for more in ({}, {"configMapGenerator": [change]}):
        words = [*COMMAND, str(write(tmp_path, told | more))]
        text = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
        names.append({each["name"] for each in references(list(yaml.safe_load_all(text)))})
    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1]


def test_the_example_of_the_docs_is_a_fleet_of_its_own(tmp_path):
    told = example()
    for key in ("resources", "components"):
        told[key] = [f"overlays/own/{each}" for each in told[key]]
    found = by_identity(kustomized(write(tmp_path, told)))
    namespace, (ours,) = told["namespace"], told["images"]
    assert {each["metadata"]["namespace"] for each in found.values()} == {namespace}
    images = set(re.findall(r"'image': '([^']+)'", str(found)))
    assert f"{ours['newName']}:{ours['newTag']}" in images
    assert IMAGE not in images
    assert found["v1", "ConfigMap", "splitserve"]["data"]["SPLITSERVE_MAX_NUM_SEQS"] == "128"
    (trigger,) = found["keda.sh/v1alpha1", "ScaledObject", "splitserve-node"]["spec"]["triggers"]
    service = found["v1", "Service", "splitserve-prometheus"]
    address = f"{service['metadata']['name']}.{namespace}:{service['spec']['ports'][0]['port']}"
    assert trigger["metadata"]["serverAddress"] == f"http://{address}"
