"""Say in three lines what `splitserve up` has chosen for a cluster: its model, its nodes, their memory, and why."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving_core.model_files.config import ModelConfig, read_model_config
from serving_core.settings import EngineSettings
from serving_core.units import size_of
from splitserve.launch.cluster import Process
from splitserve.launch.preflight import on_cpu


def choices(processes: Sequence[Process], num_nodes: Mapping[str, int], num_cpus: int) -> list[str]:
    """Return the lines for planned processes, the coordinator first. `num_cpus` of this machine is 0 on Ray."""
    coordinator, *nodes = (process.settings for process in processes)
    engine: EngineSettings = nodes[0].engine
    config = read_model_config(Path(coordinator.model), engine.model_impl, engine.runner)
    return [
        f"Model: {_model(config, engine, coordinator.max_model_len)}.",
        f"Nodes: {_nodes(nodes, num_nodes, num_cpus)}.",
        f"Memory: {_memory(config, engine)}.",
    ]


def _model(config: ModelConfig, engine: EngineSettings, max_model_len: int) -> str:
    native = "SplitServe's own code"
    code = "transformers' code" if config.is_transformers else native
    because = f"there is none of {native}" if config.is_transformers else "it supports the architecture"
    if engine.model_impl != "auto":
        because = f"--model-impl {engine.model_impl}"
    dtype = f"{config.dtype} as config.json says" if engine.dtype == "auto" else f"--dtype {engine.dtype}"
    length = f"--max-model-len {max_model_len}" if max_model_len else f"the model's {config.max_position_embeddings}"
    return f"{config.architecture} by {code} ({because}), in {dtype}, with a context of {length} tokens"


def _nodes(nodes: Sequence[Any], num_nodes: Mapping[str, int], num_cpus: int) -> str:
    counts = ", ".join(f"{number} {role}" for role, number in num_nodes.items() if number)
    num_ranks = sum(node.engine.num_ranks for node in nodes)
    engine = nodes[0].engine
    if not num_cpus:
        where = "on the hosts that Ray chooses"
    elif not on_cpu(engine):
        where = "on CUDA devices"
    elif num_cpus < num_ranks:
        where = f"sharing {num_cpus} CPUs among {num_ranks} ranks"
    else:
        where = f"on {num_cpus} CPUs, divided evenly among {num_ranks} ranks, as no CUDA is used"
    transport = nodes[0].kv_transport
    is_shared = num_cpus and transport == "zmq" and nodes[0].kv_shared_memory
    way = "through shared memory, as they are on one machine" if is_shared else f"by --kv-transport {transport}"
    ask = "; `splitserve doctor` simulates whether one large node keeps more requests within their limits"
    return f"{counts} {where}; KV goes {way}{ask if len(nodes) > 1 and num_cpus and on_cpu(engine) else ''}"


def _memory(config: ModelConfig, engine: EngineSettings) -> str:
    from serving_core.node.needs import model_layout, needs_of, num_blocks_for  # imports packages of the extra `node`

    needs = needs_of(engine, config)
    weights = f"each node holds {size_of(needs.weight_bytes)} of weights"
    is_given = engine.num_kv_blocks or engine.kv_cache_memory_bytes
    if not is_given and not on_cpu(engine):
        return f"{weights}, and KV in what --gpu-memory-utilization {engine.gpu_memory_utilization:g} leaves"
    tokens = engine.block_size * num_blocks_for(engine, model_layout(engine, config), engine.tensor_parallel_size)
    because = "as given" if is_given else "the default on CPUs; see --kv-cache-memory-bytes"
    return f"{weights} and a KV pool of {size_of(needs.pool_bytes)} ({because}), which has room for {tokens:,} tokens"
