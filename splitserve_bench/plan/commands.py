"""The commands that run a plan."""

import shlex
from collections import Counter
from pathlib import Path

from coordinator.settings import CoordinatorSettings
from serving_core.errors import ModelError
from serving_core.model_config import read_model_config
from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve_bench.plan.asked import AskedNodes
from splitserve_bench.plan.plans import Placed, Plan
from splitserve_bench.plan.study import Study


def commands_of(study: Study, plan: Plan) -> list[str]:
    """For each cell: `splitserve up` where it is on one host, else what each host runs. Of a model that cannot be
    served, why."""
    asked = study.asked
    model = asked.nodes.model or "MODEL"
    if asked.nodes.model:
        try:
            read_model_config(Path(asked.nodes.model))
        except ModelError as error:
            return [f"SplitServe does not serve it: {error}"]
    placed = plan.placed()
    hosts = sorted({each.host for each in placed})
    each_cell = f"in each of {asked.cells} cells" if asked.cells > 1 else ""
    if len(hosts) == 1:
        return [f"Run it{f', {each_cell}' if each_cell else ''}:", f"  {_up(plan, model, asked.nodes)}"]
    words = [f"  splitserve coordinator {shlex.quote(model)} --fleet-host 0.0.0.0{_in_flight(plan)}"]
    for host in hosts:
        nodes = Counter(_node(each, asked.nodes) for each in placed if each.host == host)
        for (role, kind, flags), count in nodes.items():
            command = f"splitserve {role} {shlex.quote(model)} --coordinator COORDINATOR:50052 {flags}"
            words.append(f"  {command}  # host {host}, {kind}{f', {count} of them' if count > 1 else ''}")
    return [f"Run it on {len(hosts)} hosts{f', {each_cell}' if each_cell else ''}:", *words]


def _up(plan: Plan, model: str, asked: AskedNodes) -> str:
    flags = [f"--{role} {plan.count_of(role)}" for role in (PREFILL, DECODE) if plan.count_of(role)]
    flags += [f"--{role} {plan.count_of(role)}" for role in (BOTH,) if plan.count_of(role)]
    flags += [f"--{pool.role}-tp {pool.kind.tp}" for pool in plan.pools if pool.kind.tp > 1]
    flags += [f"--{pool.role}-pp {pool.kind.pp}" for pool in plan.pools if pool.kind.pp > 1]
    kinds = [pool.kind for pool in plan.pools]
    flags += [
        f"--max-num-batched-tokens {min(kind.sizes.max_num_batched_tokens for kind in kinds)}",
        f"--max-num-seqs {min(kind.sizes.max_num_seqs for kind in kinds)}",
        f"--kv-cache-memory-bytes {min(kind.kv_cache_memory_bytes for kind in kinds)}",
        *_stored(asked, max(kind.weights_memory_bytes for kind in kinds)),
    ]
    return f"splitserve up {shlex.quote(model)} {' '.join(flags)}{_in_flight(plan)}"


def _stored(asked: AskedNodes, memory_bytes: int) -> list[str]:
    """How nodes hold weights, of which only so much may be in memory, and KV."""
    flags = [f"--weights-memory-bytes {memory_bytes}"] if memory_bytes else []
    flags += [f"--quantization {asked.quantization}"] if asked.quantization != "none" else []
    return [*flags, *([f"--kv-cache-dtype {asked.kv_cache_dtype}"] if asked.kv_cache_dtype != "auto" else [])]


def _in_flight(plan: Plan) -> str:
    """Where there are more seats than the coordinator takes answers."""
    seats = sum(pool.count * (pool.kind.sizes.max_answers + pool.kind.sizes.max_num_queued) for pool in plan.pools)
    return f" --max-num-queued-reqs {seats}" if seats > CoordinatorSettings().max_num_queued_reqs else ""


def _node(placed: Placed, asked: AskedNodes) -> tuple[str, str, str]:
    kind = placed.kind
    flags = [f"--tensor-parallel-size {kind.tp}"] if kind.tp > 1 else []
    flags += [f"--pipeline-parallel-size {kind.pp}"] if kind.pp > 1 else []
    flags += [
        f"--max-num-batched-tokens {kind.sizes.max_num_batched_tokens}",
        f"--max-num-seqs {kind.sizes.max_num_seqs}",
        f"--kv-cache-memory-bytes {kind.kv_cache_memory_bytes}",
        *_stored(asked, kind.weights_memory_bytes),
    ]
    return placed.role, kind.hardware, " ".join(flags)
