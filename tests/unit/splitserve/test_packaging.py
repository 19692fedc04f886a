"""What the package is made of. Its top-level names are generic words: nobody else may have installed one here."""

import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from serving_core.extras import MODULES

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
ROOMS = ("coordinator", "decode_node", "engine", "kv_transfer", "prefill_node", "protos", "splitserve")


@pytest.mark.parametrize("name", ROOMS)
def test_each_top_level_name_is_ours_alone(name):
    assert set(packages_distributions()[name]) == {"splitserve"}


@pytest.mark.parametrize("extra", sorted(MODULES))
def test_what_is_looked_for_is_what_the_extra_brings(extra):
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    declared = {canonicalize_name(Requirement(each).name) for each in project["optional-dependencies"][extra]}
    looked_for = [packages_distributions()[module] for module in MODULES[extra]]
    assert {canonicalize_name(name) for names in looked_for for name in names} == declared


def test_every_extra_is_looked_for_but_the_developers():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert set(extras) == {*MODULES, "dev"}
