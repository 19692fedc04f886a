"""The memory that a node's engine takes at most, in a process of its own.

`python -m tests.unit.engine.peak_process FOLDER DTYPE` loads the model and prints by how many bytes the process grew at
most, beyond what it took before and the KV blocks.
"""

import sys
from pathlib import Path

from engine.build import build_engine
from serving_core.settings import EngineSettings

NUM_KV_BLOCKS = 64


def resident_bytes(name):
    """Return the memory that this process takes ("VmRSS"), or took at most since its start ("VmHWM"). getrusage would
    count the memory of a parent that forked it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


if __name__ == "__main__":
    before = resident_bytes("VmRSS")
    engine = build_engine(EngineSettings(model=sys.argv[1], dtype=sys.argv[2], num_kv_blocks=NUM_KV_BLOCKS))
    engine.warm_up()
    grown = resident_bytes("VmHWM") - before
    sys.stdout.write(f"{grown - NUM_KV_BLOCKS * engine.layout.block_bytes}\n")
