"""How far a prompt, a decode step and a token go through the code: ceilings that no change raises unseen."""

import pytest

from splitserve.launch.models import resolve
from tools import hops

MOST_FILES = 88  # that one prompt crosses, over coordinator, prefill node and decode node
MOST_CALLS_OF_A_STEP = 62  # across files, in a decode step of one sequence
MOST_CALLS_OF_A_TOKEN = 14  # at the coordinator


@pytest.mark.nightly
def test_a_prompt_crosses_no_more_files_than_it_did():
    counted = hops.measure(str(resolve("", print).folder))
    assert len(counted.files) <= MOST_FILES
    assert sum(counted.per_token("decode_node").values()) <= MOST_CALLS_OF_A_STEP
    assert sum(counted.per_token("coordinator").values()) <= MOST_CALLS_OF_A_TOKEN
