"""How a node's process is set up before it serves."""

import os
import subprocess

import pytest

from tests import forked
from tests.tiny_models import write_fake_model
from tests.unit.serving_node import counting_node

DEADLINE_S = 240.0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_node_computes_with_a_thread_for_each_of_its_cpus(tmp_path):
    """Also where torch was imported before it was known which they are, and took another number of threads."""
    model = str(write_fake_model(tmp_path))

    def num_threads(*words):
        with forked.popen(counting_node.__name__, model, *words, stdout=subprocess.PIPE, text=True) as process:
            told, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        return int(told)

    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert num_threads() == 1
    assert num_threads("--cpus", f"{first},{second}") == 2
