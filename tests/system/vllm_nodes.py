"""Clusters whose nodes run vLLM, and what they are asked."""

import random
from pathlib import Path

import psutil
import pytest

from serving_node.settings import PACKAGES
from tests.system.cluster import Child, Cluster
from tests.tiny_models import write_tiny_llama

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
DEADLINE_S = 1500.0
BLOCK = 32
STEP_TIMEOUT_S = 60.0
FLAGS = ("--enforce-eager", "--dtype=float32", f"--block-size={BLOCK}", "--max-model-len=1024")
CHUNK = 128  # tokens of a step
POOL = ("--num-gpu-blocks-override=200", "--kv-cache-memory-bytes=67108864", f"--max-num-batched-tokens={CHUNK}")
TWO_RANKS = {"vllm": ("--tensor-parallel-size=2",), "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}  # of a node

MARKS = [
    pytest.mark.nightly,
    pytest.mark.timeout(2 * DEADLINE_S),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed here: `make vllm` installs it in .venv-vllm"),
]


class VllmCluster(Cluster):
    """Nodes run in vLLM's environment, the coordinator and the nodes of `ours` in ours.

    A node's flag `vllm` is a tuple of flags of vLLM."""

    ours = ()

    def _spawn(self, name, module, model, flags, env):
        if module not in PACKAGES.values() or name in self.ours:
            return super()._spawn(name, module, model, flags, env)
        role = name.partition("-")[0]
        own = {flag: value for flag, value in flags.items() if flag != "vllm"}
        own.setdefault("step_timeout_s", STEP_TIMEOUT_S)
        child = Child(
            name,
            "splitserve_vllm",
            role,
            str(model),
            flags=own,
            last=("--", *FLAGS, *POOL, *flags.get("vllm", ())),
            log=self.folder / f"{name}.log",
            env={**self.env, **env},
            python=str(PYTHON),
        )
        self._everyone.append(child)
        return child


def write_model(folder):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny_llama(folder, max_position_embeddings=2048, **sizes)


def started(model, folder, kind=VllmCluster, **numbers):
    return made(model, folder, kind, **numbers).start()


def made(model, folder, kind=VllmCluster, **numbers):
    cluster = kind(
        model,
        folder,
        coordinator={"node_wait_s": 60, "node_timeout_s": 30, "step_timeout_s": 300, "max_queue_wait_s": 600},
        start_deadline_s=DEADLINE_S,
        **numbers,
    )
    if not cluster.ours:
        cluster._node_flags.pop("block_size")  # a flag of our own engine
    return cluster


def prompts(number, seed=0):
    """Below a block, of several chunks, and with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(256) for _ in range(300)]
    lengths = [rng.choice([rng.randrange(1, BLOCK), rng.randrange(BLOCK, 600)]) for _ in range(number)]
    fresh = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    return [common[: rng.randrange(280)] + each if index % 3 == 2 else each for index, each in enumerate(fresh)]


def processes(child):
    """The node's process, vLLM's scheduler and vLLM's worker."""
    node = psutil.Process(child.process.pid)
    below = [each for each in node.children(recursive=True) if "VLLM::" in " ".join(each.cmdline())]
    return node, *sorted(below, key=lambda each: "Worker" in " ".join(each.cmdline()))


def has_ended(*those):
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in those)
