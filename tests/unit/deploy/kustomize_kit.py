"""Renders kustomizations, as far as those of deploy/kubernetes go: resources, components, generated ConfigMaps, and
strategic merge patches that name their object. What it does not know it refuses. Unlike kustomize it adds no hash to
the names of ConfigMaps and sorts no objects; test_kustomize.py compares all else, where kustomize is.
"""

import copy
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3] / "deploy" / "kubernetes"
KINDS = {"Kustomization": "kustomize.config.k8s.io/v1beta1", "Component": "kustomize.config.k8s.io/v1alpha1"}
FIELDS = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "configurations"}
MERGE_KEYS = {  # of lists in pods; all others are replaced
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
}


class NotRendered(Exception):
    """Something that kustomize would refuse, or that is unknown here."""


def render(folder, components=()):
    """The objects of a kustomization, with more components than it has itself."""
    found = _accumulate(folder, [])
    for component in components:
        found = _accumulate(component, found)
    return found


def read(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def identity(thing):
    return thing["apiVersion"], thing["kind"], thing["metadata"]["name"]


def _accumulate(folder, found):
    (told,) = read(folder / "kustomization.yaml")
    if unknown := set(told) - FIELDS:
        raise NotRendered(f"{folder} has {unknown}")
    if KINDS.get(told["kind"]) != told["apiVersion"]:
        raise NotRendered(f"{folder} is a {told['kind']} of {told['apiVersion']}")
    for name in told.get("resources", []):
        path = (folder / name).resolve()
        found = found + (_accumulate(path, []) if path.is_dir() else read(path))
    for name in told.get("components", []):
        found = _accumulate((folder / name).resolve(), found)
    for generator in told.get("configMapGenerator", []):
        found = _with_config_map(folder, found, generator)
    for patch in told.get("patches", []):
        if set(patch) != {"path"}:
            raise NotRendered(f"{folder} has a patch of {set(patch)}")
        for change in read(folder / patch["path"]):
            found = _patched(found, change)
    if len({identity(each) for each in found}) < len(found):
        raise NotRendered(f"{folder} has an object twice")
    return found


def _with_config_map(folder, found, generator):
    data = {}
    for literal in generator.get("literals", []):
        key, is_pair, value = literal.partition("=")
        if not is_pair:
            raise NotRendered(f"{literal} is no literal")
        data[key] = value
    for name in generator.get("files", []):
        data[name] = (folder / name).read_text()
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
    before = [each for each in found if identity(each) == identity(made)]
    if bool(before) != (generator.get("behavior", "create") == "merge"):
        raise NotRendered(f"{folder} makes or merges {generator['name']}, which is{' not' * (not before)} there")
    others = [each for each in found if each not in before]
    return [*others, _merged(before[0], made) if before else made]


def _patched(found, change):
    target = [each for each in found if identity(each) == identity(change)]
    if not target:
        raise NotRendered(f"there is no {identity(change)} to patch")
    change = dict(change)
    is_deleted = change.pop("$patch", None) == "delete"
    index = found.index(target[0])
    return found[:index] + ([] if is_deleted else [_merged(target[0], change)]) + found[index + 1 :]


def _merged(value, change, field=""):
    if isinstance(value, dict) and isinstance(change, dict):
        merged = copy.deepcopy(value)
        for key, each in change.items():
            merged[key] = _merged(value[key], each, key) if key in value else copy.deepcopy(each)
        return {key: each for key, each in merged.items() if each is not None}
    if isinstance(value, list) and isinstance(change, list) and (key := MERGE_KEYS.get(field)):
        before = {each[key]: each for each in value}
        changed = {each[key]: _merged(before.get(each[key], {}), each) for each in change}
        return [*changed.values(), *(each for name, each in before.items() if name not in changed)]
    return copy.deepcopy(change)
