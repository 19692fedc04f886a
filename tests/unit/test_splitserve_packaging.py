"""The top-level names are generic words: nobody else may have installed one of them here."""

from importlib.metadata import packages_distributions

import pytest

ROOMS = ("coordinator", "decode_node", "engine", "kv_transfer", "prefill_node", "protos", "splitserve")


@pytest.mark.parametrize("name", ROOMS)
def test_each_top_level_name_is_ours_alone(name):
    assert set(packages_distributions()[name]) == {"splitserve"}
