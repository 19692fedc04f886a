"""No child of a process with gRPC reads from its sockets, or dies before it runs its program."""

import json
import os
import subprocess
import sys

import pytest

from serving_core.net.grpc_environment import GRPC_ENVIRONMENT

ENTRIES = "coordinator.process", "coordinator.api.__main__", "serving_node.process", "splitserve.__main__"
FIRST_IMPORT = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
import splitserve.client.clients
"""


def run_python(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in GRPC_ENVIRONMENT}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.parametrize("module", ENTRIES)
def test_each_process_turns_fork_support_off_before_grpc_is_imported(module):
    assert run_python("-c", FIRST_IMPORT, module).split() == ["0"]


def test_children_run_and_streams_are_whole():
    counted = json.loads(run_python("-m", "tests.unit.serving_core.spawner"))
    assert counted == {"codes": {"0": 150}, "num_lost": 0}
